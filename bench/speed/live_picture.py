"""The cost of the live picture for the training (the same cell with `run` and `watch` in turns) and for the kernel."""

from __future__ import annotations

import math
import statistics
import time
from typing import Final

from bench.kernel import Kernel

ROUNDS: Final = 3
SPANS: Final = 1_000_000

PREPARE: Final = """
import time
import labkit as lab
import labkit.plots.live.live
import torch
import torch.distributed as dist
from labkit.teaching.models import CNN
from torch.nn.parallel import DistributedDataParallel

def train(steps):
    torch.manual_seed(0)
    device = lab.device()
    model = DistributedDataParallel(CNN().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images, labels = torch.randn(64, 1, 28, 28, device=device), torch.randint(10, (64,), device=device)
    dist.barrier()
    start = time.perf_counter()
    for _ in lab.steps(range(steps)):
        with lab.span("forward"):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        with lab.span("backward"):
            optimizer.zero_grad()
            loss.backward()
        with lab.span("optimizer"):
            optimizer.step()
        lab.record(loss=loss)
    return time.perf_counter() - start

def write(spans):
    for _ in range(spans):
        with lab.span("forward"):
            pass

group = lab.Group(2)
def timed(go):
    return max(go(train, STEPS).results)

# Keeps the kernel's processor time from the beginning to the last look, per second: without the finished picture.
class Counted(labkit.plots.live.live.Live):
    def begin(self, *arguments):
        self.since = time.process_time(), time.perf_counter()
        super().begin(*arguments)

    def update(self, *arguments):
        super().update(*arguments)
        cpu, now = time.process_time(), time.perf_counter()
        Counted.share = (cpu - self.since[0]) / (now - self.since[1])

def share_of(function, argument):
    lab.Group.picture = staticmethod(Counted)
    try:
        trace = group.watch(function, argument).trace
    finally:
        lab.Group.picture = staticmethod(labkit.plots.live.live.Live)
    return Counted.share, len(trace), sum(trace.dropped)

def share_of_run(function, argument):
    cpu, now = time.process_time(), time.perf_counter()
    group.run(function, argument)
    return (time.process_time() - cpu) / (time.perf_counter() - now)

def draw(spans):
    trace = group.run(write, spans).trace
    now = time.perf_counter()
    lab.timeline(trace).figure.canvas.draw()
    return time.perf_counter() - now
"""


def measure(kernel: Kernel, steps: int = 100, *, rounds: int = ROUNDS, spans: int = SPANS) -> dict[str, float]:
    """What the live picture costs: seconds of training with "run" and "watch", and the time to "draw" many spans.

    The shares are the kernel's processor time per second: while two ranks train ("run share", "watch share"), and while
    they write spans as fast as they can ("spans share", of which a part is "lost").
    """
    run_s, ratio = compare(kernel, steps, rounds)
    found = {"run": run_s, "watch": run_s * ratio}
    found["run share"] = kernel.run("", value=f"share_of_run(train, {steps})")
    found["watch share"], _, _ = kernel.run("", value=f"share_of(train, {steps})")
    found["spans share"], kept, dropped = kernel.run("", value=f"share_of(write, {spans})")
    found["lost"] = dropped / max(kept + dropped, 1)
    found["draw"] = kernel.run("", value=f"draw({spans // 2})")
    kernel.run("group.close()")
    return found


def compare(kernel: Kernel, steps: int, rounds: int, limit_s: float = math.inf) -> tuple[float, float]:
    """The time of training with `run`, and the ratio of `watch` to it: medians of neighbouring pairs.

    After the first pair, none begins later than `limit_s`. The kernel has the group afterwards.
    """
    kernel.run(PREPARE.replace("STEPS", str(steps)))
    kernel.run("timed(group.run); timed(group.watch)")
    run_s: list[float] = []
    watch_s: list[float] = []
    until = time.monotonic() + limit_s
    for number in range(rounds):
        if number and time.monotonic() > until:
            break
        kinds = [("group.run", run_s), ("group.watch", watch_s)]
        for how, samples in kinds if number % 2 else kinds[::-1]:
            samples.append(kernel.run("", value=f"timed({how})"))
    return statistics.median(run_s), statistics.median(w / r for r, w in zip(run_s, watch_s, strict=True))
