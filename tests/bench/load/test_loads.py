"""Heavy loads at a small size, by the code that `python -m bench.load` runs at full size."""

from __future__ import annotations

import itertools
import os
import sys

import pytest

import labkit as lab
from bench.load import loads
from bench.load.footprint import too_much

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.usefixtures("nothing_imports"),
]
MANY = 4  # as in test_footprint


@pytest.mark.parametrize("runtime", ["torch", "bare"])
def test_many_runs_on_one_group_leave_nothing(runtime: str) -> None:
    if runtime == "torch":
        pytest.importorskip("torch")
    assert too_much(loads.many_runs(60, warm=20, runtime=runtime), MANY) == []


def test_many_groups_leave_nothing() -> None:
    pytest.importorskip("torch")
    assert too_much(loads.many_groups(12, warm=6), MANY) == []


def test_sixteen_ranks() -> None:
    pytest.importorskip("torch")
    assert loads.many_ranks(16) == [120.0] * 16


def test_large_arguments_and_results_are_released() -> None:
    right, _, left = loads.move(64 << 20)
    assert right
    assert left < 16 << 20


def test_very_long_output_is_cut_and_does_not_block_the_rank() -> None:
    _, kept, said, most = loads.flood(10_000_000)
    assert said == "[rank 0] ... 98,000 lines left out ..."
    assert kept < 500_000
    assert most < 32 << 20


def print_for_ever() -> None:
    for block in itertools.repeat(b"x" * 99 + b"\n"):
        os.write(1, block * 650)


def test_the_notebook_can_end_a_rank_that_prints_for_ever(capsys: pytest.CaptureFixture[str]) -> None:
    with (
        lab.Group(2, runtime="bare", timeout_s=0.5) as group,
        pytest.raises(lab.LabError, match="longer than the group's timeout_s"),
    ):
        group.run(print_for_ever)
    capsys.readouterr()


def test_very_many_spans_are_read_counted_and_drawn() -> None:
    pytest.importorskip("matplotlib")
    seen, dropped, _ = loads.many_spans(200_000)
    assert seen + dropped == 200_000
    assert seen > 0


def test_notebooks_that_start_at_once_see_only_their_own_ranks() -> None:
    pytest.importorskip("torch")
    seen = loads.many_notebooks(6)
    assert [n["numbers"] for n in seen] == [[[i, i]] * 2 for i in range(6)]
    assert len({n["place"] for n in seen}) == 6
    assert len({pid for n in seen for pid in n["pids"]}) == 12


def test_a_notebook_that_does_not_start_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "NOTEBOOK", "raise SystemExit(1)")
    with pytest.raises(AssertionError, match="a notebook's process has ended with exit code 1"):
        loads.many_notebooks(1)
