"""Right and wrong answers to exercises, collected by decorators and made into tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

import labkit.exercises
from labkit.exercises.check import check


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
    verdict = check(answer.exercise, answer.value)
    assert verdict.written
    if answer.words:
        assert not verdict.passed
        words = "\n".join([verdict.message, *verdict.details])
        assert answer.words.casefold() in words.casefold(), words
    else:
        assert verdict.passed, str(verdict)
