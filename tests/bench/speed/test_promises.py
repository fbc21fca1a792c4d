"""Goals are judged as they are worded."""

from bench.page import table
from bench.speed.promises import PROMISES, Promise


def test_a_multiple_of_what_is_beside_it() -> None:
    promise = Promise("a call", "a", "b", "bare pipes", 2)
    assert promise.cells({"a": 250e-6, "b": 100e-6}) == [
        "a call",
        "250 µs",
        "100 µs (bare pipes)",
        "2.50×",
        "at most 2×",
        "**no**",
    ]
    assert promise.cells({"a": 200e-6, "b": 100e-6})[-1] == "yes"


def test_a_limit_in_seconds() -> None:
    promise = Promise("Stop", "a", at_most=0.5, unit="seconds")
    assert promise.cells({"a": 0.04}) == ["Stop", "40.0 ms", "", "", "at most 500 ms", "yes"]
    assert promise.cells({"a": 0.6})[-1] == "**no**"


def test_a_fraction_above_it() -> None:
    cells = Promise("watch", "a", "b", "run", 0.02, "more").cells({"a": 1.05, "b": 1.0})
    assert cells[3:] == ["+5.0%", "at most 2% more", "**no**"]


def test_a_size() -> None:
    cells = Promise("memory", "x: memory", "b", "torch", 1.5).cells({"x: memory": 3 << 20, "b": 2 << 20})
    assert cells[1:] == ["3 MiB", "2 MiB (torch)", "1.50×", "at most 1.5×", "yes"]


def test_a_missing_measurement_is_not_a_success() -> None:
    assert Promise("memory", "a", "b", "torch", 1.5).cells({"a": 1.0})[-1] == "not measured"


def test_a_number_without_a_goal() -> None:
    assert Promise("drawn ({lost:.0%} lost)", "a").cells({"a": 1.0, "picture: lost": 0.02}) == [
        "drawn (2% lost)",
        "1.00 s",
        *[""] * 4,
    ]


def test_every_promise_makes_a_row() -> None:
    measured = {key: 1.0 for promise in PROMISES for key in (promise.key, promise.beside) if key}
    assert len(table([""] * 6, [promise.cells(measured) for promise in PROMISES]).splitlines()) == len(PROMISES) + 2
