"""Executes the torch lessons as they are on this machine's devices, and saves their figures: a stage of `make gpu`.

    python -m tools.gpu_lessons FOLDER

Every cell is run, also after one that failed. FOLDER gets each executed notebook, its figures as PNG, and
`lessons.json`.
"""

from __future__ import annotations

import base64
import json
import sys
import time
from pathlib import Path
from typing import Any, Final

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellTimeoutError, DeadKernelError

ROOT: Final = Path(__file__).resolve().parent.parent
CELL_LIMIT_S: Final = 60


def torch_lessons() -> list[Path]:
    """The lessons that do without TensorFlow."""
    return [p for p in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb")) if "import tensorflow" not in p.read_text("utf-8")]


def execute(path: Path, folder: Path) -> dict[str, Any]:
    """Run one lesson; returns its results for the page."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=CELL_LIMIT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
        allow_errors=True,
        record_timing=False,
        store_widget_state=False,
        coalesce_streams=True,
    )
    started, ended_by = time.monotonic(), ""
    try:
        client.execute()
    except (CellTimeoutError, DeadKernelError) as error:
        ended_by = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    seconds = time.monotonic() - started
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    nbformat.write(notebook, folder / path.name)
    figures = save_figures(cells, folder, path.stem)
    return {
        "lesson": path.stem,
        "seconds": seconds,
        "cells": len(cells),
        "failed": [_failure(number, cell) for number, cell in enumerate(cells, 1) if _failed(cell)],
        "ended_by": ended_by,
        "figures": figures,
    }


def save_figures(cells: list[Any], folder: Path, stem: str) -> list[str]:
    """Write every picture of the cells' outputs into the folder; the files' names."""
    names = []
    for number, cell in enumerate(cells, 1):
        pictures = [o["data"]["image/png"] for o in cell.get("outputs", []) if "image/png" in o.get("data", {})]
        for i, picture in enumerate(pictures):
            names.append(f"{stem}_cell{number:02}{f'_{i}' if i else ''}.png")
            (folder / names[-1]).write_bytes(base64.b64decode(picture))
    return names


def _failed(cell: Any) -> bool:
    """Whether a cell that is not meant to fail did, or the other way round."""
    raised = any(output.output_type == "error" for output in cell.outputs)
    return raised != ("raises-exception" in cell.metadata.get("tags", []))


def _failure(number: int, cell: Any) -> str:
    error = next((o for o in cell.outputs if o.output_type == "error"), None)
    if error is None:
        return f"cell {number} was expected to raise, and did not"
    return f"cell {number}: {error.ename}: {error.evalue.splitlines()[0] if error.evalue else ''}"


def main(folder: Path) -> int:
    """Run all; how many had a cell that failed."""
    found = []
    for path in torch_lessons():
        found.append(execute(path, folder))
        print(json.dumps(found[-1], indent=1), flush=True)
        (folder / "lessons.json").write_text(json.dumps(found))  # after each, should the time for all be over
    return sum(bool(lesson["failed"] or lesson["ended_by"]) for lesson in found)


if __name__ == "__main__":
    sys.exit(min(main(Path(sys.argv[1])), 1))
