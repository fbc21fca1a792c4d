"""The page of predictions has what the executed lessons show."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import nbformat
import pytest

from bench.page import with_section
from labkit.plots.guess_charts import Outcome, draw_outcome
from labkit.plots.predictions import Predictions, Quantity
from tools.lesson_numbers import NOTEBOOKS
from tools.lesson_predictions import PAGE, predictions_in, section

STEP = Predictions((Quantity("step", 10.0, 11.0), Quantity("message", 4.0, 8.0)), "ms")


@pytest.fixture
def lesson(tmp_path: Path) -> Path:
    """An executed lesson with a table, a revealed guess with a prediction, one without, and a print."""
    figures = [draw_outcome(Outcome("", "sent", "MB", 2.0, predicted=p)).get_figure() for p in (1.0, None)]
    shown = [STEP.numbers(), *(figure.numbers for figure in figures)]
    for figure in figures:
        plt.close(figure)
    cell = nbformat.v4.new_code_cell("...", outputs=[nbformat.v4.new_output("display_data", dict(data)) for data in shown])
    cell.outputs.append(nbformat.v4.new_output("stream", text="1 of 2"))
    path = tmp_path / "07_rpc.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# 07"), cell]), path)
    return path


def test_tables_and_revealed_predictions_are_found_in_order(lesson: Path) -> None:
    assert predictions_in(lesson) == [STEP, Predictions((Quantity("sent", 1.0, 2.0),), "MB")]


def test_the_section_has_a_row_for_each_lesson_with_the_pair_furthest_from_1(lesson: Path) -> None:
    too_small = Predictions((Quantity("as predicted", 1.0, 1.0), Quantity("too small", 9.0, 3.0)), "MB")
    lines = section({"00": [], "07": [STEP], "08": [too_small, *predictions_in(lesson)]}).splitlines()
    assert lines[-4:-2] == [
        "| 07 | 2 | 1.55 | 1 | message | 4 ms | 8 ms | 2.00 |",
        "| 08 | 5 | 1.10 | 2 | too small | 9 MB | 3 MB | 0.33 |",
    ]
    assert lines[-1] == "3 of 7 ratios are between 0.8 and 1.25; their median is 1.10."


def test_only_the_section_of_the_page_is_replaced(lesson: Path) -> None:
    first = with_section("# Page\n\nmeasured\n", section({"07": [STEP]}))
    second = with_section(first, section({"07": predictions_in(lesson)}))
    assert first.startswith("# Page\n\nmeasured\n\n## In the lessons\n")
    assert second.count("## In the lessons") == 1
    assert second.count("| 07 | 3 |") == 1


def test_the_page_has_the_committed_lessons() -> None:
    tables = {path.stem[:3].rstrip("_"): predictions_in(path) for path in sorted(NOTEBOOKS.glob("*.ipynb"))}
    assert section(tables) in PAGE.read_text(encoding="utf-8"), "run: python -m tools.lesson_predictions"
