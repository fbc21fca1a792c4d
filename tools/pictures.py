"""Draws the pictures of the readme and of docs/ from real runs on this machine, into docs/pictures/.

    python -m tools.pictures              all of them
    python -m tools.pictures pipeline     that one

Other programs distort measurements: each run takes many steps, and the fastest of them are drawn; comparisons use all
steps.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
import torch
from PIL import Image
from torch import nn

import labkit as lab
from bench.machines.places import PLACES, place
from labkit.teaching.data import digits
from labkit.teaching.models import CNN
from tools.moving_picture import film

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROOT = Path(__file__).resolve().parent.parent
FOLDER, PROGRAMS = ROOT / "docs" / "pictures", ROOT / "tests" / "notebook" / "pasted"
WARM_UP = 4  # steps
DPI = 110
WIDTH, BATCH = 640, 128
COLOURS = 128
FILM = "watch.gif"  # needs a Chromium


def quickest(trace: lab.Trace, steps: int = 1) -> range:
    """The fastest consecutive steps; the first ones do not count."""
    bounds = trace.step_bounds()[WARM_UP:]
    lengths = bounds[steps - 1 :, 1] - bounds[: len(bounds) - steps + 1, 0]
    first = int(np.argmin(lengths)) + WARM_UP
    return range(first, first + steps)


def perceptron(layers: int = 6, width: int = WIDTH) -> nn.Sequential:
    """A model whose forward pass takes some milliseconds."""
    torch.manual_seed(0)
    return nn.Sequential(*[m for _ in range(layers) for m in (nn.Linear(width, width), nn.ReLU())])


def naive(steps: int = 200) -> None:
    """Data parallel by hand: all gradients are averaged after the backward pass."""
    import torch.distributed as dist

    model = perceptron()

    def average() -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)

    train(model, steps, average)


def overlapped(steps: int = 200) -> None:
    """The same with DistributedDataParallel, which sends gradients during the backward pass."""
    from torch.nn.parallel import DistributedDataParallel

    train(DistributedDataParallel(perceptron(), bucket_cap_mb=4), steps)


def train(model: nn.Module, steps: int, average: Callable[[], None] = lambda: None) -> None:
    """A training loop; `average` is called between the backward pass and the optimizer's step."""
    batch = torch.randn(BATCH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        model(batch).square().mean().backward()
        average()
        optimizer.step()
        optimizer.zero_grad()


def learn(epochs: int) -> None:
    """Data parallel on real digits, with a loss that falls."""
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    torch.manual_seed(0)
    data = TensorDataset(*digits()[0])
    loader = DataLoader(data, 48, sampler=DistributedSampler(data))
    model = DistributedDataParallel(CNN(), bucket_cap_mb=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for images, labels in lab.steps([batch for _ in range(epochs) for batch in loader]):
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        lab.record(loss=loss.item())


def pipeline(micro_batches: int = 6, steps: int = 100) -> None:
    """Two stages and 1F1B, as `torch.distributed.pipelining` does it."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank = dist.get_rank()
    batch = torch.randn(BATCH * micro_batches, WIDTH)
    stage = PipelineStage(perceptron(layers=3), rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, micro_batches, loss_fn=lambda out, _: out.square().mean())
    for _ in lab.steps(range(steps)):
        schedule.step(batch) if rank == 0 else schedule.step(target=batch)
        dist.barrier()  # so that the steps of the ranks begin and end together


def sharded(steps: int = 12) -> None:
    """FSDP2: each rank keeps half of every layer, and gathers the other half when needed."""
    from torch.distributed.fsdp import fully_shard

    model, batch = perceptron(), torch.randn(4 * BATCH, WIDTH)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters())
    with lab.track_memory(model, optimizer):
        for _ in range(steps):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()


class Shard(nn.Module):
    """The worker's part of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = perceptron(layers=4)

    def forward(self, part: torch.Tensor) -> torch.Tensor:
        """What a worker does with its half of the batch."""
        with torch.no_grad():
            return self.layers(part)  # type: ignore[no-any-return]  # a module's call is untyped


def master(steps: int = 100) -> None:
    """Remote calls: the master computes the first part of a model, each of two workers half of the batch."""
    from torch.distributed import rpc

    first, batch = perceptron(layers=2), torch.randn(4 * BATCH, WIDTH)
    shards = [rpc.remote(worker, Shard) for worker in ("worker1", "worker2")]
    with torch.no_grad():
        for _ in lab.steps(range(steps)):
            halves = first(batch).chunk(2)
            futures = [shard.rpc_async().forward(half) for shard, half in zip(shards, halves, strict=True)]
            torch.futures.wait_all(futures)


def ran(function: Callable[..., object], *arguments: object, on: Any = None, ranks: int = 2) -> lab.Run:
    """A run on a group of its own."""
    with lab.Group(ranks, on=on) as group:
        return group.run(function, *arguments)


def called() -> lab.Trace:
    """A run of remote calls."""
    with lab.Group(["master", "worker1", "worker2"], runtime="rpc") as group:
        return group["master"].run(master).trace


def draw_data_parallel() -> Axes:
    """A timeline of a few steps."""
    trace = ran(overlapped).trace
    return _with_neighbours(trace, quickest(trace, 2))


def draw_compare() -> Axes:
    """The gain of overlap."""
    with lab.Group(2) as group:
        runs = {"averaged afterwards": group.run(naive), "DistributedDataParallel": group.run(overlapped)}
    # All steps: a fast one of the first run beside a slow one of the second would prove nothing.
    return lab.compare(runs, step=range(WARM_UP, 200))


def draw_pipeline() -> Axes:
    """The ideal pipeline and the real one."""
    trace = ran(pipeline).trace
    measured = _stretch(trace, quickest(trace))
    forward, backward = (_mean_s(measured, name) for name in ("forward", "backward"))
    ideal = lab.schedule("1f1b", stages=2, micro_batches=6, forward=forward, backward=backward)
    return lab.timeline({"1F1B, ideal": ideal, "measured": measured})


def draw_memory() -> Axes:
    """The memory of two ranks that share a model."""
    run = ran(sharded)
    return lab.memory(run, step=quickest(run.trace, 2))


def draw_traffic() -> Axes:
    """Bytes of remote calls."""
    trace = called()
    return lab.traffic(_stretch(trace, quickest(trace, 2)))


def draw_calls() -> Axes:
    """Remote calls on the timeline."""
    trace = called()
    return _with_neighbours(trace, quickest(trace, 2))


def draw_machines() -> Axes:
    """The same run on this machine, and on two machines as each engine reaches them."""
    steps = {}
    for name in PLACES:
        with place(name) as at:
            trace = ran(overlapped, 60, on=at.on, ranks=4).trace
        steps[name] = _stretch(trace, quickest(trace))
    return lab.timeline(steps)


def script(path: Path) -> None:
    """Run a script, as torchrun does."""
    runpy.run_path(str(path), run_name="__main__")


def program(name: str) -> Axes:
    """Two steps of a program that knows nothing of labkit; `tests/notebook/pasted/` has its source."""
    trace = ran(script, PROGRAMS / f"plain_{name}.py").trace
    return _with_neighbours(trace, quickest(trace, 2))


def film_watch() -> None:
    """The animated picture."""
    with lab.Group(2, link=lab.Link.ethernet_1g) as group:
        group.run(learn, 1)
        film(FOLDER / FILM, group, learn, 10)


def _with_neighbours(trace: lab.Trace, steps: range) -> Axes:
    """The timeline of some steps, under a strip with ten more on both sides."""
    around = range(max(steps[0] - 10, 0), min(steps[-1] + 11, len(trace.step_bounds())))
    return lab.timeline(_stretch(trace, around), step=range(steps[0] - around[0], steps[-1] - around[0] + 1))


def _stretch(trace: lab.Trace, steps: range) -> lab.Trace:
    bounds = trace.step_bounds()
    return trace.between(int(bounds[steps[0], 0]), int(bounds[steps[-1], 1]))


def _mean_s(trace: lab.Trace, name: str) -> list[float]:
    """Per rank, the mean length of the passes in one direction, in seconds."""
    passes = [s for s in trace.filter(kind="compute") if s.name.startswith(name)]
    return [float(np.mean([s.duration_ns for s in passes if s.rank == rank])) / 1e9 for rank in range(len(trace.ranks))]


PICTURES: dict[str, Callable[[], Axes]] = {
    "data_parallel": draw_data_parallel, "compare": draw_compare, "pipeline": draw_pipeline, "memory": draw_memory,
    "traffic": draw_traffic, "calls": draw_calls, "machines": draw_machines,
    **{f"plain_{name}": partial(program, name) for name in ("ddp", "fsdp2", "gan", "accumulation", "compile")},
}  # fmt: skip


def main(names: list[str]) -> int:
    """Draw the pictures of these names; no names: all."""
    there = [*PICTURES, Path(FILM).stem]
    if unknown := set(names) - set(there):
        print(f"no picture {', '.join(sorted(unknown))}; there are {', '.join(there)}")
        return 2
    mpl.use("agg")
    for name in names or there:
        if name not in PICTURES:
            film_watch()
            print(f"{FILM}: {(FOLDER / FILM).stat().st_size / 1e3:.0f} kB")
            continue
        path = FOLDER / f"{name}.png"
        figure = PICTURES[name]().get_figure(root=True)
        assert figure is not None
        figure.savefig(path, dpi=DPI)
        with Image.open(path) as image:
            image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
        print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
