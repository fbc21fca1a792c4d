"""Collects what the executed lessons predicted and measured, and writes a summary into docs/predictions.md.

python -m tools.lesson_predictions
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any, Final

import nbformat

from bench.page import with_section
from labkit.plots.predictions import MIME, Predictions, Quantity
from tools.lesson_numbers import NOTEBOOKS

PAGE: Final = NOTEBOOKS.parent / "docs" / "predictions.md"
HEADING: Final = "## In the lessons"
INTRODUCTION: Final = """
The executed lessons show pairs of predicted and measured values, by `lab.reveal` and `lab.predictions`. This table
has a row for each lesson, with the pair whose ratio is furthest from 1. Sizes and counts are the same on each machine.
Times are those of one execution on two cores: where four ranks share them, where the lesson says that its formula
leaves something out, and in its "Break", ratios are far from 1 on purpose, and the text beside the pair explains it.
`python -m tools.lesson_predictions` writes this section.
"""
HEADINGS: Final = ("lesson", "pairs", "median ratio", "between 0.8 and 1.25", "furthest from 1", "predicted", "measured", "ratio")


def predictions_in(path: Path) -> list[Predictions]:
    """The tables and the revealed guesses of an executed notebook that have a prediction, in order."""
    found = []
    for cell in nbformat.read(path, as_version=4).cells:
        for output in cell.get("outputs", ()):
            numbers: dict[str, Any] | None = output.get("data", {}).get(MIME)
            if numbers is not None:
                found.append(Predictions(tuple(Quantity(**row) for row in numbers["rows"]), numbers["unit"]))
    return found


def section(tables: dict[str, list[Predictions]]) -> str:
    """The section of the page, from the tables of each lesson."""
    rows = [_cells_of_lesson(name, found) for name, found in tables.items() if found]
    lines = ["| " + " | ".join(row) + " |" for row in [HEADINGS, *rows]]
    lines.insert(1, "|---" * len(HEADINGS) + "|")
    ratios = [ratio for found in tables.values() for ratio in _ratios(found)]
    last = f"{_inside(ratios)} of {len(ratios)} ratios are between 0.8 and 1.25; their median is {statistics.median(ratios):.2f}."
    return "\n".join([HEADING, "", INTRODUCTION.strip(), "", *lines, "", last, ""])


def _cells_of_lesson(name: str, found: list[Predictions]) -> tuple[str, ...]:
    ratios = _ratios(found)
    cells = [cells for table in found for cells in table.cells()]
    furthest = max(range(len(ratios)), key=lambda i: abs(math.log(ratios[i])))
    return name, f"{len(ratios)}", f"{statistics.median(ratios):.2f}", f"{_inside(ratios)}", *cells[furthest]


def _ratios(found: list[Predictions]) -> list[float]:
    return [row.ratio for table in found for row in table.rows]


def _inside(ratios: list[float]) -> int:
    return sum(0.8 <= ratio <= 1.25 for ratio in ratios)


def main() -> None:
    """Write the section."""
    tables = {path.stem[:3].rstrip("_"): predictions_in(path) for path in sorted(NOTEBOOKS.glob("*.ipynb"))}
    PAGE.write_text(with_section(PAGE.read_text(encoding="utf-8"), section(tables)), encoding="utf-8")


if __name__ == "__main__":
    main()
