"""Trace files, plain or gzip: the events in them, for viewers, and behind these the whole trace, to read it again.

Events have the Chrome trace format. Its times are floating-point microseconds. Counted from the start of the trace,
they represent whole nanoseconds exactly for the length of any realistic run. Perfetto is stricter than the format and
differs from it; its requirements were found with its own trace processor.

Source: "Trace Event Format", the Chromium project's Catapult documentation.
"""

from __future__ import annotations

import base64
import errno
import gzip
import io
import json
import os
import stat
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from secrets import token_hex
from typing import Any, Final, TextIO

import numpy as np

from labkit.costs.link import Link
from labkit.costs.network import Network
from labkit.errors.exceptions import LabError
from labkit.recording.events import COLUMNS, Columns, ProfilerEvent, Scalar, blank
from labkit.recording.group_keys import GroupKind, ends_of, kind_of
from labkit.recording.operations import REPLY, SERVE, TO_HERE, VALUE, type_of
from labkit.recording.schema import FIELDS, STEPS_IN_ALL, Span

GZIP: Final = b"\x1f\x8b"  # the first bytes of every gzip file
# The key of the last entry of a file: the whole trace, which `load_trace` reads. The events are for viewers. Perfetto
# ignores what follows a key that it does not know; it rejects files with a large entry of a known one ("otherData").
KEY: Final = "labkit"
CHECKSUM_BYTES: Final = 4  # of CRC-32: a damaged file is no trace, instead of another one
# What is known of a trace besides its events: attributes of `Trace`, and arguments of it.
FACTS: Final = ("ranks", "dropped", "notes", "nodes", "link", "replayed", "simulated", "cores", "clock_error_ns", "restarts_ns")

_EVENT: Final = ("rank", "name", "kind", "start_ns", "end_ns")  # fields of an event itself; all others are its arguments
_DEFAULTS: Final = {f.name: f.default for f in FIELDS if f.name not in _EVENT}
_ROWS: Final = ("call", "step", "compute", "communication")  # from top to bottom
_DERIVED: Final = ("derived", "message")  # categories of events that are computed from spans
_TORCH: Final = "torch "  # prefix of the categories of torch's profiler
_TIMES: Final = tuple(f.name for f in FIELDS if f.is_time and f.name not in _EVENT)  # counted from the start of the trace
_ROWS_APART: Final = 1000  # row numbers reserved for each rank

Event = dict[str, Any]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give the path of a new file that takes the place of an older one once all is written: nothing is lost before."""
    path = Path(os.path.realpath(path))  # a link stays a link
    if path.exists() and not path.is_file():  # a pipe or a device
        yield path
        return
    mode = path.stat().st_mode if path.exists() else None
    if mode is not None and not mode & stat.S_IWUSR:
        raise PermissionError(errno.EACCES, "it is read-only")
    new = path.with_name(f".labkit-{token_hex(8)}")
    try:
        yield new
        if mode is not None:
            new.chmod(stat.S_IMODE(mode))
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


@contextmanager
def writing(path: Path) -> Iterator[TextIO]:
    """Open a text file for writing, compressed if its name ends in ".gz"; a `LabError` if that is not possible."""
    try:
        with replacing(path) as new:
            if path.suffix == ".gz":
                with gzip.open(new, "wt", encoding="utf-8", errors="replace", compresslevel=6) as file:
                    yield file
            else:
                with new.open("w", encoding="utf-8", errors="replace") as file:
                    yield file
    except OSError as error:
        raise LabError(f"the trace cannot be written to {str(path)!r}: {error.strerror or error}") from None


def read_file(path: Path) -> dict[str, Any]:
    """Read the arguments of `Trace` from a file; a `ValueError` says why it is no trace, or cannot be read."""
    try:
        data = path.read_bytes()
        return _unpacked(gzip.decompress(data) if data.startswith(GZIP) else data)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"it cannot be read: {error.strerror or error}") from None
    except (EOFError, zlib.error, LookupError, ValueError, TypeError):
        raise ValueError("it is cut, damaged, or of another program or version of labkit: save the run again") from None


def packed(columns: Columns, waits: Any, **others: Any) -> str:
    """Return the arguments of `Trace` in a line of text: a checksum, and a file of numpy, in base64."""
    file, about = io.BytesIO(), json.dumps(others | {"names": columns.names}, default=asdict)
    np.savez_compressed(file, spans=columns.data, waits=waits, about=about)
    data = file.getvalue()
    return base64.b64encode(zlib.crc32(data).to_bytes(CHECKSUM_BYTES) + data).decode()


def _unpacked(content: bytes) -> dict[str, Any]:
    """Return the arguments of `Trace` from the content of a file; what another version lacks has its default."""
    data = base64.b64decode(content.rpartition(f'"{KEY}":'.encode())[2].split(b'"', 2)[1], validate=True)
    checksum, data = data[:CHECKSUM_BYTES], data[CHECKSUM_BYTES:]
    if zlib.crc32(data).to_bytes(CHECKSUM_BYTES) != checksum:
        raise ValueError("it is damaged")
    with np.load(io.BytesIO(data)) as file:
        saved, waits, about = file["spans"], file["waits"], json.loads(str(file["about"]))
    spans = blank(len(saved))
    for name in set(COLUMNS.names or ()) & set(saved.dtype.names):
        spans[name] = saved[name]
    found = {name: about[name] for name in ("start_ns", "end_ns", *FACTS) if name in about}
    link = found.get("link")  # as `dataclasses.asdict` wrote it
    if link is not None and "nodes" in link:
        network = Network(**link | {level: Link(**link[level]) for level in ("inside", "between")})
        found["link"] = network.of(found["simulated"] or len(found["ranks"]))
    elif link is not None:
        found["link"] = Link(**link)
    scalars, profile = [Scalar(**one) for one in about["scalars"]], [ProfilerEvent(**one) for one in about["profile"]]
    return found | {"spans": Columns(spans, about["names"]), "scalars": scalars, "profile": profile, "waits": waits}


def write_events(
    spans: Iterable[Span],
    scalars: Iterable[Scalar],
    ranks: Sequence[str],
    start_ns: int,
    profile: Iterable[ProfilerEvent] = (),
) -> Iterator[Event]:
    """Yield the events of a trace file.

    Each rank becomes a process, with rows for its calls, steps, compute and communication, and below them rows for the
    events of torch's profiler. There is a curve for each scalar and for the bytes of pending operations, and an arrow
    for each message and remote call. Scalars that are not finite, and the total number of steps, become marks.
    `start_ns` is the origin of all times. Nothing may start earlier, since Perfetto drops negative times.
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
        # Operations do not nest: one that happens during another is not part of it. In the same row, a viewer would
        # attach its arrows to the other.
        numbers = list(_lanes([spans[i] for i in own], nest=kind != "communication"))
        for i, lane in zip(own, numbers, strict=True):
            span, places[i] = spans[i], next_row[rank] + lane
            arguments = {k: v for k, default in _DEFAULTS.items() if (v := getattr(span, k)) != default}
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
        else:  # a mark: JSON has no infinities or NaN, and a string as value would hide the whole curve
            mark = {"ph": "i", "s": "p", "name": f"{s.name} = {s.value:g}", "cat": "scalar"}
            yield place | mark | {"args": {"name": s.name, "value": str(s.value)}}
    yield from _under_way(spans, start_ns)
    yield from _arrows(spans, places, ranks, start_ns)


def _first_row(rank: int) -> int:
    """Return the number of a rank's first row: neither 0 nor the rank's number, with which Perfetto merges two rows."""
    return _ROWS_APART * (rank + 1)


def _names(title: str, rank: int, first: int, count: int) -> Iterator[Event]:
    """Yield the metadata events that name consecutive rows after one title."""
    for row in range(first, first + count):
        yield _about("thread_name", rank, row, name=title if row == first else f"{title} ({row - first + 1})")
        yield _about("thread_sort_index", rank, row, sort_index=row)


def _about(metadata: str, pid: int, tid: int, **args: Any) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "ts": 0, "name": metadata, "args": args}


def _under_way(spans: Sequence[Span], start_ns: int) -> Iterator[Event]:
    """Yield for each rank the points of a curve: the bytes of its pending operations."""
    changes: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for span in spans:
        if span.nbytes:
            changes[span.rank][span.start_ns] += span.nbytes
            changes[span.rank][span.end_ns] -= span.nbytes
    for rank, of_rank in sorted(changes.items()):
        nbytes = 0
        for time_ns, change in sorted(of_rank.items()):
            nbytes += change
            # Perfetto's title of the curve consists of the event's name and the value's key: "bytes under way".
            event = {"ph": "C", "pid": rank, "tid": _first_row(rank), "name": "bytes", "cat": _DERIVED[0]}
            yield event | {"ts": (time_ns - start_ns) / 1e3, "args": {"under way": nbytes}}


def _arrows(spans: Sequence[Span], places: Sequence[int], ranks: Sequence[str], start_ns: int) -> list[Event]:
    """Return arrows from each send to its receive, from each remote call to its serving span, and from reply to call.

    A viewer attaches the end of an arrow to the span at that row and time, so an arrow ends a nanosecond before the end
    of its span. But Perfetto draws an arrow from the end of the span that starts first to the start of the other. This
    is the wrong direction if a receive starts before its send, as most do, or a call before its reply. Therefore the
    longer side gets an inner span, to which the arrow is attached: in a receive it starts when the message is sent; in
    a send it lasts until the receive starts.
    """
    events: list[Event] = []
    serving: dict[tuple[int, str, int], int] = {}  # by rank, function and end, which is also the start of the reply
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
            return  # the ranks' clocks disagree: the arrow would point back in time
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
            senders = [i for i in messages if ends_of(spans[i].group)[0] == spans[i].rank]
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
    """Yield a lane for each span, since viewers cannot draw spans of one row that overlap without nesting.

    Spans are ordered by start; of those with the same start, the longest first. With `nest`, one may share a lane with
    another that contains it.
    """
    lanes: list[list[int]] = []  # for each lane, the ends of its open spans, the innermost last
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
