"""Compares what an answer gives with the oracle, and with what known mistakes give: each of these has a hint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from labkit.exercises.judging import AnswerError, Hint

__all__ = ["judge_result"]


def judge_result(
    given: Any,
    right: Any,
    mistakes: Mapping[Any, Any],
    otherwise: Hint,
    *details: str,
    same: Callable[[Any, Any], bool],
) -> None:
    """Accept a result that equals the oracle's; else give the hint of the mistake that has this result.

    The case that an exercise judges first must tell its mistakes apart, or one of them gets the hint of another.
    `judge` in tests/helpers/answers.py checks this for every exercise.

    Args:
        given: the answer's result.
        right: the oracle's.
        mistakes: the result of each known mistake, by its hint: a sentence, or a pair of it and the cure.
        otherwise: the hint for any other result; if empty, the caller explains it.
        details: further lines of the verdict.
        same: whether two results are equal up to rounding.

    Raises:
        AnswerError: the result is wrong.
    """
    if same(given, right):
        return
    hint = next((hint for hint, result in mistakes.items() if same(given, result)), otherwise)
    if hint:
        raise AnswerError(hint, *details)
