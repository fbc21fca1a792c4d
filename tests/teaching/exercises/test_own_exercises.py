"""Exercises that a course defines outside of labkit, in a module of its own or in a notebook."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed as dist

from labkit import LabError, check
from labkit.teaching.exercises import find
from labkit.teaching.exercises.exercise import exercise

COURSE = '''
"""The exercises of a course."""
import torch.distributed as dist

from labkit.teaching.exercises.comparisons import expect, expect_numbers
from labkit.teaching.exercises.exercise import exercise

LESSON = "w3_reductions"


def expected(ranks):
    return [float(max(range(ranks)))] * ranks


def on_rank(answer):
    return answer(float(dist.get_rank()))


@exercise(LESSON, "The largest, on each rank.", [(3,)], on_ranks=on_rank)
def largest(given, ranks):
    """largest(own) returns the largest number of all ranks."""
    mistakes = [([0.0, 1.0, 2.0], "that is this rank's own number"), ([3.0] * 3, "that is the sum", "op=MAX")]
    expect(given, expected(ranks), mistakes, "not the largest number of all ranks")


@exercise(LESSON, "Two rounds for each other rank.", [(4,)], other=lambda random: (random.randint(2, 64),))
def rounds(answer, ranks):
    """rounds(ranks) is the number of rounds of a ring all-reduce."""
    expect_numbers(answer(ranks), 2 * (ranks - 1), [(ranks - 1, "one all-gather")], "draw the ring")
'''


@pytest.fixture
def course(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    (tmp_path / "my_course.py").write_text(COURSE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("my_course")
    del sys.modules["my_course"]


def largest(own):
    import torch

    number = torch.tensor(own)
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return number.item()


def own_number(own):
    return own


def look_at_the_course(own):
    from my_course import expected

    return expected(3)[0]


def search_the_course(own):
    import sys

    return sys.modules["my_course"].expected(3)[0]


def oracle_of_the_course(ranks):
    import my_course

    return my_course.__dict__["rounds"].judge(ranks)


@pytest.mark.processes
def test_check_finds_the_exercises_of_an_imported_module(course: ModuleType) -> None:
    assert check("largest", largest).passed
    assert check("largest", own_number).message == "That is this rank's own number"
    assert check("rounds", lambda ranks: 2 * ranks - 2).passed
    assert not check("rounds", lambda ranks: ranks - 1)
    assert check("largest").message.startswith("largest(own) returns the largest")


@pytest.mark.processes
def test_the_judges_module_is_not_in_the_ranks(course: ModuleType) -> None:
    assert "'NoneType' object has no attribute 'expected'" in check("largest", search_the_course).message
    for name, answer in (("largest", look_at_the_course), ("rounds", oracle_of_the_course)):
        assert "import of my_course halted" in check(name, answer).message


def test_a_module_that_is_not_imported_is_not_searched() -> None:
    with pytest.raises(LabError, match="no exercise is called 'largest'"):
        find("largest")


def test_a_similar_name_of_an_own_exercise_is_offered(course: ModuleType) -> None:
    with pytest.raises(LabError, match="did you mean 'largest'"):
        find("larges")


def test_an_exercise_of_a_notebook_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    @exercise("w3", "Half of it.")
    def halves(answer):
        """halves(x) is x / 2."""

    monkeypatch.setattr(sys.modules["__main__"], "halves", halves, raising=False)
    assert find("halves") is halves


def test_no_module_replaces_an_exercise_of_labkit(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = find("introduce")
    other = type(ours)("introduce", "w3", "Anything.", "Right.", ours.judge)
    monkeypatch.setattr(sys.modules["__main__"], "_introduce", other, raising=False)
    assert find("introduce") is ours
