"""Time limits of waits: the program's own are respected, but torch's defaults do not delay the report of a deadlock."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final, NamedTuple

from labkit.ipc.tracebacks import OWN_LIMIT
from labkit.recording.record import clock
from labkit.worker.comm.torch_internals import TIME_LIMITS

# NCCL's default; gloo's is three times as long. A program that expects a wait to fail, and handles that, sets a shorter
# limit.
RESPECTED: Final = timedelta(minutes=10)


class OwnLimit(NamedTuple):
    """A time limit that the program has set for a group's operations, and the student's line that set it, or ""."""

    seconds: float
    line: str

    def note(self, error: BaseException, start_ns: int) -> None:
        """Note in the error of an operation that this limit ended it, if it had lasted so long."""
        if clock() - start_ns >= self.seconds * 1e9:
            where = f" ({self.line})" if self.line else ""
            setattr(error, OWN_LIMIT, f"{self.seconds:g} s is the program's own time limit{where}.")


def ends_by_itself(limit: timedelta | float | None) -> bool:
    """Whether a time limit (in seconds if it is a number) is so short that the program expects the wait to fail."""
    if limit is None:
        return False
    seconds = limit.total_seconds() if isinstance(limit, timedelta) else limit
    return 0 < seconds < RESPECTED.total_seconds()


def backends_limit(backend: Any) -> timedelta | None:
    """Return the time limit of a backend's operations; None if it is unknown, or ends the process as NCCL's does."""
    if backend.name() != "gloo" or not TIME_LIMITS.found:
        return None
    limit: timedelta = TIME_LIMITS.of(backend.options, "_timeout")
    return limit
