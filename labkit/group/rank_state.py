"""The state of a rank at one moment: its pending operations, and whether it can still enter others' operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from labkit.recording.schema import STREAM, TIMED, Pending


@dataclass(frozen=True, slots=True)
class RankState:
    """The state of a rank at one moment.

    Args:
        name: the rank's name.
        pending: its operations that are issued and not completed, oldest first.
        called: whether it was called to run the function.
        returned: whether its function has returned, or it was not called: it enters no more operations by itself.
        serving: the number of its threads that serve calls of others (RPC).
        receiving: whether only these threads receive the replies to its own calls.
        entered: the number of the last operation that it entered, by process group or pair of ranks.
        done: its completed operations among those in which others are blocked.
        uncounted: whether it had more pending operations than can be recorded, so that it may have entered any
            operation.
        free: whether something else in it may still act, such as another thread.
    """

    name: str
    pending: Sequence[Pending] = ()
    called: bool = True
    returned: bool = False
    serving: int = 0
    receiving: bool = False
    entered: Mapping[str, int] = field(default_factory=dict)
    done: Sequence[Pending] = ()
    uncounted: bool = False
    free: bool = False

    @property
    def blocked(self) -> list[Pending]:
        """The operations in which it is blocked until they complete, oldest first."""
        return [p for p in self.pending if p.wait_start_ns and p.thread not in (STREAM, TIMED)]

    @property
    def timed(self) -> list[Pending]:
        """The operations in which it is blocked until they complete or a time limit expires."""
        return [p for p in self.pending if p.wait_start_ns and p.thread == TIMED]

    @property
    def queued(self) -> list[Pending]:
        """The operations that its GPU waits for, while the rank itself continues."""
        return [p for p in self.pending if p.wait_start_ns and p.thread == STREAM]
