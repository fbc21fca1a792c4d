"""The process of a judge: gives the verdicts on the answers of one submission. It runs none of the submission's code.

It reads a `Judging` from standard input, as JSON, and writes a line of JSON for each verdict into the file descriptor
that is its argument.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from labkit.errors.exceptions import LabError
from labkit.launch.descendants import adopt_orphans, end_children
from labkit.teaching.classroom.confined_process import Cover
from labkit.teaching.classroom.packed_answer import Packed, only_trusted_pickles
from labkit.teaching.exercises import answer_ranks, find
from labkit.teaching.exercises.check import MORE_LATER, Verdict, judged, looks_at_judge, not_written
from labkit.teaching.exercises.exercise import Exercise

UNKNOWN: Final = "There is no exercise of this name. (For a course's own exercises: --modules.)"
# Ranks of RPC import the judge's module, and TensorFlow reads the source of the judge's functions.
_JUDGES_IN_RANKS: Final = ("07_rpc", "08_rpc_hybrid", "10_tf_data_parallel", "11_tf_model_parallel", "12_tf_hybrid")


@dataclass(frozen=True)
class Judging:
    """The answers to judge."""

    answers: dict[str, dict[str, Any]]  # by exercise, what the process of the submission has found
    seed: int  # as for `labkit.check`
    limit_s: float  # for one run of an answer
    hidden: Sequence[str] = ()  # files and folders that do not exist for the answers
    judges: Sequence[str] = ()  # those of the judges
    modules: Sequence[str] = ()  # that have a course's own exercises


def main(result: int, cover: Cover) -> None:
    """Judge the answers, in their order; `cover` hides files from here on."""
    adopt_orphans()
    judging = Judging(**json.load(sys.stdin))
    for module in judging.modules:
        importlib.import_module(module)
    exercises = {name: _found(name) for name in judging.answers}  # imports the judges, whose files are covered then
    in_ranks = any(exercise is not None and exercise.lesson in _JUDGES_IN_RANKS for exercise in exercises.values())
    cover([*judging.hidden, *([] if in_ranks else judging.judges)])
    answer_ranks.RUN_LIMIT_S = judging.limit_s
    with os.fdopen(result, "w") as file:
        for name, exercise in exercises.items():
            begin = time.monotonic()
            verdict = Verdict(name, False, UNKNOWN) if exercise is None else _verdict(exercise, judging)
            print(json.dumps(asdict(verdict) | {"seconds": time.monotonic() - begin}), file=file, flush=True)
    end_children()


def _found(name: str) -> Exercise | None:
    with contextlib.suppress(LabError):  # a student has misspelt it
        return find(name)
    return None


def _verdict(exercise: Exercise, judging: Judging) -> Verdict:
    name, found = exercise.name, judging.answers[exercise.name]
    if found.get("unwritten"):
        return not_written(exercise)
    if "refused" in found:
        return Verdict(name, False, str(found["refused"]))
    if "value" in found:
        return judged(exercise, found["value"], judging.seed)
    answer = Packed.from_json(found["packed"])
    if exercise.number:
        return Verdict(name, False, f"Given {answer.name}: expected a number, a text or a list of them.")
    if (reason := looks_at_judge(answer.data)) is not None:
        return Verdict(name, False, reason)
    with only_trusted_pickles():
        verdict = judged(exercise, answer, judging.seed)
    return dataclasses.replace(verdict, details=tuple(line for line in verdict.details if line != MORE_LATER))
