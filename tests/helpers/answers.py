"""Right and wrong answers to exercises, collected by decorators and made into tests."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest

import labkit.exercises
from labkit.exercises.check import check
from labkit.exercises.known_mistakes import judge_result


@dataclass(frozen=True)
class Answer:
    exercise: str
    value: Any
    words: str  # that the verdict must contain; "" for a right answer


class Answers:
    def __init__(self) -> None:
        self.all: list[Answer] = []

    def right(self, exercise: str, value: Any = None) -> Any:
        return self._take(exercise, value, "")

    def wrong(self, exercise: str, words: str, value: Any = None) -> Any:
        return self._take(exercise, value, words)

    def _take(self, exercise: str, value: Any, words: str) -> Callable[[Any], Any]:
        def keep(answer: Any) -> Any:
            self.all.append(Answer(exercise, answer, words))
            return answer

        return keep if value is None else keep(value)

    def parameters(self) -> list[Any]:
        cases = []
        for answer in self.all:
            kind = "wrong" if answer.words else "right"
            label = getattr(answer.value, "__name__", str(answer.value))
            cases.append(pytest.param(answer, id=f"{answer.exercise}-{kind}-{label}"))
        return cases

    def complete(self, lesson: str) -> None:
        """Every exercise of the lesson has a right answer here and at least two wrong ones that fail in different
        words."""
        for name in labkit.exercises.LESSONS[lesson]:
            own = [a for a in self.all if a.exercise == name]
            assert [a for a in own if not a.words], f"no right answer to {name}"
            assert len({a.words for a in own if a.words}) >= 2, f"fewer than two kinds of wrong answers to {name}"


def judge(answer: Answer) -> None:
    """Check the verdict; with a right answer, which passes all cases, also that they tell the known mistakes apart."""
    with comparisons(answer.exercise) as cases:
        verdict = check(answer.exercise, answer.value)
    assert verdict.written
    if answer.words:
        assert not verdict.passed
        words = "\n".join([verdict.message, *verdict.details])
        assert answer.words.casefold() in words.casefold(), words
        lines_are_shown = any(part in words for part in ("failed: ", "it raised", ", line "))  # of an error or a deadlock
        number = labkit.exercises.find(answer.exercise).number
        assert number or lines_are_shown or f"{answer.exercise}(" in words, f"no call is shown: {words}"
    else:
        assert verdict.passed, str(verdict)
        assert confused(cases) == []


@dataclass(frozen=True)
class Case:
    """What `judge_result` compares an answer with."""

    right: Any
    mistakes: dict[str, Any]
    same: Callable[[Any, Any], bool]

    def is_wrong(self, hint: str) -> bool:
        return hint in self.mistakes and not self.same(self.mistakes[hint], self.right)


@contextlib.contextmanager
def comparisons(exercise: str) -> Iterator[list[Case]]:
    """Collect the calls of `judge_result`, in order."""
    labkit.exercises.find(exercise)  # imports the judge
    cases: list[Case] = []

    def compared(given: Any, right: Any, mistakes: Any, otherwise: str, *details: str, same: Callable[[Any, Any], bool]) -> None:
        cases.append(Case(right, dict(mistakes), same))
        judge_result(given, right, mistakes, otherwise, *details, same=same)

    with contextlib.ExitStack() as patches:
        for name, module in list(sys.modules.items()):
            if name.startswith("labkit.exercises.") and getattr(module, "judge_result", None) is judge_result:
                patches.enter_context(mock.patch.object(module, "judge_result", compared))
        yield cases


def confused(cases: list[Case]) -> list[str]:
    """Describe the mistakes that are never wrong, or that get another's hint in the first case in which they are."""
    found = []
    for hint in dict.fromkeys(hint for case in cases for hint in case.mistakes):
        first = next((case for case in cases if case.is_wrong(hint)), None)
        if first is None:
            found.append(f"never wrong: {hint}")
            continue
        given = next(other for other, result in first.mistakes.items() if first.same(first.mistakes[hint], result))
        if given != hint:
            found.append(f"the mistake of {hint!r} is told {given!r}")
    return found
