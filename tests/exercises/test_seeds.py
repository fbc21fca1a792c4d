"""Other inputs for graders: they differ from the lesson's, and stay the same for a seed."""

from __future__ import annotations

import os
from typing import Any

import pytest

from labkit.exercises import LESSONS, calculations, find, random_state
from labkit.exercises.check import check
from labkit.exercises.judging import Exercise

TENSORFLOW = ("tf_data_parallel", "tf_model_parallel", "tf_hybrid")
FILES = [pytest.param(name, marks=pytest.mark.tf) if name in TENSORFLOW else name for name in LESSONS]


def calls(exercise: Exercise, seed: int) -> list[Any]:
    """The arguments of all calls, by an answer that is judged as right."""
    found: list[Any] = []

    def compared(answer: Any, name: str, arguments: tuple[Any, ...], expected: Any, same: Any = None) -> None:
        found.append(arguments)

    with pytest.MonkeyPatch.context() as patch, random_state.other_inputs(seed):
        patch.setattr(calculations, "judge_calculation", compared)
        exercise.judge(None, lambda *_, **__: pytest.fail("it only computes"))
    return found


@pytest.mark.parametrize("file", FILES)
def test_each_calculation_has_other_cases_for_another_seed(file: str) -> None:
    for exercise in (find(name) for name in LESSONS[file]):
        parts = [cell.cell_contents for cell in exercise.judge.__closure__ or ()]  # type: ignore[attr-defined]
        if not any("calculation.<locals>" in getattr(part, "__qualname__", "") for part in parts):
            continue
        of_lesson, again, other, another = (calls(exercise, seed) for seed in (0, 0, 1, 2))
        assert str(of_lesson) == str(again)
        assert str(other) == str(calls(exercise, 1))
        assert len(other) == len(of_lesson) + random_state.OTHER_CASES
        assert len({str(case) for case in [*other, *another]}) > len({str(case) for case in other})


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
