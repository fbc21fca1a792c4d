"""Lessons for Otter-Grader: the students' plain notebooks, and a file of tests for each exercise.

Otter runs tests after a submission even where the notebook does not mention them. So students need no Otter, and their
notebooks are the lessons.

Source: exception-based tests and plugins in Otter-Grader's documentation, version 7, https://otter-grader.readthedocs.io.
"""

from __future__ import annotations

import json

from labkit.teaching.classroom.handout import AssignedExercise, Order


def write_otter(order: Order) -> list[str]:
    """Write a folder for each lesson; return what to type next."""
    for one in order.handouts:
        folder = order.folder / one.name
        one.write(folder / "student")
        (folder / "tests").mkdir(parents=True, exist_ok=True)
        for exercise in one.exercises:
            (folder / "tests" / f"{exercise.name}.py").write_text(_tests(exercise, order.seed), encoding="utf-8")
        config = {"plugins": [{"labkit.teaching.classroom.grader_plugins.OtterPlugin": {}}], "show_stdout": False, "pdf": False}
        (folder / "otter_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        requirement = order.install or f"labkit[{order.extras()}]"
        (folder / "requirements.txt").write_text(f"{requirement}\nipykernel\n", encoding="utf-8")
    names = ", ".join(one.name for one in order.handouts)
    return [
        f"Hand out the folders `student`. In each of {names} in {order.folder}:",
        "otter generate                            # writes autograder.zip, from tests, otter_config.json and requirements.txt",
        "otter run -a autograder.zip SUBMISSION    # grades one submission here; otter grade does it in Docker",
    ]


def _tests(exercise: AssignedExercise, seed: int) -> str:
    return f'''"""Tests of {exercise.name}, whose answer is `{exercise.answer}` in the student's notebook."""

from otter.test_files import test_case

from labkit.teaching.classroom.grader_plugins import check_afresh

OK_FORMAT = False

name = "{exercise.name}"
points = {exercise.points:g}
all_or_nothing = True


def judge(env, **options):
    verdict = check_afresh(name, eval("{exercise.answer}", env), **options)
    assert verdict, verdict


@test_case(hidden=False)
def test_inputs_of_the_lesson(env):
    judge(env)


@test_case(hidden=True)
def test_other_inputs(env):
    judge(env, seed={seed})
'''
