"""Time limits for tests of time limits: a machine that is too busy for one gets a longer one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from labkit.errors.exceptions import RunTimeoutError

LIMITS_S = (2.0, 15.0, 90.0)


def some_limit_does(shows: Callable[[float], bool], limits_s: tuple[float, ...] = LIMITS_S) -> bool:
    """Whether the test passes with one of the limits, tried in turn. Broken code passes with none."""
    for limit_s in limits_s:
        with contextlib.suppress(RunTimeoutError):  # of a run that comes to its end on a machine with time for it
            if shows(limit_s):
                return True
    return False
