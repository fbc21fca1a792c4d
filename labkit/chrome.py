"""Trace files: spans and scalars as events of the Chrome trace format, and back without the loss of a nanosecond.

Source: "Trace Event Format", the Chromium project's Catapult documentation. Its times are floating-point microseconds; counted
from the start of the trace they hold whole nanoseconds exactly for as long as any run lasts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any, Final

from labkit.ring import ROOTED, SERVE
from labkit.spans import ProfilerEvent, Scalar, Span

__all__ = ["read_events", "write_events"]

_EVENT: Final = ("rank", "name", "kind", "start_ns", "end_ns")  # an event has places for these; the other fields are arguments
_DEFAULTS: Final = {f.name: f.default for f in fields(Span) if f.name not in _EVENT}
_ROWS: Final = ("call", "step", "compute", "communication")  # from top to bottom
_DERIVED: Final = "derived"  # the category of what follows from the rest, and is not read back
_TORCH: Final = "torch "  # how the categories of torch's profiler begin

Event = dict[str, Any]


def write_events(
    spans: Iterable[Span],
    scalars: Iterable[Scalar],
    ranks: Sequence[str],
    start_ns: int,
    profile: Iterable[ProfilerEvent] = (),
) -> list[Event]:
    """The events: a process for each rank, with rows for its calls, steps, work and communication.

    A curve for each scalar and for the bytes under way, an arrow for each message and remote call, and what torch's profiler saw
    in rows of its own below.

    Args:
        spans: in any order.
        scalars: in any order.
        ranks: the names of the ranks.
        start_ns: what the times are counted from.
        profile: in any order.
    """
    events = [_about("process_name", rank, 0, name=name) for rank, name in enumerate(ranks)]
    events += [_about("process_sort_index", rank, 0, sort_index=rank) for rank in range(len(ranks))]
    spans = list(spans)
    rows: dict[tuple[int, str, str], list[int]] = {}
    for i, span in enumerate(spans):
        rows.setdefault((span.rank, span.kind, span.device), []).append(i)
    next_row, places = [0] * len(ranks), [0] * len(spans)
    for rank, kind, device in sorted(rows, key=lambda row: (row[0], _ROWS.index(row[1]), row[2])):
        own = sorted(rows[rank, kind, device], key=lambda i: (spans[i].start_ns, -spans[i].end_ns))
        title = kind if device == "cpu" else f"{kind} on {device}"
        # An operation that lies within another in time is no part of it, and an arrow to it must not end at the other.
        numbers = list(_lanes([spans[i] for i in own], nest=kind != "communication"))
        for i, lane in zip(own, numbers, strict=True):
            span, places[i] = spans[i], next_row[rank] + lane
            arguments = {k: v for k, default in _DEFAULTS.items() if (v := getattr(span, k)) != default}
            if span.root >= 0:
                arguments["root"] = ROOTED - arguments.pop("peer")  # for who reads it in a viewer
            events.append(
                {"ph": "X", "pid": rank, "tid": places[i], "name": span.name, "cat": kind, "args": arguments}
                | {"ts": (span.start_ns - start_ns) / 1e3, "dur": span.duration_ns / 1e3}
            )
        next_row[rank] = _name_rows(events, title, rank, next_row[rank], max(numbers) + 1)
    tracks: dict[tuple[int, str], list[ProfilerEvent]] = {}
    for event in profile:
        tracks.setdefault((event.rank, event.track), []).append(event)
    for rank, track in sorted(tracks):
        seen = sorted(tracks[rank, track], key=lambda e: (e.start_ns, -e.end_ns))
        numbers = list(_lanes(seen))
        for event, lane in zip(seen, numbers, strict=True):
            ts, dur = (event.start_ns - start_ns) / 1e3, (event.end_ns - event.start_ns) / 1e3
            events.append(
                {"ph": "X", "pid": rank, "tid": next_row[rank] + lane, "name": event.name, "cat": f"{_TORCH}{event.category}"}
                | {"args": {"track": track}, "ts": ts, "dur": dur}
            )
        next_row[rank] = _name_rows(events, f"torch.profiler: {track}", rank, next_row[rank], max(numbers) + 1)
    for s in scalars:
        # JSON has no number that is not finite; as a text it stays what it is.
        value = s.value if s.value - s.value == 0 else str(s.value)
        ts = (s.time_ns - start_ns) / 1e3
        events.append({"ph": "C", "pid": s.rank, "tid": 0, "name": s.name, "ts": ts, "args": {"value": value}})
    return events + _under_way(spans, start_ns) + _arrows(spans, places, start_ns)


def read_events(events: Iterable[Event], start_ns: int) -> tuple[list[Span], list[Scalar], list[ProfilerEvent]]:
    """The spans, scalars and profiler's events of events that `write_events` made.

    Args:
        events: in any order; those of other kinds are passed over.
        start_ns: what their times are counted from.
    """
    spans, scalars, profile = [], [], []
    for event in events:
        if event["ph"] == "X":
            rank, name, category = event["pid"], event["name"], event["cat"]
            begin = start_ns + round(event["ts"] * 1e3)
            end = begin + round(event["dur"] * 1e3)
            if category.startswith(_TORCH):
                profile.append(ProfilerEvent(rank, event["args"]["track"], name, category.removeprefix(_TORCH), begin, end))
            else:
                arguments = {k: v for k, v in event["args"].items() if k in _DEFAULTS}
                if "root" in event["args"]:
                    arguments["peer"] = ROOTED - event["args"]["root"]
                spans.append(Span(rank, name, category, begin, end, **arguments))
        elif event["ph"] == "C" and event.get("cat") != _DERIVED:
            time_ns = start_ns + round(event["ts"] * 1e3)
            scalars.append(Scalar(event["pid"], event["name"], time_ns, float(event["args"]["value"])))
    return spans, scalars, profile


def _name_rows(events: list[Event], title: str, rank: int, first: int, count: int) -> int:
    """Give the rows of one title their names; where the next one begins."""
    for row in range(first, first + count):
        events.append(_about("thread_name", rank, row, name=title if row == first else f"{title} ({row - first + 1})"))
        events.append(_about("thread_sort_index", rank, row, sort_index=row))
    return first + count


def _about(what: str, pid: int, tid: int, **args: Any) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "ts": 0, "name": what, "args": args}


def _under_way(spans: Sequence[Span], start_ns: int) -> list[Event]:
    """For each rank, a curve of the bytes of the operations that it has issued and that are not complete."""
    changes: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for span in spans:
        if span.nbytes:
            changes[span.rank][span.start_ns] += span.nbytes
            changes[span.rank][span.end_ns] -= span.nbytes
    events = []
    for rank, of_rank in sorted(changes.items()):
        nbytes = 0
        for time_ns, change in sorted(of_rank.items()):
            nbytes += change
            events.append(
                {"ph": "C", "pid": rank, "tid": 0, "name": "bytes under way", "cat": _DERIVED}
                | {"ts": (time_ns - start_ns) / 1e3, "args": {"bytes": nbytes}}
            )
    return events


def _arrows(spans: Sequence[Span], places: Sequence[int], start_ns: int) -> list[Event]:
    """From each message's send to its receive; from a remote call to what serves it, and from the reply back to the call.

    A viewer ties the end of an arrow to the span in whose row and time it lies; so an arrow ends a nanosecond before its span.
    """
    events: list[Event] = []
    serving: dict[tuple[int, str, int], int] = {}  # a call is served until the moment in which its reply begins
    pairs: dict[tuple[str, int], list[int]] = defaultdict(list)
    for i, span in enumerate(spans):
        if span.name.startswith(SERVE) and span.kind == "compute":
            serving[span.rank, span.name.removeprefix(SERVE), span.end_ns] = i
        elif span.peer >= 0 and span.group and span.kind == "communication":
            pairs[span.group, span.match].append(i)

    def arrow(name: str, source: int, target: int, *, to_start: bool = False) -> None:
        begin_ns, last_ns = spans[source].start_ns, max(spans[target].start_ns, spans[target].end_ns - 1)
        end_ns = max(begin_ns, spans[target].start_ns) if to_start else last_ns
        if begin_ns <= end_ns <= last_ns:  # else two clocks disagree, and no arrow goes back in time
            number = len(events) // 2 + 1
            for ph, i, time_ns in (("s", source, begin_ns), ("f", target, end_ns)):
                event = {"ph": ph, "id": number, "pid": spans[i].rank, "tid": places[i], "name": name, "cat": "message"}
                events.append(event | {"ts": (time_ns - start_ns) / 1e3, "args": {}} | ({"bp": "e"} if ph == "f" else {}))

    for pair in pairs.values():
        if len(pair) != 2 or spans[pair[0]].rank == spans[pair[1]].rank:
            continue  # one end is not in the trace
        replies = [i for i in pair if spans[i].name.startswith(("reply ", "value "))]
        if len(replies) != 1:
            senders = [i for i in pair if spans[i].group.startswith(f"p2p {spans[i].rank}>")]
            if len(senders) == 1:
                arrow("message", senders[0], pair[pair[0] == senders[0]])
            continue
        reply, call = replies[0], pair[pair[0] == replies[0]]
        served = serving.get((spans[reply].rank, spans[reply].name[len("reply ") :], spans[reply].start_ns))
        if served is not None and spans[call].name != "to_here":
            arrow("call", call, served, to_start=True)
        arrow("reply", reply, call)
    return events


def _lanes(spans: Sequence[Span | ProfilerEvent], *, nest: bool = True) -> Iterator[int]:
    """A lane for each span: viewers draw only those that nest or lie apart. They come by start, the longer first.

    Args:
        spans: what is to be laid out.
        nest: whether one may lie within another.
    """
    lanes: list[list[int]] = []  # the ends of the spans that are open in each lane, the innermost last
    for span in spans:
        lane = 0
        while lane < len(lanes):
            ends = lanes[lane]
            while ends and ends[-1] <= span.start_ns:
                ends.pop()
            if not ends or (nest and span.end_ns <= ends[-1]):
                break
            lane += 1
        else:
            lanes.append([])
        lanes[lane].append(span.end_ns)
        yield lane
