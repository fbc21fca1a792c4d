"""What the live picture costs the training that it shows: the same cell with `run` and with `watch`, in turns."""

from __future__ import annotations

import statistics
import sys
from typing import Final

from kernel import Kernel

__all__ = ["measure"]

ROUNDS: Final = 9

PREPARE: Final = """
import time
import labkit as lab
import torch
import torch.distributed as dist
from labkit.models import CNN
from torch.nn.parallel import DistributedDataParallel

def train(steps):
    torch.manual_seed(0)
    model = DistributedDataParallel(CNN())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images, labels = torch.randn(64, 1, 28, 28), torch.randint(10, (64,))
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

group = lab.Group(2)
def timed(go):
    return max(go(train, STEPS).results)
"""


def measure(steps: int = 100) -> tuple[float, float, float]:
    """Seconds of training with `run` and with `watch`, as medians, and the median of the ratios of neighbours."""
    with Kernel(sys.executable) as kernel:
        kernel.run(PREPARE.replace("STEPS", str(steps)))
        kernel.run("timed(group.run); timed(group.watch)")
        run_s: list[float] = []
        watch_s: list[float] = []
        for number in range(ROUNDS):
            kinds = [("group.run", run_s), ("group.watch", watch_s)]
            for how, samples in kinds if number % 2 else kinds[::-1]:
                samples.append(kernel.run("", value=f"timed({how})"))
        kernel.run("group.close()")
    ratios = [w / r for r, w in zip(run_s, watch_s, strict=True)]
    return statistics.median(run_s), statistics.median(watch_s), statistics.median(ratios)
