"""The resources of a process and its descendants (descriptors, memory, processes), and whether they grow."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Final

import numpy as np
import psutil


@dataclass(frozen=True, slots=True)
class Footprint:
    """The resources at one moment."""

    descriptors: float  # open ones, of this process and all below it
    segments: float  # of shared memory: descriptors of those without a name, and files in /dev/shm
    processes: float  # below this one
    resident: float  # bytes of memory of this process
    below: float  # bytes of memory of the processes below it, each counted as its own


# The allowed growth per run, or per group, once warm. Leaks are whole numbers: one descriptor each time is 1.
GROWTH: Final = Footprint(descriptors=0.01, segments=0.01, processes=0.01, resident=4096, below=4096)


def footprint() -> Footprint:
    """The resources of this process now; garbage that is not yet collected does not count."""
    gc.collect()
    me = psutil.Process()
    below = me.children(recursive=True)
    held = [_links(p.pid) for p in (me, *below)]
    named = len(list(Path("/dev/shm").iterdir())) if Path("/dev/shm").is_dir() else 0
    memory = 0
    for process in below:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            memory += process.memory_info().rss
    return Footprint(
        sum(map(len, held)),
        named + sum("memfd:" in link for links in held for link in links),
        len(below),
        me.memory_info().rss,
        memory,
    )


def watch_growth(action: Callable[[], object], count: int, *, warm: int, looks: int = 30) -> Footprint:
    """Call the action `warm + count` times; returns the growth per call, by some looks after the warm ones.

    Meanwhile imports, caches and the allocator's pools fill up.
    """
    for _ in range(warm):
        action()
    every = max(1, count // looks)
    gc.collect()
    gc.freeze()  # existing objects need not be collected each time: with torch alone this takes 0.15 s
    try:
        at, seen = [0], [footprint()]
        for number in range(1, count + 1):
            action()
            if number % every == 0:
                at.append(number)
                seen.append(footprint())
    finally:
        gc.unfreeze()
    return growth(at, seen)


def growth(at: list[int], seen: list[Footprint]) -> Footprint:
    """The slope of each quantity: the lower quartile of the slopes between all pairs, which ignores single jumps.

    Theil-Sen's estimate is the median of these slopes; one jump in the middle decides it. A leak shows in all of them.

    Source: P. K. Sen, "Estimates of the Regression Coefficient Based on Kendall's Tau", 1968.
    """
    x, y = np.array(at, float), np.array([astuple(s) for s in seen], float)
    first, second = np.triu_indices(len(x), 1)
    slopes = (y[second] - y[first]) / (x[second] - x[first])[:, None]
    return Footprint(*np.quantile(slopes, 0.25, axis=0).tolist())


def too_much(grown: Footprint, times: float = 1) -> list[str]:
    """The quantities that grow by more than `GROWTH`, or some multiple of it, allows."""
    names = [f.name for f in fields(Footprint)]
    return [n for n in names if getattr(grown, n) > times * getattr(GROWTH, n)]


def _links(pid: int) -> list[str]:
    """The open descriptors of a process; [] if it has just ended."""
    links = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the listing's own descriptor
                links.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return links
