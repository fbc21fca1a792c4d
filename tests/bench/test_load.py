"""Heavy loads at a small size, by the code that `bench/load.py` runs at full size; and that it sees what it looks for."""

from __future__ import annotations

import importlib
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import labkit as lab
from labkit.group.open_groups import notebook

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
BENCH = Path(__file__).resolve().parents[2] / "bench"
# A short look is less exact: an allocator's pool that grows once counts for more. What leaks one page each time is still seen.
MANY = 4


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Gives a module of the benchmarks; nothing below this process is still importing, and growing, by itself."""
    for key, starter in list(notebook.starters.items()):
        if starter.importing:
            notebook.starters.pop(key).close()
    monkeypatch.syspath_prepend(str(BENCH))
    before = set(sys.modules)
    yield importlib.import_module
    for name in {"footprint", "heavy", "load", "machine", "table"} - before:
        sys.modules.pop(name, None)


# The judge


def test_what_does_not_grow_is_flat(bench: Any) -> None:
    footprint = bench("footprint")
    assert footprint.too_much(footprint.watch_growth(lambda: None, 20, warm=2), MANY) == []


@pytest.fixture
def spares() -> None:
    """As a test before this one may have left them."""
    pytest.importorskip("torch")
    notebook.starter("torch", "spawn").warm(2)


def test_what_imports_by_itself_is_no_growth(spares: None, bench: Any) -> None:
    footprint = bench("footprint")
    assert footprint.too_much(footprint.watch_growth(lambda: None, 20, warm=2), MANY) == []


def test_a_descriptor_left_each_time_is_seen(bench: Any) -> None:
    footprint = bench("footprint")
    left: list[int] = []
    try:
        grown = footprint.watch_growth(lambda: left.append(os.open(os.devnull, os.O_RDONLY)), 20, warm=2)
        assert grown.descriptors == 1
        assert footprint.too_much(grown) == ["descriptors"]
    finally:
        for fd in left:
            os.close(fd)


def test_a_segment_left_each_time_is_seen(bench: Any) -> None:
    footprint = bench("footprint")
    left: list[int] = []
    try:
        grown = footprint.watch_growth(lambda: left.append(os.memfd_create("left")), 20, warm=2)
        assert footprint.too_much(grown) == ["descriptors", "segments"]
    finally:
        for fd in left:
            os.close(fd)


def test_memory_left_each_time_is_seen(bench: Any) -> None:
    footprint = bench("footprint")
    left: list[bytes] = []  # of random bytes: zeros take memory only when they are written to
    grown = footprint.watch_growth(lambda: left.append(os.urandom(8 << 20)), 20, warm=2)
    assert footprint.too_much(grown, MANY) == ["resident"]


def test_a_process_left_each_time_is_seen(bench: Any) -> None:
    footprint = bench("footprint")
    left: list[subprocess.Popen[bytes]] = []
    try:
        grown = footprint.watch_growth(lambda: left.append(subprocess.Popen(["sleep", "600"])), 6, warm=1)
        assert "processes" in footprint.too_much(grown)
        assert "below" in footprint.too_much(grown)
    finally:
        for process in left:
            process.kill()
            process.wait()


def test_one_jump_is_no_growth(bench: Any) -> None:
    footprint = bench("footprint")
    seen = [footprint.Footprint(10 + 5 * (i > 1), 10 + 5 * (i == 7), 0, 0, 0) for i in range(10)]
    grown = footprint.growth(list(range(10)), seen)
    assert (grown.descriptors, grown.segments) == (0, 0)


# The loads


@pytest.mark.parametrize("runtime", ["torch", "bare"])
def test_many_runs_on_one_group_leave_nothing(bench: Any, runtime: str) -> None:
    if runtime == "torch":
        pytest.importorskip("torch")
    assert bench("footprint").too_much(bench("heavy").many_runs(60, warm=20, runtime=runtime), MANY) == []


def test_many_groups_leave_nothing(bench: Any) -> None:
    pytest.importorskip("torch")
    assert bench("footprint").too_much(bench("heavy").many_groups(12, warm=6), MANY) == []


def test_sixteen_ranks(bench: Any) -> None:
    pytest.importorskip("torch")
    assert bench("heavy").many_ranks(16) == [120.0] * 16


def test_large_arguments_and_results_are_let_go(bench: Any) -> None:
    moved = bench("heavy").move(64 << 20)
    assert moved.right
    assert moved.left < 16 << 20


def test_a_rank_that_prints_very_much_is_cut_and_not_blocked(bench: Any) -> None:
    flooded = bench("heavy").flood(10_000_000)
    assert flooded.said == "[rank 0] ... 98,000 lines left out ..."
    assert flooded.kept < 500_000
    assert flooded.most < 32 << 20


def print_for_ever() -> None:
    for block in itertools.repeat(b"x" * 99 + b"\n"):
        os.write(1, block * 650)


def test_a_rank_that_prints_for_ever_does_not_keep_the_notebook_from_ending_it(capsys: pytest.CaptureFixture[str]) -> None:
    with (
        lab.Group(2, runtime="bare", timeout_s=0.5) as group,
        pytest.raises(lab.LabError, match="longer than the group's timeout_s"),
    ):
        group.run(print_for_ever)
    capsys.readouterr()


def test_very_many_spans_are_read_counted_and_drawn(bench: Any) -> None:
    pytest.importorskip("matplotlib")
    spans = bench("heavy").many_spans(200_000)
    assert spans.seen + spans.dropped == 200_000
    assert spans.seen > 0


@pytest.mark.slow
def test_notebooks_that_start_at_once_see_their_own_ranks_alone(bench: Any) -> None:
    pytest.importorskip("torch")
    seen = bench("heavy").many_notebooks(6)
    assert [n.numbers for n in seen] == [[[i, i]] * 2 for i in range(6)]
    assert len({n.place for n in seen}) == 6
    assert len({pid for n in seen for pid in n.pids}) == 12


def test_a_notebook_that_does_not_come_up_is_told_of(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    heavy = bench("heavy")
    monkeypatch.setattr(heavy, "HERE", Path("nowhere"))
    with pytest.raises(AssertionError, match="a notebook's process has ended with exit code 1"):
        heavy.many_notebooks(1)


def test_the_command_explains_itself() -> None:
    shown = subprocess.run(
        [sys.executable, str(BENCH / "load.py"), "--help"], capture_output=True, text=True, timeout=200, check=True
    )
    assert "--only {runs,groups,ranks,move,flood,spans,notebooks}" in shown.stdout
