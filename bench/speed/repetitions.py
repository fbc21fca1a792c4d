"""Repetitions inside ranks, and their medians, each from the last rank's start to the last rank's end."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Final

import torch.distributed as dist

REPEATS: Final = 9
Times = list[tuple[int, int]]  # begin and end of each, in ns


def repeated(action: Callable[[], object], times: int = REPEATS + 1) -> Times:
    """In a rank: start and end of each repetition; the first one, which warms up, is left out."""
    made = []
    for _ in range(times):
        dist.barrier()
        begin_ns = time.perf_counter_ns()
        action()
        made.append((begin_ns, time.perf_counter_ns()))
    return made[1:]


def in_turns(actions: dict[str, Callable[[], object]]) -> dict[str, Times]:
    """In a rank: several actions, repeated in turns, so that all see the machine in the same state."""
    made: dict[str, Times] = {name: [] for name in actions}
    for _ in range(REPEATS):
        for name, action in actions.items():
            made[name] += repeated(action, 2)
    return made


def seconds(of_ranks: list[Times]) -> float:
    """The median of the repetitions, each from the last rank's start to the last rank's end."""
    each = zip(*of_ranks, strict=True)
    return float(statistics.median(max(e for _, e in one) - max(b for b, _ in one) for one in each)) / 1e9
