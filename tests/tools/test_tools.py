"""The tools behind the Makefile: lessons executed again and stripped, and JupyterLab served on the first of them."""

from __future__ import annotations

import copy
import json
import os
import posixpath
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

from labkit.notebook.lessons import Copies
from tools import lab, notebooks

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


# Executing and stripping


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


# JupyterLab


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"DISPLAY": ":0"}, True),
        ({"WAYLAND_DISPLAY": "wayland-0"}, True),
        ({}, False),
        ({"DISPLAY": ":0", "SSH_CONNECTION": "a b c d"}, False),
    ],
)
def test_whether_a_browser_can_open(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: bool) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SSH_CONNECTION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(lab.sys, "platform", "linux")
    monkeypatch.setattr(lab.webbrowser, "get", lambda: None)
    assert lab.has_browser() is expected
    assert ("--no-browser" in lab.command([])) is not expected


def test_no_browser_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def get() -> None:
        raise lab.webbrowser.Error("could not locate runnable browser")

    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr(lab.webbrowser, "get", get)
    assert not lab.has_browser()


def test_a_students_options_come_last() -> None:
    assert lab.command(["--port=9000"])[-1] == "--port=9000"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (["--ServerApp.root_dir=FOLDER"], ".root_dir = 'FOLDER'"),
        (["--ServerApp.root_dir", "FOLDER"], ".root_dir = 'FOLDER'"),
        (["--notebook-dir=FOLDER"], ".root_dir = 'FOLDER'"),
        (["--Application.log_level=ERROR"], ".log_level = 'ERROR'"),
        (["--LabApp.default_url=/tree"], ".default_url = '/tree'"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
@pytest.mark.processes
def test_jupyterlab_accepts_a_students_options_beside_ours(tmp_path: Path, given: list[str], shown: str) -> None:
    """It refuses an option that is given twice."""
    line = lab.command([argument.replace("FOLDER", str(tmp_path)) for argument in given])
    done = subprocess.run([*line, "--show-config"], check=False, capture_output=True, text=True, timeout=150)
    assert shown.replace("FOLDER", str(tmp_path)) in done.stdout, done.stdout + done.stderr


def page(arguments: list[str]) -> tuple[str, str]:
    """The root folder that JupyterLab serves, and the page that it opens; "" for its file browser."""
    line = lab.command(arguments)[3:]
    options = dict(option.partition("=")[::2] for option in line)
    assert len(options) == len(line), "JupyterLab refuses an option that is given twice"
    return options["--ServerApp.root_dir"], options.get("--LabApp.default_url", "")


def test_the_page_is_the_students_copy_of_the_first_lesson(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(lab, "FOLDER", ROOT / "my_lessons")
    assert page([]) == (str(ROOT), "/lab/tree/my_lessons/00_start_here.ipynb")
    monkeypatch.setattr(lab, "FOLDER", ROOT.parent / "mine")
    assert page([]) == (str(ROOT.parent), "/lab/tree/mine/00_start_here.ipynb")


def test_a_root_folder_of_the_students_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a" / "mine").mkdir(parents=True)
    monkeypatch.setattr(lab, "FOLDER", tmp_path / "a" / "mine")
    assert page([f"--ServerApp.root_dir={tmp_path}"]) == (str(tmp_path), "/lab/tree/a/mine/00_start_here.ipynb")
    assert page([f"--ServerApp.root_dir={tmp_path / 'elsewhere'}"]) == (str(tmp_path / "elsewhere"), "")


def test_new_and_outdated_copies_are_announced(capsys: pytest.CaptureFixture[str]) -> None:
    lab.announce(Copies())
    assert capsys.readouterr().out == ""
    lab.announce(Copies(new=("00_start_here.ipynb",), outdated=("02_data_parallel.ipynb", "02b_costs.ipynb")))
    copied, outdated, second = capsys.readouterr().out.splitlines()
    assert copied.startswith(f"Your copies of the lessons are in {lab.FOLDER}.")
    assert outdated.startswith("02_data_parallel.ipynb has a newer version")
    assert 'lab.reset_lesson("02")' in outdated
    assert 'lab.reset_lesson("02b")' in second


@pytest.fixture
def server(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """JupyterLab as `make lab` starts it on a machine without a display."""
    headless = {k: v for k, v in os.environ.items() if k not in ("DISPLAY", "WAYLAND_DISPLAY")}
    headless["JUPYTER_RUNTIME_DIR"] = str(tmp_path)
    headless["LABKIT_MY_LESSONS"] = str(tmp_path / "my_lessons")
    command = [sys.executable, str(ROOT / "tools" / "lab.py"), "--port=0"]
    with subprocess.Popen(
        command, env=headless, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as p:
        yield p
        p.terminate()


def fetch(address: str) -> str:
    """The answer of a server, which may not listen yet."""
    until = time.monotonic() + 150
    while True:
        try:
            with urllib.request.urlopen(address, timeout=30) as answer:
                text: str = answer.read().decode()
                return text
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ConnectionRefusedError) or time.monotonic() > until:
                raise
            time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.processes
def test_make_lab_serves_the_first_lesson_and_its_pictures(server: subprocess.Popen[str]) -> None:
    assert server.stdout is not None
    addresses = (re.search(r"(http://127\.0\.0\.1:\d+)/lab/tree/(\S+)\?token=(\w+)", line) for line in server.stdout)
    found = next(filter(None, addresses))  # printed a moment before the server listens
    host, page, token = found.groups()
    folder, _, name = page.rpartition("/")
    assert name == lab.LESSON
    assert "<title>JupyterLab</title>" in fetch(f"{host}/lab/tree/{page}?token={token}")
    notebook = json.loads(fetch(f"{host}/api/contents/{page}?token={token}"))
    texts = [cell["source"] for cell in notebook["content"]["cells"] if cell["cell_type"] == "markdown"]
    pictures = [target for text in texts for target in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)]
    assert pictures
    for picture in pictures:
        assert "<svg" in fetch(f"{host}/files/{posixpath.normpath(posixpath.join(folder, picture))}?token={token}")
    settings = fetch(f"{host}/lab/api/settings/@jupyterlab/apputils-extension:notification?token={token}")
    assert json.loads(settings)["schema"]["properties"]["fetchNews"]["default"] == "false"
