"""Figures in a notebook, where matplotlib uses Jupyter's backend, which starts with the first figure."""

from __future__ import annotations

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.processes

pytest.importorskip("matplotlib_inline")


def test_every_figure_is_shown() -> None:
    make = "import labkit as lab\ntrace = lab.Trace([lab.Span(0, 'forward', 'compute', 0, 1000)], ranks=['rank 0'])"
    cells = [nbformat.v4.new_code_cell(source) for source in (make, "lab.timeline(trace);", "lab.breakdown(trace);")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, timeout=200, kernel_name="python3").execute()
    for cell in notebook.cells[1:]:
        assert ["image/png" in output.data for output in cell.outputs] == [True], cell.source
