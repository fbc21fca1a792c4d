"""`Picture`: the interface through which a run informs its live picture. Nothing in this package draws."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from labkit.launch.resource_usage import Load
from labkit.recording.schema import Pending
from labkit.tracing.trace import Trace


class Picture(Protocol):
    """A live picture of a run; its methods are called on the thread that called `watch`."""

    interval_s: float

    def begin(self, ranks: tuple[str, ...], title: str, start_ns: int, called: Sequence[int]) -> None:
        """The run starts; the ranks with the numbers `called` call the function, the others serve."""

    def update(
        self, now_ns: int, new: Trace, pending: Sequence[Sequence[Pending]], loads: Sequence[Load], silent: Mapping[int, int]
    ) -> None:
        """Receive newly completed spans, per rank its pending operations and its resource usage.

        `silent` has the ranks whose machine does not answer, with the time of its last report.
        """

    def hold(self, asking: Collection[int]) -> None:
        """The student is asked for a command for one of these ranks: no update follows while the student thinks."""

    def end(self, trace: Trace, stopped: str) -> None:
        """The run has ended; `stopped` says why it ended early, as in "stopped by an error"; "" if it did not."""
