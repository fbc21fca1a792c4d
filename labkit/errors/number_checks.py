"""`check_number`: the one way to check a number that a student gives."""

from __future__ import annotations

import math
import numbers
from typing import Any


def check_number(
    value: Any,
    expected: str,
    *,
    whole: bool = False,
    at_least: float = -math.inf,
    above: float = -math.inf,
    below: float | None = None,
) -> None:
    """Check that a value is a number in a range.

    Args:
        value: what was given.
        expected: the message if it is something else: what was given, and what was expected.
        whole: whether it must be a whole number.
        at_least: the lowest value.
        above: a value that it must exceed.
        below: a value that it must not reach; default: it may be infinite.

    Raises:
        TypeError: it is no such number.
        ValueError: it is out of range, or not a number (nan).
    """
    if not isinstance(value, numbers.Integral if whole else numbers.Real) or isinstance(value, bool):
        raise TypeError(expected)
    try:
        number = float(value)
    except OverflowError:  # a whole number that is too large for a float
        number = math.inf
    if not (number >= at_least and number > above and (below is None or number < below)):
        raise ValueError(expected)
