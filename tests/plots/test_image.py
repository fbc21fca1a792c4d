"""Figures as notebooks show them: transparent, as wide as the page, with alternative text, and never cut or doubled."""

from __future__ import annotations

import base64
import io
import re
from typing import Any

import nbformat
import numpy as np
import pytest
from matplotlib.figure import Figure
from nbformat import v4
from PIL import Image

from labkit.plots.breakdown import breakdown, compare
from labkit.plots.figure import LabFigure
from labkit.plots.guess_charts import Outcome, draw_calibration, draw_outcome
from labkit.plots.image import HTML_CLASS, WIDEST_PX, as_image
from labkit.plots.memory import memory
from labkit.plots.scaling import scaling
from labkit.plots.style import INK
from labkit.plots.timeline import timeline
from labkit.plots.traffic import traffic
from tools.notebooks import strip

from synthetic import data_parallel, model_parallel, sharded  # isort: skip

pytestmark = pytest.mark.usefixtures("plain")

GUESS = Outcome("02", "step", "ms", 12.0, guess=8.0, predicted=11.0)
# The first words are the same in every run; what follows has what the picture says.
ALTERNATIVES = {
    "timeline": (lambda: timeline(data_parallel()), "Timeline", ["4 ranks", "67.7 ms", "rank 3", "exposed communication"]),
    "breakdown": (lambda: breakdown(data_parallel()), "Where the time went", ["compute 64 %", "waiting 3 %"]),
    "compare": (
        lambda: compare(a=model_parallel(), b=data_parallel(2, 2)),
        "Where the time of each run went",
        ["1.58 × as fast"],
    ),
    "memory": (lambda: memory(sharded()), "What fills the memory", ["rank 0: peak 285 MB"]),
    "traffic": (lambda: traffic(data_parallel()), "What travelled", ["all_reduce: 9 ×, 132 MB"]),
    "scaling": (lambda: scaling({1: data_parallel(1), 2: data_parallel(2)}), "Scaling", ["1: 1 (100 %)", "speed-up"]),
    "outcome": (lambda: draw_outcome(GUESS), "A guess beside the measurement", ["your guess 8 ms", "measured 12 ms"]),
    "calibration": (lambda: draw_calibration([GUESS]), "All guesses of the course", ["1 of 1 guesses"]),
}


@pytest.fixture
def displayed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    shown: list[tuple[dict[str, Any], dict[str, Any]]] = []
    monkeypatch.setattr("IPython.display.display", lambda data, **options: shown.append((data, options)))
    return shown


@pytest.mark.parametrize("name", ALTERNATIVES)
def test_every_figure_shows_itself_with_alternative_text(name, displayed):
    draw, first, words = ALTERNATIVES[name]
    draw().get_figure(root=True)._ipython_display_()
    (begun, options), (data, update) = displayed
    assert begun == {"text/plain": first}, "nbval compares this with the saved output: no number in it"
    assert update["update"]
    assert update["display_id"] == options["display_id"]
    assert data["text/plain"] == first
    alt = update["metadata"]["image/png"]["alt"]
    for word in words:
        assert word in alt
    assert f'alt="{alt}"' in data["text/html"]


def test_html_in_the_alternative_text_is_escaped():
    data, _ = as_image(Figure(), 'a "quoted" <b>')
    assert 'alt="a &quot;quoted&quot; &lt;b&gt;"' in data["text/html"]


def test_the_page_is_transparent_and_its_text_has_the_neutral_ink():
    data, _ = as_image(timeline(data_parallel()).get_figure(root=True), "")
    with Image.open(io.BytesIO(base64.b64decode(data["image/png"]))) as image:
        pixels = np.asarray(image.convert("RGBA")).reshape(-1, 4)
    clear = pixels[:, 3] == 0
    assert clear.mean() > 0.3
    ink = [int(INK[i : i + 2], 16) for i in (1, 3, 5)]
    assert (np.abs(pixels[:, :3].astype(int) - ink).max(axis=1) < 12)[~clear].mean() > 0.02


def test_a_figure_fills_the_page_and_a_narrow_one_its_share():
    wide, _ = as_image(timeline(data_parallel()).get_figure(root=True), "")
    assert re.search(r'style="width:100%;max-width:(\d+)px"', wide["text/html"])[1] == str(WIDEST_PX)
    figure = Figure(figsize=(4.5, 2))
    figure.add_axes((0, 0, 1, 1))
    narrow, metadata = as_image(figure, "")
    assert 40 < int(re.search(r"width:(\d+)%", narrow["text/html"])[1]) < 60
    assert 500 < metadata["image/png"]["width"] < 800


def test_a_figure_of_the_students_own_keeps_its_page_and_shows_itself_as_matplotlib_does():
    figure = Figure()
    timeline(data_parallel(), ax=figure.add_subplot())
    assert not isinstance(figure, LabFigure)
    assert not hasattr(figure, "_ipython_display_")


def test_committed_notebooks_keep_the_png_with_its_alternative_text():
    data, metadata = as_image(timeline(data_parallel()).get_figure(root=True), "Timeline: two steps")
    table = {"text/html": "<table></table>", "text/plain": "a table"}
    outputs = [v4.new_output("display_data", data, metadata=metadata), v4.new_output("display_data", table)]
    notebook = v4.new_notebook(cells=[v4.new_code_cell("lab.timeline(run);", outputs=outputs)])
    strip(notebook)
    nbformat.validate(notebook)
    kept, other = notebook.cells[0].outputs
    assert sorted(kept.data) == ["image/png", "text/plain"]
    assert kept.metadata["image/png"]["alt"] == "Timeline: two steps"
    assert HTML_CLASS in data["text/html"]
    assert dict(other.data) == table
