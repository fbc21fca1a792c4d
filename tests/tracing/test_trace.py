"""The arithmetic of traces, checked by hand and by an independent recount per nanosecond; and trace files."""

import dataclasses
import itertools
import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from synthetic import chrome, many

from labkit.costs.link import Link
from labkit.errors.exceptions import LabError
from labkit.recording.events import ProfilerEvent, Scalar, blank
from labkit.recording.ring_buffer import record_dtype
from labkit.recording.schema import COMMUNICATION, COMPUTE, CUDA, DATA, STEP, UNKNOWN, WAIT, Pending, Span
from labkit.tracing.intervals import Intervals, difference, intersection, length, union
from labkit.tracing.load import load_trace
from labkit.tracing.trace import Share, Trace, from_records

TWO = ("rank 0", "rank 1")
SEEDS = range(40)


def compute(rank: int, start: int, end: int, name: str = "forward", **more: Any) -> Span:
    return Span(rank, name, "compute", start, end, **more)


def step(rank: int, start: int, end: int) -> Span:
    return Span(rank, "step", "step", start, end)


def travel(
    rank: int, start: int, end: int, *, wait: tuple[int, int] = (0, 0), match: int = 0, group: str = "", **more: Any
) -> Span:
    return Span(rank, "all_reduce", "communication", start, end, *wait, match=match, group=group, **more)


def test_a_table_for_pandas_has_the_fields_of_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = [travel(1, 5, 9, nbytes=8, done=False), compute(0, 1, 4, "backward", device="CPU:1", automatic=True)]
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=dict))  # pandas itself is not among the tests' tools
    table: dict[str, list[Any]] = Trace(spans, ranks=TWO).to_pandas()
    assert [Span(**dict(zip(table, row, strict=True))) for row in zip(*table.values(), strict=True)] == spans[::-1]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(LabError, match="to_pandas: pandas is not installed; `pip install pandas`"):
        Trace(ranks=TWO).to_pandas()


# Intervals: boolean arrays, one element per nanosecond, are the oracle.


def covered(start: Any, end: Any) -> NDArray[np.bool_]:
    """Which nanoseconds lie in any of the intervals."""
    moments = np.zeros(80, bool)
    for a, b in zip(start, end, strict=True):
        moments[a : max(a, b)] = True
    return moments


def as_intervals(moments: NDArray[np.bool_]) -> list[list[int]]:
    """The disjoint ascending intervals of nanoseconds that are covered."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], moments, [False]])))
    result: list[list[int]] = edges.reshape(-1, 2).tolist()
    return result


def some_intervals(rng: random.Random) -> tuple[list[int], list[int]]:
    """Overlapping, touching, empty and reversed ones, in any order."""
    count = rng.randrange(9)
    start = [rng.randrange(60) for _ in range(count)]
    return start, [s + rng.randrange(-3, 15) for s in start]


def test_sets_of_intervals_agree_with_a_recount() -> None:
    for seed in SEEDS:
        rng = random.Random(seed)
        (a_start, a_end), (b_start, b_end) = some_intervals(rng), some_intervals(rng)
        a, b = union(a_start, a_end), union(b_start, b_end)
        in_a, in_b = covered(a_start, a_end), covered(b_start, b_end)
        assert a.tolist() == as_intervals(in_a), seed
        assert intersection(a, b).tolist() == as_intervals(in_a & in_b), seed
        assert difference(a, b).tolist() == as_intervals(in_a & ~in_b), seed
        assert length(a) == in_a.sum(), seed


def test_an_empty_set_of_intervals() -> None:
    nothing = union([], [])
    assert nothing.shape == (0, 2)
    assert length(nothing) == 0
    assert intersection(nothing, union([1], [2])).shape == difference(nothing, union([1], [2])).shape == (0, 2)
    assert difference(union([1], [2]), nothing).tolist() == [[1, 2]]


def test_intervals_that_touch_become_one_and_stay_exact() -> None:
    assert union([3, 0, 5], [5, 3, 6]).tolist() == [[0, 6]]
    years = 10**17  # three of them: as a float, one more would be rounded
    assert union([years + 1], [years + 2]).tolist() == [[years + 1, years + 2]]


# Shares: worked by hand.


SHARES: dict[str, tuple[list[Span], Share]] = {
    "nobody waits for communication": (
        [compute(0, 0, 100), travel(0, 40, 80)],
        Share(0, window_ns=100, compute_ns=100, communication_ns=40, overlap_ns=40, idle_ns=0, waiting_ns=0),
    ),
    # backward 0-60, its gradients travel from 30 to 90; the rank is blocked in wait() from 60 to 90, in one span of 100
    "the rank waits for communication": (
        [compute(0, 0, 100, "train"), travel(0, 30, 90, wait=(60, 90))],
        Share(0, window_ns=100, compute_ns=70, communication_ns=60, overlap_ns=30, idle_ns=0, waiting_ns=0),
    ),
    "a communication span without a recorded operation": (
        [Span(0, "upload", "communication", 0, 30, 0, 30), Span(0, "send", "communication", 40, 50, group="g", match=1)],
        Share(0, window_ns=50, compute_ns=0, communication_ns=40, overlap_ns=0, idle_ns=10, waiting_ns=0),
    ),
    "a rank that did nothing": ([compute(1, 0, 10)], Share(0, 10, 0, 0, 0, 10, 0)),
    # rank 0 comes at 20, rank 1 at 70; the sum takes 10
    "a slow peer": (
        [
            compute(0, 0, 20), travel(0, 20, 80, wait=(20, 80), group="world", match=1),
            compute(1, 0, 70), travel(1, 70, 80, wait=(70, 80), group="world", match=1),
        ],
        Share(0, 80, compute_ns=20, communication_ns=10, overlap_ns=0, idle_ns=50, waiting_ns=50),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SHARES)
def test_how_a_rank_spent_its_time(case: str) -> None:
    spans, share = SHARES[case]
    assert Trace(spans, ranks=TWO).shares()[0] == share


BLOCKED: dict[str, tuple[list[Span], list[list[int]], int]] = {
    # An RPC worker serves two calls; each fetches something (0-20 and 5-60) and computes on it (20-50 and 60-70).
    "another thread computes": (
        [
            compute(0, 0, 50), travel(0, 0, 20, wait=(0, 20)), compute(0, 20, 50),
            compute(0, 5, 70), travel(0, 5, 60, wait=(5, 60)), compute(0, 60, 70),
        ],
        [[0, 20], [50, 60]], 40,
    ),
    # The call came before the function began to wait (in `rpc.shutdown`, say, until 100). It fetches something, 60-70.
    "the function waits, not a served call": (
        [
            Span(0, "run", "call", 0, 100), compute(0, 10, 90, automatic=True, served=True), travel(0, 20, 100, wait=(20, 100)),
            travel(0, 60, 70, wait=(60, 70), served=True),
        ],
        [[60, 70], [90, 100]], 80,
    ),
    "a served call waits, not the function": (
        [
            Span(0, "run", "call", 0, 100), travel(0, 5, 10, wait=(5, 10)), travel(0, 60, 100, wait=(60, 100)),
            compute(0, 20, 90, automatic=True, served=True), travel(0, 30, 80, wait=(30, 80), served=True),
        ],
        [[5, 10], [60, 80], [90, 100]], 65,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BLOCKED)
def test_when_a_rank_is_blocked_and_computes(case: str) -> None:
    spans, blocked, computes_ns = BLOCKED[case]
    trace = Trace(spans, ranks=["worker"])
    assert trace.blocked(0).tolist() == blocked
    assert trace.shares()[0].compute_ns == computes_ns


@pytest.mark.parametrize(
    ("beside", "data", "computes"),
    [
        (compute(0, 20, 30), 50, 10),  # such as preparing the batch, on the same thread
        (compute(0, 20, 30, measured=True), 40, 20),
        (compute(0, 20, 30, served=True), 40, 20),
        (compute(0, 20, 30, device="cuda"), 40, 20),
        (travel(0, 20, 30), 40, 20),
    ],
    ids=["its own span", "an operation", "a served call", "a GPU", "communication"],
)
def test_a_rank_that_only_waits_for_data_does_not_compute(beside: Span, data: int, computes: int) -> None:
    trace = Trace([compute(0, 0, 60, "step"), compute(0, 0, 50, DATA, measured=True), beside], ranks=["rank 0"])
    (share,) = trace.shares()
    assert (share.data_ns, share.compute_ns, share.idle_ns) == (data, computes, 0)


@pytest.mark.parametrize(("error_ns", "waiting_ns"), [(0, 50), (50, 50), (51, 0)])
@pytest.mark.parametrize("issued", [5, 20], ids=["issued before", "issued then"])
def test_waiting_for_less_than_the_clocks_error_is_communication(error_ns: int, waiting_ns: int, issued: int) -> None:
    spans = [
        compute(0, 0, 20), travel(0, issued, 80, wait=(20, 80), group="world", match=1),
        compute(1, 0, 70), travel(1, 70, 80, wait=(70, 80), group="world", match=1),
    ]  # fmt: skip
    trace = Trace(spans, ranks=TWO, clock_error_ns=error_ns)
    for part in (trace, trace.between(0, 80)):
        assert part.clock_error_ns == error_ns
        assert part.filter(kind="communication").ready().tolist() == [20 + waiting_ns, 70]
        fast, slow = part.shares()
        assert (fast.waiting_ns, fast.exposed_ns, fast.compute_ns) == (waiting_ns, 60 - waiting_ns, 20)
        assert (slow.waiting_ns, slow.exposed_ns) == (0, 10)


def around_an_operation() -> list[Span]:
    """Rank 0 prepares, waits for rank 1, and sends, all inside a span of the program."""
    return [
        Span(0, "step", "compute", 0, 100),
        Span(0, "exchange", "communication", 10, 90, 10, 90),
        Span(0, "prepare", "compute", 10, 40),
        Span(0, "all_reduce", "communication", 40, 80, 40, 80, nbytes=8, group="g", match=1),
        Span(1, "step", "compute", 0, 100),
        Span(1, "all_reduce", "communication", 60, 80, 60, 80, nbytes=8, group="g", match=1),
    ]


def test_inside_a_communication_span_the_recorded_operation_counts() -> None:
    labelled = around_an_operation()
    alone = [span for span in labelled if span.name != "exchange"]
    trace = Trace(labelled, ranks=TWO)
    assert trace.shares() == Trace(alone, ranks=TWO).shares()
    share = trace.shares()[0]
    assert (share.compute_ns, share.exposed_ns, share.overlap_ns, share.waiting_ns) == (60, 20, 0, 20)
    assert [s.name for s in trace.filter(name="exchange")] == ["exchange"]  # it stays in the trace
    for part in (trace.between(10, 40), trace.between(80, 90)):  # without the operation
        assert part.shares()[0].communication_ns == 0


def test_a_rank_without_compute_spans_computes_inside_its_function() -> None:
    calls = [Span(0, "train", "call", 10, 90), Span(1, "train", "call", 0, 100)]
    first, second = Trace([*calls, travel(0, 20, 50, wait=(20, 50)), compute(1, 5, 6)], ranks=TWO).shares()
    assert (first.compute_ns, first.communication_ns, first.idle_ns) == (50, 30, 20)
    assert second.compute_ns == 1, "a program that names some spans names all of them"
    trace = Trace([Span(0, "train", "call", 0, 100), compute(0, 0, 10)], ranks=["rank 0"])
    for part in (trace.between(50, 100), trace.filter(kind="call")):  # without compute spans
        assert part.shares()[0].compute_ns == 0


def test_an_empty_trace() -> None:
    trace = Trace(ranks=TWO)
    assert (len(trace), trace.spans, trace.duration_ns, trace.dropped) == (0, (), 0, (0, 0))
    assert trace.shares() == (Share(0, 0, 0, 0, 0, 0, 0), Share(1, 0, 0, 0, 0, 0, 0))
    assert trace.step_bounds().shape == (0, 2)
    assert trace.ready().tolist() == []
    assert len(Trace(ranks=[]).shares()) == 0


# Shares: random traces, recounted nanosecond by nanosecond.


def some_trace(rng: random.Random) -> Trace:
    spans = []
    for rank in range(3):
        if rng.random() < 0.8:
            spans.append(Span(rank, "train", "call", rng.randrange(10), rng.randrange(40, 60)))
        for _ in range(rng.randrange(5)):
            start = rng.randrange(50)
            spans.append(compute(rank, start, start + rng.randrange(12), rng.choice(["forward", DATA])))
        for match in range(rng.randrange(4)):
            start = rng.randrange(50)
            end = start + rng.randrange(14)
            wait = (rng.randint(start, end), end) if rng.random() < 0.7 else (0, 0)
            group = rng.choice(["", "world", "pair"])
            spans.append(travel(rank, start, end, wait=wait, group=group, match=match, done=rng.random() < 0.9))
    rng.shuffle(spans)
    return Trace(spans, ranks=["a", "b", "c"], start_ns=rng.randrange(10), end_ns=rng.randrange(45, 64))


def is_label(trace: Trace, own: Span) -> bool:
    """Whether the program has put a span around a recorded operation."""
    if own.group or not own.done:
        return False
    recorded = [s for s in trace if s.rank == own.rank and s.kind == "communication" and s.group]
    return any(own.start_ns <= s.start_ns <= own.end_ns and (s.start_ns + s.end_ns) // 2 <= own.end_ns for s in recorded)


def recount(trace: Trace, rank: int) -> Share:
    """The definition, in words of one nanosecond."""
    compute_, communication, blocked, data = (np.zeros(80, bool) for _ in range(4))
    kind = "compute" if any(s.kind == "compute" and s.rank == rank for s in trace) else "call"
    waits = []
    for span, ready_ns in zip(trace, trace.ready().tolist(), strict=True):
        if span.rank == rank and span.kind == "communication" and not is_label(trace, span):
            communication[ready_ns : span.end_ns] = True
            blocked[span.wait_start_ns : span.wait_end_ns] = True
            waits.append((span.wait_start_ns, span.wait_end_ns))
    for span in trace:
        if span.rank == rank and span.kind == kind:
            alone = np.zeros(80, bool)
            alone[span.start_ns : span.end_ns] = True
            for start, end in waits:
                if span.start_ns <= start:  # else it blocks another thread, if it still does
                    alone[start:end] = False
            compute_ |= alone
            if span.name == DATA:
                data[span.start_ns : span.end_ns] = True
    data &= compute_ & ~communication
    compute_ &= ~data
    inside = slice(trace.start_ns, trace.end_ns)
    compute_, communication, data = compute_[inside], communication[inside], data[inside]
    blocked = blocked[inside] & ~compute_ & ~data
    return Share(
        rank,
        window_ns=trace.end_ns - trace.start_ns,
        compute_ns=int(compute_.sum()),
        communication_ns=int(communication.sum()),
        overlap_ns=int((compute_ & communication).sum()),
        idle_ns=int((~compute_ & ~communication & ~data).sum()),
        waiting_ns=int((blocked & ~communication).sum()),
        data_ns=int(data.sum()),
    )


def test_shares_agree_with_a_recount_and_add_up() -> None:
    for seed in SEEDS:
        trace = some_trace(random.Random(seed))
        assert trace.shares() == tuple(recount(trace, rank) for rank in range(3)), seed
        for share in trace.shares():
            assert share.compute_ns + share.data_ns + share.exposed_ns + share.idle_ns == share.window_ns == trace.duration_ns
            assert share.overlap_ns <= min(share.compute_ns, share.communication_ns)
            assert 0 <= share.waiting_ns <= share.idle_ns


def test_the_parts_of_a_trace_add_up_to_the_whole() -> None:
    for seed in SEEDS:
        trace = some_trace(random.Random(seed))
        cut = (trace.start_ns + trace.end_ns) // 2
        parts = trace.between(trace.start_ns, cut).shares(), trace.between(cut, trace.end_ns).shares()
        for field in dataclasses.fields(Share)[1:]:
            whole = [getattr(s, field.name) for s in trace.shares()]
            summed = [getattr(a, field.name) + getattr(b, field.name) for a, b in zip(*parts, strict=True)]
            assert summed == whole, (seed, field.name)
        assert [trace.filter(rank=r).shares()[r] for r in range(3)] == list(trace.shares()), seed


# When all ranks have arrived.


FINISHED = [travel(r, 1, 5, group="world", match=1) for r in range(3)]
STILL = [travel(r, 10 + r, 90, group="world", match=2, done=False) for r in range(2)]
READY: dict[str, tuple[list[Span], dict[tuple[int, int], int]]] = {
    "the last rank arrives": (
        [travel(r, start, 50, group="world", match=7) for r, start in enumerate([10, 30, 20])],
        {(0, 10): 30, (1, 30): 30, (2, 20): 30},
    ),
    "a number in two groups": (
        [travel(0, 10, 90, group="a", match=1), travel(1, 20, 90, group="b", match=1)], {(0, 10): 10, (1, 20): 20}
    ),
    "a rank leaves before the last arrives": (
        [travel(0, 10, 15, group="0 to 1", match=1), travel(1, 30, 40, group="0 to 1", match=1)], {(0, 10): 15, (1, 30): 30}
    ),
    "a rank is missing": ([*FINISHED, *STILL], {(0, 10): 90, (1, 11): 90}),
    "all have arrived: now data is sent": (
        [*FINISHED, *STILL, travel(2, 60, 90, group="world", match=2, done=False)], {(0, 10): 60, (1, 11): 60, (2, 60): 60}
    ),
    "the first operation of a group": (STILL, {(0, 10): 90, (1, 11): 90}),
}  # fmt: skip


@pytest.mark.parametrize("case", READY)
def test_when_an_operation_is_ready(case: str) -> None:
    spans, expected = READY[case]
    trace = Trace(spans, ranks=["a", "b", "c"])
    ready = {(s.rank, s.start_ns): r for s, r in zip(trace, trace.ready().tolist(), strict=True)}
    assert {key: ready_ns for key, ready_ns in ready.items() if key[1] != 1} == expected


def test_ready_agrees_with_a_search_through_all_spans() -> None:
    for seed in SEEDS:
        rng = random.Random(seed)
        spans = []
        for _ in range(30):
            start = rng.randrange(50)
            group, match = rng.choice(["", "a", "b"]), rng.randrange(4)
            spans.append(travel(rng.randrange(4), start, start + rng.randrange(20), group=group, match=match))
        trace = Trace(spans, ranks=["0", "1", "2", "3"])
        for span, ready_ns in zip(trace, trace.ready().tolist(), strict=True):
            same = [s.start_ns for s in spans if s.group and (s.group, s.match) == (span.group, span.match)]
            assert ready_ns == min(max(same, default=span.start_ns), span.end_ns), seed


# Parts of a trace.


TRACE = Trace(
    [
        compute(0, 0, 10), compute(0, 20, 30, "backward"), compute(1, 5, 25), travel(0, 8, 28, group="world", match=1),
        step(0, 0, 12), step(0, 12, 30), step(1, 2, 15), step(1, 15, 40),
    ],
    [Scalar(0, "loss", 20, 0.25), Scalar(0, "loss", 10, 0.5), Scalar(1, "loss", 11, 0.75), Scalar(1, "accuracy", 12, 0.1)],
    ranks=TWO,
)  # fmt: skip


def test_a_trace_lasts_from_its_first_span_to_its_last() -> None:
    assert (TRACE.start_ns, TRACE.end_ns, TRACE.duration_ns) == (0, 40, 40)
    assert [s.start_ns for s in TRACE.spans] == sorted(s.start_ns for s in TRACE)
    assert [s.value for s in TRACE.scalars] == [0.5, 0.75, 0.1, 0.25], "by time"
    assert repr(TRACE) == "<Trace of 2 ranks, 8 spans, 4 scalars>"
    assert TRACE.spans[0].duration_ns == 10
    assert (Trace(ranks=TWO, start_ns=5).end_ns, Trace(ranks=TWO, start_ns=5, end_ns=9).duration_ns) == (5, 4)
    given = Trace([compute(0, 10, 20)], ranks=["a"], start_ns=0, end_ns=30)
    assert given.shares() == (Share(0, 30, 10, 0, 0, 20, 0),)


def test_of_keeps_spans_and_scalars_of_one_rank_kind_or_name() -> None:
    assert {s.rank for s in TRACE.filter(rank=1)} == {1}
    assert [s.value for s in TRACE.filter(rank=1).scalars] == [0.75, 0.1]
    assert [s.name for s in TRACE.filter(kind="compute")] == ["forward", "forward", "backward"]
    assert TRACE.filter(kind="compute").scalars == ()
    assert [len(TRACE.filter(name=n)) for n in ("forward", "loss")] == [2, 0]
    assert len(Trace([compute(0, 0, 1, "")], ranks=["a"]).filter(name="unheard of")) == 0, "not those without a name either"
    assert [s.value for s in TRACE.filter(name="loss").scalars] == [0.5, 0.75, 0.25]
    assert [s.value for s in TRACE.filter(name="loss", rank=0).scalars] == [0.5, 0.25]
    assert len(TRACE.filter(kind="scalar").scalars) == 4
    assert (TRACE.filter(rank=1).start_ns, TRACE.filter(rank=1).end_ns) == (0, 40), "the interval stays"
    with pytest.raises(ValueError, match="kind='comm': expected one of compute, communication, step, scalar, call"):
        TRACE.filter(kind="comm")


def test_between_selects_an_interval() -> None:
    part = TRACE.between(10, 20)
    assert (part.start_ns, part.end_ns, part.duration_ns) == (10, 20, 10)
    assert [(s.rank, s.start_ns) for s in part.filter(kind="compute")] == [(1, 5)], (
        "spans that only touch the interval are left out"
    )
    assert [s.time_ns for s in part.scalars] == [10, 11, 12, 20]
    assert part.shares()[1] == Share(1, 10, 10, 0, 0, 0, 0)
    assert part.activity(0)["communication"].tolist() == [[10, 20]]
    with pytest.raises(ValueError, match="from 20 to 10 ns: the end lies before the start"):
        TRACE.between(20, 10)


def test_a_step_lasts_from_the_first_rank_to_the_last() -> None:
    assert TRACE.step_bounds().tolist() == [[0, 15], [12, 40]]
    assert (TRACE.step(1).start_ns, TRACE.step(-1).end_ns) == (12, 40)
    with pytest.raises(LabError, match=r"step 2: all ranks of this trace have completed 2 steps$"):
        TRACE.step(2)
    with pytest.raises(LabError, match=r"step 0: all ranks of this trace have completed 0 steps; `for batch in lab"):
        TRACE.filter(kind="compute").step(0)


def test_which_steps_count() -> None:
    steps = [step(r, 10 * i + r, 10 * i + r + 9) for r, count in ((0, 3), (2, 2)) for i in range(count)]
    assert Trace(steps, ranks=["a", "b", "c"]).step_bounds().tolist() == [[0, 11], [10, 21]], "those of all; b has no loop"
    nested = [step(0, start, start + 5) for start in (0, 5, 10, 21, 26)]
    with_epochs = Trace([*nested, step(0, 0, 20), step(0, 20, 40)], ranks=["a"])
    assert with_epochs.step_bounds().tolist() == [[0, 5], [5, 10], [10, 15], [21, 26], [26, 31]], "the innermost"
    zipped = [*nested[:3], *(step(0, start + 1, start + 6) for start in (0, 5, 10))]
    assert Trace(zipped, ranks=["a"]).step_bounds().tolist() == [[0, 5], [5, 10], [10, 15]], "zip(steps(a), steps(b))"
    assert Trace([*zipped, step(0, 0, 20)], ranks=["a"]).step_bounds().tolist() == [[0, 5], [5, 10], [10, 15]]


def test_a_step_cut_out_of_a_run_has_its_own_bounds() -> None:
    """Rank 1 enters each step later: at the ends of a step, the ranks are in different steps."""
    trace = Trace([step(rank, 10 * n + late, 10 * n + 10 + late) for rank, late in ((0, 0), (1, 4)) for n in range(4)], ranks=TWO)
    bounds = trace.step_bounds().tolist()
    assert bounds == [[0, 14], [10, 24], [20, 34], [30, 44]]
    assert trace.step(1).step_bounds().tolist() == [bounds[1]]
    assert trace.between(10, 34).step_bounds().tolist() == bounds[1:3]
    assert trace.step(1).step(0).duration_ns == 14


def test_a_span_of_a_rank_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a span of rank 2, but ranks=\['rank 0', 'rank 1'\] names 2"):
        Trace([compute(2, 0, 1)], ranks=TWO)


# From the ring.


def test_records_become_a_trace() -> None:
    records = blank(4, record_dtype())
    records["kind"] = [COMPUTE, COMMUNICATION, STEP, COMPUTE]
    records["name"], records["line"], records["device"] = [1, 2, 3, 1], [5, 0, 0, 0], [CUDA, 0, 0, 0]
    records["start_ns"], records["end_ns"] = [0, 10, 0, 30], [10, 20, 20, 40]
    for field, value in (("wait_start_ns", 11), ("wait_end_ns", 12), ("nbytes", 13), ("peer", 1), ("match", 14), ("group", 4)):
        records[field][1] = value
    scalars = blank(1, record_dtype())
    scalars["kind"], scalars["start_ns"], scalars["value"] = 3, 7, -0.5
    scalars["name"] = 1
    trace = from_records(
        [records, scalars], [["", "forward", "send", "step", "0 to 1", "cell 2"], ["", "loss"]], TWO, dropped=[0, 5]
    )
    assert trace.spans == (
        Span(0, "forward", "compute", 0, 10, line="cell 2", device="cuda"),
        Span(0, "step", "step", 0, 20),
        Span(0, "send", "communication", 10, 20, 11, 12, 13, 1, "0 to 1", 14),
        Span(0, "forward", "compute", 30, 40),
    )
    assert trace.scalars == (Scalar(1, "loss", 7, -0.5),)
    assert (trace.ranks, trace.dropped) == (TWO, (0, 5))


def with_waits() -> Trace:
    """A trace of two ranks that waited three times for operations that were complete."""
    rows = [blank(3, record_dtype()), blank(2, record_dtype())]
    for rank, (times, matches) in enumerate((((5, 30, 20), (1, 2, 1)), ((5, 25), (1, 1)))):
        rows[rank]["kind"] = [COMMUNICATION] + [WAIT] * (len(times) - 1)
        rows[rank]["group"] = 2 - rank
        rows[rank]["start_ns"] = rows[rank]["end_ns"] = times
        rows[rank]["match"] = matches
    return from_records(rows, [["", "x", "world"], ["", "world"]], TWO, end_ns=40)


def waits_of(trace: Trace) -> list[tuple[int, str, int, int]]:
    return [(rank, trace.columns.names[group], match, time_ns) for rank, group, match, time_ns in trace.waits.tolist()]


def test_waits_for_completed_operations(tmp_path: Path) -> None:
    trace = with_waits()
    assert len(trace) == 2, "a wait is no span"
    assert not trace.scalars
    first, second, third = (0, "world", 1, 20), (1, "world", 1, 25), (0, "world", 2, 30)
    assert waits_of(trace) == waits_of(load_trace(trace.save(tmp_path / "x.json"))) == [first, second, third]
    assert waits_of(trace.between(25, 30)) == [second, third]
    assert waits_of(trace.filter(rank=0)) == waits_of(trace.filter(rank=0, kind="wait")) == [first, third]
    assert waits_of(trace.filter(kind="compute")) == waits_of(trace.filter(name="all_reduce")) == []
    assert len(Trace([compute(0, 0, 1)], ranks=TWO).waits) == 0
    alone = trace.filter(kind="wait")
    assert len(alone) == 0
    assert waits_of(load_trace(alone.save(tmp_path / "x.json"))) == waits_of(trace), "without the operations, too"


def test_no_records_become_an_empty_trace() -> None:
    nothing = np.zeros(0, record_dtype())
    trace = from_records([nothing, nothing], [[], [""]], TWO, start_ns=5, end_ns=9)
    assert (len(trace), trace.start_ns, trace.end_ns) == (0, 5, 9)


def test_a_group_is_one_although_each_rank_numbers_names_differently() -> None:
    both = [blank(1, record_dtype()) for _ in TWO]
    for rank, (records, group) in enumerate(zip(both, (2, 1), strict=True)):
        values = {"kind": COMMUNICATION, "start_ns": 5 * rank, "end_ns": 9, "match": 1, "group": group}
        for field, value in values.items():
            records[field] = value
    assert from_records(both, [["", "x", "world"], ["", "world"]], TWO).ready().tolist() == [5, 5]


def test_pending_operations_last_until_now() -> None:
    records = blank(1, record_dtype())
    records["kind"], records["end_ns"] = COMPUTE, 10
    blocked = Pending("recv", 10, 12, 400, 1, "1 to 0", 3, "cell 2, line 1")
    beside = Pending("isend", 15, 0, 0, 1, "0 to 1", 1, "")
    trace = from_records([records], [["", "forward"]], ["rank 0"], pending=[[blocked, beside]], end_ns=50)
    assert trace.spans[1:] == (
        Span(0, "recv", "communication", 10, 50, 12, 50, 400, 1, "1 to 0", 3, "cell 2, line 1", done=False),
        Span(0, "isend", "communication", 15, 50, peer=1, group="0 to 1", match=1, done=False),
    )
    assert trace.shares()[0] == Share(0, 50, 10, 0, 0, 40, waiting_ns=38)


def test_after_the_last_report_of_a_silent_machine_its_rank_is_unknown_and_the_others_wait() -> None:
    none, waits = blank(0, record_dtype()), [Pending("all_reduce", 20, 20, 400, match=1, group="default")]
    trace = from_records(
        [none, none], [[""], [""]], TWO, calls=[(0, "train"), (1, "train")], pending=[waits, waits], silent=[(1, 30)],
        start_ns=0, end_ns=100,
    )  # fmt: skip
    assert [(s.name, s.start_ns, s.end_ns) for s in trace.filter(rank=1)] == [
        ("train", 0, 30), ("all_reduce", 20, 30), (UNKNOWN, 30, 100)
    ]  # fmt: skip
    assert trace.shares() == (
        Share(0, 100, compute_ns=20, communication_ns=0, overlap_ns=0, idle_ns=80, waiting_ns=80),
        Share(1, 100, compute_ns=20, communication_ns=0, overlap_ns=0, idle_ns=80, waiting_ns=10, unknown_ns=70),
    )
    assert trace.between(40, 60).shares()[1] == Share(1, 20, 0, 0, 0, 20, 0, unknown_ns=20)


def test_a_rank_that_is_silent_since_before_the_run_is_unknown_from_its_start() -> None:
    trace = from_records(
        [blank(0, record_dtype())], [[""]], ["rank 0"], calls=[(0, "train")], silent=[(0, 30)], start_ns=40, end_ns=100
    )
    assert [(s.name, s.start_ns, s.end_ns) for s in trace.filter(kind="call")] == [("train", 40, 40), (UNKNOWN, 40, 100)]


# Trace files.


def some_rich_trace(rng: random.Random) -> Trace:
    start = rng.randrange(10**18)
    times = [start + rng.randrange(10**13) for _ in range(40)]  # nearly three hours, not in whole microseconds
    spans = []
    for i, at in enumerate(times):
        kind = rng.choice(["compute", "communication", "step", "call"])
        more: dict[str, Any] = {}
        if kind == "communication":
            more = {
                "wait_start_ns": at + 3, "wait_end_ns": at + rng.randrange(10**6), "nbytes": rng.randrange(2**40), "match": i,
                "peer": rng.choice([-1, 0, 1]), "group": "world", "line": "cell 5, line 12", "done": rng.random() < 0.8,
            }  # fmt: skip
        device = rng.choice(["cpu", "cuda"])
        spans.append(Span(rng.randrange(2), f"span “{i % 5}”\n", kind, at, at + rng.randrange(10**9), device=device, **more))
    values = [0.1, -3e-200, float("inf"), float("-inf"), 5.0]
    scalars = [Scalar(rng.randrange(2), "loss", start + rng.randrange(10**13), rng.choice(values)) for _ in range(10)]
    profile = [
        ProfilerEvent(
            rng.randrange(2), rng.choice(["thread 7", "stream 20"]), "aten::mm", "cpu_op", at, at + rng.randrange(10**6)
        )
        for at in times
    ]
    return Trace(
        spans, scalars, ranks=["master", "größer"], start_ns=start, end_ns=start + 10**13 + 7, dropped=[0, 3],
        notes=["rank 7 is missing"], profile=profile, nodes=[0, 1],
        link=Link(gbit_per_s=1, latency_us=50, name="slow"), replayed=True, cores=1.5,
        clock_error_ns=120_000,
    )  # fmt: skip


def same(a: Trace, b: Trace) -> bool:
    def key(span: Span) -> Any:
        return dataclasses.astuple(span)

    window = a.start_ns, a.end_ns, a.ranks, a.dropped, a.notes, a.nodes, a.link, a.replayed, a.cores, a.clock_error_ns
    return (
        sorted(a, key=key) == sorted(b, key=key) and sorted(a.scalars, key=repr) == sorted(b.scalars, key=repr)
        and window == (b.start_ns, b.end_ns, b.ranks, b.dropped, b.notes, b.nodes, b.link, b.replayed, b.cores, b.clock_error_ns)
        and sorted(a.profile, key=repr) == sorted(b.profile, key=repr)
    )  # fmt: skip


def test_a_saved_trace_is_read_back_to_the_nanosecond(tmp_path: Path) -> None:
    for seed in SEEDS:
        trace = some_rich_trace(random.Random(seed))
        assert same(load_trace(str(trace.save(tmp_path / "x.json"))), trace), seed
    trace = Trace([], [Scalar(0, "loss", 3, float("nan"))], ranks=["a"], start_ns=0, end_ns=9)
    (scalar,) = load_trace(trace.save(tmp_path / "x.json")).scalars
    assert np.isnan(scalar.value)


@pytest.mark.parametrize("piece", [1, 2, 7, 1000])
def test_a_file_is_written_in_pieces(piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("labkit.tracing.trace.CHUNK", piece)
    for trace in (some_rich_trace(random.Random(3)), Trace([], ranks=[])):
        path = trace.save(tmp_path / "x.json")
        assert json.loads(path.read_text(encoding="utf-8"))["traceEvents"] == json.loads(json.dumps(chrome(trace)))
        assert same(load_trace(path), trace)


def test_the_rows_and_curves_of_the_file() -> None:
    """What each event needs is checked in test_perfetto.py."""
    events = chrome(some_rich_trace(random.Random(1)))
    assert {e["ph"] for e in events} == {"M", "X", "C", "i"}  # no arrows: no message of this trace has two ends
    titles = [e for e in events if e["name"] == "thread_name"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in titles}
    assert len(names) == len(titles), "no two rows in one place"
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"master", "größer"}
    rows = {"call", "step", "compute", "communication"}
    seen = {"torch.profiler: thread 7", "torch.profiler: stream 20"}
    assert {n.split(" (")[0] for n in names.values()} == rows | {f"{row} on cuda" for row in rows} | seen
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"} == set(names)
    assert {(e["pid"], e["name"]) for e in events if e["ph"] == "C" and "cat" not in e} == {(0, "loss"), (1, "loss")}


def test_spans_in_one_row_nest_or_are_disjoint() -> None:
    for seed in SEEDS:
        rng = random.Random(seed)
        spans = [travel(0, start := rng.randrange(50), start + rng.randrange(20)) for _ in range(25)]
        rows: dict[int, list[tuple[int, int]]] = {}
        for event in chrome(Trace(spans, ranks=["a"], start_ns=0)):
            if event["ph"] == "X":
                start = round(event["ts"] * 1000)
                rows.setdefault(event["tid"], []).append((start, start + round(event["dur"] * 1000)))
        for row in rows.values():
            for (start, end), (next_start, next_end) in itertools.combinations(row, 2):
                assert next_start >= end or (next_start >= start and next_end <= end), "by start, the outer one first"


def test_rows_are_in_the_order_of_a_run_and_spans_that_do_not_cross_share_one() -> None:
    spans = [
        travel(0, 0, 10), travel(0, 5, 15), travel(0, 5, 15, device="cuda"), compute(0, 0, 5), compute(0, 3, 8),
        step(0, 0, 20), Span(0, "train", "call", 0, 20),
    ]  # fmt: skip
    rows = [(e["tid"], e["args"]["name"]) for e in chrome(Trace(spans, ranks=["a"])) if e["name"] == "thread_name"]
    names = "call, step, compute, compute (2), communication, communication (2), communication on cuda"
    assert rows == list(enumerate(names.split(", "), 1000))
    spans = [compute(0, 10 * i, 10 * i + 10) for i in range(5)] + [compute(0, 11, 15), compute(0, 20, 24)]
    assert {e["tid"] for e in chrome(Trace(spans, ranks=["a"])) if e["ph"] == "X"} == {1000}


def test_a_missing_file_is_reported() -> None:
    with pytest.raises(
        LabError, match=r"no trace at 'nowhere.json': run.trace.save\(path\) writes a file, LABKIT_TRACE=folder torch"
    ):
        load_trace("nowhere.json")


# Size.


@pytest.mark.slow
def test_a_million_spans_are_summed() -> None:
    trace = many(1_000_000, ranks=4)  # 9 µs each, every third an all_reduce, which each rank enters 300 ns after the previous one
    for rank, share in enumerate(trace.shares()):
        waiting_ns = 83_333 * (3 - rank) * 300
        assert share.compute_ns == 166_667 * 9_000
        assert (share.communication_ns, share.waiting_ns) == (83_333 * 9_000 - waiting_ns, waiting_ns)
    assert len(trace.between(trace.start_ns, trace.start_ns + 10**6)) == 4 * 100


def are_sets(parts: dict[str, Intervals]) -> bool:
    return all((p[:, 0] < p[:, 1]).all() and (p[1:, 0] > p[:-1, 1]).all() for p in parts.values())


def test_activities_are_disjoint_and_ascending() -> None:
    for seed in SEEDS:
        trace = some_trace(random.Random(seed))
        assert all(are_sets(trace.activity(rank)) for rank in range(3)), seed
