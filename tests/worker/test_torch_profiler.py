"""Events of torch's profiler beside labkit's spans, on the same clock."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import labkit as lab
from labkit.errors.exceptions import LabError, RankError
from labkit.group.group import Group, profile
from labkit.recording.events import ProfilerEvent
from labkit.recording.schema import Span
from labkit.tracing.load import load_trace
from labkit.worker import torch_profiler

NEAR_NS = 100_000  # allowed difference of the clocks


@pytest.fixture(scope="module")
def pair() -> Iterator[Group]:
    with Group(2) as group:
        yield group


def nested() -> None:
    """A span between two annotations of the profiler."""
    import torch
    from torch.profiler import record_function

    for _ in range(3):
        with record_function("around"), lab.span("between"), record_function("inside"):
            time.sleep(0.002)
    values = torch.ones(100, 100, requires_grad=True)
    (values @ values).sum().backward()


def one_seventh() -> float:
    return 1 / 7


def fail() -> None:
    raise ValueError("on purpose")


def named(events: tuple[ProfilerEvent, ...], rank: int, name: str) -> list[ProfilerEvent]:
    return sorted((e for e in events if e.rank == rank and e.name == name), key=lambda e: e.start_ns)


def close(outer: ProfilerEvent | Span, inner: ProfilerEvent | Span) -> bool:
    return outer.start_ns <= inner.start_ns + NEAR_NS and inner.end_ns <= outer.end_ns + NEAR_NS


@pytest.mark.processes
def test_the_profiler_and_the_spans_have_one_clock(pair: Group, tmp_path: Path) -> None:
    with profile(pair):
        run = pair.run(nested)
    trace = run.trace
    assert (run.output, trace.notes) == ("", ()), "the profiler says nothing"
    for rank in range(2):
        around, between = named(trace.profile, rank, "around"), trace.filter(rank=rank, name="between").spans
        inside = named(trace.profile, rank, "inside")
        assert len(around) == len(between) == len(inside) == 3
        assert all(close(a, b) and close(b, c) for a, b, c in zip(around, between, inside, strict=True))
        (product,) = named(trace.profile, rank, "aten::matmul")
        assert (product.track, product.category) == ("main thread", "cpu_op")
        assert not named(trace.profile, rank, torch_profiler.MARK)
        assert len(named(trace.profile, rank, "aten::mm")) == 3, "one forward, two backward"
    again = load_trace(trace.save(tmp_path / "x.json"))
    assert sorted(again.profile, key=repr) == sorted(trace.profile, key=repr)
    assert {e.rank for e in trace.filter(rank=1).profile} == {1}
    assert pair.run(nested).trace.profile == (), "only inside the block"


@pytest.mark.processes
def test_a_failing_run_does_not_disturb_the_profiler(pair: Group) -> None:
    before = pair.run(os.getpid).results
    with profile(pair):
        with pytest.raises(RankError, match="on purpose"):
            pair.run(fail)
        assert pair.run(one_seventh).results == [1 / 7] * 2
    assert not {*before} & {*pair.run(os.getpid).results}, "ranks in which a profiler was left running serve no more"


def with_its_own_profiler() -> str:
    """Tries to start a profiler of its own."""
    import torch

    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            return "started"
    except LabError as error:
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        return str(error)


@pytest.mark.processes
def test_a_profiler_of_the_programs_own_is_refused_beside_ours(pair: Group) -> None:
    with profile(pair):
        run = pair.run(with_its_own_profiler)
    assert all("torch can run only one" in said for said in run.results)
    assert all(named(run.trace.profile, rank, "aten::mm") for rank in range(2)), "ours goes on"
    assert pair.run(with_its_own_profiler).results == ["started"] * 2


def never_stopped() -> None:
    import torch

    torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]).start()


@pytest.mark.processes
def test_a_profiler_that_was_not_stopped_is_an_error_and_not_a_crash(pair: Group) -> None:
    pair.run(never_stopped)
    with profile(pair), pytest.raises(RankError, match=r"a torch\.profiler that an earlier run started is still running"):
        pair.run(one_seventh)


@pytest.mark.processes
def test_only_torch_has_a_profiler() -> None:
    expected = "is for torch; this group has the runtime 'bare'"
    with Group(1, runtime="bare") as group, pytest.raises(LabError, match=expected), profile(group):
        pass


# Files made by the test.

BASE_NS = 1_800_000_000_000_000_000
AHEAD_NS = 1_790_000_000_000_000_000  # the time of day minus our clock


def content(events: list[dict[str, Any]], marks: list[tuple[int, int, int]], drift: float = 0.0) -> dict[str, Any]:
    """The file that a profiler would write whose clock is ahead of ours and too fast by `drift`."""

    def ts(ns: float) -> float:
        return (ns * (1 + drift) + AHEAD_NS - BASE_NS) / 1e3

    made = [{"name": torch_profiler.MARK, "cat": "user_annotation", "start": a + 1, "end": c - 1, "tid": 1} for a, _, c in marks]
    written = [
        {"ph": "X", "pid": 0, "ts": ts(e["start"]), "dur": ts(e["end"]) - ts(e["start"])}
        | {k: e[k] for k in ("name", "cat", "tid")}
        for e in [*events, *made]
    ]
    return {"baseTimeNanoseconds": BASE_NS, "traceEvents": [{"ph": "M", "name": "process_name"}, *written]}


def test_times_are_converted_to_the_clock_of_the_spans() -> None:
    s = 10**9
    marks = [(t, t + 5, t + 10) for t in (0, 100, 60 * s, 60 * s + 100)]
    events = [
        {"name": "mm", "cat": "cpu_op", "start": 30 * s, "end": 31 * s, "tid": os.getpid()},
        {"name": "gemm", "cat": "kernel", "start": 40 * s, "end": 41 * s, "tid": 7},
        {"name": "profiler", "cat": "overhead", "start": 40 * s, "end": 41 * s, "tid": 7},
    ]
    found = torch_profiler.events_of(content(events, marks, drift=20e-6), marks)
    assert [row[:3] for row in found] == [("main thread", "mm", "cpu_op"), ("GPU 0, stream 7", "gemm", "kernel")]
    for row, event in zip(found, events, strict=False):
        assert abs(row[3] - event["start"]) < 2000, "ns; without drift it would be a millisecond"
        assert abs(row[4] - event["end"]) < 2000


def test_the_longest_events_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_profiler, "MOST_EVENTS", 2)
    marks = [(0, 5000, 9000), (10**6, 10**6 + 5000, 10**6 + 9000)]
    lengths = [500, 300_000, 7000, 200_000]
    events = [{"name": str(n), "cat": "cpu_op", "start": 10_000, "end": 10_000 + n, "tid": 1} for n in lengths]
    assert {row[1] for row in torch_profiler.events_of(content(events, marks), marks)} == {"300000", "200000"}


def test_a_file_without_marks_is_not_used() -> None:
    marks = [(0, 5000, 9000), (10**6, 10**6 + 5000, 10**6 + 9000)]
    assert torch_profiler.events_of(content([], marks[:1]), marks) == []
