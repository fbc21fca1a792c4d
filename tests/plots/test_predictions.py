"""The table of predicted and measured values."""

import numpy as np
import pytest

from labkit import predict
from labkit.costs.link import Link
from labkit.plots.predictions import MIME, predictions
from labkit.tracing import step_times

from synthetic import run_of  # isort: skip


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch):
    monkeypatch.setattr(step_times, "usable_cores", lambda: 2)
    monkeypatch.setattr(step_times, "machine_load", lambda: 0.0)


def test_the_table_as_text():
    table = predictions({"usual cut": (10.0, 12.5), "balanced cut": (1200.4, 600.2)}, unit="ms")
    assert repr(table).splitlines() == [
        "              predicted  measured  ratio",
        "usual cut       10.0 ms   12.5 ms   1.25",
        "balanced cut   1,200 ms    600 ms   0.50",
    ]


@pytest.mark.parametrize(
    ("pair", "unit", "shown"),
    [
        ((0.0021, 0.00234), "s", ("0.0021 s", "0.00234 s", "1.11")),
        ((0.3, 1), "s", ("0.30 s", "1.00 s", "3.33")),
        ((6, 6), "", ("6", "6", "1.00")),
        ((4, 3), "", ("4", "3", "0.75")),
        ((0, 3), "", ("0", "3", "")),
        ((predict.pipeline_bubble(stages=2, micro_batches=1), 55), "%", ("50 %", "55 %", "1.10")),
    ],
)
def test_numbers_have_three_digits_and_whole_ones_no_decimal_places(pair, unit, shown):
    assert [row[1:] for row in predictions({"a": pair}, unit).cells()] == [shown]


def test_the_table_as_html_and_as_numbers():
    table = predictions({"<sent>": [3, np.float32(6)]}, unit="MB")
    bundle = table._repr_mimebundle_()
    assert bundle["text/plain"] == repr(table)
    assert "&lt;sent&gt;" in bundle["text/html"]
    assert bundle["text/html"].count("<td") == 4
    assert bundle["text/html"].count("<th ") == 4
    assert bundle[MIME] == {"unit": "MB", "rows": [{"name": "<sent>", "predicted": 3.0, "measured": 6.0}]}


def test_a_prediction_is_converted_to_the_unit_of_the_table():
    message = predict.message(1_000_000, Link(gbit_per_s=1, latency_us=50))  # 8.05 ms
    (row,) = predictions({"message": (message, 8.05)}, unit="ms").rows
    assert (row.predicted, row.ratio) == (pytest.approx(8.05), pytest.approx(1))
    with pytest.raises(ValueError, match=r"predictions\('message': \.\.\.\): the prediction, 8\.05 ms, is not in MB"):
        predictions({"message": (message, 8.05)}, unit="MB")


@pytest.mark.parametrize(
    ("values", "unit", "error", "words"),
    [
        ([("a", 1, 2)], "", TypeError, "expected pairs by name"),
        ({}, "", ValueError, "expected at least one quantity"),
        ({"a": 3}, "", TypeError, r"predictions\('a': 3\): expected a pair"),
        ({"a": (1, 2, 3)}, "", TypeError, "expected a pair"),
        ({"a": (1, "2")}, "", TypeError, r"predictions\('a': '2'\): expected one number"),
        ({"a": (1, True)}, "", TypeError, "expected one number"),
        ({"a": (1, np.ones(3))}, "", TypeError, r"predictions\('a': array\(\[1\., 1\., 1\.\]\)\): expected one number"),
        ({"a": (1, float("nan"))}, "", ValueError, "expected a finite number"),
        ({"a": (1, 2)}, "hours", ValueError, r"predictions\(unit='hours'\): expected one of '', '%', 's', 'ms'"),
    ],
)
def test_invalid_arguments(values, unit, error, words):
    with pytest.raises(error, match=words):
        predictions(values, unit)


def test_runs_have_their_spread_and_rows_may_be_too_close_to_call():
    log, data = run_of(8, 10, 12, 14), [12, 11, 30]
    table = predictions(
        {"log": (run_of(9), log), "data": (9, data), "other": (40, run_of(40, 41, 42)), "log again": (8, log)}, "ms"
    )
    assert [row[1:] for row in table.cells()] == [
        ("9.00 ms", "11.0 ms (9.50 ms to 12.5 ms)", "1.22"),
        ("9.00 ms", "12.0 ms (11.0 ms to 30.0 ms)", "1.33"),
        ("40.0 ms", "41.0 ms (40.5 ms to 41.5 ms)", "1.02"),
        ("8.00 ms", "11.0 ms (9.50 ms to 12.5 ms)", "1.38"),
    ]
    notes = [
        f"Too close to call: {pair}. The difference is inside their spread." for pair in ("log and data", "data and log again")
    ]
    assert repr(table).splitlines()[5:] == notes
    assert all(note in table._repr_html_() for note in notes)


@pytest.mark.parametrize(("run", "load", "busy"), [(10, 1e6, True), (10, 0, False), (run_of(10, load=6.2), 0, True)])
def test_a_busy_machine_is_told_below_a_table_of_times(monkeypatch, run, load, busy):
    monkeypatch.setattr(step_times, "machine_load", lambda: load)
    assert ("This machine was busy" in repr(predictions({"step": (10, run)}, "ms"))) is busy
    assert "busy" not in repr(predictions({"sent": (10, 10)}, "MB"))
