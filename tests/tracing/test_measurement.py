"""What is measured, with its spread: numbers, runs made by hand, several of either; and busy machines."""

from types import SimpleNamespace

import pytest
from synthetic import run_of

from labkit.errors.exceptions import LabError
from labkit.recording.rank_facts import Fact, FactKind
from labkit.tracing import step_times as module
from labkit.tracing.replaying.replay import replay
from labkit.tracing.step_times import Measurement, busy_machine, measurement_of

BUSY = "This machine was busy (load 6 on 2 cores): measure again"


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr(module, "usable_cores", lambda: 2)


@pytest.mark.parametrize(
    ("given", "unit", "expected"),
    [
        (3, "MB", Measurement(3, 3, 3)),
        ([3, 9, 5], "", Measurement(5, 3, 9)),
        (run_of(8, 10, 12, 14), "ms", Measurement(11, 9.5, 12.5)),
        (run_of(8, 10, 12, 14), "s", Measurement(0.011, 0.0095, 0.0125)),
        ([run_of(8, 10, 12), run_of(20, 20, 90), run_of(7, 7, 7)], "ms", Measurement(10, 7, 20)),
        ([run_of(8, 10, 12), run_of(8, 10, 12, load=6.2)], "ms", Measurement(10, 10, 10, BUSY)),
        ("fast", "", None),
        ([], "", None),
        ([3, "fast"], "", None),
    ],
)
def test_what_was_measured_and_its_spread(given, unit, expected):
    assert measurement_of(given, unit, "reveal") == expected


def test_a_run_has_no_measurement_in_bytes_nor_without_steps():
    with pytest.raises(TypeError, match="reveal: a run is measured by the time of its steps, which is not in MB"):
        measurement_of(run_of(1), "MB", "reveal")
    with pytest.raises(LabError, match="no steps"):
        measurement_of(lasting_without_steps(), "ms", "reveal")


def lasting_without_steps():
    trace = run_of(1).trace
    return SimpleNamespace(trace=type(trace)([span for span in trace.spans if span.kind != "step"], ranks=trace.ranks))


@pytest.mark.parametrize(("other", "close"), [((4, 3, 5), True), ((6, 4.1, 8), False), ((1, 1, 1.9), False), ((2.5, 2, 3), True)])
def test_measurements_are_too_close_where_their_spreads_meet(other, close):
    one = Measurement(3, 2, 4)
    assert one.too_close(Measurement(*other)) is close
    assert Measurement(*other).too_close(one) is close


def test_a_machine_is_busy_if_more_is_loaded_than_its_cores_and_the_runs_own_threads():
    assert busy_machine(run_of(1, load=6.2)) == BUSY
    assert busy_machine(run_of(1, load=2.9)) == ""
    threads = Fact(FactKind.RUN, 0, "", values={"threads": 4})
    assert busy_machine(SimpleNamespace(**vars(run_of(1, load=5.9)), facts={0: [threads]})) == ""
    assert busy_machine(SimpleNamespace(**vars(run_of(1, load=6.1)), facts={0: [threads]})) == BUSY


def test_what_was_not_run_was_not_disturbed():
    assert busy_machine(replay(run_of(1, 2, load=60))) == ""


@pytest.mark.parametrize(("load", "busy"), [(11, True), (9, False)])
def test_without_a_run_only_a_very_busy_machine_is_told(monkeypatch, load, busy):
    """So much of the load may be the student's own ranks."""
    monkeypatch.setattr(module, "machine_load", lambda: load)
    assert (busy_machine() != "") is busy
