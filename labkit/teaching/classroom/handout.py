"""What students get of a lesson: its notebook without outputs and without solutions, and the diagrams that it shows.

An `Order` is what `python -m labkit assign` was asked for: the lessons, and where and how to write them.
"""

from __future__ import annotations

import ast
import copy
import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from labkit.teaching.classroom.statements import parsed

GUIDE: Final = "AGENTS.md"  # says how an AI tutor helps without solving
_PICTURE: Final = re.compile(r"!\[[^\]]*\]\((images/[^)\s]+)\)")
_LESSON_LINK: Final = re.compile(r"(?<!!)\[([^\]]*)\]\(([\w.-]+\.ipynb)\)")


@dataclass(frozen=True)
class AssignedExercise:
    """An exercise of a lesson."""

    name: str
    answer: str  # the expression that the student's cell submits, such as "average_gradients"
    cell: int  # the index of that cell in the notebook
    points: float  # what a right answer earns


@dataclass(frozen=True)
class Handout:
    """A lesson for students."""

    lesson: Path  # the original, whose folder has the diagrams
    notebook: dict[str, Any]  # the content of the students' notebook
    exercises: tuple[AssignedExercise, ...]  # in the order of the notebook

    @property
    def name(self) -> str:
        """The lesson's name, such as "02_data_parallel"."""
        return self.lesson.stem

    def pictures(self) -> list[str]:
        """Return the diagrams that the notebook shows, as it refers to them, such as "images/02_average.svg"."""
        shown = (_PICTURE.findall(cell["source"]) for cell in self.notebook["cells"] if cell["cell_type"] == "markdown")
        return list(dict.fromkeys(name for names in shown for name in names))

    def with_cells(self, cells: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the content of a notebook that has other cells."""
        return self.notebook | {"cells": cells}

    def write(self, folder: Path, cells: list[dict[str, Any]] | None = None) -> Path:
        """Write the notebook, perhaps with other cells, its diagrams and the guide for AI tutors; return its path."""
        for name in (*self.pictures(), GUIDE):
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((self.lesson.parent / name).read_bytes())
        path = folder / self.lesson.name
        write_notebook(path, self.notebook if cells is None else self.with_cells(cells))
        return path


@dataclass(frozen=True)
class Order:
    """What to write."""

    handouts: Sequence[Handout]
    folder: Path  # where to write; it exists
    seed: int  # of the hidden inputs
    install: str = ""  # what a hosted kernel installs; "" for the default
    repository: str = ""  # "owner/name" of a copy of labkit's repository on GitHub, or ""
    branch: str = "main"

    def extras(self) -> str:
        """Return the extras of labkit that answers to these lessons need."""
        return "torch,hosted,tf" if any("_tf_" in one.name for one in self.handouts) else "torch,hosted"


def read_handout(lesson: Path, points: dict[str, float], beside: Collection[str]) -> Handout:
    """Read a lesson. `beside` are the notebooks in the students' folder: links to others become text."""
    notebook = json.loads(lesson.read_bytes())
    for cell in notebook["cells"]:
        cell["source"] = "".join(cell["source"])
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
        else:
            text = _without_solutions(cell["source"])
            cell["source"] = _LESSON_LINK.sub(lambda link: link[0] if link[2] in beside else link[1], text)
    return Handout(lesson, notebook, tuple(_exercises(notebook["cells"], points)))


def code_cell(identifier: str, source: str) -> dict[str, Any]:
    """Return a code cell that has not run."""
    return {"cell_type": "code", "execution_count": None, "id": identifier, "metadata": {}, "outputs": [], "source": source}


def markdown_cell(identifier: str, source: str) -> dict[str, Any]:
    """Return a cell of text."""
    return {"cell_type": "markdown", "id": identifier, "metadata": {}, "source": source}


def write_notebook(path: Path, notebook: dict[str, Any]) -> None:
    """Write a notebook, and create its folder if needed. Sources become lists of lines, as Jupyter writes them."""
    notebook = copy.deepcopy(notebook)
    for cell in notebook["cells"]:
        cell["source"] = cell["source"].splitlines(keepends=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _exercises(cells: list[dict[str, Any]], points: dict[str, float]) -> Iterable[AssignedExercise]:
    code = [(index, cell["source"]) for index, cell in enumerate(cells) if cell["cell_type"] == "code"]
    program = parsed([source for _, source in code])
    for position, name in program.answers():
        statement = program.statements[position]
        yield AssignedExercise(name, ast.unparse(statement.answers[name]), code[statement.cell - 1][0], points.get(name, 1.0))


def _without_solutions(text: str) -> str:
    """Leave out the clauses that say where the solutions are."""
    return "\n".join(_clauses_without_solutions(line) if "solutions/" in line else line for line in text.splitlines())


def _clauses_without_solutions(line: str) -> str:
    clauses = re.split(r"(?<=[.;]) ", line)
    kept = " ".join(clause for clause in clauses if "solutions/" not in clause)
    return re.sub(r";(?= [A-Z]|$)", ".", kept)
