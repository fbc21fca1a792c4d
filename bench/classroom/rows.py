"""Grades the class by one of the three ways, and prints what each submission got beside what it must get.

    python -m bench.classroom --by grade
    python -m bench.classroom --by nbgrader --python ENVIRONMENT/bin/python
    python -m bench.classroom --by otter --python ENVIRONMENT/bin/python

The environments have nbgrader or Otter-Grader, ipykernel, torch, and what labkit needs; the checkout is on their path.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import psutil

from bench.classroom.submissions import CLASS, LESSON, POINTS, Submission, notebook_of
from bench.table import table
from labkit.launch.descendants import adopt_orphans, end_children
from labkit.teaching.classroom.assign import main as assign
from labkit.teaching.classroom.handout import read_handout, write_notebook
from labkit.teaching.lessons import ORIGINALS

ROOT: Final = Path(__file__).resolve().parent.parent.parent
LIMIT_S: Final = 1800.0  # for the whole class
SEED: Final = "271828"

Graded = dict[str, tuple[float, float]]  # by student: points and seconds


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m bench.classroom", description=__doc__.splitlines()[0])
    parser.add_argument("--by", choices=WAYS, default="grade")
    parser.add_argument("--python", default=sys.executable, help="of the environment that has nbgrader or Otter")
    parser.add_argument("--only", nargs="+", default=[], metavar="STUDENT", help="some of the submissions, such as right")
    parser.add_argument("--jobs", type=int, default=2, help="submissions at a time, but for nbgrader (default: 2)")
    options = parser.parse_args()
    chosen = [one for one in CLASS if not options.only or one.student in options.only]
    adopt_orphans()  # so that processes that stay are seen
    with tempfile.TemporaryDirectory(prefix="labkit-class-") as folder:
        began = time.perf_counter()
        graded = WAYS[options.by](chosen, Path(folder), options.python, options.jobs)
        took_s = time.perf_counter() - began
    stayed = _stayed()
    end_children()
    rows = []
    for one in chosen:
        expected = one.points if options.by == "grade" or one.in_kernel is None else one.in_kernel
        points, seconds = graded.get(_slug(one), (0.0, 0.0))
        rows.append([one.student, f"{expected:g}", f"{points:g}", f"{seconds:.1f}", "" if points == expected else "differs"])
    print(table(["submission", "must get", "got", "s", ""], rows))
    print(f"\n{len(rows)} submissions by {options.by} in {took_s / 60:.1f} min; {len(stayed)} processes stayed")
    print("\n".join(stayed))
    sys.exit(any(row[-1] for row in rows) or bool(stayed))


def _stayed() -> list[str]:
    """Return the command lines of processes that submissions have left behind, and that still run."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # ZombieProcess is one
            found.append(" ".join(process.cmdline())[:100])
    return found


def _by_grade(chosen: list[Submission], folder: Path, python: str, jobs: int) -> Graded:
    _write_submissions(chosen, folder, "{student}")
    points = [f"{name}={number:g}" for name, number in POINTS.items()]
    result = folder / "results.json"
    files = [str(folder / _slug(one)) for one in chosen]
    command = ["-m", "labkit", "grade", *files, "--lessons", "02", "--points", *points, "--memory-mb", "2000"]
    _run([python, *command, "--jobs", str(jobs), "--json", str(result)], folder)
    students = json.loads(result.read_text(encoding="utf-8"))["students"]
    return {name: (one["points"], sum(part["seconds"] for part in one["exercises"].values())) for name, one in students.items()}


def _by_nbgrader(chosen: list[Submission], folder: Path, python: str, _: int) -> Graded:
    _assigned("nbgrader", folder)
    _run([python, "-m", "nbgrader", "generate_assignment", LESSON], folder)
    release = folder / "release" / LESSON / f"{LESSON}.ipynb"
    _write_submissions(chosen, folder / "submitted", f"{{student}}/{LESSON}", release)
    lines = _run([python, "-m", "nbgrader", "autograde", LESSON], folder)
    began: dict[str, float] = {}
    ended: dict[str, float] = {}
    for at_s, line in lines:
        if found := re.search(rf"(?:submitted|autograded)/([\w-]+)/{LESSON}", line):
            began.setdefault(found[1], at_s)
            ended[found[1]] = at_s
    _run([python, "-m", "nbgrader", "export"], folder)
    with (folder / "grades.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return {
        row["student_id"]: (float(row["score"] or 0), ended.get(name, 0.0) - began.get(name, 0.0))
        for row in rows
        for name in [row["student_id"]]
    }


def _by_otter(chosen: list[Submission], folder: Path, python: str, jobs: int) -> Graded:
    _assigned("otter", folder)
    _write_submissions(chosen, folder / "submitted", "{student}")
    _run([python, "-m", "otter", "generate"], folder / LESSON)

    def graded(one: Submission) -> tuple[float, float]:
        output = folder / "output" / _slug(one)
        output.mkdir(parents=True)
        began = time.perf_counter()
        notebook = folder / "submitted" / _slug(one) / f"{LESSON}.ipynb"
        command = [python, "-m", "otter", "run", "-a", str(folder / LESSON / "autograder.zip"), "-o", str(output), str(notebook)]
        _run(command, output)
        results = output / "results.json"
        tests = json.loads(results.read_text(encoding="utf-8"))["tests"] if results.exists() else []
        return sum(float(test.get("score", 0)) for test in tests), time.perf_counter() - began

    with ThreadPoolExecutor(jobs) as pool:
        return dict(zip(map(_slug, chosen), pool.map(graded, chosen), strict=True))


WAYS: Final[dict[str, Callable[[list[Submission], Path, str, int], Graded]]] = {
    "grade": _by_grade, "nbgrader": _by_nbgrader, "otter": _by_otter,
}  # fmt: skip


def _assigned(form: str, folder: Path) -> None:
    points = [f"{name}={number:g}" for name, number in POINTS.items()]
    assign(["--lessons", "02", "--to", str(folder), "--for", form, "--seed", SEED, "--points", *points])


def _write_submissions(chosen: list[Submission], folder: Path, below: str, released: Path | None = None) -> None:
    handed_out = read_handout(released or ORIGINALS / f"{LESSON}.ipynb", POINTS, []).notebook
    for one in chosen:
        path = folder / below.format(student=_slug(one)) / f"{LESSON}.ipynb"
        if one.text is None:
            write_notebook(path, notebook_of(one, handed_out, folder / below.format(student="right") / f"{LESSON}.ipynb"))
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(one.text, encoding="utf-8")


def _slug(one: Submission) -> str:
    return re.sub(r"[^\w]+", "-", one.student.lower())


def _run(command: list[str], folder: Path) -> list[tuple[float, str]]:
    """Run a program to its end; return its lines with the seconds at which they came."""
    path = os.pathsep.join([str(Path(command[0]).parent), os.environ.get("PATH", "")])
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": path}
    began, lines = time.perf_counter(), []
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace",
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        lines.append((time.perf_counter() - began, line.rstrip()))
        if time.perf_counter() - began > LIMIT_S:
            process.kill()
    if process.wait() != 0:
        print(f"{' '.join(command[1:4])} ended with {process.returncode}: {lines[-1][1] if lines else ''}", file=sys.stderr)
    return lines
