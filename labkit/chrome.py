"""Trace files: spans and scalars as events of the Chrome trace format, and back without the loss of a nanosecond.

Source: "Trace Event Format", the Chromium project's Catapult documentation. Its times are floating-point microseconds; counted
from the start of the trace they hold whole nanoseconds exactly for as long as any run lasts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any, Final

from labkit.spans import Scalar, Span

__all__ = ["read_events", "write_events"]

_EVENT: Final = ("rank", "name", "kind", "start_ns", "end_ns")  # an event has places for these; the other fields are arguments
_DEFAULTS: Final = {f.name: f.default for f in fields(Span) if f.name not in _EVENT}
_ROWS: Final = ("call", "step", "compute", "communication")  # from top to bottom


def write_events(spans: Iterable[Span], scalars: Iterable[Scalar], ranks: Sequence[str], start_ns: int) -> list[dict[str, Any]]:
    """The events: a process for each rank, with rows for its calls, steps, work and communication, and a curve for each scalar.

    Args:
        spans: in any order.
        scalars: in any order.
        ranks: the names of the ranks.
        start_ns: what the times are counted from.
    """
    events: list[dict[str, Any]] = [_title("process_name", name, rank, 0) for rank, name in enumerate(ranks)]
    rows: dict[tuple[int, str, str], list[Span]] = {}
    for span in spans:
        rows.setdefault((span.rank, span.kind, span.device), []).append(span)
    next_row = [0] * len(ranks)
    for rank, kind, device in sorted(rows, key=lambda row: (row[0], _ROWS.index(row[1]), row[2])):
        own = sorted(rows[rank, kind, device], key=lambda s: (s.start_ns, -s.end_ns))
        title, base, lanes = kind if device == "cpu" else f"{kind} on {device}", next_row[rank], 0
        for span, lane in zip(own, _lanes(own), strict=True):
            if lane == lanes:
                events.append(_title("thread_name", title if lane == 0 else f"{title} ({lane + 1})", rank, base + lane))
                lanes += 1
            arguments = {k: v for k, default in _DEFAULTS.items() if (v := getattr(span, k)) != default}
            events.append(
                {"ph": "X", "pid": rank, "tid": base + lane, "name": span.name, "cat": kind, "args": arguments}
                | {"ts": (span.start_ns - start_ns) / 1e3, "dur": span.duration_ns / 1e3}
            )
        next_row[rank] += lanes
    for s in scalars:
        # JSON has no number that is not finite; as a text it stays what it is.
        value = s.value if s.value - s.value == 0 else str(s.value)
        ts = (s.time_ns - start_ns) / 1e3
        events.append({"ph": "C", "pid": s.rank, "tid": 0, "name": s.name, "ts": ts, "args": {"value": value}})
    return events


def read_events(events: Iterable[dict[str, Any]], start_ns: int) -> tuple[list[Span], list[Scalar]]:
    """The spans and scalars of events that `write_events` made.

    Args:
        events: in any order; those of other kinds are passed over.
        start_ns: what their times are counted from.
    """
    spans, scalars = [], []
    for event in events:
        if event["ph"] == "X":
            begin = start_ns + round(event["ts"] * 1e3)
            arguments = {k: v for k, v in event["args"].items() if k in _DEFAULTS}
            spans.append(Span(event["pid"], event["name"], event["cat"], begin, begin + round(event["dur"] * 1e3), **arguments))
        elif event["ph"] == "C":
            time_ns = start_ns + round(event["ts"] * 1e3)
            scalars.append(Scalar(event["pid"], event["name"], time_ns, float(event["args"]["value"])))
    return spans, scalars


def _title(what: str, name: str, pid: int, tid: int) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "ts": 0, "name": what, "args": {"name": name}}


def _lanes(spans: Sequence[Span]) -> Iterator[int]:
    """A lane for each span: viewers draw only those that nest or lie apart. They come by start, the longer first."""
    lanes: list[list[int]] = []  # the ends of the spans that are open in each lane, the innermost last
    for span in spans:
        lane = 0
        while lane < len(lanes):
            ends = lanes[lane]
            while ends and ends[-1] <= span.start_ns:
                ends.pop()
            if not ends or span.end_ns <= ends[-1]:
                break
            lane += 1
        else:
            lanes.append([])
        lanes[lane].append(span.end_ns)
        yield lane
