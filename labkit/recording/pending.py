"""An operation that a rank has issued and that has not completed, as the notebook reads it from the rank's memory."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Pending"]


@dataclass(frozen=True, slots=True)
class Pending:
    """An operation that a rank issued and that has not completed: what it is waiting for, or what runs beside it.

    The numbers mean what they mean in `tracing.trace.Span`; `wait_start_ns` is 0 while the rank is not blocked in it, and
    `thread` is the system's number of the thread that is, or that issued it.
    """

    name: str
    start_ns: int
    wait_start_ns: int
    nbytes: int
    peer: int
    group: str
    match: int
    line: str
    signature: str = ""
    thread: int = 0
