"""Executes the torch lessons as they are on this machine's devices, and saves their figures: a stage of `make gpu`.

    python -m tools.gpu_lessons FOLDER          all
    python -m tools.gpu_lessons FOLDER 00 02    these

Up to six lessons run at a time, each in a kernel of its own. Every cell is run, also after one that failed. FOLDER gets
each executed notebook and its figures as PNG.
"""

from __future__ import annotations

import base64
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Final

import nbformat
from nbclient import NotebookClient

from tools.gpu_report import in_one_line

ROOT: Final = Path(__file__).resolve().parent.parent
REHEARSAL: Final = os.environ.get("LABKIT_GPU_REHEARSAL") == "1"
CELL_LIMIT_S: Final = 240 if REHEARSAL else 60  # on two busy cores some cells take more than a minute
MOST_AT_A_TIME: Final = 6  # each has two to four ranks


def torch_lessons(numbers: Sequence[str] = ()) -> list[Path]:
    """The lessons that do without TensorFlow: all, or those with the given numbers, such as "02b"."""
    paths = [p for p in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb")) if "import tensorflow" not in p.read_text("utf-8")]
    return [p for p in paths if not numbers or p.stem.partition("_")[0] in numbers]


def execute(path: Path, folder: Path) -> tuple[str, str, list[str]]:
    """Run one lesson; returns its name, what it did, and a line for each failure."""
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    meant = [_raised(cell) for cell in cells]  # the stored run shows which cells are meant to raise
    for cell in cells:  # where a cell does not run, the stored output of another machine would pass for its own
        cell.outputs, cell.execution_count = [], None
    client = NotebookClient(
        notebook, timeout=CELL_LIMIT_S, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}},
        extra_arguments=["--log-level=40"],  # errors: a kernel also warns that its connection is not encrypted
        allow_errors=True, record_timing=False, store_widget_state=False, coalesce_streams=True,
    )  # fmt: skip
    started, ended_by = time.monotonic(), ""
    try:
        client.execute()
    except (TimeoutError, RuntimeError) as error:  # a cell, or the kernel's start, took too long; or the kernel died
        ended_by = f"{type(error).__name__}: {in_one_line(str(error))}"
    seconds = time.monotonic() - started
    nbformat.write(notebook, folder / path.name)
    figures = save_figures(cells, folder, path.stem)
    said = f"{seconds:.0f} s, {len(cells)} cells, {figures} figures"
    return path.stem, said, failures(cells, meant, client.code_cells_executed, ended_by)


def failures(cells: list[Any], meant: list[bool], begun: int, ended_by: str) -> list[str]:
    """What failed in a lesson, a line each; an error may have ended it in the last cell that was begun."""
    completed = cells[: begun - 1] if ended_by and begun else cells[:begun]
    failed = [_failure(i + 1, cell) for i, cell in enumerate(completed) if _raised(cell) != meant[i]]
    if ended_by:
        failed.append(f"cell {begun}: {ended_by}" if begun else ended_by)
    if begun < len(cells):
        failed.append(f"cells {begun + 1} to {len(cells)} did not run")
    return failed


def save_figures(cells: list[Any], folder: Path, stem: str) -> int:
    """Write every picture of the cells' outputs into the folder; returns how many."""
    count = 0
    for number, cell in enumerate(cells, 1):
        pictures = [o["data"]["image/png"] for o in cell.get("outputs", []) if "image/png" in o.get("data", {})]
        for i, picture in enumerate(pictures):
            (folder / f"{stem}_cell{number:02}{f'_{i}' if i else ''}.png").write_bytes(base64.b64decode(picture))
            count += 1
    return count


def _raised(cell: Any) -> bool:
    return any(output.output_type == "error" for output in cell.outputs)


def _failure(number: int, cell: Any) -> str:
    error = next((o for o in cell.outputs if o.output_type == "error"), None)
    if error is None:
        return f"cell {number} was expected to raise, and did not"
    return f"cell {number}: {error.ename}: {in_one_line(error.evalue)}"


def main(folder: Path, numbers: Sequence[str] = ()) -> int:
    """Run the lessons, and say at the end what failed; returns how many had a cell that failed."""
    paths = torch_lessons(numbers)
    if not paths:
        print(f"No torch lesson has the number {' or '.join(numbers)}.", file=sys.stderr)
        return 1
    print(f"{len(paths)} lessons: {' '.join(path.stem for path in paths)}", flush=True)
    failed: dict[str, list[str]] = {}
    with ThreadPoolExecutor(min(MOST_AT_A_TIME, os.cpu_count() or 1)) as pool:
        # Those that take longest are the last ones: they start first.
        for run in as_completed([pool.submit(execute, path, folder) for path in reversed(paths)]):
            lesson, said, failed_cells = run.result()
            print(f"{lesson}: {said}, {len(failed_cells) or 'no'} failures", flush=True)
            if failed_cells:
                failed[lesson] = failed_cells
    for lesson, failed_cells in failed.items():
        print(f"{lesson} failed:", *failed_cells, sep="\n  ")
    return len(failed)


if __name__ == "__main__":
    sys.exit(min(main(Path(sys.argv[1]), sys.argv[2:]), 1))
