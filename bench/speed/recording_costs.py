"""What recording costs: a span, the phases of a training step, a collective; each beside the same without it."""

from __future__ import annotations

import contextlib
import importlib
import mmap
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import nn
from torch._C._distributed_c10d import ProcessGroup
from torch.optim import optimizer as optimizers

import labkit as lab
from labkit.recording.ring_buffer import RING_BYTES, RingWriter
from labkit.worker.comm import phases

ROUNDS: Final = 15
LOOPS: Final = 50_000  # of spans, in a round
STEPS: Final = 20  # of training, in a round
CALLS: Final = 200  # of a collective, in a round
LAYERS, WIDTH, BATCH = 10, 256, 64  # a step of some milliseconds on one core
recording: Any = importlib.import_module("labkit.recording.record")  # `labkit.record` is the function


def _recorder() -> Any:
    return recording.Recorder(RingWriter(mmap.mmap(-1, RING_BYTES)))


def spans() -> dict[str, float]:
    """Seconds, medians of loops in turns: "two clocks" (readings), a span "outside" a group, and "recording"."""
    span, clock = lab.span, time.perf_counter_ns

    def nothing() -> None:
        for _ in range(LOOPS):
            pass

    def two_clocks() -> None:
        for _ in range(LOOPS):
            clock()
            clock()

    def many_spans() -> None:
        for _ in range(LOOPS):
            with span("forward"):
                pass

    def per_loop(loop: Callable[[], None]) -> float:
        start = clock()
        loop()
        return (clock() - start) / LOOPS / 1e9

    samples: dict[str, list[float]] = {name: [] for name in ("empty", "two clocks", "outside", "recording")}
    recorder = _recorder()
    for _ in range(ROUNDS):
        samples["empty"].append(per_loop(nothing))
        samples["two clocks"].append(per_loop(two_clocks))
        samples["outside"].append(per_loop(many_spans))
        recording.here.start(recorder)
        samples["recording"].append(per_loop(many_spans))
        recording.here.start(None)
    empty = statistics.median(samples.pop("empty"))  # the loop itself
    return {name: statistics.median(values) - empty for name, values in samples.items()}


@contextlib.contextmanager
def _without_phases() -> Iterator[None]:
    """Training as torch itself does it."""
    hooks: Any = optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks
    wrapped = (nn.Module, "__call__"), (torch.autograd, "backward")
    ours, kept = [getattr(owner, name) for owner, name in wrapped], [dict(these) for these in hooks]
    for (owner, name), one in zip(wrapped, ours, strict=True):
        setattr(owner, name, one.__labkit_original__)
    for these in hooks:
        these.clear()
    yield
    for (owner, name), one in zip(wrapped, ours, strict=True):
        setattr(owner, name, one)
    for these, those in zip(hooks, kept, strict=True):
        these.update(those)


def training() -> dict[str, float]:
    """Seconds of a small model's step: "plain", and with its "phases" recorded, by the median ratio of turns."""
    torch.set_num_threads(1)
    model = nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))
    optimizer, criterion = torch.optim.SGD(model.parameters(), lr=1e-3), nn.MSELoss()
    batch = torch.randn(BATCH, WIDTH)

    def median_step() -> float:
        took = []
        for _ in range(STEPS):
            start = time.perf_counter()
            optimizer.zero_grad()
            criterion(model(batch), batch).backward()
            optimizer.step()
            took.append(time.perf_counter() - start)
        return statistics.median(took)

    recording.here.start(_recorder())
    phases.install()
    median_step()  # warms up
    plain, ratios = [], []
    for turn in range(ROUNDS):
        first = median_step() if turn % 2 else 0.0
        with _without_phases():
            plain.append(median_step())
        ratios.append((first or median_step()) / plain[-1])
    return {"plain": statistics.median(plain), "phases": statistics.median(plain) * statistics.median(ratios)}


def collectives() -> dict[str, float]:
    """Seconds of one all_reduce over two ranks, in turns: "recorded", and by "torch's" own group."""
    with lab.Group(2, devices="cpu") as group:
        of_ranks = group.run(_all_reduces).results
    return {name: statistics.median(s for samples in of_ranks for s in samples[name]) for name in of_ranks[0]}


def _all_reduces() -> dict[str, list[float]]:
    """In a rank; the first loop of each group warms up."""
    watched: Any = c10d.ProcessGroup
    c10d.ProcessGroup = ProcessGroup  # type: ignore[misc]  # so that torch makes the next group of its own class
    groups = {"torch's": dist.new_group([0, 1])}
    c10d.ProcessGroup = watched  # type: ignore[misc]
    groups["recorded"] = dist.group.WORLD
    number = torch.ones(1)
    samples: dict[str, list[float]] = {name: [] for name in groups}
    for _ in range(1 + ROUNDS):
        for name, group in groups.items():
            begin = time.perf_counter()
            for _ in range(CALLS):
                dist.all_reduce(number, group=group)
            samples[name].append((time.perf_counter() - begin) / CALLS)
    return {name: seconds[1:] for name, seconds in samples.items()}
