"""The older form of a judge, with its own loop over cases; it goes when the last judge has the form of exercise.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from labkit.teaching.exercises.answer_ranks import call_answer
from labkit.teaching.exercises.comparisons import AnswerError, Hint, equal, expect
from labkit.teaching.exercises.exercise import (
    NUMBER_FOR_LIST,
    Exercise,
    OnRanks,
    Passed,
    Results,
    explaining,
    judge_exchange,
    showing,
)

__all__ = [
    "NUMBER_FOR_LIST", "AnswerError", "Exercise", "Hint", "OnRanks", "Passed", "Results", "as_list", "call", "exercise",
    "explaining", "judge_exchange", "judge_result", "reject", "showing",
]  # fmt: skip
call = call_answer


def exercise(
    lesson: str, target: str, passed: str, *, name: str = "", number: bool = False
) -> Callable[[Callable[[Any, OnRanks], float | None]], Exercise]:
    """Make an exercise of a judge, `_ring_all_reduce` say; it has the judge's name without the underscore."""

    def made(judge: Callable[[Any, OnRanks], float | None]) -> Exercise:
        def judged(answer: Any, on: OnRanks) -> Passed:
            score = judge(answer, on)
            return Passed(passed if score is None else passed.format(score=score), score)

        return Exercise(name or judge.__name__.removeprefix("_"), lesson, target, judged, number)

    return made


def reject(faults: Mapping[Any, object], *details: str) -> None:
    """Give the hint of the first fault that an answer has, if it has one."""
    for hint, present in faults.items():
        if present:
            raise AnswerError(hint, *details)


def judge_result(
    given: Any,
    right: Any,
    mistakes: Mapping[Any, Any],
    otherwise: Hint = "",
    *details: str,
    same: Callable[[Any, Any], bool] = equal,
) -> None:
    """As `expect`, with the known mistakes by their hints."""
    pair = (otherwise, "") if isinstance(otherwise, str) else otherwise
    expect(given, right, as_list(mistakes), *pair, *details, same=same)


def as_list(mistakes: Mapping[Any, Any]) -> list[tuple[Any, ...]]:
    """Return known mistakes by their hints in the form of `expect`."""
    return [(result, hint) if isinstance(hint, str) else (result, *hint) for hint, result in mistakes.items()]
