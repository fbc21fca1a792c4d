"""Right and wrong answers to exercises, collected by decorators and made into tests."""

from __future__ import annotations

import ast
import contextlib
import json
import linecache
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from processes import kept

import labkit.teaching.exercises
from labkit.group.group import Group
from labkit.teaching.exercises import comparisons
from labkit.teaching.exercises.check import check, wrong_tries
from labkit.teaching.exercises.comparisons import AnswerError
from labkit.worker.runtimes.registry import RUNTIMES

SOLUTIONS = Path(__file__).resolve().parents[2] / "notebooks" / "solutions"


@dataclass(frozen=True)
class Answer:
    exercise: str
    value: Any
    words: str  # that the verdict must contain; "" for a right answer
    cure: str  # words that the verdict contains only after another wrong answer; "" if it says all at once
    edits: tuple[str, ...] = ()  # of the reference solution: old text, new text, and so on; then there is no value


class Answers:
    def __init__(self) -> None:
        self.all: list[Answer] = []

    def of(self, exercise: str) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., None]]:
        """The functions `right`, `wrong` and `mutant` below, for one exercise."""
        return partial(self._right, exercise), partial(self._wrong, exercise), partial(self._mutant, exercise)

    def _right(self, exercise: str, value: Any) -> Any:
        self.all.append(Answer(exercise, value, "", ""))
        return value

    def _wrong(self, exercise: str, words: str, value: Any = None, *, cure: str = "") -> Any:
        def keep(answer: Any) -> Any:
            self.all.append(Answer(exercise, answer, words, cure))
            return answer

        return keep if value is None else keep(value)

    def _mutant(self, exercise: str, old: str, new: str, words: str = "", *, cure: str = "") -> None:
        """An answer that is the reference solution with one text replaced, which occurs once in it; without words of
        a verdict, a right one.

        It is made when it is judged: ranks that import a file of tests have no judges."""
        self.all.append(Answer(exercise, None, words, cure, (old, new)))

    def test_of_verdicts(self) -> Callable[[Answer], None]:
        """A test that judges each answer collected so far."""
        cases = []
        for answer in self.all:
            kind = "wrong" if answer.words else "right"
            label = (answer.words or "edited") if answer.edits else getattr(answer.value, "__name__", str(answer.value))
            cases.append(pytest.param(answer, id=f"{answer.exercise}-{kind}-{label}"))

        @pytest.mark.parametrize("answer", cases)
        @pytest.mark.processes
        def test(answer: Answer) -> None:
            judge(answer)

        return test

    def test_of_completeness(self, lesson: str) -> Callable[[], None]:
        """A test that every exercise of the lesson has a right answer here and at least two wrong ones that fail in
        different words."""

        def test() -> None:
            for name in labkit.teaching.exercises.exercise_names()[lesson]:
                own = [a for a in self.all if a.exercise == name]
                assert [a for a in own if not a.words], f"no right answer to {name}"
                assert len({a.words for a in own if a.words}) >= 2, f"fewer than two kinds of wrong answers to {name}"

        return test


def judge(answer: Answer) -> None:
    """Check the verdict on a first answer, and the cure that a second wrong one adds.

    A right answer passes all cases on ranks of its own, as a student's does; with it, check also that they tell the
    known mistakes apart. Wrong answers share their ranks.
    """
    groups = mock.patch("labkit.teaching.exercises.answer_ranks.Group", kept_groups) if answer.words else contextlib.nullcontext()
    value = edited_solution(answer.exercise, *answer.edits) if answer.edits else answer.value
    with compared() as cases, first_try(answer.exercise) as cures, groups:
        verdict = check(answer.exercise, value)
    assert verdict.written
    if answer.words:
        assert not verdict.passed
        words = "\n".join([verdict.message, *verdict.details])
        assert answer.words.casefold() in words.casefold(), words
        cure = "".join(cures)
        assert answer.cure in cure if answer.cure else not cure, f"the cure is {cure!r}"
        assert not cure or cure.casefold() not in words.casefold(), f"the first verdict contains the cure: {words}"
        lines_are_shown = any(part in words for part in ("failed: ", "it raised", ", line "))  # of an error or a deadlock
        number = labkit.teaching.exercises.find(answer.exercise).number
        assert number or lines_are_shown or f"{answer.exercise}(" in words, f"no call is shown: {words}"
    else:
        assert verdict.passed, str(verdict)
        assert confused(cases) == []


def edited_solution(exercise: str, old: str, new: str) -> Any:
    """The reference solution of an exercise, after a text is replaced in it or in the functions just before it."""
    path = SOLUTIONS / f"{labkit.teaching.exercises.find(exercise).lesson}.ipynb"
    cells = ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    end = 1 + next(number for number, cell in enumerate(cells) if f'lab.check("{exercise}"' in cell)
    begin = max((number + 1 for number, cell in enumerate(cells[: end - 1]) if "lab.check(" in cell), default=0)
    own = "\n\n".join(cells[begin:end])
    assert own.count(old) == 1, f"{own.count(old)} times in the solution: {old}"
    source = "\n\n".join([*cells[:begin], own.replace(old, new)])
    file = f"solution of {exercise}"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # TensorFlow reads it
    defined = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef
    body = [statement for statement in ast.parse(source).body if isinstance(statement, defined)]
    names: dict[str, Any] = {"__name__": "solution"}  # no module of this name exists, so it is sent by value
    exec(compile(ast.Module(body, []), file, "exec"), names)
    return names[exercise]


class KeptGroup(Group):
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
    found, cures = labkit.teaching.exercises.find(exercise), list[str]()

    def judge(*args: Any) -> float | None:
        try:
            return found.judge(*args)
        except AnswerError as wrong:
            cures.append(wrong.cure)
            raise

    with (
        mock.patch.dict(wrong_tries, clear=True),
        mock.patch("labkit.teaching.exercises.check.find", return_value=replace(found, judge=judge)),
    ):
        yield cures


@dataclass(frozen=True)
class Case:
    """What `expect` compares an answer with."""

    right: Any
    mistakes: Sequence[tuple[Any, ...]]
    same: Callable[[Any, Any], bool]

    def wrong(self, hint: tuple[str, ...]) -> list[Any]:
        """The results of the mistake with this hint and cure that are wrong here."""
        return [result for result, *own in self.mistakes if tuple(own) == hint and not self.same(result, self.right)]

    def told(self, given: Any) -> tuple[str, ...]:
        """The hint and cure that a result gets."""
        return next(tuple(hint) for result, *hint in self.mistakes if self.same(given, result))


@contextlib.contextmanager
def compared() -> Iterator[list[Case]]:
    """Collect what `expect` compares, in order."""
    explained = comparisons._explained
    cases: list[Case] = []

    def noted(given: Any, right: Any, mistakes: Any, otherwise: Any, same: Any) -> Any:
        cases.append(Case(right, mistakes, same))
        return explained(given, right, mistakes, otherwise, same)

    with mock.patch.object(comparisons, "_explained", noted):
        yield cases


def confused(cases: list[Case]) -> list[str]:
    """Describe the mistakes that are never wrong, or that get another's hint in the first case in which they are."""
    found = []
    for hint in dict.fromkeys(tuple(hint) for case in cases for _, *hint in case.mistakes):
        first = next((case for case in cases if case.wrong(hint)), None)
        if first is None:
            found.append(f"never wrong: {hint[0]}")
            continue
        others = [told for told in map(first.told, first.wrong(hint)) if told != hint]
        found += [f"the mistake of {hint[0]!r} is told {told[0]!r}" for told in others]
    return found
