"""Executes the lessons again from top to bottom, each in a fresh kernel, and strips what differs from run to run.

    python tools/notebooks.py          all lessons and solutions
    python tools/notebooks.py 02 10    those whose names begin with these numbers

A notebook that fails stays unchanged, and the others are still executed.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellControlSignal, DeadKernelError

from labkit.plots.image import HTML_CLASS

ROOT = Path(__file__).resolve().parent.parent
CELL_LIMIT_S = 120
SIZE_LIMIT_KB = 500  # beyond this, GitHub shows notebooks slowly or not at all

# Metadata that front ends write for themselves; it differs from person to person.
VOLATILE_NOTEBOOK = ("widgets", "signature", "vscode", "toc")
VOLATILE_CELL = ("execution", "ExecuteTime", "collapsed", "scrolled", "vscode", "trusted")
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
LANGUAGE = {"file_extension": ".py", "mimetype": "text/x-python", "name": "python", "pygments_lexer": "ipython3"}  # no version
WIDGET_MIMES = ("application/vnd.jupyter.widget-view+json", "application/vnd.jupyter.widget-state+json")


def lessons(beginnings: list[str]) -> list[Path]:
    """The notebooks whose names begin with one of these (none: all), lessons before solutions."""
    found = [*sorted(ROOT.glob("notebooks/*.ipynb")), *sorted(ROOT.glob("notebooks/solutions/*.ipynb"))]
    return [path for path in found if not beginnings or path.name.startswith(tuple(beginnings))]


def execute(notebook: Any, folder: Path) -> None:
    """Run all cells in a fresh kernel that works in `folder`, and keep their outputs in the notebook.

    Raises:
        CellControlSignal: a cell that is not tagged `raises-exception` failed, or took longer than `CELL_LIMIT_S`.
        DeadKernelError: the kernel died.
    """
    NotebookClient(
        notebook, timeout=CELL_LIMIT_S, kernel_name="python3", resources={"metadata": {"path": str(folder)}},
        record_timing=False, store_widget_state=False,
        coalesce_streams=True,  # the division of prints into messages depends on timing
    ).execute()  # fmt: skip


def strip(notebook: Any) -> None:
    """Remove what differs from one execution to the next: timestamps, widget state and ids, Python's patch level.

    Execution counts, text and pictures stay. Of a widget, the picture or text beside it stays.
    """
    for key in VOLATILE_NOTEBOOK:
        notebook.metadata.pop(key, None)
    notebook.metadata["kernelspec"] = dict(KERNEL)
    notebook.metadata["language_info"] = dict(LANGUAGE)
    for cell in notebook.cells:
        for key in VOLATILE_CELL:
            cell.metadata.pop(key, None)
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if _strip_output(output)]


def _strip_output(output: Any) -> bool:
    """Strip one output; False if nothing is worth keeping."""
    if "".join(output.get("text", "")).startswith("Writing /"):  # %%writefile names a folder of this machine
        return False
    data = output.get("data")
    if data is None:
        return True
    if not data:  # the line that a group shows while it starts, taken away again
        return False
    if "image/png" in data and HTML_CLASS in "".join(data.get("text/html", "")):
        del data["text/html"]  # the same image; GitHub shows the PNG, whose metadata has the alternative text
    widget = [data.pop(mime) for mime in WIDGET_MIMES if mime in data]
    return not widget or bool(set(data) - {"text/plain"})  # without its state a widget's text is only its constructor


def main(beginnings: list[str]) -> int:
    """Execute, strip and write each notebook; returns the number of failures."""
    paths = lessons(beginnings)
    if not paths:
        print(f"No notebook begins with {' or '.join(beginnings) or 'anything'}.", file=sys.stderr)
        return 1
    failed = 0
    for path in paths:
        name = path.relative_to(ROOT)
        notebook = nbformat.read(path, as_version=4)
        start = time.monotonic()
        try:
            execute(notebook, path.parent)
        except (CellControlSignal, DeadKernelError) as error:
            failed += 1
            print(f"{name}: FAILED, left as it was\n{error}", file=sys.stderr)
            continue
        strip(notebook)
        nbformat.write(notebook, path)
        size_kb = path.stat().st_size / 1000
        warning = f"  more than {SIZE_LIMIT_KB} kB" if size_kb > SIZE_LIMIT_KB else ""
        print(f"{name}: {time.monotonic() - start:.0f} s, {size_kb:.0f} kB{warning}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
