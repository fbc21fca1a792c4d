"""Submitted notebooks: whose each is, its code, and the exercises that it should answer."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from labkit.classroom.statements import parsed
from labkit.errors.exceptions import LabError
from labkit.notebook.lessons import ORIGINALS

__all__ = ["Submission", "exercises_of", "printable", "submissions"]


@dataclass(frozen=True)
class Submission:
    """One notebook of one student.

    Args:
        student: the student's name, as the files tell it.
        path: the file.
        cells: the sources of its code cells; none if it is no notebook.
        exercises: the names of the exercises that it should answer.
        error: why it is no notebook; "" if it is one.
    """

    student: str
    path: Path
    cells: tuple[str, ...]
    exercises: tuple[str, ...]
    error: str = ""


def submissions(paths: Iterable[Path], required: Sequence[str]) -> list[Submission]:
    """Read submitted notebooks.

    Args:
        paths: files, and folders that contain them at any depth.
        required: the names of the exercises that each student should answer. Empty: those of the lesson after which a
            file is named, or else those that the notebook checks.

    Raises:
        LabError: a path does not exist, or there is no notebook.
    """
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise LabError(f"{path}: no such file or folder")
        found = sorted(path.rglob("*.ipynb")) if path.is_dir() else [path]
        files += [file for file in found if ".ipynb_checkpoints" not in file.parts]
    if not files:
        raise LabError(f"there is no notebook in {', '.join(map(str, paths))}")
    return _distinct([_read(file, required) for file in files])


def printable(text: object) -> str:
    """Return a text without what is no character, and what would change a terminal or a table."""
    valid = str(text).encode(errors="replace").decode()
    return "".join(character if character.isprintable() else " " for character in valid)


def _distinct(given: list[Submission]) -> list[Submission]:
    """Name students also by their files where two notebooks under one name answer the same exercise."""
    taken = Counter((one.student, name) for one in given for name in one.exercises)
    twice = {student for (student, _), count in taken.items() if count > 1}
    return [replace(one, student=printable(one.path)) if one.student in twice else one for one in given]


@cache
def exercises_of(lesson: Path) -> tuple[str, ...]:
    """Return the names of a lesson's exercises, in its order."""
    return tuple(dict.fromkeys(name for _, name in parsed(_cells(lesson)).answers()))


def _read(path: Path, required: Sequence[str]) -> Submission:
    lesson = next((p for p in ORIGINALS.glob("*.ipynb") if path.stem.startswith(p.stem)), None)
    student = printable(path.parent.name if lesson is not None and path.stem == lesson.stem else path.stem)
    names = tuple(required) or (exercises_of(lesson) if lesson is not None else ())
    try:
        cells = _cells(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return Submission(student, path, (), names, f"{path.name} is no notebook: {error}")
    return Submission(student, path, cells, names or tuple(dict.fromkeys(name for _, name in parsed(cells).answers())))


def _cells(path: Path) -> tuple[str, ...]:
    content = json.loads(path.read_text(encoding="utf-8-sig"))
    if "worksheets" in content:  # version 3 of the format
        cells = [cell for part in content["worksheets"] for cell in part["cells"]]
        return tuple("".join(cell["input"]) for cell in cells if cell["cell_type"] == "code")
    return tuple("".join(cell["source"]) for cell in content["cells"] if cell["cell_type"] == "code")
