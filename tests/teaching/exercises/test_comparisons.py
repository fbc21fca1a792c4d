"""What an answer gives is compared with the oracle and with known mistakes, and cases tell these apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from answers import Case, compared, confused, edited_solution

from labkit.teaching.exercises.comparisons import AnswerError, equal, expect, expect_numbers, wrong_if

MISTAKES = [(6, "half", "double it"), (24, "twice"), (12.5, "almost")]


def error_of(*arguments: Any, **options: Any) -> tuple[str, str, tuple[str, ...]]:
    with pytest.raises(AnswerError) as caught:
        expect(*arguments, **options)
    return caught.value.message, caught.value.cure, caught.value.details


def test_the_right_result_is_accepted() -> None:
    expect(12, 12, MISTAKES, "otherwise")


@pytest.mark.parametrize(
    ("given", "hint", "cure"), [(6, "half", "double it"), (24, "twice", ""), (7, "otherwise", "count again")]
)
def test_a_wrong_result_gets_the_hint_and_the_cure_of_its_mistake(given: int, hint: str, cure: str) -> None:
    assert error_of(given, 12, MISTAKES, "otherwise", "count again", "details") == (hint, cure, ("details",))


def test_a_result_that_no_hint_fits_is_left_to_the_caller() -> None:
    expect(7, 12, MISTAKES)


def test_which_results_are_equal_is_the_exercise_s_choice() -> None:
    expect(12.4, 12, MISTAKES, "otherwise", same=lambda a, b: abs(a - b) < 0.5)
    assert error_of(12.4, 12, MISTAKES, "otherwise", same=lambda a, b: abs(a - b) < 0.2)[0] == "almost"


def test_a_fault_is_named_only_if_the_answer_has_it() -> None:
    wrong_if([], "absent")
    with pytest.raises(AnswerError) as caught:
        wrong_if([1], "present", "its cure", "a detail")
    assert (caught.value.message, caught.value.cure, caught.value.details) == ("present", "its cure", ("a detail",))


@pytest.mark.parametrize(
    ("given", "right", "hint", "detail"),
    [
        (3.0, 2.0, "otherwise", "given 3.0, expected 2.0"),
        (None, 2.0, "the function returns nothing: print only shows", "given None, expected 2.0"),
        ([1 / 3], [2.0], "otherwise", "given [0.333333], expected [2.0]"),
        ([1.0], [1.0, 2.0], "1 number in place of 2: expected a list", "given [1.0], expected [1.0, 2.0]"),
        ([1.5], [2], "1.5 is not a whole number", "given [1.5], expected [2]"),
        ([None], [2.0], "expected a list", "given [None], expected [2.0]"),
        ({"a": 1}, {"b": 2.0}, "b is missing: expected a list", "given {'a': 1}, expected {'b': 2.0}"),
        ({"a": 1, "b": 2}, {"b": 2.0}, "a is no key here: expected a list", "given {'a': 1, 'b': 2}, expected {'b': 2.0}"),
    ],
)
def test_numbers_have_the_form_of_the_right_ones_and_the_verdict_shows_both(
    given: Any, right: Any, hint: str, detail: str
) -> None:
    with pytest.raises(AnswerError) as caught:
        expect_numbers(given, right, [], "otherwise", form="a list")
    assert caught.value.message.startswith(hint)
    assert caught.value.details[-1] == detail


def test_the_hint_can_depend_on_the_numbers() -> None:
    with pytest.raises(AnswerError) as caught:
        expect_numbers(3, 2.0, [(4.0, "twice")], lambda number: (f"{number - 2:.0f} too many", "count again"))
    assert (caught.value.message, caught.value.cure) == ("1 too many", "count again")


def test_a_mistake_that_gets_the_hint_of_another_is_found() -> None:
    """With 2 ranks, p and 2 coincide; a mistake that is right there is judged in the next case."""
    with compared() as cases:
        expect(12, 12, [(6, "half"), (3, "divided by p"), (48, "p is forgotten")])
        expect(12, 12, [(6, "half"), (6, "divided by p"), (12, "p is forgotten")])
    four, two = cases
    assert confused([four, two]) == []
    assert confused([two, four]) == ["the mistake of 'divided by p' is told 'half'"]
    assert confused([two]) == ["the mistake of 'divided by p' is told 'half'", "never wrong: p is forgotten"]


def test_one_mistake_can_have_several_results() -> None:
    assert confused([Case(1, [(2, "even"), (4, "even")], equal)]) == []
    assert confused([Case(1, [(4, "twice"), (2, "even"), (4, "even")], equal)]) == ["the mistake of 'even' is told 'twice'"]


def test_an_edit_of_a_solution_replaces_one_text() -> None:
    rate = edited_solution("scaled_learning_rate", "/ base_batch", "/ 2")
    assert rate(1, 100, 4, 3) == 6
    layer = torch.nn.Linear(2, 3)
    layer(torch.ones(2)).sum().backward()
    in_buckets = edited_solution("average_in_buckets", "> bucket_bytes", "> 0")  # in a function before it
    assert [len(bucket) for bucket in in_buckets.__globals__["buckets_of"](layer, 1000)] == [1, 1]
    for text in ("not in it", "ranks"):
        with pytest.raises(AssertionError, match="times in the solution"):
            edited_solution("scaled_learning_rate", text, "")


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
