"""Right and wrong answers to exercises, collected by decorators and made into tests."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
from processes import kept

import labkit.exercises
from labkit.exercises.check import check, tries
from labkit.exercises.comparisons import equal, judge_result
from labkit.exercises.judging import AnswerError, Hint, Passed
from labkit.group.group import Group
from labkit.worker.runtimes.registry import RUNTIMES


@dataclass(frozen=True)
class Answer:
    exercise: str
    value: Any
    words: str  # that the verdict must contain; "" for a right answer
    cure: str  # words that the verdict contains only after another wrong answer; "" if it says all at once


class Answers:
    def __init__(self) -> None:
        self.all: list[Answer] = []

    def right(self, exercise: str, value: Any = None) -> Any:
        return self._take(exercise, value, "", "")

    def wrong(self, exercise: str, words: str, value: Any = None, *, cure: str = "") -> Any:
        return self._take(exercise, value, words, cure)

    def _take(self, exercise: str, value: Any, words: str, cure: str) -> Callable[[Any], Any]:
        def keep(answer: Any) -> Any:
            self.all.append(Answer(exercise, answer, words, cure))
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
    """Check the verdict on a first answer, and the cure that a second wrong one adds.

    A right answer passes all cases on ranks of its own, as a student's does; with it, check also that they tell the
    known mistakes apart. Wrong answers share their ranks.
    """
    groups = mock.patch("labkit.exercises.answer_ranks.Group", kept_groups) if answer.words else contextlib.nullcontext()
    with comparisons(answer.exercise) as cases, first_try(answer.exercise) as cures, groups:
        verdict = check(answer.exercise, answer.value)
    assert verdict.written
    if answer.words:
        assert not verdict.passed
        words = "\n".join([verdict.message, *verdict.details])
        assert answer.words.casefold() in words.casefold(), words
        cure = "".join(cures)
        assert answer.cure in cure if answer.cure else not cure, f"the cure is {cure!r}"
        assert not cure or cure.casefold() not in words.casefold(), f"the first verdict contains the cure: {words}"
        lines_are_shown = any(part in words for part in ("failed: ", "it raised", ", line "))  # of an error or a deadlock
        number = labkit.exercises.find(answer.exercise).number
        assert number or lines_are_shown or f"{answer.exercise}(" in words, f"no call is shown: {words}"
    else:
        assert verdict.passed, str(verdict)
        assert confused(cases) == []


class KeptGroup(Group):
    """Stays open when its verdict is given."""

    def close(self) -> None: ...

    def end(self) -> None:
        super().close()


class KeptGroups:
    """Gives each verdict the group of an earlier one with the same ranks and options: to start ranks takes longer than
    most verdicts. If a run fails, its group starts new ranks."""

    def __init__(self) -> None:
        self._groups: dict[str, KeptGroup] = {}

    def __call__(self, ranks: Any, **options: Any) -> Group:
        if RUNTIMES[options.get("runtime", "torch")].fresh_each_run:
            return Group(ranks, **options)
        call = f"{ranks} {sorted(options.items())}"
        if call not in self._groups:
            self._groups[call] = KeptGroup(ranks, **options)
            kept.add(self._groups[call])
        return self._groups[call]

    def end(self) -> None:
        kept.difference_update(self._groups.values())
        for group in self._groups.values():
            group.end()
        self._groups.clear()


kept_groups = KeptGroups()


@contextlib.contextmanager
def first_try(exercise: str) -> Iterator[list[str]]:
    """Forget earlier wrong answers, and collect the cures that the judge gives and `check` does not show yet."""
    found, cures = labkit.exercises.find(exercise), list[str]()

    def judge(*args: Any) -> Passed:
        try:
            return found.judge(*args)
        except AnswerError as wrong:
            cures.append(wrong.cure)
            raise

    with (
        mock.patch.dict(tries.wrong, clear=True),
        mock.patch("labkit.exercises.check.find", return_value=replace(found, judge=judge)),
    ):
        yield cures


@dataclass(frozen=True)
class Case:
    """What `judge_result` compares an answer with."""

    right: Any
    mistakes: dict[Hint, Any]
    same: Callable[[Any, Any], bool]

    def is_wrong(self, hint: Hint) -> bool:
        return hint in self.mistakes and not self.same(self.mistakes[hint], self.right)


@contextlib.contextmanager
def comparisons(exercise: str) -> Iterator[list[Case]]:
    """Collect the calls of `judge_result`, in order."""
    labkit.exercises.find(exercise)  # imports the judge
    cases: list[Case] = []

    def compared(
        given: Any, right: Any, mistakes: Any, otherwise: Hint, *details: str, same: Callable[[Any, Any], bool] = equal
    ) -> None:
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
