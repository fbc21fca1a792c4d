"""What an answer gives is compared with the oracle and with known mistakes, and cases tell these apart."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import pytest
import torch
from answers import Case, confused

from labkit.exercises.comparisons import equal, judge_result
from labkit.exercises.judging import AnswerError, reject

MISTAKES = {"half": 6, "twice": 24}


def test_a_hint_can_have_a_cure() -> None:
    with pytest.raises(AnswerError) as caught:
        judge_result(6, 12, {("half", "double it"): 6}, "otherwise", same=operator.eq)
    assert (caught.value.message, caught.value.cure) == ("half", "double it")


def test_the_right_result_is_accepted() -> None:
    judge_result(12, 12, MISTAKES, "otherwise", same=operator.eq)


@pytest.mark.parametrize(("given", "hint"), [(6, "half"), (24, "twice"), (7, "otherwise")])
def test_a_wrong_result_gets_the_hint_of_its_mistake(given: int, hint: str) -> None:
    with pytest.raises(AnswerError) as caught:
        judge_result(given, 12, MISTAKES, "otherwise", "details", same=operator.eq)
    assert (caught.value.message, caught.value.details) == (hint, ("details",))


def test_a_result_that_no_hint_fits_is_left_to_the_caller() -> None:
    judge_result(7, 12, MISTAKES, "", same=operator.eq)


def test_a_mistake_that_gets_the_hint_of_another_is_found() -> None:
    """With 2 ranks, p and 2 coincide; a mistake that is right there is judged in the next case."""
    two = Case(12, {"half": 6, "divided by p": 6, "p is forgotten": 12}, operator.eq)
    four = Case(12, {"half": 6, "divided by p": 3, "p is forgotten": 48}, operator.eq)
    assert confused([four, two]) == []
    assert confused([two, four]) == ["the mistake of 'divided by p' is told 'half'"]
    assert confused([two]) == ["the mistake of 'divided by p' is told 'half'", "never wrong: p is forgotten"]


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (1 + 1e-7, 1.0, True),
        (1 + 1e-5, 1.0, False),
        (float("inf"), float("inf"), True),
        (float("nan"), float("nan"), False),
        ((1, 2), [1.0, 2.0], True),
        ([1.0], [1.0, 2.0], False),
        ({0: 1.0}, {0: 1}, True),
        ({1: 1.0}, {0: 1}, False),
        ([1.0], {0: 1}, False),
        (torch.ones(2), np.ones(2), True),
        (np.zeros(2), np.zeros(3), False),
        (np.array([1e9, 1.0]), np.array([1e9, 2.0]), True),
        ("a text", 1.0, False),
        (None, 1.0, False),
    ],
)
def test_results_are_equal_up_to_rounding(a: Any, b: Any, expected: bool) -> None:
    """Relative to the largest number of an array, in some entries of which terms may cancel."""
    assert equal(a, b) is expected


def test_how_far_results_may_be_apart_is_the_exercise_s_choice() -> None:
    assert equal(1.0005, 1.0, within=1e-3)
    assert not equal(1.0005, 1.0, within=1e-4)


def test_the_first_fault_is_named_and_no_other() -> None:
    with pytest.raises(AnswerError) as caught:
        reject({"absent": [], ("present", "its cure"): [1], "present, too": True}, "a detail")
    assert (caught.value.message, caught.value.cure, caught.value.details) == ("present", "its cure", ("a detail",))
    reject({"absent": None})
