"""The tool behind `make notebooks`: lessons executed again and stripped."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tools import notebooks

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = notebooks.lessons([])
names = [str(path.relative_to(ROOT / "notebooks")) for path in COMMITTED]

v4 = nbformat.v4


def write(path: Path, *cells: Any) -> Path:
    nbformat.write(v4.new_notebook(cells=list(cells)), path)
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A separate tree of notebooks for the tool."""
    monkeypatch.setattr(notebooks, "ROOT", tmp_path)
    (tmp_path / "notebooks" / "solutions").mkdir(parents=True)
    return tmp_path / "notebooks"


def test_volatile_data_is_removed_and_the_rest_is_kept() -> None:
    picture = {"image/png": "iVBORw0KGgo=", "text/plain": "<Figure>"}
    view = {"application/vnd.jupyter.widget-view+json": {"model_id": "1f"}, "text/plain": "IntProgress(value=3)"}
    cell = v4.new_code_cell(
        "work()",
        execution_count=4,
        metadata={"execution": {"iopub.status.busy": "2026-11-20T10:00:00Z"}, "tags": ["raises-exception"], "scrolled": True},
        outputs=[
            v4.new_output("stream", text="hello\n"),
            v4.new_output("display_data", data=picture),
            v4.new_output("display_data", data={}),
            v4.new_output("display_data", data=view),
            v4.new_output("display_data", data=view | picture),
        ],
    )
    notebook = v4.new_notebook(cells=[v4.new_markdown_cell("# Title"), cell])
    notebook.metadata = nbformat.from_dict(
        {
            "widgets": {"state": {}},
            "language_info": {"name": "python", "version": "3.11.7"},
            "kernelspec": {"name": "mine"},
            "title": "kept",
        }
    )

    notebooks.strip(notebook)

    assert notebook.metadata == {"kernelspec": notebooks.KERNEL, "language_info": notebooks.LANGUAGE, "title": "kept"}
    assert "version" not in notebook.metadata.language_info
    assert cell.metadata == {"tags": ["raises-exception"]}
    assert cell.execution_count == 4
    assert cell.outputs == [
        {"output_type": "stream", "name": "stdout", "text": "hello\n"},
        {"output_type": "display_data", "metadata": {}, "data": picture},
        {"output_type": "display_data", "metadata": {}, "data": picture},
    ]
    again = copy.deepcopy(notebook)
    notebooks.strip(again)
    assert again == notebook


@pytest.mark.processes
def test_a_lesson_is_executed_from_top_to_bottom(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lesson = write(
        folder / "07_seven.ipynb",
        v4.new_code_cell("import os\nnumber = 3", execution_count=9),
        v4.new_code_cell(
            "print(number, os.path.basename(os.getcwd()))\nnumber + 1", outputs=[v4.new_output("stream", text="old\n")]
        ),
        v4.new_code_cell("for i in range(3): print(i, flush=True)"),
        v4.new_code_cell("1 / 0", metadata={"tags": ["raises-exception"]}),
    )
    assert notebooks.main([]) == 0
    first = lesson.read_text()
    cells = nbformat.reads(first, as_version=4).cells
    assert "version" not in nbformat.reads(first, as_version=4).metadata.language_info
    assert [c.execution_count for c in cells] == [1, 2, 3, 4]
    assert [o.get("text") or o.data["text/plain"] for o in cells[1].outputs] == ["3 notebooks\n", "4"]
    assert [o.text for o in cells[2].outputs] == ["0\n1\n2\n"]
    assert cells[3].outputs[0].ename == "ZeroDivisionError"
    assert re.fullmatch(r"notebooks/07_seven\.ipynb: \d+ s, \d kB\n", capsys.readouterr().out)
    assert notebooks.main(["07"]) == 0
    assert lesson.read_text() == first


@pytest.mark.processes
def test_a_failing_lesson_is_unchanged(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lesson = write(folder / "01_one.ipynb", v4.new_code_cell("raise ValueError('no such rank')", execution_count=5))
    solution = write(folder / "solutions" / "01_one.ipynb", v4.new_code_cell("1"))
    before = lesson.read_text()
    assert notebooks.main([]) == 1
    assert lesson.read_text() == before
    assert nbformat.read(solution, as_version=4).cells[0].execution_count == 1
    complaint = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().err)  # IPython colours its tracebacks
    assert "notebooks/01_one.ipynb: FAILED, left as it was" in complaint
    assert "ValueError: no such rank" in complaint


def test_only_some_lessons(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("00_start.ipynb", "02_two.ipynb", "10_ten.ipynb", "solutions/02_two.ipynb"):
        write(folder / name)
    chosen = [str(path.relative_to(folder)) for path in notebooks.lessons(["02", "10"])]
    assert chosen == ["02_two.ipynb", "10_ten.ipynb", "solutions/02_two.ipynb"]
    assert notebooks.main(["77"]) == 1
    assert capsys.readouterr().err == "No notebook begins with 77.\n"


@pytest.mark.parametrize("path", COMMITTED, ids=names)
def test_committed_notebooks_are_as_make_notebooks_leaves_them(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    stripped = copy.deepcopy(notebook)
    notebooks.strip(stripped)
    assert notebook == stripped, "run  make notebooks"
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1)), "not executed from top to bottom: run  make notebooks"
    assert path.stat().st_size < notebooks.SIZE_LIMIT_KB * 1000
