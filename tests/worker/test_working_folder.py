"""The working folder of ranks on a machine that does not have the notebook's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made_up_machines import started_on
from python_programs import environment

import labkit as lab
from labkit.ipc.options import Place
from labkit.worker.process_state import PREFIX, WorkingFolder, remove_leftovers

NOWHERE = "/nowhere/course"
THERE = Place("pc2")


@pytest.fixture(autouse=True)
def unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests change the working folder, and have a folder for temporary ones."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_the_notebooks_folder_is_entered_if_it_is_there(tmp_path: Path) -> None:
    (tmp_path / "course").mkdir()
    folder = WorkingFolder(THERE)
    assert folder.enter(str(tmp_path / "course")) == []
    assert os.getcwd() == str(tmp_path / "course")


def test_on_the_notebooks_machine_a_missing_folder_is_an_error() -> None:
    with pytest.raises(FileNotFoundError):
        WorkingFolder(Place()).enter(NOWHERE)


def test_a_missing_folder_is_replaced_until_the_rank_ends(tmp_path: Path) -> None:
    folder = WorkingFolder(THERE)
    (note,) = folder.enter(NOWHERE)
    instead = "each rank there works in a temporary folder of its own; files of the notebook are not there."
    assert note == f"pc2 has no folder {NOWHERE}: {instead}"
    own = Path.cwd()
    assert own.name.startswith(PREFIX)
    Path("file").touch()
    folder.enter("/nowhere/else")
    assert Path.cwd() == own
    assert Path("file").exists(), "it stays the same"
    remove_leftovers()
    assert Path("file").exists(), "it is locked"


@pytest.mark.processes
def test_folders_of_killed_ranks_are_removed_by_the_next(tmp_path: Path) -> None:
    program = (
        "import os, tempfile; from labkit.ipc.options import Place; from labkit.worker.process_state import WorkingFolder; "
        f"tempfile.tempdir = {str(tmp_path)!r}; WorkingFolder(Place('pc2')).enter({NOWHERE!r}); print(os.getcwd(), flush=True); "
        "open('file', 'w').close(); input()"
    )
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", program], env=environment(), **pipes) as other:
        assert other.stdout is not None
        left = Path(other.stdout.readline().strip())
        first = WorkingFolder(THERE)
        first.enter(NOWHERE)
        assert left.exists(), "a living process works in it"
        other.send_signal(signal.SIGKILL)
        other.wait(200)
        second = WorkingFolder(THERE)
        second.enter(NOWHERE)
        assert not left.exists()
    assert len(list(tmp_path.iterdir())) == 2


# Groups


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[lab.Group]:
    """Ranks on pc1, which does not have the notebook's folder."""
    monkeypatch.setattr("labkit.worker.process_state._folder", lambda: NOWHERE)
    with started_on("pc1", "pc1"), lab.Group(2, runtime="bare", timeout_s=200) as group:
        yield group


@pytest.mark.processes
def test_ranks_say_once_that_they_lack_the_notebooks_folder(
    elsewhere: lab.Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = elsewhere.run(os.getcwd).results
    assert len(set(own)) == 2
    assert all(Path(folder).name.startswith(PREFIX) for folder in own)
    elsewhere.run(os.getcwd)
    assert capsys.readouterr().out.count(f"pc1 has no folder {NOWHERE}") == 1

    monkeypatch.setattr("labkit.worker.process_state._folder", lambda: str(tmp_path))
    assert elsewhere.run(os.getcwd).results == [str(tmp_path)] * 2
    assert capsys.readouterr().out == ""

    monkeypatch.setattr("labkit.worker.process_state._folder", lambda: "/nowhere/else")
    assert elsewhere.run(os.getcwd).results == own
    assert capsys.readouterr().out.count("pc1 has no folder /nowhere/else") == 1

    elsewhere.close()
    monkeypatch.setattr(tempfile, "tempdir", str(Path(own[0]).parent))
    remove_leftovers()  # as a machine's agent does
    assert not any(Path(folder).exists() for folder in own)


@pytest.mark.processes
def test_a_program_that_misses_its_files_fails_after_the_remark(elsewhere: lab.Group, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(lab.RankError, match=r"data\.csv"):
        elsewhere.run(open, "data.csv")
    assert capsys.readouterr().out.count(f"pc1 has no folder {NOWHERE}") == 1


@pytest.mark.processes
def test_variables_of_a_machine_stay_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def look() -> list[Any]:
        return [os.environ.get(name) for name in ("PATH", "LABKIT_TEST_FIRST", "LABKIT_TEST_LATER")]

    with started_on("pc1"), lab.Group(1, runtime="bare", timeout_s=200) as group:
        ((before, *_),) = group.run(look).results
        with monkeypatch.context() as changed:
            changed.setenv("PATH", "/nowhere")
            changed.setenv("LABKIT_TEST_FIRST", "1")
            assert group.run(look).results == [[before, "1", None]]
            changed.setenv("PATH", "/nowhere/else")
            changed.setenv("LABKIT_TEST_LATER", "1")
            assert group.run(look).results == [[before, "1", "1"]]
        assert group.run(look).results == [[before, None, None]]


@pytest.mark.processes
def test_a_machine_keeps_its_own_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its libraries may be in other folders than the notebook's."""

    def path() -> list[str]:
        return sys.path

    own = list(sys.path)
    with started_on("pc1"), lab.Group(1, runtime="bare", timeout_s=200) as group:
        group.run(int)  # the server has started, with this process's path
    monkeypatch.setattr(sys, "path", ["/notebooks/folder", *(entry for entry in own if "site-packages" not in entry)])
    with started_on("pc1"), lab.Group(1, runtime="bare", timeout_s=200) as group:
        (found,) = group.run(path).results
    assert found[0] == "/notebooks/folder"
    assert set(own) <= set(found)
