"""What a run tells whoever draws it while it is under way: `Picture`. Nothing in this package draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from labkit.recording.schema import Pending
from labkit.tracing.trace import Trace
from labkit.worker.resource_usage import Load

__all__ = ["Picture"]


class Picture(Protocol):
    """What a run tells a watcher, on the thread that called `watch`."""

    interval_s: float

    def begin(self, ranks: tuple[str, ...], title: str, start_ns: int, called: Sequence[int]) -> None:
        """The ranks start now; those with the numbers `called` call the function, the others serve."""

    def update(self, now_ns: int, new: Trace, pending: Sequence[Sequence[Pending]], loads: Sequence[Load]) -> None:
        """`new`: what was completed since the last update; `pending`: what each rank has under way; `loads`: what it takes."""

    def end(self, trace: Trace, stopped: str) -> None:
        """The run is over; `stopped` says what ended it before its time: "stopped by an error", or "" if nothing did."""
