"""Goals are judged as they are worded."""

import pytest

from bench.page import table
from bench.speed.promises import PROMISES, Promise

CALL = Promise("a call", "a", "b", "bare pipes", 2)
STOP = Promise("Stop", "a", at_most=0.5, unit="seconds")
WATCH = Promise("watch", "a", "b", "run", 0.02, "more")
MEMORY = Promise("memory", "x: memory", "b", "torch", 1.5)
LOST = Promise("drawn ({lost:.0%} lost)", "a")


@pytest.mark.parametrize(
    ("promise", "measured", "cells"),
    [
        (CALL, {"a": 250e-6, "b": 100e-6}, ["a call", "250 µs", "100 µs (bare pipes)", "2.50×", "at most 2×", "**no**"]),
        (CALL, {"a": 200e-6, "b": 100e-6}, ["a call", "200 µs", "100 µs (bare pipes)", "2.00×", "at most 2×", "yes"]),
        (STOP, {"a": 0.04}, ["Stop", "40.0 ms", "", "", "at most 500 ms", "yes"]),
        (STOP, {"a": 0.6}, ["Stop", "600 ms", "", "", "at most 500 ms", "**no**"]),
        (WATCH, {"a": 1.05, "b": 1.0}, ["watch", "1.05 s", "1.00 s (run)", "+5.0%", "at most 2% more", "**no**"]),
        (MEMORY, {"x: memory": 3 << 20, "b": 2 << 20}, ["memory", "3 MiB", "2 MiB (torch)", "1.50×", "at most 1.5×", "yes"]),
        (LOST, {"a": 1.0, "picture: lost": 0.02}, ["drawn (2% lost)", "1.00 s", "", "", "", ""]),
    ],
)
def test_a_promise_is_judged_as_it_is_worded(promise: Promise, measured: dict[str, float], cells: list[str]) -> None:
    assert promise.cells(measured) == cells


def test_a_missing_measurement_is_not_a_success() -> None:
    assert MEMORY.cells({"x: memory": 1.0})[-1] == "not measured"


def test_every_promise_makes_a_row() -> None:
    measured = {key: 1.0 for promise in PROMISES for key in (promise.key, promise.beside) if key}
    assert len(table([""] * 6, [promise.cells(measured) for promise in PROMISES]).splitlines()) == len(PROMISES) + 2
