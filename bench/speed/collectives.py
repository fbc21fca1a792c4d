"""The cost of recording a collective: one all_reduce over two ranks, compared with torch's own group class."""

from __future__ import annotations

import statistics
import time
from typing import Any, Final

__all__ = ["measure"]

RANKS: Final = 2
LOOPS: Final = 200
ROUNDS: Final = 15


def measure() -> dict[str, float]:
    """Medians in seconds, of loops that alternate: "recorded", "unrecorded"."""
    import labkit as lab

    with lab.Group(RANKS, devices="cpu") as group:
        of_ranks = group.run(_in_turns).results
    return {name: statistics.median(s for samples in of_ranks for s in samples[name]) for name in of_ranks[0]}


def _in_turns() -> dict[str, list[float]]:
    """In a rank: seconds of one all_reduce per group; the first loop of each warms up."""
    import torch
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d
    from torch._C._distributed_c10d import ProcessGroup

    watched: Any = c10d.ProcessGroup
    c10d.ProcessGroup = ProcessGroup  # type: ignore[misc]  # so that torch makes the next group of its own class
    groups = {"unrecorded": dist.new_group(list(range(RANKS)))}
    c10d.ProcessGroup = watched  # type: ignore[misc]
    groups["recorded"] = dist.group.WORLD
    number = torch.ones(1)
    samples: dict[str, list[float]] = {name: [] for name in groups}
    for _ in range(1 + ROUNDS):
        for name, group in groups.items():
            begin = time.perf_counter()
            for _ in range(LOOPS):
                dist.all_reduce(number, group=group)
            samples[name].append((time.perf_counter() - begin) / LOOPS)
    return {name: seconds[1:] for name, seconds in samples.items()}
