"""The wheel has all that a student needs: in an environment without a checkout, lessons, groups and pictures work."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import labkit

ROOT = Path(__file__).resolve().parent.parent
HOSTED = ("ipykernel", "ipywidgets", "nbclient", "torch")  # what a hosted kernel has before labkit is installed
INSTALL_S = 900  # where torch is not in pip's cache, it is downloaded
pytestmark = [
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.timeout(2 * INSTALL_S),
    pytest.mark.skipif(shutil.which("git") is None or not (ROOT / ".git").exists(), reason="needs git and a clone"),
]

STUDENT = """
import json
from pathlib import Path

import torch
import torch.distributed as dist

import labkit as lab


def total():
    own = torch.full((1000,), float(dist.get_rank() + 1))
    dist.all_reduce(own)
    return own[0].item()


if __name__ == "__main__":
    print(lab.lessons("my_lessons"))
    with lab.Group(2) as group:
        run = group.run(total)
    lab.timeline(run).figure.savefig("timeline.png")
    print(json.dumps([lab.__file__, lab.__version__, run.results]))
"""
JUDGED = """
import labkit as lab

if __name__ == "__main__":
    answers = (lambda base, batch, own, ranks: base * own * ranks / batch), (lambda base, batch, own, ranks: base)
    print(*(bool(lab.check("scaled_learning_rate", answer)) for answer in answers))
"""
CELLS = """
import nbformat
from nbclient import NotebookClient

lesson = nbformat.read("my_lessons/02_data_parallel.ipynb", as_version=4)
last = next(i for i, cell in enumerate(lesson.cells) if cell.cell_type == "code" and "lab.Group(" in cell.source)
lesson.cells = lesson.cells[: last + 3]
NotebookClient(lesson, timeout=240, kernel_name="python3", resources={"metadata": {"path": "my_lessons"}}).execute()
print(sum(cell.cell_type == "code" for cell in lesson.cells), "cells")
"""


def tracked(folder: str) -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z", folder], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy that has only the files of the repository, as `make wheel` builds it."""
    tree = tmp_path_factory.mktemp("tree")
    for name in tracked("."):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)
    pip(sys.executable, "wheel", "--no-deps", "--wheel-dir", "dist", ".", folder=tree)
    (built,) = (tree / "dist").iterdir()
    return built


def pip(python: str, *arguments: str, folder: Path) -> str:
    line = [python, "-m", "pip", "--quiet", *arguments]
    done = subprocess.run(line, cwd=folder, env=clean(), capture_output=True, text=True, check=False, timeout=INSTALL_S)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def clean() -> dict[str, str]:
    """The environment of a student: no checkout is in the path."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH" and not name.startswith("LABKIT_")}


def test_it_has_all_files_of_the_package_and_of_the_lessons_and_no_others(wheel: Path) -> None:
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    lessons = [re.sub("^notebooks/", "labkit/course/", name) for name in tracked("notebooks")]
    assert sorted(names) == sorted([*tracked("labkit"), *lessons])
    assert wheel.name == f"labkit-{labkit.__version__}-py3-none-any.whl"
    assert wheel.stat().st_size < 8e6


def test_a_student_without_a_checkout(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "environment", with_pip=True)
    python = str(next((tmp_path / "environment").glob("*/python")))
    folder = tmp_path / "student"
    folder.mkdir()

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [python, *arguments], cwd=folder, env=clean(), capture_output=True, text=True, check=False, timeout=400
        )

    pip(python, "install", "-c", str(ROOT / "constraints.txt"), *HOSTED, folder=folder)
    before = set(pip(python, "freeze", folder=folder).splitlines())
    pip(python, "install", "-c", str(ROOT / "constraints.txt"), f"{wheel}[hosted]", folder=folder)
    assert before - set(pip(python, "freeze", folder=folder).splitlines()) == set(), "the extra 'hosted' has replaced these"

    (folder / "student.py").write_text(STUDENT)
    done = run("student.py")
    assert done.returncode == 0, done.stderr
    file, version, results = json.loads(done.stdout.splitlines()[-1])
    assert Path(file).is_relative_to(tmp_path / "environment")
    assert (version, results) == (labkit.__version__, [3.0, 3.0])
    assert (folder / "timeline.png").read_bytes().startswith(b"\x89PNG")
    copied = {str(path.relative_to(folder / "my_lessons")) for path in (folder / "my_lessons").rglob("*") if path.is_file()}
    kept = ("notebooks/judges/", "notebooks/faults/")  # read where they are installed
    assert copied == {name.removeprefix("notebooks/") for name in tracked("notebooks") if not name.startswith(kept)}
    done = run("-c", JUDGED)
    assert (done.returncode, done.stdout) == (0, "True False\n"), done.stderr

    done = run("-c", CELLS)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"\d+ cells\n", done.stdout)

    done = run("-m", "labkit", "lab")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("JupyterLab is not installed; this command installs it: pip install")
    pip(python, "install", "-c", str(ROOT / "constraints.txt"), f"{wheel}[course]", folder=folder)
    done = run("-m", "labkit", "lab", "--version")
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", done.stdout), done.stderr
