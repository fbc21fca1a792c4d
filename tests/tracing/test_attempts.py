"""The trace of a run whose ranks were replaced: all attempts on one clock; only the last one's steps count."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from synthetic import MS, made

from labkit.plots.timeline import RESTARTED, explore, timeline
from labkit.recording.events import WAITS, Scalar
from labkit.recording.schema import ENDED, MEMORY
from labkit.tracing.attempts import joined_attempts
from labkit.tracing.load import load_trace
from labkit.tracing.step_times import step_ms, trace_of
from labkit.tracing.trace import Trace


def attempt(start: float, steps: int, waits: int = 0, name: str = "forward") -> Trace:
    """Two ranks with steps of 10 ms, each with an all-reduce, numbered from 1; rank 1 comes 2 ms later."""
    ranks = []
    for late in (0, 2):
        spans = []
        for number in range(steps):
            at = start + 10 * number
            spans += [("step", at, at + 10), (name, at, at + 4 + late)]
            spans.append(("all_reduce", at + 4 + late, at + 8, (at + 4 + late, at + 8), {"match": number + 1}))
        ranks.append(spans)
    trace = made(*ranks)
    rows = np.zeros(waits, WAITS)
    rows["group"], rows["match"] = trace.columns.name_id("g"), range(1, waits + 1)
    return Trace(trace.columns, [Scalar(0, "loss", trace.start_ns, 1.0)], ranks=trace.ranks, waits=rows)


def test_operations_of_two_attempts_are_told_apart() -> None:
    first, second = attempt(0, 2, waits=3), attempt(100, 3, waits=1, name="other")
    both = joined_attempts([first, second])
    assert (both.start_ns, both.end_ns, both.restarts_ns) == (0, 130 * MS, (100 * MS,))
    matches = both.columns.data["match"][both.columns.travels].tolist()
    assert matches == [1, 1, 2, 2, 4, 4, 5, 5, 6, 6]
    assert both.waits["match"].tolist() == [1, 2, 3, 4]
    assert {both.columns.names[i] for i in both.waits["group"]} == {"g"}
    assert [span.name for span in both if span.kind == "compute"] == ["forward"] * 4 + ["other"] * 6
    late = both.ready()[both.columns.travels & (both.columns.data["rank"] == 0)]
    assert late.tolist() == [6 * MS, 16 * MS, 106 * MS, 116 * MS, 126 * MS]
    assert [s.time_ns for s in both.scalars] == [0, 100 * MS]


def test_only_the_steps_of_the_last_attempt_count() -> None:
    run = joined_attempts([attempt(0, 4), attempt(100, 1), attempt(200, 2)])
    assert run.restarts_ns == (100 * MS, 200 * MS)
    assert run.step_bounds().tolist() == [[200 * MS, 210 * MS], [210 * MS, 220 * MS]]
    assert run.filter(kind="step").step_bounds(1).tolist() == run.step_bounds().tolist()
    assert step_ms(run) == 10
    last = run.last_attempt()
    assert (last.start_ns, last.end_ns, last.restarts_ns, len(last)) == (200 * MS, 220 * MS, (), 12)
    assert len(trace_of(run, "explain")) == 12
    assert trace_of(run, "timeline", whole=True) is run


def test_restarts_are_saved(tmp_path: Path) -> None:
    run = joined_attempts([attempt(0, 1), attempt(100, 1)])
    assert load_trace(run.save(tmp_path / "x.json")).restarts_ns == run.restarts_ns


@pytest.mark.parametrize("steps", [2, 20])
def test_a_timeline_shows_all_attempts(steps: int) -> None:
    pytest.importorskip("matplotlib")
    ax = timeline(joined_attempts([attempt(0, 3), attempt(100, steps)]), critical_path=True)
    assert ax.get_title(loc="left") == f"2 ranks, {steps} steps after 1 restart, {100 + 10 * steps} ms"
    (line,) = [c for c in ax.collections if c.get_label() == RESTARTED]
    assert line.get_segments()[0][0][0] == 100
    (path,) = [line for line in ax.lines if line.get_label() == "critical path"]
    assert (min(path.get_xdata()), max(path.get_xdata())) == (100, 100 + 10 * steps), "of the last attempt"


def test_the_memory_of_ranks_that_were_replaced_is_gone() -> None:
    first, second = attempt(0, 2), attempt(100, 2)
    first.scalars += (Scalar(0, f"{MEMORY}gradients", 5 * MS, 4e6),)
    assert not [s for s in joined_attempts([first, second]).last_attempt().scalars if s.name.startswith(MEMORY)]


def test_controls_replay_one_attempt_and_say_how() -> None:
    pytest.importorskip("anywidget")
    run = joined_attempts([attempt(0, 2), attempt(100, 2)])
    assert explore(run)._controls == (
        "No controls: only one attempt can be replayed: lab.explore(run.trace.last_attempt()) replays the last."
    )
    assert [control["name"] for control in explore(run.last_attempt())._controls.all][:2] == ["link", "latency "]


def test_a_part_has_the_restarts_inside_it_and_the_memory_of_its_ranks() -> None:
    first, second = attempt(0, 2), attempt(100, 3)
    first.scalars += (Scalar(0, f"{MEMORY}gradients", 5 * MS, 4e6),)
    run = joined_attempts([first, second])
    assert run.between(0, 100 * MS).restarts_ns == run.step(1).restarts_ns == ()
    assert run.between(10 * MS, 110 * MS).restarts_ns == (100 * MS,)
    assert step_ms(run.between(0, 100 * MS)) == 10, "of the first attempt"
    assert trace_of(run.step(1), "explain").duration_ns == 10 * MS
    memory = [
        [s.time_ns for s in part.scalars if s.name.startswith(MEMORY)] for part in (run.step(0), run.between(10 * MS, 20 * MS))
    ]
    assert memory == [[], [10 * MS]]


def test_failures_are_in_order_of_time() -> None:
    first, second = attempt(0, 2), attempt(100, 2)
    second.scalars += (Scalar(0, ENDED, 110 * MS, 1.0), Scalar(1, ENDED, 105 * MS, 1.0))
    assert joined_attempts([first, second]).failures_ns == (105 * MS, 110 * MS)
    assert first.failures_ns == ()
