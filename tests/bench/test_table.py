"""The benchmarks' table: numbers in suitable units, and goals judged as they are worded. Nothing is measured here."""

from bench.table import Goal, duration, table


def test_durations_have_a_suitable_unit() -> None:
    shown = [duration(s) for s in (142.3, 8.31, 0.0512, 0.000131, 3.4e-7, None)]
    assert shown == ["142 s", "8.31 s", "51.2 ms", "131 µs", "340 ns", "–"]


def test_a_multiple_of_the_floor() -> None:
    goal = Goal("a call", 0.000250, 0.000100, "bare pipes", 2)
    assert goal.cells() == ["a call", "250 µs", "100 µs (bare pipes)", "2.50×", "at most 2×", "**no**"]
    assert Goal("a call", 0.0002, 0.0001, "", 2).cells()[-1] == "yes"


def test_a_limit_in_seconds() -> None:
    assert Goal("Stop", 0.04, None, "", 0.5, "seconds").cells() == ["Stop", "40.0 ms", "", "", "500 ms", "yes"]


def test_a_fraction_above_the_floor() -> None:
    cells = Goal("watch", 1.05, 1.0, "run", 0.03, "slower").cells()
    assert cells[3:] == ["+5.0%", "at most 3% slower", "**no**"]


def test_a_size() -> None:
    cells = Goal("memory", 3 << 20, 2 << 20, "torch", 1.5, is_size=True).cells()
    assert cells[1:] == ["3 MiB", "2 MiB (torch)", "1.50×", "at most 1.5×", "yes"]


def test_a_missing_measurement_is_not_a_success() -> None:
    assert Goal("memory", None, 1.0, "torch", 1.5).cells()[-1] == "not measured"


def test_a_table_is_markdown() -> None:
    assert table(["a", "bc"], [["one", "2"]]).splitlines() == ["| a   | bc |", "|-----|----|", "| one | 2  |"]
