"""Which values pass as numbers, and which error each of the others gives."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from labkit.errors.wrong_calls import check_number


@pytest.mark.parametrize(
    ("value", "limits"),
    [
        (0, {}),
        (-2.5, {}),
        (math.inf, {"above": 0}),
        (10**400, {"at_least": 1}),
        (Fraction(1, 3), {"above": 0, "below": 1}),
        (np.float32(0), {"at_least": 0}),
        (np.int64(3), {"whole": True, "at_least": 3, "below": 4}),
    ],
)
def test_a_number_in_range_passes(value: Any, limits: dict[str, Any]) -> None:
    check_number(value, "unused", **limits)


@pytest.mark.parametrize(
    ("value", "limits", "error"),
    [
        ("1", {}, TypeError),
        (None, {}, TypeError),
        (True, {}, TypeError),
        (1j, {}, TypeError),
        (1.0, {"whole": True}, TypeError),
        (math.nan, {}, ValueError),
        (0, {"above": 0}, ValueError),
        (-1e-9, {"at_least": 0}, ValueError),
        (4, {"whole": True, "below": 4}, ValueError),
        (math.inf, {"below": math.inf}, ValueError),
        (10**400, {"below": math.inf}, ValueError),
    ],
)
def test_anything_else_is_an_error_with_the_given_message(value: Any, limits: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        check_number(value, "x=...: expected another", **limits)
    assert type(caught.value) is error
    assert str(caught.value) == "x=...: expected another"
