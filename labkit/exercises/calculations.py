"""Exercises whose answer computes numbers from its arguments, as an oracle does that also knows common mistakes."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from labkit.errors.lists import counted
from labkit.exercises.comparisons import equal, judge_result, number_of, whole_numbers
from labkit.exercises.judging import AnswerError, Exercise, Hint, OnRanks, exercise, showing
from labkit.exercises.random_state import other_cases


@dataclass(frozen=True)
class Expected:
    """What an answer should return for the arguments of a case.

    Args:
        right: the oracle's result: a number, or a list or dictionary of numbers.
        mistakes: the known mistakes by their hints, as for `judge_result`.
        otherwise: the hint for any other result, or a function that gives it for a result.
        form: what the result is, in words, if it is no number.
    """

    right: Any
    mistakes: Mapping[Any, Any]
    otherwise: Hint | Callable[[Any], Hint]
    form: str = ""


def calculation(
    lesson: str,
    target: str,
    passed: str,
    cases: Iterable[tuple[Any, ...]],
    *,
    other: Callable[[Random], tuple[Any, ...]],
    same: Callable[[Any, Any], bool] = equal,
) -> Callable[[Callable[..., Expected]], Exercise]:
    """Make an exercise of an oracle, `_bubble` say; it has the oracle's name without the underscore.

    Args:
        lesson: the notebook that contains it.
        target: the task.
        passed: the message for a right answer.
        cases: the arguments of each call. The first case tells the known mistakes apart.
        other: makes the arguments of one more call, with which graders judge: an answer that knows only the results of
            `cases`, which verdicts show, fails.
        same: whether two results are equal up to rounding.
    """

    def made(oracle: Callable[..., Expected]) -> Exercise:
        name = oracle.__name__.removeprefix("_")

        def judge(answer: Any, _: OnRanks) -> None:
            for arguments in (*cases, *other_cases(other)):
                judge_calculation(answer, name, arguments, oracle(*arguments), same)

        return exercise(lesson, target, passed, name=name)(judge)

    return made


def judge_calculation(
    answer: Any, name: str, arguments: tuple[Any, ...], expected: Expected, same: Callable[[Any, Any], bool] = equal
) -> None:
    """Compare what an answer returns for some arguments with the oracle's result.

    Raises:
        AnswerError: it is wrong.
    """
    right = expected.right
    with showing(f"{name}({', '.join(map(_shown, arguments))})"):
        given = answer(*arguments)
        with showing(f"given {_shown(given)}, expected {_shown(right)}"):
            numbers = _numbers(given, right, expected.form)
            otherwise = expected.otherwise(numbers) if callable(expected.otherwise) else expected.otherwise
            judge_result(numbers, right, expected.mistakes, otherwise, same=same)


def _numbers(given: Any, right: Any, form: str) -> Any:
    """Return the numbers of a result that has the same form as the oracle's."""
    if isinstance(right, dict):
        if not isinstance(given, dict):
            raise AnswerError(f"expected {form}")
        if missing := [key for key in right if key not in given]:
            raise AnswerError(f"{missing[0]} is missing: expected {form}")
        if extra := [key for key in given if key not in right]:
            raise AnswerError(f"{extra[0]} is no key here: expected {form}")
        return {key: number_of(given[key]) for key in right}
    if not isinstance(right, list):
        return number_of(given)
    try:
        numbers = whole_numbers(given, form) if isinstance(right[0], int) else [float(number) for number in given]
    except (TypeError, ValueError):
        raise AnswerError(f"expected {form}") from None
    if len(numbers) != len(right):
        raise AnswerError(f"{counted(len(numbers), 'number')} in place of {len(right)}: expected {form}")
    return numbers


def _shown(value: Any) -> str:
    """Return a value as in code, with six digits of a number that is not whole."""
    if isinstance(value, float):
        return repr(value) if value.is_integer() else f"{value:.6g}"
    if isinstance(value, (list, tuple)):
        inside = ", ".join(map(_shown, value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' * (len(value) == 1)})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_shown(each)}" for key, each in value.items()) + "}"
    return reprlib.repr(value)
