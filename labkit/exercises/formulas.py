"""Exercises whose answer computes numbers from its arguments, as an oracle does that also knows common mistakes."""

from __future__ import annotations

import copy
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from labkit.errors.lists import counted
from labkit.exercises.comparisons import EXACT, judge_result, number_of, whole_numbers
from labkit.exercises.judging import AnswerError, Exercise, Hint, OnRanks, exercise, showing

__all__ = ["Expected", "formula_exercise", "judge_formula"]


@dataclass(frozen=True)
class Expected:
    """What an answer should return for the arguments of a case.

    Args:
        right: the oracle's result: a number, or a list or dictionary of numbers.
        mistakes: the known mistakes by their hints, as for `judge_result`.
        otherwise: the hint for any other result.
        form: what the result is, in words, if it is no number.
    """

    right: Any
    mistakes: Mapping[Any, Any] = field(default_factory=dict)
    otherwise: Hint = ""
    form: str = ""


Oracle = Callable[..., Expected]


def formula_exercise(
    lesson: str, target: str, passed: str, cases: Sequence[tuple[Any, ...]], *, within: float = EXACT
) -> Callable[[Oracle], Exercise]:
    """Make an exercise of an oracle, `_bubble` say; it has the oracle's name without the underscore.

    Args:
        lesson: the notebook that contains it.
        target: the task.
        passed: the message for a right answer.
        cases: as for `judge_formula`.
        within: as for `judge_formula`.
    """

    def made(oracle: Oracle) -> Exercise:
        name = oracle.__name__.removeprefix("_")

        def judge(answer: Any, _: OnRanks) -> None:
            judge_formula(answer, name, cases, oracle, within=within)

        return exercise(lesson, target, passed, name=name)(judge)

    return made


def judge_formula(answer: Any, name: str, cases: Iterable[tuple[Any, ...]], oracle: Oracle, *, within: float = EXACT) -> None:
    """Compare an answer with an oracle.

    Args:
        answer: the student's function.
        name: the exercise's name.
        cases: the arguments of each call. The first case tells the known mistakes apart.
        oracle: called with the same arguments.
        within: how far a result may be off, see `same`.

    Raises:
        AnswerError: a result is wrong.
    """
    for arguments in cases:
        expected = oracle(*arguments)
        with showing(f"{name}({', '.join(map(_shown, arguments))})"):
            given = answer(*copy.deepcopy(arguments))
            with showing(f"given {_shown(given)}, expected {_shown(expected.right)}"):
                numbers = _numbers(given, expected.right, expected.form)
                judge_result(numbers, expected.right, expected.mistakes, expected.otherwise, within=within)


def _numbers(given: Any, right: Any, form: str) -> Any:
    """Return the numbers of a result that has the same form as the oracle's.

    Raises:
        AnswerError: it has another form.
    """
    if isinstance(right, dict):
        if not isinstance(given, dict) or set(given) != set(right):
            raise AnswerError(f"expected {form}")
        return {key: number_of(given[key]) for key in right}
    if not isinstance(right, list):
        return number_of(given)
    if isinstance(right[0], int):
        numbers: list[Any] = list(whole_numbers(given, form))
    else:
        try:
            numbers = [float(number) for number in given]
        except (TypeError, ValueError):
            raise AnswerError(f"given {reprlib.repr(given)}: expected {form}") from None
    if len(numbers) != len(right):
        raise AnswerError(f"{counted(len(numbers), 'number')} in place of {len(right)}: expected {form}")
    return numbers


def _shown(value: Any) -> str:
    """Return a value as in code, with at most six digits of a float."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (list, tuple)):
        inside = ", ".join(map(_shown, value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' * (len(value) == 1)})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_shown(each)}" for key, each in value.items()) + "}"
    return reprlib.repr(value)
