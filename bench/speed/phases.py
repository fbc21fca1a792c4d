"""The cost of finding the phases of training: a small model's step with and without labkit's wrappers, in turns."""

from __future__ import annotations

import contextlib
import mmap
import statistics
import time
from collections.abc import Iterator
from typing import Any, Final

__all__ = ["measure"]

ROUNDS: Final = 41
STEPS: Final = 20  # per round and turn
LAYERS, WIDTH, BATCH = 10, 256, 64  # a step of some milliseconds on one core


def measure() -> tuple[float, float]:
    """Return the median step in seconds without the wrappers, and the median ratio with them."""
    import torch
    from torch import nn
    from torch.optim import optimizer as optimizers

    from labkit.recording.record import Recorder, here
    from labkit.recording.ring_buffer import RING_BYTES, RingWriter
    from labkit.worker.comm import phases

    hooks: Any = optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks
    wrapped = (nn.Module, "__call__"), (torch.autograd, "backward")

    @contextlib.contextmanager
    def without() -> Iterator[None]:
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

    threads = torch.get_num_threads()
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

    recorder = Recorder(RingWriter(mmap.mmap(-1, RING_BYTES)))
    here.start(recorder)
    phases.install()
    plain, ratios = [], []
    for turn in range(ROUNDS):
        first = median_step() if turn % 2 else 0.0
        with without():
            plain.append(median_step())
        ratios.append((first or median_step()) / plain[-1])
    here.start(None)
    torch.set_num_threads(threads)
    return statistics.median(plain), statistics.median(ratios)
