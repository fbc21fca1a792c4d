"""Ranks follow the notebook's process: its folder, import path and variables; edited modules are named."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import cells as in_cells
import pytest

import labkit as lab
from labkit.ipc.protocol import Changes, ImportedModule
from labkit.worker.process_state import Imports, ProcessState, _digest, edited


@pytest.mark.processes
def test_a_deleted_folder_is_an_error_at_once(ranks: lab.Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    pids = ranks.run(os.getpid).results
    with monkeypatch.context() as patch:
        patch.chdir(gone)
        gone.rmdir()
        with pytest.raises(lab.LabError, match="the notebook's working folder has been deleted or moved"):
            ranks.run(int)
        with lab.Group(2, runtime="bare") as other, pytest.raises(lab.LabError, match="the notebook's working folder"):
            other.run(int)
    assert ranks.run(os.getpid).results == pids, "the ranks go on"


@pytest.mark.processes
def test_folder_path_and_variables_reach_ranks_at_the_next_run(
    ranks: lab.Group, cells: in_cells.Cells, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "found_later.py").write_text("word = 'found'\n")
    cells("""
        import os, sys
        def look():
            from found_later import word
            return word, os.getcwd(), os.environ.get("LABKIT_TEST_NEW")
        def forget():
            sys.modules.pop("found_later", None)
            sys.path.append("the rank's own")
            os.environ["LABKIT_TEST_OWN"] = "own"
        def own(): return sys.path[-1], os.environ["LABKIT_TEST_OWN"]
    """)
    ranks.run(cells.forget)
    with pytest.raises(lab.RankError, match="found_later"):
        ranks.run(cells.look)
    ranks.run(cells.forget)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    monkeypatch.setenv("LABKIT_TEST_NEW", "new")
    assert ranks.run(cells.look).results == [("found", str(tmp_path), "new")] * 2
    monkeypatch.delenv("LABKIT_TEST_NEW")
    assert ranks.run(cells.look).results[0][2] is None
    assert ranks.run(cells.own).results == [("the rank's own", "own")] * 2


@pytest.mark.processes
def test_a_ranks_own_variables_stay(ranks: lab.Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tutorials set MASTER_PORT in a cell, which would send every rank to another address."""

    def look() -> list[str]:
        return [os.environ[name] for name in names]

    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    before = ranks.run(look).results
    for name in names:
        monkeypatch.setenv(name, "29500")
    assert ranks.run(look).results == before
    assert ranks.run(lambda: os.environ.get("LABKIT_RANK")).results == ["0", "1"]


@pytest.mark.processes
def test_a_folder_changed_by_a_rank_stays(ranks: lab.Group, tmp_path: Path) -> None:
    def go(folder: Path) -> None:
        os.chdir(folder)

    here = os.getcwd()
    ranks[0].run(go, tmp_path)
    assert ranks.run(os.getcwd).results == [str(tmp_path), here]
    ranks.run(go, here)


@pytest.mark.processes
def test_an_edited_module_is_named(
    ranks: lab.Group, cells: in_cells.Cells, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "edited_by_a_student.py"

    def write(text: str, at_s: float) -> None:
        file.write_text(text)
        os.utime(file, (at_s, at_s))  # two edits within one tick of the clock are one to Python's cache

    write("word = 'old'\n", 1_000_000_000)
    cells("""
        import importlib, sys
        def word(fail=False):
            import edited_by_a_student
            if fail: raise ValueError(edited_by_a_student.word)
            return edited_by_a_student.word
        def reload(): importlib.reload(sys.modules["edited_by_a_student"])
        def forget(): sys.modules.pop("edited_by_a_student", None)
    """)
    with pytest.raises(lab.RankError, match="ValueError: old"):  # a failing run imports it as well
        ranks.run(cells.word, fail=True)
    assert ranks.run(cells.word).results == ["old"] * 2
    capsys.readouterr()
    write("word = 'new word'\n", 1_000_000_100)
    at = time.strftime("%H:%M:%S", time.localtime(1_000_000_100))
    assert ranks.run(cells.word).results == ["old"] * 2
    assert capsys.readouterr().out == (
        f"labkit: edited_by_a_student.py was edited at {at}, and the ranks still have edited_by_a_student as it was when they "
        "imported it. Close the group and make a new one, or call importlib.reload(edited_by_a_student) in the function.\n"
    )
    ranks.run(cells.word)
    assert capsys.readouterr().out == "", "once for each edit"
    ranks.run(cells.reload)
    write("word = 'newest'\n", 1_000_000_200)
    assert ranks.run(cells.word).results == ["new word"] * 2
    assert "edited_by_a_student.py was edited at" in capsys.readouterr().out
    file.unlink()
    ranks.run(cells.word)
    assert capsys.readouterr().out == ""
    ranks.run(cells.forget)


def test_only_differences_are_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_TEST_GONE", "1")
    before = ProcessState.now()
    assert ProcessState.now().since(before) is None
    monkeypatch.delenv("LABKIT_TEST_GONE")
    monkeypatch.setenv("LABKIT_TEST_ADDED", "ä")
    changes = ProcessState.now().since(before)
    assert changes == Changes(None, None, before.path, {"LABKIT_TEST_GONE": None, "LABKIT_TEST_ADDED": "ä"})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["new"])
    changes = ProcessState.now().since(before)
    assert changes is not None
    assert (changes.folder, changes.path) == (str(tmp_path), ("new",))


@pytest.mark.parametrize("machine", ["", "pc2"])
def test_a_module_is_edited_if_its_content_is_another(machine: str, tmp_path: Path) -> None:
    """A copy on another machine has the same content and its own time of modification."""
    file = tmp_path / "mine.py"
    file.write_text("word = 'old'\n")
    imported = ImportedModule("mine", str(file), 1_000_000_000, _digest(str(file)), machine)
    assert edited([imported]) == []
    file.write_text("word = 'new'\n")
    (line,) = edited([imported])
    assert line.startswith("mine.py was edited at ")
    assert ("the ranks on pc2 have another version" in line) is bool(machine)
    os.utime(file, ns=(1_000_000_000, 1_000_000_000))
    assert edited([imported]) == [], "a file of the same time is not read"
    file.unlink()
    assert edited([imported]) == []


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """What `Imports` sees as `sys.modules`: the modules of a rank that has just started."""
    found = {name: ModuleType(name) for name in ("before", "last_before")}
    monkeypatch.setattr("labkit.worker.process_state.sys", SimpleNamespace(modules=found))
    return found


def _module(name: str, folder: Path) -> ModuleType:
    module = ModuleType(name)
    module.__file__ = str(folder / f"{name}.py")
    Path(module.__file__).touch()
    return module


def test_earlier_modules_are_not_kept_alive(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    modules["mine_before"] = _module("mine_before", tmp_path)
    imports = Imports()
    assert imports.new() == []
    modules["mine"] = _module("mine", tmp_path)
    assert [m.name for m in imports.new()] == ["mine"]
    assert imports.new() == []


def test_any_number_of_modules_may_come_in_one_run(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    imports = Imports()
    modules |= {f"mine{number}": _module(f"mine{number}", tmp_path) for number in range(3)}
    modules |= {f"library{number}": ModuleType(f"library{number}") for number in range(1000)}
    assert sorted(m.name for m in imports.new()) == ["mine0", "mine1", "mine2"]


def test_modules_are_found_after_earlier_ones_were_removed(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    imports = Imports()
    del modules["last_before"]
    modules |= {name: _module(name, tmp_path) for name in ("one", "two")}
    assert sorted(m.name for m in imports.new()) == ["one", "two"]
    del modules["one"]
    modules |= {name: _module(name, tmp_path) for name in ("three", "four")}
    assert sorted(m.name for m in imports.new()) == ["four", "three"]
