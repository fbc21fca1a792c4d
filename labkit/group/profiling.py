"""`Profiling`: whether torch's profiler records the runs of a group; `lab.profile` switches it on for a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Profiling"]


class Profiling:
    """Whether torch's profiler records the runs of a group.

    Attributes:
        on: whether it does so now.
    """

    def __init__(self) -> None:
        self.on = False

    @contextmanager
    def block(self) -> Iterator[None]:
        """Profile the runs of this block."""
        before, self.on = self.on, True
        try:
            yield
        finally:
            self.on = before
