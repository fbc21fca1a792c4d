"""How much longer a communication takes in a real group on this machine than its link's model says."""

from __future__ import annotations

from statistics import median
from typing import Final

from labkit.costs.link import Link
from labkit.group.group import Group
from labkit.recording.record import clock

TRIES: Final = 60
LINK: Final = Link(gbit_per_s=1000, latency_us=100)  # slow enough to be what an operation waits for


def lateness_ns() -> int:
    """Measure it with all-reduces of a single number between two ranks."""
    with Group(2, devices="cpu", threads=1, link=LINK) as group:
        taken_ns = min(float(median(of_rank)) for of_rank in group.run(_reduce).results)
    return max(round(taken_ns - LINK.seconds("all_reduce", 4, 2) * 1e9), 0)


def _reduce() -> list[int]:
    """Return how long each of some all-reduces takes, in ns."""
    import torch
    import torch.distributed as dist

    number, found = torch.ones(1), []
    for _ in range(TRIES):
        start_ns = clock()
        dist.all_reduce(number)
        found.append(clock() - start_ns)
    return found[TRIES // 3 :]
