"""The older form of a calculation, an oracle that returns an `Expected`; it goes when no judge has it any more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from labkit.teaching.exercises.comparisons import Hint, equal, expect_numbers, shown
from labkit.teaching.exercises.exercise import Exercise, OnRanks, Passed, showing
from labkit.teaching.exercises.judging import as_list
from labkit.teaching.exercises.random_state import other_cases


@dataclass(frozen=True)
class Expected:
    """What an answer should return for the arguments of a case."""

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
    """Make an exercise of an oracle, `_bubble` say; it has the oracle's name without the underscore."""

    def made(oracle: Callable[..., Expected]) -> Exercise:
        name = oracle.__name__.removeprefix("_")

        def judge(answer: Any, _: OnRanks) -> Passed:
            for arguments in (*cases, *other_cases(other)):
                judge_calculation(answer, name, arguments, oracle(*arguments), same)
            return Passed(passed)

        return Exercise(name, lesson, target, judge)

    return made


def judge_calculation(
    answer: Any, name: str, arguments: tuple[Any, ...], expected: Expected, same: Callable[[Any, Any], bool] = equal
) -> None:
    """Compare what an answer returns for some arguments with the oracle's result."""
    with showing(f"{name}({', '.join(map(shown, arguments))})"):
        hint = expected.otherwise
        otherwise: Any = (lambda _: hint) if isinstance(hint, tuple) else hint
        expect_numbers(answer(*arguments), expected.right, as_list(expected.mistakes), otherwise, form=expected.form, same=same)
