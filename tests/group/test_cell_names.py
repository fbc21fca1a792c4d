"""Names that `%%ranks` cells leave in the ranks: how long they last, and the notice when they are gone."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import cells as in_cells
import pytest

import labkit as lab
from labkit.group.pool_state import MOST_NAMES, lost_names
from labkit.ipc.ranks_cell import cell_filename

pytestmark = pytest.mark.processes


class Notebook:
    """Runs cells of one group, numbered."""

    def __init__(self, group: lab.Group) -> None:
        self.group, self.number = group, 0

    def cell(self, source: str, on: list[int] | None = None) -> str:
        self.number += 1
        return self.group.run_cell(source, cell_filename(self.number), f"cell {self.number}", on).output


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Notebook]]:
    in_cells.new_main(monkeypatch)
    made: list[Notebook] = []

    def start(ranks: int = 2, **options: Any) -> Notebook:
        made.append(Notebook(lab.Group(ranks, **options)))
        return made[-1]

    yield start
    for notebook in made:
        notebook.group.close()


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("labkit: the ranks have ended")]


LOST = "labkit: the ranks have ended, so these names of %%ranks cells are lost: "


@pytest.mark.parametrize("how", ["one dies", "one fails after it has talked", "of a run"])
def test_names_lost_with_the_ranks_are_reported(
    how: str, make: Callable[..., Notebook], capsys: pytest.CaptureFixture[str]
) -> None:
    notebook = make(runtime="bare" if how == "one dies" else "torch")
    if how != "one dies":
        pytest.importorskip("torch")
    notebook.cell("import os\nx = 1")
    notebook.cell("def f(): return x\nx = 2")
    fail = {
        "one dies": lambda: notebook.cell("y = 1; os._exit(1)", [1]),
        "one fails after it has talked": lambda: notebook.cell(
            "import torch, torch.distributed as d\nd.all_reduce(torch.ones(1))\nif d.get_rank(): 1 / 0"
        ),
        "of a run": lambda: notebook.group[1].run(_die),
    }[how]
    with pytest.raises(lab.RankError) as caught:
        fail()
    assert caught.value.stopped
    assert said(capsys) == [f"{LOST}os (cell 1); x, f (cell 2). Run cell 1 and cell 2 again."]
    with pytest.raises(lab.RankError, match="NameError: name 'x' is not defined"):
        notebook.cell("x")
    notebook.cell("z = 1")
    notebook.group.close()
    assert said(capsys) == [], "whoever closes a group knows"


def _die() -> None:
    import os

    os._exit(1)


@pytest.mark.usefixtures("patient")
def test_the_same_mistake_on_all_ranks_keeps_the_ranks(make: Callable[..., Notebook], capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    notebook = make(runtime="torch")
    notebook.cell("import torch, torch.distributed as dist\none = torch.ones(1)\ndist.all_reduce(one)")
    with pytest.raises(lab.RankError) as caught:
        notebook.cell("dist.all_reduce(one)\nlast = one.item()\nundefined")
    assert not caught.value.stopped
    assert notebook.cell("dist.all_reduce(one)\nlast, one.item()") == "[rank 0] (4.0, 8.0)\n[rank 1] (4.0, 8.0)"
    assert said(capsys) == []
    for mistake in (
        "if dist.get_rank() == 0: kept = dist.isend(one, 1)\nundefined",  # a message that nobody received
        "import json; json.loads('no')",  # raised by a library, which may have done half of something
        "dist.all_reduce(one)\nraise ValueError(dist.get_rank())",  # different errors
    ):
        notebook.cell("import torch, torch.distributed as dist\none = torch.ones(1)\ndist.all_reduce(one)")
        with pytest.raises(lab.RankError) as caught:
            notebook.cell(f"dist.all_reduce(one)\n{mistake}")
        assert caught.value.stopped
        assert len(said(capsys)) == 1


@pytest.mark.tf
def test_runs_are_fresh_and_cells_share_processes(make: Callable[..., Notebook], capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorflow")
    notebook = make(runtime="tensorflow")
    group = notebook.group
    notebook.cell("import os, tensorflow as tf\nx = tf.ones(2)")
    with pytest.raises(lab.RankError, match="The ranks are still running"):
        notebook.cell("y = x + 1\nundefined")
    assert notebook.cell("float(sum(y))") == "[rank 0] 4.0\n[rank 1] 4.0"
    pids = notebook.cell("os.getpid()")
    assert said(capsys) == []
    first = group.run(_strategy).results  # in processes where TensorFlow has computed it would fail
    assert said(capsys) == [f"{LOST}os, tf, x (cell 1); y (cell 2). Run cell 1 and cell 2 again."]
    assert not set(map(str, first)) & set(pids.split())
    notebook.cell("import os, tensorflow as tf\ns = tf.distribute.MultiWorkerMirroredStrategy()")
    assert not set(map(str, first)) & set(notebook.cell("os.getpid()").split()), "a run's processes are its own"
    assert notebook.cell("s.num_replicas_in_sync") == "[rank 0] 2\n[rank 1] 2"


def _strategy() -> int:
    import os

    import tensorflow as tf

    tf.distribute.MultiWorkerMirroredStrategy()
    return os.getpid()


def test_many_names_are_bounded() -> None:
    member: Any = types.SimpleNamespace(made={f"x{i}": f"cell {i // 6}" for i in range(20)})
    text = lost_names([member, member])
    shown = "x0, x1, x2, x3, x4, x5 (cell 0); x6, x7 (cell 1)"
    assert f"lost: {shown}; and {20 - MOST_NAMES} more. Run cell 0, cell 1, cell 2 and cell 3 again." in text
    assert lost_names([]) == ""


@pytest.mark.tf
def test_an_error_of_tensorflows_own_names_what_is_lost(
    make: Callable[..., Notebook], capsys: pytest.CaptureFixture[str]
) -> None:
    """The notebook cannot know whether an operation failed, after which the process has no collectives."""
    pytest.importorskip("tensorflow")
    notebook = make(1, runtime="tensorflow")
    notebook.cell("import tensorflow as tf\nx = tf.ones(2)")
    with pytest.raises(lab.RankError) as caught:
        notebook.cell("x @ x")
    assert caught.value.stopped
    with pytest.raises(lab.RankError):
        notebook.cell("x")
    assert "lost: tf, x (cell 1)" in " ".join(said(capsys))
