"""The benchmarks' table: numbers in units that suit them, and goals judged as they are worded. Nothing is measured here."""

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def bench_table(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    module = importlib.import_module("table")
    monkeypatch.delitem(sys.modules, "table")
    return module


def test_durations_are_shown_in_the_unit_that_suits_them(bench_table: Any) -> None:
    shown = [bench_table.duration(s) for s in (142.3, 8.31, 0.0512, 0.000131, 3.4e-7, None)]
    assert shown == ["142 s", "8.31 s", "51.2 ms", "131 µs", "340 ns", "–"]


def test_a_multiple_of_the_floor(bench_table: Any) -> None:
    goal = bench_table.Goal("a call", 0.000250, 0.000100, "bare pipes", 2)
    assert goal.cells() == ["a call", "250 µs", "100 µs (bare pipes)", "2.50×", "at most 2×", "**no**"]
    assert bench_table.Goal("a call", 0.0002, 0.0001, "", 2).cells()[-1] == "yes"


def test_a_limit_in_seconds(bench_table: Any) -> None:
    assert bench_table.Goal("Stop", 0.04, None, "", 0.5, "seconds").cells() == ["Stop", "40.0 ms", "", "", "500 ms", "yes"]


def test_a_fraction_above_the_floor(bench_table: Any) -> None:
    cells = bench_table.Goal("watch", 1.05, 1.0, "run", 0.03, "slower").cells()
    assert cells[3:] == ["+5.0%", "at most 3% slower", "**no**"]


def test_a_size(bench_table: Any) -> None:
    cells = bench_table.Goal("memory", 3 << 20, 2 << 20, "torch", 1.5, is_size=True).cells()
    assert cells[1:] == ["3 MiB", "2 MiB (torch)", "1.50×", "at most 1.5×", "yes"]


def test_what_could_not_be_measured_is_no_success(bench_table: Any) -> None:
    assert bench_table.Goal("memory", None, 1.0, "torch", 1.5).cells()[-1] == "not measured"


def test_a_table_is_markdown(bench_table: Any) -> None:
    assert bench_table.table(["a", "bc"], [["one", "2"]]).splitlines() == ["| a   | bc |", "|-----|----|", "| one | 2  |"]


def test_the_command_explains_itself() -> None:
    shown = subprocess.run(
        [sys.executable, str(BENCH / "run.py"), "--help"], capture_output=True, text=True, timeout=200, check=True
    )
    assert "--write FILE" in shown.stdout


def test_a_prediction_is_compared_with_the_median_from_the_last_begin_to_the_last_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    predictions = importlib.import_module("predictions")
    for name in ("predictions", "sharded", "repeat", "table", "machine"):
        monkeypatch.delitem(sys.modules, name)
    first, second = [(0, 90), (100, 190), (200, 990)], [(10, 60), (110, 160), (210, 260)]
    assert predictions.seconds([first, second]) == 80e-9
