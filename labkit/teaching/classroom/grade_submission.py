"""Grades one submission: one process runs its code, another judges the answers on ranks.

    grade (trusted, runs nothing) ──> submission_process: runs the submission's statements, packs its answers
                                  ──> judge_process: imports the judges, hands the packed answers on
                                        └──> ranks: unpack and run them

If the judge's process ends before it has judged all answers, the exercise at which it ended has failed, and a new
process judges the rest. Each process has a folder of its own, so that what a submission writes reaches no judge.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from labkit.errors.exceptions import LabError
from labkit.teaching import exercises
from labkit.teaching.classroom import judge_process, submission_process
from labkit.teaching.classroom.confined_process import Limits, ProcessEnd, run_confined
from labkit.teaching.classroom.judge_process import Judging
from labkit.teaching.classroom.submission_process import SELECTED, Job
from labkit.teaching.classroom.submissions import Submission, printable
from labkit.teaching.lessons import ORIGINALS

_UNDEFINED: Final = ("NameError", "AttributeError", "KeyError")  # what an answer raises that lacks a statement
MOST_FAILURES: Final = 5  # statements of the submission in one verdict
START_S: Final = 60.0  # for the imports of a process on a busy machine


@dataclass(frozen=True)
class GradeSettings:
    """How submissions are graded."""

    execute: bool = False  # whether to run the whole notebook
    seed: int = 1  # as for `labkit.check`
    limit_s: float = 60.0  # for one run of an answer
    memory_mb: float = 4000.0  # resident
    hidden: tuple[str, ...] = ()  # files and folders that submissions must not open
    judges: tuple[str, ...] = ()  # those of the judges
    modules: tuple[str, ...] = ()  # that have a course's own exercises; their folders are in `sys.path`
    confined: bool = True  # whether processes have namespaces of their own


@dataclass(frozen=True)
class Graded:
    """The verdict on an answer."""

    exercise: str
    passed: bool
    state: str  # "passed", "wrong", "not written yet", or "no answer" if there is nothing to judge
    message: str
    details: tuple[str, ...] = ()  # further lines
    score: float | None = None  # for the leaderboard; less is better
    seconds: float = 0.0  # how long it took

    def __post_init__(self) -> None:
        object.__setattr__(self, "exercise", printable(self.exercise))
        object.__setattr__(self, "message", printable(self.message))
        object.__setattr__(self, "details", tuple("\n".join(map(printable, str(one).splitlines())) for one in self.details))


def hidden_for(paths: Sequence[Path]) -> tuple[str, ...]:
    """Return what submissions must not open: the solutions, and the submitted files with the whole folder of each."""
    return tuple(sorted({str(ORIGINALS / "solutions"), *map(_folder, paths)}))


def judges_in(modules: Sequence[str] = ()) -> tuple[str, ...]:
    """Return where the judges are: labkit's, and those in modules of a course."""
    return tuple(sorted({*exercises.__path__, *(_folder(_file_of(module)) for module in modules)}))


def _folder(path: Path) -> str:
    """Return the folder of a file, or the file itself if Python needs another part of the folder."""
    needed = [Path(p) for p in (sys.prefix, sys.base_prefix, tempfile.gettempdir(), exercises.__file__, os.devnull)]
    path = path.resolve()
    return str(path if any(one.resolve().is_relative_to(path.parent) for one in needed) else path.parent)


def _file_of(module: str) -> Path:
    with contextlib.suppress(ImportError, ValueError):
        if (spec := importlib.util.find_spec(module)) is not None and spec.origin is not None:
            return Path(spec.origin)
    raise LabError(f"--modules {module}: there is no such module in {', '.join(map(repr, sys.path[:3]))} ...")


def grade(submission: Submission, settings: GradeSettings) -> list[Graded]:
    """Grade all exercises of a submission."""
    if submission.error:
        return [_no_answer(name, submission.error) for name in submission.exercises]
    hidden = (*settings.hidden, *settings.judges)
    job = Job(submission.cells, submission.exercises, settings.execute, hidden)
    limits = Limits(START_S + settings.limit_s * (10 if settings.execute else 1), settings.memory_mb)
    ended = run_confined(submission_process.__name__, json.dumps(asdict(job)), limits, confined=settings.confined)
    found, failures = _found(ended, submission)
    absent = {name: _no_answer(name, one["missing"], one.get("failures", [])) for name, one in found.items() if "missing" in one}
    present = {name: one for name, one in found.items() if name not in absent}
    judged = [_with_failures(one, failures, settings.execute) for one in _judged(present, settings)]
    by_name = absent | dict(zip(present, judged, strict=True))
    return [by_name[name] for name in submission.exercises]


def _found(ended: ProcessEnd, submission: Submission) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return what the process of the submission has found, or why each exercise fails; and which statements failed."""
    try:
        found = json.loads(ended.result)
        failures = found.pop("", {}).get("failures", [])
    except (ValueError, AttributeError, TypeError, RecursionError):
        found, failures = {}, []
    if not all(isinstance(one, dict) and _is_shallow(one) for one in ({"failures": failures}, *found.values())):
        return {name: {"refused": "Refused: it sent something else than answers."} for name in submission.exercises}, []
    ending = f"The notebook was not run to its end: {ended.why}." if ended.why else "There is no answer in the notebook."
    return {name: found.get(name, {"missing": ending, "failures": failures}) for name in submission.exercises}, failures


def _with_failures(verdict: Graded, failures: Sequence[str], execute: bool) -> Graded:
    """Add to an error in an answer which statements had failed, or were not run: it may lack what they define."""
    if verdict.state != "wrong" or "Error" not in verdict.message:
        return verdict
    more = [f"before, in the notebook's {failure}" for failure in failures[:MOST_FAILURES]]
    more += [SELECTED] * (not execute and any(error in verdict.message for error in _UNDEFINED))
    return replace(verdict, details=(*verdict.details, *more))


def _is_shallow(value: Any, levels: int = 5) -> bool:
    """Whether no list or dictionary is deep within others; what is made of it may be recursive."""
    if isinstance(value, dict) and not isinstance(value.get("failures", []), list):
        return False
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels > 0 and all(_is_shallow(one, levels - 1) for one in inner)


def _judged(found: dict[str, dict[str, Any]], settings: GradeSettings) -> list[Graded]:
    graded: list[Graded] = []
    path = [str(_file_of(module).parent) for module in settings.modules]
    while waiting := list(found)[len(graded) :]:
        answers = {name: found[name] for name in waiting}
        judging = Judging(answers, settings.seed, settings.limit_s, settings.hidden, settings.judges, settings.modules)
        limits = Limits(START_S + 2 * settings.limit_s * len(waiting), settings.memory_mb)
        ended = run_confined(judge_process.__name__, json.dumps(asdict(judging)), limits, path, confined=settings.confined)
        lines = [line for line in ended.result.split("\n")[:-1] if line]  # the last one may have no end
        verdicts = [_graded(json.loads(line)) for line in lines]
        graded += verdicts
        if len(verdicts) < len(waiting):
            reason = ended.why or "its judge ended too early"
            shown = [] if verdicts else ended.output.splitlines()[-5:]  # an earlier answer may have printed it
            message = f"Not judged to the end: {reason}."
            graded.append(Graded(waiting[len(verdicts)], False, "wrong", message, tuple(shown)))
    return graded


def _graded(given: dict[str, Any]) -> Graded:
    state = "passed" if given["passed"] else "wrong" if given["written"] else "not written yet"
    names = ("passed", "message", "score", "seconds")
    return Graded(given["name"], state=state, details=tuple(given["details"]), **{name: given[name] for name in names})


def _no_answer(exercise: str, message: str, failures: Sequence[str] = ()) -> Graded:
    return Graded(exercise, False, "no answer", message, tuple(failures[:MOST_FAILURES]))
