"""Runs an exercise's function on TensorFlow ranks, and explains TensorFlow's messages after common mistakes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from labkit.errors.exceptions import RankError
from labkit.exercises.judging import AnswerError, OnRanks, Results

__all__ = ["explaining"]


def explaining(on: OnRanks, messages: Sequence[tuple[str, str]]) -> OnRanks:
    """Return an `OnRanks` for TensorFlow ranks that raises an `AnswerError` if a run fails with a known message.

    Args:
        on: runs a function on ranks.
        messages: parts of TensorFlow's messages, and what they mean for the student.
    """

    def explained(ranks: Any, function: Callable[..., Any], *args: Any, **options: Any) -> Results:
        try:
            return on(ranks, function, *args, runtime="tensorflow", **options)
        except RankError as error:
            text = f"{error.failures[0].headline}\n{error.failures[0].traceback}"
            explanation = next((explanation for message, explanation in messages if message in text), None)
            if explanation is None:
                raise
            raise AnswerError(explanation) from None

    return explained
