"""Trace files: spans and scalars as events of the Chrome trace format, and back without the loss of a nanosecond.

Source: "Trace Event Format", the Chromium project's Catapult documentation. Its times are floating-point microseconds;
counted from the start of the trace they hold whole nanoseconds exactly for as long as any run lasts. Perfetto is
stricter than the format and differs from it; what it wants was found with its own trace processor (docs/decisions.md).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from labkit.recording.events import ProfilerEvent, Scalar
from labkit.recording.group_keys import GroupKind, kind_of, sender_of
from labkit.recording.operations import REPLY, SERVE, TO_HERE, VALUE, type_of
from labkit.recording.schema import FIELDS, ROOTED, STEPS_IN_ALL, Span

__all__ = ["read_events", "write_events"]

_EVENT: Final = ("rank", "name", "kind", "start_ns", "end_ns")  # an event has places for these; the other fields are arguments
_DEFAULTS: Final = {f.name: f.default for f in FIELDS if f.name not in _EVENT}
_ROWS: Final = ("call", "step", "compute", "communication")  # from top to bottom
_DERIVED: Final = ("derived", "message")  # the categories of what follows from the rest, and is not read back
_TORCH: Final = "torch "  # how the categories of torch's profiler begin
_TIMES: Final = tuple(f.name for f in FIELDS if f.is_time and f.name not in _EVENT)  # counted like the events' own times
_ROWS_APART: Final = 1000  # between the first row of one rank and that of the next

Event = dict[str, Any]


def write_events(
    spans: Iterable[Span],
    scalars: Iterable[Scalar],
    ranks: Sequence[str],
    start_ns: int,
    profile: Iterable[ProfilerEvent] = (),
) -> Iterator[Event]:
    """The events, one at a time: a process for each rank, with rows for its calls, steps, work and communication.

    A curve for each scalar and for the bytes under way, an arrow for each message and remote call, and what torch's
    profiler saw in rows of its own below. Values that are not finite are marks, and so is how many steps there will be.

    Args:
        spans: in any order.
        scalars: in any order.
        ranks: the names of the ranks.
        start_ns: what the times are counted from; nothing may begin earlier, since Perfetto drops times below zero.
        profile: in any order.
    """
    next_row = [_first_row(rank) for rank in range(len(ranks))]
    for rank, name in enumerate(ranks):
        yield _about("process_name", rank, next_row[rank], name=name)
        yield _about("process_sort_index", rank, next_row[rank], sort_index=rank)
    spans = list(spans)
    rows: dict[tuple[int, str, str], list[int]] = {}
    for i, span in enumerate(spans):
        rows.setdefault((span.rank, span.kind, span.device), []).append(i)
    places = [0] * len(spans)
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
            arguments |= {k: arguments[k] - start_ns for k in _TIMES if k in arguments}
            event = {"ph": "X", "pid": rank, "tid": places[i], "name": span.name, "cat": kind, "args": arguments}
            yield event | {"ts": (span.start_ns - start_ns) / 1e3, "dur": span.duration_ns / 1e3}
        yield from _names(title, rank, next_row[rank], max(numbers) + 1)
        next_row[rank] += max(numbers) + 1
    tracks: dict[tuple[int, str], list[ProfilerEvent]] = {}
    for one in profile:
        tracks.setdefault((one.rank, one.track), []).append(one)
    for rank, track in sorted(tracks):
        seen = sorted(tracks[rank, track], key=lambda e: (e.start_ns, -e.end_ns))
        numbers = list(_lanes(seen))
        for one, lane in zip(seen, numbers, strict=True):
            ts, dur = (one.start_ns - start_ns) / 1e3, (one.end_ns - one.start_ns) / 1e3
            event = {"ph": "X", "pid": rank, "tid": next_row[rank] + lane, "name": one.name, "cat": f"{_TORCH}{one.category}"}
            yield event | {"args": {"track": track}, "ts": ts, "dur": dur}
        yield from _names(f"torch.profiler: {track}", rank, next_row[rank], max(numbers) + 1)
        next_row[rank] += max(numbers) + 1
    for s in scalars:
        place = {"pid": s.rank, "tid": _first_row(s.rank), "ts": (s.time_ns - start_ns) / 1e3}
        if s.value - s.value == 0 and s.name != STEPS_IN_ALL:
            yield place | {"ph": "C", "name": s.name, "args": {"value": s.value}}
        else:  # a mark. JSON has no number that is not finite, and as a text one would hide the whole curve
            mark = {"ph": "i", "s": "p", "name": f"{s.name} = {s.value:g}", "cat": "scalar"}
            yield place | mark | {"args": {"name": s.name, "value": str(s.value)}}
    yield from _under_way(spans, start_ns)
    yield from _arrows(spans, places, ranks, start_ns)


def read_events(events: Iterable[Event], start_ns: int) -> tuple[list[Span], list[Scalar], list[ProfilerEvent]]:
    """The spans, scalars and profiler's events of events that `write_events` made.

    Args:
        events: in any order; those of other kinds are passed over.
        start_ns: what their times are counted from.
    """
    spans, scalars, profile = [], [], []
    for event in events:
        if event.get("cat") in _DERIVED:
            continue
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
                arguments |= {k: arguments[k] + start_ns for k in _TIMES if k in arguments}
                spans.append(Span(rank, name, category, begin, end, **arguments))
        elif event["ph"] in ("C", "i"):
            args, time_ns = event["args"], start_ns + round(event["ts"] * 1e3)
            scalars.append(Scalar(event["pid"], args.get("name", event["name"]), time_ns, float(args["value"])))
    return spans, scalars, profile


def _first_row(rank: int) -> int:
    """The number of a rank's first row. Neither 0 nor the rank's own: with either, Perfetto makes two rows into one."""
    return _ROWS_APART * (rank + 1)


def _names(title: str, rank: int, first: int, count: int) -> Iterator[Event]:
    """The names of the rows of one title."""
    for row in range(first, first + count):
        yield _about("thread_name", rank, row, name=title if row == first else f"{title} ({row - first + 1})")
        yield _about("thread_sort_index", rank, row, sort_index=row)


def _about(metadata: str, pid: int, tid: int, **args: Any) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "ts": 0, "name": metadata, "args": args}


def _under_way(spans: Sequence[Span], start_ns: int) -> Iterator[Event]:
    """For each rank, a curve of the bytes of the operations that it has issued and that are not complete."""
    changes: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for span in spans:
        if span.nbytes:
            changes[span.rank][span.start_ns] += span.nbytes
            changes[span.rank][span.end_ns] -= span.nbytes
    for rank, of_rank in sorted(changes.items()):
        nbytes = 0
        for time_ns, change in sorted(of_rank.items()):
            nbytes += change
            # Perfetto calls the curve by both, the name and what the value is.
            event = {"ph": "C", "pid": rank, "tid": _first_row(rank), "name": "bytes", "cat": _DERIVED[0]}
            yield event | {"ts": (time_ns - start_ns) / 1e3, "args": {"under way": nbytes}}


def _arrows(spans: Sequence[Span], places: Sequence[int], ranks: Sequence[str], start_ns: int) -> list[Event]:
    """Arrows from each send to its receive, from a remote call to its serving span, and from the reply to the call.

    A viewer ties the end of an arrow to the span in whose row and time it lies; so an arrow ends a nanosecond before
    its span. Perfetto then draws it from the end of the span that began first to the begin of the other, which for a
    receive that was there before its send is the wrong way round. So what lasts longer than one side alone has a span
    of its own within the other's: in a receive from when the message was sent, in a send until somebody receives. The
    arrow is tied to that one.
    """
    events: list[Event] = []
    serving: dict[tuple[int, str, int], int] = {}  # a call is served until the moment in which its reply begins
    pairs: dict[tuple[str, int], list[int]] = defaultdict(list)
    for i, span in enumerate(spans):
        if span.kind == "compute" and type_of(span.name) is SERVE:
            serving[span.rank, SERVE.function_in(span.name), span.end_ns] = i
        elif span.peer >= 0 and span.group and span.kind == "communication":
            pairs[span.group, span.match].append(i)
    arrows = 0

    def add(ph: str, i: int, name: str, time_ns: int, **more: Any) -> None:
        event = {"ph": ph, "pid": spans[i].rank, "tid": places[i], "name": name, "cat": _DERIVED[1]}
        events.append(event | {"ts": (time_ns - start_ns) / 1e3, "args": {}} | more)

    def arrow(name: str, source: int, target: int, *, to_start: bool = False) -> None:
        nonlocal arrows
        begin_ns, target_ns = spans[source].start_ns, spans[target].start_ns
        end_ns = target_ns if to_start else max(target_ns, spans[target].end_ns - 1)
        if begin_ns > end_ns:
            return  # two clocks disagree, and no arrow goes back in time
        until_ns = min(target_ns, spans[source].end_ns)
        if target_ns < begin_ns:
            add("X", target, f"{name} from {ranks[spans[source].rank]}", begin_ns, dur=(spans[target].end_ns - begin_ns) / 1e3)
        elif begin_ns < until_ns:
            add("X", source, f"{name} to {ranks[spans[target].rank]}", begin_ns, dur=(until_ns - begin_ns) / 1e3)
        arrows += 1
        add("s", source, name, begin_ns, id=arrows)
        add("f", target, name, end_ns, id=arrows, bp="e")

    for pair in pairs.values():
        if len(pair) != 2 or spans[pair[0]].rank == spans[pair[1]].rank:
            continue  # one end is not in the trace
        replies = [i for i in pair if type_of(spans[i].name) in (REPLY, VALUE)]
        if len(replies) != 1:
            messages = [i for i in pair if kind_of(spans[i].group) is GroupKind.PAIR]
            senders = [i for i in messages if sender_of(spans[i].group) == spans[i].rank]
            if len(senders) == 1:
                arrow("message", senders[0], pair[pair[0] == senders[0]])
            continue
        reply, call = replies[0], pair[pair[0] == replies[0]]
        function = type_of(spans[reply].name).function_in(spans[reply].name)
        served = serving.get((spans[reply].rank, function, spans[reply].start_ns))
        if served is not None and type_of(spans[call].name) is not TO_HERE:
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
