"""`python -m labkit assign` writes lessons for a class, in the form that a service or a grader expects.

`docs/handing_out.md` describes it. Each form is a function in a file of its own: `for_nbgrader.py` and so on.
"""

from __future__ import annotations

import argparse
import secrets
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from labkit.errors.exceptions import LabError
from labkit.teaching.classroom.for_hosted import write_colab, write_kaggle
from labkit.teaching.classroom.for_nbgrader import write_nbgrader
from labkit.teaching.classroom.for_otter import write_otter
from labkit.teaching.classroom.grade import points_given
from labkit.teaching.classroom.handout import Order, read_handout
from labkit.teaching.lessons import lessons_named


def _write_plain(order: Order) -> list[str]:
    for one in order.handouts:
        one.write(order.folder)
    return [f"Hand out the folder {order.folder}."]


FORMS: Final[dict[str, Callable[[Order], list[str]]]] = {
    "plain": _write_plain,
    "nbgrader": write_nbgrader,
    "otter": write_otter,
    "colab": write_colab,
    "kaggle": write_kaggle,
}
TOGETHER: Final = ("plain", "colab", "kaggle")  # all notebooks are in one folder, so that links between them work


def main(arguments: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        lessons = lessons_named(options.lessons)
        points = points_given(options.points)
        beside = [lesson.name for lesson in lessons] if options.form in TOGETHER else []
        handouts = [read_handout(lesson, points, beside) for lesson in lessons]
        known = [exercise.name for one in handouts for exercise in one.exercises]
        if unknown := [name for name in points if name not in known]:
            raise LabError(f"--points {unknown[0]}: these lessons have no such exercise; they have {', '.join(known)}")
        order = Order(
            handouts, options.to, options.seed or 1 + secrets.randbelow(10**6), options.install, options.repository,
            options.branch,
        )  # fmt: skip
        order.folder.mkdir(parents=True, exist_ok=True)
        lines = FORMS[options.form](order)
    except LabError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"{error.filename or options.to}: {error.strerror}")
    print("\n".join(lines), file=sys.stdout)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m labkit assign",
        description="Writes students' copies of lessons, without outputs and solutions, and what a grader needs to judge them.",
    )
    parser.add_argument("--lessons", nargs="+", default=[], help="such as 02 04; default: all")
    parser.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="where to write; created if it does not exist")
    parser.add_argument("--for", dest="form", choices=FORMS, default="plain", help="default: plain notebooks")
    parser.add_argument("--points", nargs="+", default=[], metavar="NAME=N", help="points for an exercise; default: 1 for each")
    parser.add_argument("--seed", type=int, default=0, help="of the hidden inputs, for nbgrader and Otter; default: a random one")
    parser.add_argument(
        "--install",
        default="",
        metavar="REQUIREMENT",
        help="what colab, kaggle and otter install; default: labkit, for colab from --repository if it is given",
    )
    parser.add_argument("--repository", default="", metavar="OWNER/NAME", help="a copy of labkit's repository on GitHub")
    parser.add_argument("--branch", default="main", help="of the repository (default: main)")
    return parser
