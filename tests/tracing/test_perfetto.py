"""The file for Perfetto: each event follows the format's description, arrows end where they should, curves."""

from __future__ import annotations

import json
import math
import random
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pytest
from synthetic import chrome

from labkit.recording.events import ProfilerEvent, Scalar
from labkit.recording.schema import STEPS_IN_ALL, Span
from labkit.tracing.load import load_trace
from labkit.tracing.trace import Trace
from labkit.tracing.trace_file import KEY

Event = dict[str, Any]

# Source: "Trace Event Format", the Chromium project's Catapult documentation: what an event of each phase must have.
REQUIRED: Final = {
    "X": {"name": str, "cat": str, "ts": float, "dur": float, "pid": int, "tid": int, "args": dict},
    "M": {"name": str, "pid": int, "tid": int, "args": dict},
    "C": {"name": str, "ts": float, "pid": int, "args": dict},
    "i": {"name": str, "cat": str, "ts": float, "pid": int, "s": str, "args": dict},
    "s": {"name": str, "cat": str, "id": int, "ts": float, "pid": int, "tid": int},
    "f": {"name": str, "cat": str, "id": int, "ts": float, "pid": int, "tid": int, "bp": str},
}
METADATA: Final = {
    "process_name": "name",
    "thread_name": "name",
    "process_sort_index": "sort_index",
    "thread_sort_index": "sort_index",
}


def checked(spans: list[Span], **more: Any) -> list[Event]:
    """The events of a trace of three ranks, read back from JSON and checked."""
    text = json.dumps(chrome(Trace(spans, ranks=["a", "b", "c"], start_ns=0, **more)), allow_nan=False)
    events: list[Event] = json.loads(text)
    arrows: dict[int, list[Event]] = {}
    for event in events:
        for field, kind in REQUIRED[event["ph"]].items():
            assert isinstance(event[field], (int, float) if kind is float else kind), event
        assert event["ph"] != "M" or set(event["args"]) == {METADATA[event["name"]]}
        assert event["ts"] >= 0, "Perfetto drops what is below zero"
        assert event["tid"] not in (0, event["pid"]), "Perfetto takes either for the process's main thread, one row for both"
        assert event["ph"] != "X" or event["dur"] >= 0
        assert event["ph"] != "C" or all(type(v) in (int, float) for v in event["args"].values()), "inf hides a whole curve"
        if event["ph"] in "sf":
            arrows.setdefault(event["id"], []).append(event)
    assert len({e["tid"] for e in events}) == len({(e["pid"], e["tid"]) for e in events}), "no number stands for two rows"
    for start, finish in arrows.values():
        assert (start["ph"], finish["ph"], finish["bp"]) == ("s", "f", "e")
        assert (start["name"], start["cat"]) == (finish["name"], finish["cat"]), "viewers tie an arrow by name, category and id"
        assert start["ts"] <= finish["ts"]
        source, target = around(events, start), around(events, finish)
        assert source["ts"] <= target["ts"], "Perfetto takes the span that began first for the source"
        drawn_from = source["ts"] if source["ts"] == target["ts"] else source["ts"] + source["dur"]
        assert drawn_from <= target["ts"] + 1e-6, "Perfetto draws from the source's end to the target's begin"
    return events


def around(events: list[Event], arrow: Event) -> Event:
    """The innermost span under way in an arrow's row: this is where a viewer attaches the arrow."""
    at = arrow["ts"]
    inside = [
        x for x in events
        if x["ph"] == "X" and (x["pid"], x["tid"]) == (arrow["pid"], arrow["tid"])
        and (x["ts"] <= at < x["ts"] + x["dur"] or x["ts"] == at)
    ]  # fmt: skip
    return inside[-1]


def arrows(events: list[Event]) -> list[tuple[str, str, str]]:
    """For each arrow, its name and the names of the spans at which a viewer shows its start and end."""

    def tied_to(event: Event) -> str:
        span = around(events, event)
        return f"{span['name']} {span['pid']}"

    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    return [(e["name"], tied_to(starts[e["id"]]), tied_to(e)) for e in events if e["ph"] == "f"]


def message(rank: int, name: str, start_ns: int, end_ns: int, peer: int, group: str, match: int) -> Span:
    return Span(rank, name, "communication", start_ns, end_ns, nbytes=4, peer=peer, group=group, match=match)


def test_an_arrow_goes_from_a_send_to_its_receive() -> None:
    there, back = "p2p 0>1 tag 0", "p2p 1>0 tag 0"
    spans = [
        message(0, "isend", 10, 500, 1, there, 1), message(0, "isend", 20, 400, 1, there, 2),
        message(1, "recv", 5, 100, 0, there, 1), message(1, "irecv", 7, 90, 0, there, 2),
        message(1, "send", 100, 110, 0, back, 1), message(0, "recv", 50, 120, 1, back, 1),
    ]  # fmt: skip
    events = checked(spans)
    # Each receive began before its send.
    own = [("message", "isend 0", "message from a 1")] * 2
    assert sorted(arrows(events)) == [*own, ("message", "send 1", "message from b 0")]
    # The second message is inside the first in time, and still has a row of its own.
    assert len({e["tid"] for e in events if e["ph"] == "X" and e["pid"] == 0}) == 3
    assert {e["ts"] for e in events if e["ph"] == "f"} == {0.099, 0.089, 0.119}
    # A send that waits is drawn until its receive.
    spans = [message(0, "send", 10, 90, 1, there, 1), message(1, "recv", 60, 95, 0, there, 1)]
    spans += [message(1, "send", 100, 110, 0, back, 1), message(0, "recv", 120, 130, 1, back, 1)]
    events = checked(spans)
    assert sorted(arrows(events)) == [("message", "message to a 1", "recv 0"), ("message", "message to b 0", "recv 1")]
    drawn = [(e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["cat"] == "message"]
    assert drawn == [("message to b", 0.01, 0.05), ("message to a", 0.1, 0.01)]


@pytest.mark.parametrize(
    "spans",
    [
        [message(0, "send", 10, 20, 1, "p2p 0>1 tag 0", 1), message(1, "recv", 1, 10, 0, "p2p 0>1 tag 0", 1)],
        [message(0, "send", 10, 20, 1, "p2p 0>1 tag 0", 1)],
        [Span(r, "all_reduce", "communication", 1, 9, nbytes=4, group="world", match=1) for r in range(3)],
    ],
    ids=["back in time", "to a missing rank", "a collective"],
)
def test_what_has_no_arrow(spans: list[Span]) -> None:
    assert arrows(checked(spans)) == []


def test_remote_calls_have_arrows_in_both_directions() -> None:
    spans = [
        message(0, "rpc_sync f", 0, 100, 1, "rpc 0>1", 1), Span(1, "serve f", "compute", 20, 60),
        message(1, "reply f", 60, 63, 0, "rpc 0>1", 1),
        message(0, "rpc_async f", 5, 130, 1, "rpc 0>1", 2), Span(1, "serve f", "compute", 25, 90),
        Span(1, "serve f", "compute", 26, 59), message(1, "reply f", 90, 93, 0, "rpc 0>1", 2),
        message(0, "remote f", 200, 205, 1, "", 0), Span(1, "serve f", "compute", 210, 250),
        message(1, "value f", 250, 252, 0, "rpc 0>1", 3), message(0, "to_here", 206, 300, 1, "rpc 0>1", 3),
        message(2, "rpc_sync g", 0, 100, 1, "rpc 2>1", 1), message(1, "reply g", 50, 60, 2, "rpc 2>1", 1),
    ]  # fmt: skip
    events = checked(spans)
    assert sorted(arrows(events)) == [
        ("call", "call to b 0", "serve f 1"), ("call", "call to b 0", "serve f 1"), ("reply", "reply f 1", "reply from b 0"),
        ("reply", "reply f 1", "reply from b 0"), ("reply", "reply g 1", "reply from b 2"),
        ("reply", "value f 1", "reply from b 0"),
    ]  # fmt: skip
    served = {e["ts"] for e in events if e["ph"] == "f" and e["name"] == "call"}
    assert served == {0.02, 0.025}, "each call has its own"


def test_bytes_under_way_are_a_curve() -> None:
    times = ((0, 30), (10, 20), (30, 40))
    spans = [message(0, "isend", start, end, 1, "x", match) for match, (start, end) in enumerate(times, 1)]
    events = checked(spans, scalars=[Scalar(0, "loss", 5, 0.5)])
    curve = [(e["ts"], e["args"]["under way"]) for e in events if e["name"] == "bytes"]
    assert curve == [(0.0, 4), (0.01, 8), (0.02, 4), (0.03, 4), (0.04, 0)]
    assert [(e["ts"], e["args"]) for e in events if e["name"] == "loss"] == [(0.005, {"value": 0.5})]


def test_a_root_is_named() -> None:
    spans = [Span(rank, "broadcast", "communication", 0, 5, group="world", match=1, root=1) for rank in range(3)]
    assert [e["args"] for e in checked(spans) if e["ph"] == "X"] == [{"group": "world", "match": 1, "root": 1}] * 3


def test_ranks_and_rows_are_sorted() -> None:
    spans = [
        message(1, "send", 0, 9, 0, "", 0),
        Span(1, "forward", "compute", 0, 9),
        Span(1, "forward", "compute", 2, 4, device="cuda"),
    ]
    seen = [ProfilerEvent(1, "thread 3", "aten::mm", "cpu_op", 1, 5), ProfilerEvent(1, "thread 3", "aten::empty", "cpu_op", 2, 3)]
    events = checked(spans, profile=seen)
    assert [(e["pid"], e["args"]["sort_index"]) for e in events if e["name"] == "process_sort_index"] == [(0, 0), (1, 1), (2, 2)]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    order = {e["tid"]: e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    assert [rows[tid] for tid in sorted(rows, key=order.__getitem__)] == [
        "compute", "compute on cuda", "communication", "torch.profiler: thread 3",
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(30))
def test_any_trace_is_well_formed(seed: int) -> None:
    rng = random.Random(seed)
    spans = []
    for _ in range(rng.randrange(60)):
        rank, start = rng.randrange(3), rng.randrange(1000)
        kind = rng.choice(["compute", "communication", "step", "call"])
        name = rng.choice(["send", "recv", "reply f", "value f", "serve f", "rpc_sync f", "to_here"])
        more = {"peer": rng.randrange(-4, 3), "match": rng.randrange(5), "nbytes": rng.randrange(3)}
        texts = {"group": rng.choice(["", "world", "p2p 0>1 tag 0", "rpc 0>2"]), "device": rng.choice(["cpu", "cuda"])}
        spans.append(Span(rank, name, kind, start, start + rng.randrange(100), **more, **texts))
    curves: dict[int, list[Event]] = {}
    for event in checked(spans):
        if event["ph"] == "C" and event["name"] == "bytes":
            curves.setdefault(event["pid"], []).append(event)
    for curve in curves.values():
        assert all(a["ts"] < b["ts"] for a, b in pairwise(curve))
        assert min(e["args"]["under way"] for e in curve) == 0


def test_a_value_that_is_not_finite_is_a_mark() -> None:
    """So is the total number of steps, which would fill the row as a curve."""
    scalars = [Scalar(0, "loss", 1, 0.5), Scalar(0, "loss", 2, math.inf), Scalar(0, "loss", 3, math.nan)]
    scalars += [Scalar(1, STEPS_IN_ALL, 4, 20.0)]
    events = checked([], scalars=scalars)
    assert [(e["name"], e["args"]["value"]) for e in events if e["ph"] == "C"] == [("loss", 0.5)]
    assert [(e["name"], e["pid"], e["s"]) for e in events if e["ph"] == "i"] == [
        ("loss = inf", 0, "p"), ("loss = nan", 0, "p"), ("steps in all = 20", 1, "p"),
    ]  # fmt: skip


def test_a_part_of_a_trace_begins_at_zero(tmp_path: Path) -> None:
    """A span that reaches into the part began before it."""
    whole = Trace(
        [Span(0, "train", "call", 5, 90, wait_start_ns=7, wait_end_ns=8), Span(0, "forward", "compute", 40, 60)], ranks=["a"]
    )
    part = whole.between(30, 70)
    assert [e["ts"] for e in chrome(part) if e["ph"] == "X"] == [0.0, 0.035]
    again = load_trace(part.save(tmp_path / "x.json"))
    assert (again.spans, again.start_ns, again.end_ns) == (part.spans, 30, 70)


def test_waiting_inside_a_span_counts_as_its_time() -> None:
    span = Span(0, "recv", "communication", 10, 90, wait_start_ns=20, wait_end_ns=80)
    (event,) = [e for e in checked([span]) if e["ph"] == "X"]
    assert event["args"] == {"wait_start_ns": 20, "wait_end_ns": 80}
    later = Trace([Span(0, "recv", "communication", 1010, 1090, wait_start_ns=1010, wait_end_ns=1080)], ranks=["a"])
    (event,) = [e for e in chrome(later) if e["ph"] == "X"]
    assert event["args"] == {"wait_start_ns": 0, "wait_end_ns": 70}


@pytest.mark.parametrize("name", ["größe", "\N{ROCKET}", 'a "quoted" \\ name\n', "half \udc80"])
def test_a_file_has_unescaped_characters(name: str, tmp_path: Path) -> None:
    """Perfetto rejects files with escaped surrogate pairs, and shows other escapes in curve names literally."""
    path = Trace([Span(0, name, "compute", 1, 2)], [Scalar(0, name, 1, 1.0)], ranks=[name]).save(tmp_path / "x.json")
    assert "\\u" not in path.read_text(encoding="utf-8")
    again = load_trace(path)
    assert (again.spans[0].name, again.scalars[0].name, again.ranks) == (name, name, (name,))


def test_the_trace_for_load_trace_is_behind_all_that_perfetto_knows(tmp_path: Path) -> None:
    """It ignores all that follows a key that it does not know, and rejects a large entry of one that it knows."""
    path = Trace([Span(0, "forward", "compute", 1, 2)], ranks=["a"]).save(tmp_path / "x.json")
    assert list(json.loads(path.read_text())) == ["traceEvents", "displayTimeUnit", KEY]
