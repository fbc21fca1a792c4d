"""Time limits of waits: one that the program has set is respected, torch's own of half an hour do not put off a verdict."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

__all__ = ["backends_limit", "ends_by_itself"]

# NCCL's own limit; gloo's is three times as long. A program that means to go on after a wait has failed sets a shorter one.
RESPECTED: Final = timedelta(minutes=10)


def ends_by_itself(limit: timedelta | float | None) -> bool:
    """Whether a wait with this limit, in seconds if it is a number, fails so soon that the program surely reckons with it."""
    if limit is None:
        return False
    seconds = limit.total_seconds() if isinstance(limit, timedelta) else limit
    return 0 < seconds < RESPECTED.total_seconds()


def backends_limit(backend: Any) -> timedelta | None:
    """After what time an operation of a backend fails; None where it does not say, or ends the process then, as NCCL does."""
    if backend.name() != "gloo":
        return None
    limit: timedelta = backend.options._timeout
    return limit
