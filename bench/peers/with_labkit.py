"""labkit's groups; the text of this file is a cell, so that its functions are those of a notebook."""

from __future__ import annotations

from typing import Any

import labkit as lab
from bench.peers.work import RANKS, Tool, wait_until_children_rest
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


class Labkit(Tool):
    """`labkit.Group`; where ranks are spawned, later groups have spare ones that are warm."""

    def __init__(self, start: str) -> None:
        super().__init__()
        self._start = start
        self.times = 3 if start == "fork" else 1

    def ready(self) -> list[float]:
        """See `Tool`; the rest likewise."""
        self._group = lab.Group(RANKS, start=self._start)
        return self._group.run(add_up).results

    def call(self) -> object:
        """See `Tool`."""
        return self._group.run(nothing)

    def move(self) -> object:
        """See `Tool`."""
        return self._group.run(same, self.array).results

    def close(self) -> None:
        """See `Tool`."""
        self._group.close()

    def prepare(self) -> None:
        """See `Tool`."""
        if self._start == "spawn":
            notebook.starter("torch", "spawn").warm(RANKS)
            wait_until_children_rest()
