"""Lessons run unchanged on two machines: the groups of a kernel have `on`, the cells do not know."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

pytest.importorskip("torch")
pytestmark = [pytest.mark.processes, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[3]
# Emulated links are for one machine; all other groups of the lessons are on two.
STARTUP = """
from labkit.group.group import Group
from labkit.launch.machines.command import SSH

def init(self, *args, own=Group.__init__, **options):
    if options.get("link") is None and options.get("on") is None:
        options["on"] = SSH("pc1", "pc2", python={python!r})
    own(self, *args, **options)

Group.__init__ = init
"""
MACHINES = """
lesson_groups = [g for g in globals().values() if isinstance(g, Group) and g.on and g.last_run]
print(sorted({label.rpartition(" · ")[2] for g in lesson_groups for label in g.last_run.trace.ranks}))
"""


# This system has no network namespaces.
WITHOUT = """
import labkit.launch.machines.emulated

labkit.launch.machines.emulated.READY = "never said"
"""


def executed(name: str, startup: str, last: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run a lesson in a kernel that begins with some code, and then another cell; return what that cell prints."""
    profile = folder / "profile_default" / "startup"
    profile.mkdir(parents=True)
    (profile / "machines.py").write_text(startup)
    monkeypatch.setenv("IPYTHONDIR", str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(last))
    client = NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(ROOT / "notebooks")}}
    )
    client.execute()  # raises an error if a cell fails that need not
    return [o.text for o in notebook.cells[-1].outputs]


# Lesson 02 takes two and a half minutes on two quiet cores: each rank that is started imports torch anew.
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["00_start_here", "02_data_parallel", "08_rpc_hybrid"])
def test_a_lesson(name: str, ssh_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert executed(name, STARTUP.format(python=ssh_python), MACHINES, tmp_path, monkeypatch) == ["['pc1', 'pc2']\n"]


def test_the_lesson_on_machines_without_namespaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its group is on this machine, and an all-reduce takes no less than over the network of two nodes."""
    last = "print(group.on, group.link.nodes, sorted(transfers_ms(flat))[5] > 900 * lab.predict.all_reduce(nbytes, 4, network))"
    assert executed("09b_several_machines", WITHOUT, last, tmp_path, monkeypatch) == ["None 2 True\n"]
