"""Submitted notebooks: whose each is, its code, and the exercises that it should answer."""

from __future__ import annotations

import json
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Final

from labkit.errors.exceptions import LabError
from labkit.teaching.classroom.statements import parsed
from labkit.teaching.lessons import ORIGINALS

MOST_BYTES: Final = 1 << 26  # of a notebook; the process that grades the class reads it
# What browsers, Jupyter and Canvas add to the name of a second copy.
_COPY: Final = r"(-Copy\d+| ?\(\d+\)|-\d+)?"
# Names of folders and files in what Moodle and Canvas download, with the student's name first.
_MOODLE: Final = re.compile(r"(.+)_\d+_assignsubmission_\w+")
_CANVAS: Final = re.compile(r"([^\W_]+)_(?:late_)?\d+_\d{3,}_.+")


@dataclass(frozen=True)
class Submission:
    """One notebook of one student."""

    student: str  # the name, as the files tell it
    path: Path
    cells: tuple[str, ...]  # the sources of its code cells; none if it is no notebook
    exercises: tuple[str, ...]  # that it should answer
    error: str = ""  # why it is no notebook


def submissions(paths: Iterable[Path], required: Sequence[str]) -> list[Submission]:
    """Read submitted notebooks. Of a folder, at any depth, only regular files are read: no links.

    `required` are the names of the exercises that each student should answer. Empty: those of the lesson after which a
    file is named, or else those that the notebook checks.
    """
    files: dict[Path, bool] = {}  # whether it was named itself
    for path in paths:
        if not path.exists():
            raise LabError(f"{path}: no such file or folder")
        if packed := [path] if path.suffix == ".zip" else sorted(path.rglob("*.zip")):
            raise LabError(f"{packed[0]}: unpack zip files into folders first, and then delete them")
        named = not path.is_dir()
        found = [path] if named else sorted(path.rglob("*.ipynb"))
        files |= {file: named for file in found if not {".ipynb_checkpoints", "__MACOSX"} & {*file.parts}}
    given = [_read(file, required, named) for file, named in files.items()]
    names = tuple(dict.fromkeys(name for one in given for name in one.exercises))
    errors = [one.error for one in given if one.error]
    if not given or (errors and not names):
        raise LabError("; ".join([f"there is no notebook in {', '.join(map(str, paths))}", *errors]))
    return _distinct([replace(one, exercises=names) if one.error and not one.exercises else one for one in given])


def printable(text: object) -> str:
    """Return a text without what is no character, and what would change a terminal or a table."""
    valid = str(text).encode(errors="replace").decode()
    return "".join(character if character.isprintable() else " " for character in valid)


def _distinct(given: list[Submission]) -> list[Submission]:
    """Name students by folders or whole paths where two notebooks under one name answer the same exercise."""
    for named in (lambda path: f"{path.parent.name}/{path.stem}", str):
        taken = Counter((one.student, name) for one in given for name in one.exercises)
        twice = {student for (student, _), count in taken.items() if count > 1}
        given = [replace(one, student=printable(named(one.path))) if one.student in twice else one for one in given]
    return given


@cache
def exercises_of(lesson: Path) -> tuple[str, ...]:
    """Return the names of a lesson's exercises, in its order."""
    return tuple(dict.fromkeys(name for _, name in parsed(_cells(lesson.read_bytes())).answers()))


def _read(path: Path, required: Sequence[str], named: bool) -> Submission:
    lesson = next((p for p in ORIGINALS.glob("*.ipynb") if path.stem.startswith(p.stem)), None)
    student = printable(_student(path, lesson))
    names = tuple(required) or (exercises_of(lesson) if lesson is not None else ())
    try:
        cells = _cells(_content(path, named))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return Submission(student, path, (), names, printable(f"{path.name} is no notebook: {error}"))
    return Submission(student, path, cells, names or tuple(dict.fromkeys(name for _, name in parsed(cells).answers())))


def _student(path: Path, lesson: Path | None) -> str:
    for folder in reversed(path.parts[:-1]):
        if found := _MOODLE.fullmatch(folder):
            return found[1]
    if found := _CANVAS.fullmatch(path.stem):
        return found[1]
    after_lesson = lesson is not None and re.fullmatch(re.escape(lesson.stem) + _COPY, path.stem)
    return path.parent.name if after_lesson else path.stem


def _content(path: Path, named: bool) -> bytes:
    """Return the content of a regular file; of a link only if the teacher has named it, and not a student."""
    found = path.stat() if named else path.lstat()
    if stat.S_ISLNK(found.st_mode):
        raise ValueError("it is a link, and links in a folder are not followed")
    if not stat.S_ISREG(found.st_mode) or found.st_size > MOST_BYTES:
        raise ValueError(f"it is no regular file of at most {MOST_BYTES >> 20} MiB")
    # Meanwhile it can have become a link, or a pipe whose `open` would wait for a writer.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | (0 if named else os.O_NOFOLLOW)), "rb") as file:
        if not os.path.samestat(found, os.fstat(file.fileno())):
            raise ValueError("it was replaced while it was read")
        return file.read()


def _cells(notebook: bytes) -> tuple[str, ...]:
    content = json.loads(notebook.decode("utf-8-sig"))
    return tuple("".join(cell["source"]) for cell in content["cells"] if cell["cell_type"] == "code")
