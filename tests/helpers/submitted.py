"""Notebooks that students submit, for the tests of `python -m labkit grade`."""

from __future__ import annotations

from pathlib import Path

import nbformat

LESSON = "02_data_parallel"
AVERAGE = "average_gradients"
RATE = "scaled_learning_rate"
RATE_BODY = "return base * per_rank * ranks / base_batch"


def notebook(path: Path, *cells: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells]), path)
    return path


def rate(body: str, name: str = RATE) -> str:
    indented = body.replace("\n", "\n    ")
    return f"def {name}(base, base_batch, per_rank, ranks):\n    {indented}\n\nlab.check('{RATE}', {name})"


RIGHT_RATE = rate(RATE_BODY)
