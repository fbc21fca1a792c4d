"""How a rank stands at one moment: what it has issued, what it is blocked in, whether others can still count on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from labkit.recording.schema import STREAM, TIMED, Pending

__all__ = ["Standing"]


@dataclass(frozen=True, slots=True)
class Standing:
    """How a rank stands at one moment.

    Args:
        name: its name.
        pending: its operations that are issued and not completed, oldest first.
        called: whether it was to call the function.
        returned: whether it takes part in nothing any more: its function has returned, or it was not called.
        serving: how many of its threads do others' calls all the same (RPC).
        entered: by process group or pair of ranks, the number of the last operation that it came to.
        done: of the operations in which others are blocked, those that it has completed.
        uncounted: whether it has had more under way than it can note down, so that it may have come to anything.
        free: whether it may act beside what it is blocked in, or after it has returned: on another thread, say.
    """

    name: str
    pending: Sequence[Pending] = ()
    called: bool = True
    returned: bool = False
    serving: int = 0
    entered: Mapping[str, int] = field(default_factory=dict)
    done: Sequence[Pending] = ()
    uncounted: bool = False
    free: bool = False

    @property
    def blocked(self) -> list[Pending]:
        """What it is blocked in until that completes, oldest first."""
        return [p for p in self.pending if p.wait_start_ns and p.thread not in (STREAM, TIMED)]

    @property
    def timed(self) -> list[Pending]:
        """What it is blocked in until that completes or a time is up, after which it goes on in any case."""
        return [p for p in self.pending if p.wait_start_ns and p.thread == TIMED]

    @property
    def queued(self) -> list[Pending]:
        """What its GPU waits for, while it goes on itself."""
        return [p for p in self.pending if p.wait_start_ns and p.thread == STREAM]
