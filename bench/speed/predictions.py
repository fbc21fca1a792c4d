"""Predictions of `lab.predict` beside measurements of ranks over an emulated link, in one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import rpc

import labkit as lab
from bench.page import about, duration, options, publish, say, table
from bench.speed import sharded_models
from bench.speed.repetitions import REPEATS, Times, in_turns, repeated, seconds
from bench.speed.two_levels import two_levels
from labkit.errors.units import in_words
from labkit.recording.cores import usable_cores

LINK: Final = lab.Link(gbit_per_s=1, latency_us=50)
FAR: Final = lab.Link(gbit_per_s=1, latency_us=5000)  # where latency dominates
LARGE: Final = 1_000_000  # bytes
SMALL: Final = 4_000
Row = tuple[str, float, float]  # the case; seconds or bytes, predicted and measured


def main() -> None:
    """Measure and print all cases; optionally keep a row for each kind of case in a page."""
    arguments = options("bench.speed.predictions", __doc__)
    machine, measured = about(), dict[str, list[Row]]()
    for kind in (kind for kind in PARTS if arguments.only in kind):
        say(kind)
        measured[kind] = list(PARTS[kind]())
    print(table(["case", "predicted", "measured", "ratio"], all_cases(measured)), end="\n\n")
    rows = table(["what", "cases", "predicted", "ratio, median", "ratios"], kinds_of_cases(measured))
    ratios = [ratio for rows in measured.values() for ratio in _ratios(rows)]
    inside = sum(0.8 <= ratio <= 1.25 for ratio in ratios)
    said = f"{inside} of {len(ratios)} ratios of measured to predicted are between 0.8 and 1.25."
    publish([INTRODUCTION, *machine, "", rows, "", said], arguments.write)


def all_cases(measured: dict[str, list[Row]]) -> list[list[str]]:
    """A row of the table for each case."""
    cells = []
    for kind, rows in measured.items():
        for name, predicted, found in rows:
            cells.append([name, *(in_words(value, _unit(kind)) for value in (predicted, found)), f"{found / predicted:.2f}"])
    return cells


def kinds_of_cases(measured: dict[str, list[Row]]) -> list[list[str]]:
    """A row of the table for each kind of case: how many there are, and how far their ratios are from 1."""
    cells = []
    for kind, rows in measured.items():
        predicted = [in_words(value, _unit(kind)) for value in sorted(row[1] for row in rows)]
        ratios = sorted(_ratios(rows))
        sizes = f"{predicted[0]} to {predicted[-1]}"
        cells.append([kind, f"{len(rows)}", sizes, f"{statistics.median(ratios):.2f}", f"{ratios[0]:.2f} to {ratios[-1]:.2f}"])
    return cells


def _ratios(rows: list[Row]) -> list[float]:
    return [found / predicted for _, predicted, found in rows]


def _unit(kind: str) -> str:
    return "B" if kind == MEMORY else "s"


INTRODUCTION: Final = """# Predicted and measured

How close `lab.predict` comes to what ranks measure over emulated links, what [`lab.explain`
says](#causes-that-explain-says) about slow programs, and what [the lessons](#in-the-lessons) show.
The pages on [replay](replay.md), [simulated ranks](simulate.md) and [networks](networks.md) have tables of their own.

`python -m bench.speed.predictions` prints all cases; `--write docs/predictions.md` keeps this table. The predictions
need the link's latency and bandwidth and, where ranks compute, how long they compute alone. Collectives and messages
have 4 kB to 4 MB, over links of 1 Gbit/s with 50 µs or 5 ms, on two and four ranks; steps run on two. A time is the
median of nine. On a busy machine, or with fewer cores than ranks, gloo's own time is added, and where it exceeds the
link's time it is what is measured. Memory is what `lab.track_memory` counts of parameters, gradients and optimizer
state.
"""


# --------------------------------------------------------------------------------------------- collectives and messages


def every_collective(nbytes: int) -> dict[str, Times]:
    """In a rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = torch.ones(nbytes // 4)
    part, parts = whole[: len(whole) // ranks].clone(), [p.clone() for p in whole.chunk(ranks)]
    others, other = [p.clone() for p in parts], whole.clone()
    actions: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather(others, part),
        "reduce_scatter": lambda: dist.reduce_scatter(part, parts),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "reduce": lambda: dist.reduce(whole, 0),
        "gather": lambda: dist.gather(part, others if rank == 0 else None),
        "scatter": lambda: dist.scatter(part, parts if rank == 0 else None),
        "barrier": dist.barrier,
    }
    return {name: repeated(action) for name, action in actions.items()}


def collectives() -> Iterator[Row]:
    """Every collective on two and four ranks, large over a fast link and small over one with high latency."""
    for ranks in (2, 4):
        # Four times as much among four ranks: on two cores, gloo's own time for less would exceed the link's.
        for link, nbytes in ((LINK, LARGE if ranks == 2 else 4 * LARGE), (FAR, SMALL)):
            with lab.Group(ranks, link=link) as group:
                results = group.run(every_collective, nbytes).results
            for name in results[0]:
                if name == "barrier":
                    if link is FAR:
                        took_s = seconds([r[name] for r in results])
                        yield f"barrier, {ranks} ranks, {link}", lab.predict.barrier(ranks, link), took_s
                    continue
                predicted = getattr(lab.predict, name)(nbytes, ranks, link)
                yield f"{name}, {in_words(nbytes, 'B')}, {ranks} ranks, {link}", predicted, seconds([r[name] for r in results])


def send_and_receive(nbytes: int, count: int) -> Times:
    """In a rank: `count` messages from rank 0 to rank 1, all issued at once."""
    x = torch.ones(nbytes // 4)

    def action() -> None:
        issue = dist.isend if dist.get_rank() == 0 else dist.irecv
        for work in [issue(x, 1 - dist.get_rank()) for _ in range(count)]:
            assert work is not None
            work.wait()

    return repeated(action)


def messages() -> Iterator[Row]:
    """One message, and four that queue."""
    for link, nbytes, count in ((LINK, LARGE, 1), (LINK, LARGE, 4), (FAR, SMALL, 1)):
        with lab.Group(2, link=link) as group:
            results = group.run(send_and_receive, nbytes, count).results
        busy_s = nbytes / link.bytes_per_s
        words = "a message" if count == 1 else f"{count} messages at once"
        predicted = lab.predict.message(nbytes, link) + (count - 1) * busy_s
        yield f"{words}, {in_words(nbytes, 'B')}, {link}", predicted, seconds(results)


# ---------------------------------------------------------------------------------------------------- beside computing


def compute(rounds: int) -> None:
    """Some work for one core."""
    x = torch.ones(256, 256)
    for _ in range(rounds):
        x = torch.tanh(x @ x)


def beside_computing(nbytes: int) -> tuple[Times, Times]:
    """In a rank: computing alone, and with an all-reduce under way."""
    x = torch.ones(nbytes // 4)
    compute(20)
    start = time.perf_counter()
    compute(50)
    rounds = max(1, int(50 * 0.02 / (time.perf_counter() - start)))
    count = torch.tensor([rounds])
    dist.broadcast(count, 0)

    def both() -> None:
        work = dist.all_reduce(x, async_op=True)
        compute(int(count))
        assert work is not None
        work.wait()

    made = in_turns({"alone": lambda: compute(int(count)), "both": both})
    return made["alone"], made["both"]


def overlapped() -> Iterator[Row]:
    """An all-reduce beside computing: whichever takes longer; and one after the other, for comparison."""
    for nbytes in (LARGE, 4 * LARGE):
        with lab.Group(2, link=LINK) as group:
            results = group.run(beside_computing, nbytes).results
        alone_s, both_s = (seconds([r[i] for r in results]) for i in (0, 1))
        predicted = max(alone_s, lab.predict.all_reduce(nbytes, 2, LINK))
        yield f"all_reduce, {in_words(nbytes, 'B')}, beside {duration(alone_s)} of computing, 2 ranks", predicted, both_s


LAYERS: Final = 8
WIDTH: Final = 512
BUCKETS: Final = LAYERS // 2  # of two layers each
BUCKET_BYTES: Final = 2 * (WIDTH * WIDTH + WIDTH) * 4


def network() -> nn.Module:
    """Layers of equal size, so that buckets of gradients are equal too."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def training() -> tuple[dict[str, Times], float]:
    """In a rank: forward and backward alone; with DistributedDataParallel; with all-reduces after the backward pass.

    And the processor time of one of these all-reduces, in seconds.
    """
    from torch.nn.parallel import DistributedDataParallel

    plain, model = network(), DistributedDataParallel(network(), bucket_cap_mb=1.1)
    x = torch.randn(192, WIDTH)
    loss: Any = None

    def forward(model: nn.Module) -> None:
        nonlocal loss
        loss = model(x).square().mean()

    def step(model: nn.Module) -> None:
        forward(model)
        loss.backward()

    def then_reduce() -> None:
        step(plain)
        for a, b in zip(plain[::2], plain[1::2], strict=True):  # type: ignore[index]
            together = torch.cat([p.grad.flatten() for p in (*a.parameters(), *b.parameters())])
            dist.all_reduce(together)

    made = in_turns(
        {
            "forward": lambda: forward(plain),
            "step": lambda: step(plain),
            "overlapped": lambda: step(model),
            "one after the other": then_reduce,
        }
    )
    bucket = torch.ones(BUCKET_BYTES // 4)
    begin_s = time.process_time()  # of all threads, gloo's too
    for _ in range(REPEATS):
        dist.all_reduce(bucket)
    return made, (time.process_time() - begin_s) / REPEATS


def data_parallel() -> Iterator[Row]:
    """A step of data-parallel training with and without overlap, from a rank's own compute times.

    Where the ranks have all cores, gloo takes its time from their computing: LogP's overhead.
    """
    for link in (LINK, lab.Link(gbit_per_s=4, latency_us=50)):
        with lab.Group(2, link=link, threads=1) as group:
            made, overhead_s = zip(*group.run(training).results, strict=True)
        took = {name: seconds([times[name] for times in made]) for name in made[0]}
        forward_s, backward_s = took["forward"], took["step"] - took["forward"]
        for name, overlap in (("overlapped", True), ("one after the other", False)):
            predicted = lab.predict.data_parallel_step(
                forward_s, backward_s, BUCKETS * BUCKET_BYTES, 2, link, overlap=overlap, buckets=BUCKETS,
                overhead_s=max(overhead_s) if usable_cores() <= 2 else 0.0,
            )  # fmt: skip
            yield f"data-parallel step, {name}, 2 ranks, {link}", predicted, took[name]


def same(x: torch.Tensor) -> torch.Tensor:
    """The worker's function."""
    return x


def call(nbytes: int) -> Times:
    """In the caller."""
    x, made = torch.ones(nbytes // 4), []
    for _ in range(REPEATS + 1):
        begin_ns = time.perf_counter_ns()
        rpc.rpc_sync("worker", same, args=(x,))
        made.append((begin_ns, time.perf_counter_ns()))
    return made[1:]


def echo() -> Iterator[Row]:
    """A remote call there and back."""
    for link, nbytes in ((LINK, LARGE), (FAR, SMALL)):
        with lab.Group(["master", "worker"], runtime="rpc", link=link) as group:
            took_s = seconds(group["master"].run(call, nbytes).results)
        yield f"remote call, {in_words(nbytes, 'B')} there and back, {link}", lab.predict.rpc(nbytes, nbytes, link), took_s


MEMORY: Final = "memory of DDP, ZeRO and FSDP2"
PARTS: Final[dict[str, Callable[[], Iterator[Row]]]] = {
    "collectives": collectives,
    "messages": messages,
    "collectives and messages on two nodes": two_levels,
    "an all-reduce beside computing": overlapped,
    "a data-parallel step": data_parallel,
    "a tensor-parallel layer": sharded_models.tensor_parallel,
    MEMORY: sharded_models.memory,
    "a remote call, there and back": echo,
}

if __name__ == "__main__":
    main()
