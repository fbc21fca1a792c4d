"""Other inputs for graders: they differ from the lesson's, and stay the same for a seed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest

from labkit.teaching.exercises import exercise, exercise_names, find, random_state
from labkit.teaching.exercises.check import check
from labkit.teaching.exercises.comparisons import AnswerError
from labkit.teaching.exercises.exercise import Exercise

TENSORFLOW = ("tf_data_parallel", "tf_model_parallel", "tf_hybrid")
FILES = [pytest.param(name, marks=pytest.mark.tf) if name in TENSORFLOW else name for name in exercise_names()]


def makers(judged: Exercise) -> list[Callable[[Random], Any]]:
    """What an exercise makes other cases with."""
    found: list[Callable[[Random], Any]] = []
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Exception):
        patch.setattr(exercise, "other_cases", lambda make: found.append(make) or [])
        judged.judge(None)  # fails at the first case
    return found


@pytest.mark.parametrize("file", FILES)
def test_each_calculation_has_other_cases_for_another_seed(file: str) -> None:
    for make in (make for name in exercise_names()[file] for make in makers(find(name))):
        of_seed = []
        for seed in (0, 1, 1, 2):
            with random_state.other_inputs(seed):
                of_seed.append([str(case) for case in random_state.other_cases(make)])
        of_lesson, other, again, another = of_seed
        assert (of_lesson, again) == ([], other)
        assert len(other) == random_state.OTHER_CASES
        assert len({*other, *another}) > len({*other})


def test_the_calculations_are_found() -> None:
    assert [name for name in exercise_names()["data_parallel"] if makers(find(name))] == ["scaled_learning_rate"]


class Notes:
    """An answer that notes its arguments, and is wrong in each case."""

    is_class = True

    def __init__(self) -> None:
        self.given: list[str] = []

    def __call__(self, *args: Any) -> Any:
        self.given.append(str(args))
        raise AnswerError("wrong")

    def on(self, _ranks: Any, _function: Any, *args: Any, **_options: Any) -> Any:
        self(*(arg for arg in args if arg is not self and not isinstance(arg, str)))  # a text: a folder


@contextlib.contextmanager
def going_on(*_: Any) -> Iterator[None]:
    """Judge the next case, too."""
    with contextlib.suppress(Exception):
        yield


@pytest.mark.parametrize("file", FILES)
def test_graded_twice_with_the_same_seed_every_exercise_has_the_same_inputs(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exercise, "explaining", going_on)
    for name in exercise_names()[file]:
        inputs = []
        for seed in (1, 1):
            answer = Notes()
            with random_state.other_inputs(seed):
                find(name).judge(answer)
            inputs.append(answer.given)
        assert inputs[0] == inputs[1]


def test_cases_are_drawn_anew_in_each_check_of_a_notebook() -> None:
    def drawn(seed: int) -> float:
        with random_state.other_inputs(seed):
            return random_state.case_random().random()

    assert drawn(0) != drawn(0)
    assert drawn(1) == drawn(1) != drawn(2)


def test_the_seed_reaches_the_generators_and_leaves_nothing_behind() -> None:
    assert random_state.VARIABLE not in os.environ
    with random_state.other_inputs(3):
        assert random_state.case_seed(7) == 30_007
        with random_state.other_inputs(0):
            assert random_state.case_seed(7) == 7
        assert random_state.case_seed(7) == 30_007
    assert random_state.VARIABLE not in os.environ
    assert random_state.case_seed(7) == 7


@pytest.mark.processes
def test_an_answer_that_knows_only_the_cases_of_the_lesson_fails_with_another_seed() -> None:
    known = {(0.1, 256, 64, 12): 0.3, (0.05, 256, 100, 3): 0.05 * 300 / 256, (0.1, 256, 32, 2): 0.025, (0.1, 64, 64, 1): 0.1}

    def scaled_learning_rate(*case: Any) -> float:
        return known.get(case, 0.0)

    assert check("scaled_learning_rate", scaled_learning_rate)
    assert not check("scaled_learning_rate", scaled_learning_rate, seed=1)
