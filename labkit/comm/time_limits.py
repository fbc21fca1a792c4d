"""Time limits of waits: the program's own are respected; torch's defaults do not postpone the report of a deadlock."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

__all__ = ["backends_limit", "ends_by_itself"]

# NCCL's own limit; gloo's is three times as long. A program that means to go on after a wait has failed sets a shorter
# one.
RESPECTED: Final = timedelta(minutes=10)


def ends_by_itself(limit: timedelta | float | None) -> bool:
    """Whether a wait with this limit (in seconds if it is a number) is so short that the program expects a failure."""
    if limit is None:
        return False
    seconds = limit.total_seconds() if isinstance(limit, timedelta) else limit
    return 0 < seconds < RESPECTED.total_seconds()


def backends_limit(backend: Any) -> timedelta | None:
    """The time limit of a backend's operations; None if it is unknown, or if it ends the process, as with NCCL."""
    if backend.name() != "gloo":
        return None
    limit: timedelta = backend.options._timeout
    return limit
