"""`python -m labkit grade` judges submitted notebooks; `docs/teaching.md` describes it."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

from labkit.errors.exceptions import LabError
from labkit.launch.descendants import descendants, end_all, end_children
from labkit.teaching.classroom.confined_process import why_unconfined
from labkit.teaching.classroom.grade_submission import Graded, GradeSettings, grade, hidden_for, judges_in
from labkit.teaching.classroom.results import FORMS, ClassResults
from labkit.teaching.classroom.submissions import Submission, exercises_of, printable, submissions
from labkit.teaching.exercises import exercise_names
from labkit.teaching.lessons import lessons_named

UNCONFINED: Final = (
    "--unconfined: the submissions could read, change and delete your files, use the network and end your processes. "
    "Grade in a container that has nothing else: docs/teaching.md."
)


def main(arguments: Sequence[str]) -> int:
    """Run the command; return its exit code: 1 if something was not graded or not written."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        points = points_given(options.points)
        lessons = lessons_named(options.lessons) if options.lessons else []
        required = [name for lesson in lessons for name in exercises_of(lesson)]
        given = submissions(options.files, list(dict.fromkeys([*required, *points])) if required else [])
        judges = judges_in(options.modules)
        _check(options, {name: points.get(name, 1.0) for one in given for name in one.exercises})
        if not options.unconfined and (why := why_unconfined()):
            raise LabError(
                f"this system does not let submissions have namespaces of their own ({why}). Use another machine, or a "
                "container that has nothing else and the option --unconfined"
            )
    except LabError as error:
        parser.error(str(error))
    if options.unconfined:
        print(UNCONFINED, file=sys.stderr, flush=True)
    read = [one.path for one in given if not (one.error and one.path.is_symlink())]  # what a link names may be a library
    settings = GradeSettings(
        options.execute, options.seed, options.limit_s, options.memory_mb, hidden_for(read), judges, tuple(options.modules),
        not options.unconfined,
    )  # fmt: skip
    results, failed = _results(given, settings, options.jobs, points)
    try:
        print(results.as_table(), flush=True)
    finally:
        failed += _write(results, options)
        print("".join(f"{line}\n" for line in failed), end="", file=sys.stderr)
    return int(bool(failed))


def _write(results: ClassResults, options: argparse.Namespace) -> list[str]:
    """Write the files; return a line for each that could not be written."""
    failed: list[str] = []
    for form, (_, written) in FORMS.items():
        if path := getattr(options, form):
            with _failing_alone(path, failed):
                path.write_text(written(results), encoding="utf-8")
    if options.feedback:
        for student in results.by_student:
            name = re.sub(r"[^\w .()-]", "_", student)
            with _failing_alone(path := options.feedback / f"{name}.txt", failed):
                path.write_text(results.feedback(student), encoding="utf-8")
    if options.figure:
        with _failing_alone(options.figure, failed):
            figure = results.draw_mistakes().get_figure(root=True)
            assert figure is not None
            figure.savefig(options.figure, dpi=160)
    return failed


@contextlib.contextmanager
def _failing_alone(path: Path, failed: list[str]) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001  # whatever it is, the other results are written
        failed.append(f"{path} was not written: {type(error).__name__}: {error}")


def _check(options: argparse.Namespace, points: dict[str, float]) -> None:
    """Find out before submissions are graded, which takes minutes, what would fail at its end."""
    for option in ("limit-s", "memory-mb", "jobs"):
        if not 0 < (number := getattr(options, option.replace("-", "_"))) < math.inf:
            raise LabError(f"--{option} {number}: expected a number above 0")
    known = {*points} & {name for names in exercise_names().values() for name in names}
    if not options.modules and (unknown := [name for name in points_given(options.points) if name not in known]):
        raise LabError(f"--points {unknown[0]}: no submission should answer it; there are {', '.join(sorted(known))}")
    for form in (*FORMS, "figure", "feedback"):
        if path := getattr(options, form):
            try:
                path.mkdir(parents=True, exist_ok=True) if form == "feedback" else path.open("a").close()
            except OSError as error:
                raise LabError(f"--{form} {path}: {error.strerror}") from None


def points_given(texts: Sequence[str]) -> dict[str, float]:
    """Return the points of options such as "average_gradients=2", by exercise."""
    points = {}
    for text in texts:
        name, _, number = text.partition("=")
        try:
            points[name] = float(number)
        except ValueError:
            raise LabError(f"--points {text}: expected an exercise and a number, as in average_gradients=2") from None
        if not 0 <= points[name] < math.inf:
            raise LabError(f"--points {text}: expected a number from 0 on")
    return points


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m labkit grade",
        description="Judges the answers in submitted notebooks, each in processes of its own, without your files and network.",
        epilog="A student's name is that of the notebook, or of its folder if the notebook is named after a lesson.",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="notebooks, and folders that contain them")
    parser.add_argument(
        "--lessons",
        nargs="+",
        default=[],
        help="lessons whose exercises count, such as 02 04; "
        "default: the lesson that a notebook is named after, else the exercises that it checks",
    )
    parser.add_argument("--points", nargs="+", default=[], metavar="NAME=N", help="points for an exercise; default: 1 for each")
    parser.add_argument("--modules", nargs="+", default=[], help="modules that have exercises of your own, as in `import`")
    parser.add_argument("--unconfined", action="store_true", help="let submissions do what you may: only in a container")
    parser.add_argument("--execute", action="store_true", help="run the whole notebook, not only what the answers need")
    parser.add_argument("--seed", type=int, default=1, help="other inputs for the judges; 0: those of the lessons (default: 1)")
    parser.add_argument("--jobs", type=int, default=2, help="submissions at a time (default: 2)")
    parser.add_argument("--limit-s", type=float, default=60.0, help="seconds for one run of an answer (default: 60)")
    parser.add_argument("--memory-mb", type=float, default=4000.0, help="megabytes for one submission (default: 4000)")
    for form, (content, _) in FORMS.items():
        parser.add_argument(f"--{form}", type=Path, metavar="FILE", help=f"writes {content}")
    parser.add_argument("--feedback", type=Path, metavar="FOLDER", help="writes the verdicts of each student into a text file")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draws the commonest mistakes, as PNG, SVG or PDF")
    return parser


def _results(
    given: Sequence[Submission], settings: GradeSettings, jobs: int, points: dict[str, float]
) -> tuple[ClassResults, list[str]]:
    """Grade the submissions, until a signal stops it; return the results, and lines on what was not graded."""
    by_student: dict[str, dict[str, Graded]] = {}
    failed: list[str] = []
    futures: list[Future[list[Graded]]] = []
    pool = ThreadPoolExecutor(jobs)
    with _stopped_once():
        try:
            futures += [pool.submit(grade, one, settings) for one in given]
            for one, future in zip(given, futures, strict=True):
                right = "?" if future.exception() else sum(verdict.passed for verdict in future.result())
                print(f"{one.student}: {right} of {len(one.exercises)}", file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            failed.append(f"stopped: {sum(future.done() for future in futures)} of {len(given)} submissions are graded")
        for one, future in zip(given, futures, strict=False):
            if future.done() and (error := future.exception()):
                failed.append(f"{one.student} was not graded: {error!r}")
            elif future.done():
                by_student.setdefault(one.student, {}).update({verdict.exercise: verdict for verdict in future.result()})
        pool.shutdown(wait=False, cancel_futures=True)
        while not all(future.done() for future in futures):  # without its processes, each ends and deletes its folder
            end_all(descendants([os.getpid()]))
            time.sleep(0.1)
    end_children()  # what submissions have left behind
    names = dict.fromkeys(name for submission in given for name in submission.exercises)
    return ClassResults(by_student, {printable(name): points.get(name, 1.0) for name in names}), failed


@contextlib.contextmanager
def _stopped_once() -> Iterator[None]:
    """Let the first of the signals that end a command raise KeyboardInterrupt; while it is handled, ignore others."""
    ignored, ending = signal.SIG_IGN, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: handler for number in ending if (handler := signal.getsignal(number)) is not ignored}  # as by nohup

    def stop(*_: object) -> None:
        for number in before:
            signal.signal(number, ignored)
        raise KeyboardInterrupt

    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
