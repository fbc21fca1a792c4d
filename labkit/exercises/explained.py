"""Runs an exercise's function on ranks, and explains what libraries say after common mistakes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from labkit.errors.exceptions import RankError
from labkit.exercises.judging import AnswerError, Hint, OnRanks, Results

__all__ = ["explaining"]


def explaining(on: OnRanks, messages: Sequence[tuple[str, Hint]], **options: Any) -> OnRanks:
    """Return an `OnRanks` that raises an `AnswerError` if a run fails with a known message.

    Args:
        on: runs a function on ranks.
        messages: parts of error messages, and what they mean for the student.
        options: options of the group, if a call does not give them.
    """

    def explained(ranks: Any, function: Callable[..., Any], *args: Any, **more: Any) -> Results:
        try:
            return on(ranks, function, *args, **options | more)
        except RankError as error:
            text = f"{error.failures[0].headline}\n{error.failures[0].traceback}\n{error.hint}"
            known = next(((message, explanation) for message, explanation in messages if message in text), None)
            if known is None:
                raise
            raise AnswerError(known[1], *([error.hint] if known[0] in error.hint else [])) from None

    return explained
