"""labkit's groups. Like the other `with_` files, this one is run as a cell of a kernel of its own."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np

import labkit as lab
from bench.peers.work import ARRAY_BYTES, RANKS, children_pss, seconds, wait_until_children_rest
from labkit.group.open_groups import notebook


def add_up() -> float:
    """Return the sum of a one from each rank."""
    import torch
    import torch.distributed as dist

    total = torch.ones(1)
    dist.all_reduce(total)
    return float(total)


def nothing() -> None:
    """Do nothing."""


def same(array: Any) -> Any:
    """Return the argument."""
    return array


class Labkit:
    """`labkit.Group`.

    Args:
        start: "fork" or "spawn".
    """

    def __init__(self, start: str) -> None:
        self._start = start
        self._group: lab.Group | None = None
        self._array = np.ones(ARRAY_BYTES, np.uint8)

    def ready(self) -> float:
        """See `work.Tool`; the rest likewise."""
        self.close()
        if self._start == "spawn":
            notebook.starter("torch", "spawn").warm(RANKS)
            wait_until_children_rest()
        start = time.perf_counter()
        results = self._running().run(add_up).results
        took_s = time.perf_counter() - start
        assert results == [RANKS] * RANKS
        return took_s

    def call(self) -> float:
        """See `work.Tool`."""
        group = self._running()
        return statistics.median(seconds(lambda: group.run(nothing)) for _ in range(200))

    def move(self) -> float:
        """See `work.Tool`."""
        group = self._running()
        start = time.perf_counter()
        results = group.run(same, self._array).results
        took_s = time.perf_counter() - start
        assert [r.nbytes for r in results] == [ARRAY_BYTES] * RANKS
        return took_s

    def memory(self) -> float:
        """See `work.Tool`."""
        self.ready()
        return children_pss()

    def close(self) -> None:
        """See `work.Tool`."""
        if self._group is not None:
            self._group.close()
            self._group = None

    def _running(self) -> lab.Group:
        if self._group is None:
            self._group = lab.Group(RANKS, start=self._start)
        return self._group
