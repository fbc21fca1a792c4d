"""Tests of what happens within a time limit, or for as long as one: a machine that is too busy for it gets a longer one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from labkit.errors.exceptions import RunTimeoutError

__all__ = ["LIMITS_S", "some_limit_does"]

LIMITS_S = (2.0, 15.0, 90.0)


def some_limit_does(shows: Callable[[float], bool], limits_s: tuple[float, ...] = LIMITS_S) -> bool:
    """Whether it is seen with one of the limits, tried in turn. What is broken is seen with none."""
    for limit_s in limits_s:
        with contextlib.suppress(RunTimeoutError):  # of a run that comes to its end on a machine with time for it
            if shows(limit_s):
                return True
    return False
