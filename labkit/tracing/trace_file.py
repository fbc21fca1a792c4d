"""Trace files, plain or gzip: writes them, and reads them with validation."""

from __future__ import annotations

import errno
import gzip
import json
import math
import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from secrets import token_hex
from typing import Any, Final, TextIO

import numpy as np

from labkit.costs.link import Link
from labkit.costs.network import Network
from labkit.errors.exceptions import LabError
from labkit.recording.events import WAITS, Columns, ProfilerEvent, Scalar
from labkit.tracing.perfetto import read_events

GZIP: Final = b"\x1f\x8b"  # the first bytes of every gzip file
LARGEST: Final = 1 << 62  # nanoseconds, bytes, and any other whole number
MOST_RANKS: Final = 1 << 31


class TraceFileError(ValueError):
    """An invalid trace file; the message is the rest of a sentence: "it ends in the middle"."""


def _check(right: Any, otherwise: str) -> None:
    if not right:
        raise TraceFileError(otherwise)


@dataclass(frozen=True, slots=True)
class TraceInfo:
    """What is known of a trace besides its events. A new fact is a field here, and an argument of `Trace`."""

    ranks: tuple[str, ...]
    dropped: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    nodes: tuple[int, ...] = ()
    link: Link | Network | None = None
    replayed: bool = False
    simulated: int = 0
    cores: float = 0.0
    clock_error_ns: int = 0

    def arguments(self) -> dict[str, Any]:
        """Return the facts by name, as arguments of `Trace`."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_file(cls, entries: dict[str, Any]) -> TraceInfo:
        """Read the entries of a trace file; a `KeyError` or a `TraceFileError` if one is missing or invalid."""
        given: dict[str, Any] = {"notes": [], "nodes": [], "replayed": False, "simulated": 0, "cores": 0.0, "clock_error_ns": 0}
        given |= entries
        ranks, dropped, nodes = given["ranks"], given["dropped"], given["nodes"]
        simulated, cores, clock_error_ns = given["simulated"], given["cores"], given["clock_error_ns"]
        _check(_is_list(ranks, str), "its entry 'ranks' is invalid")
        valid = {
            "dropped": _is_list(dropped, int) and len(dropped) in (0, len(ranks)) and min(dropped, default=0) >= 0,
            "notes": _is_list(given["notes"], str),
            "nodes": _is_list(nodes, int) and len(nodes) in (0, len(ranks)),
            "replayed": isinstance(given["replayed"], bool),
            "simulated": _is_list([simulated], int) and (not simulated or len(ranks) <= simulated < MOST_RANKS),
            "cores": isinstance(cores, int | float) and not isinstance(cores, bool) and 0 <= cores < math.inf,
            "clock_error_ns": _is_list([clock_error_ns], int) and clock_error_ns >= 0,
        }
        for name, right in valid.items():
            _check(right, f"its entry {name!r} is invalid")
        link = None if given.get("link") is None else _link(given["link"], simulated or len(ranks))
        facts: dict[str, Any] = {"ranks": ranks, "link": link} | {name: given[name] for name in valid}
        return cls(**facts | {name: tuple(facts[name]) for name in ("ranks", "dropped", "notes", "nodes")})


def _link(entries: dict[str, Any], ranks: int) -> Link | Network:
    """Read a link or a network, as `dataclasses.asdict` writes it."""
    try:
        if "nodes" not in entries:
            return Link(**entries)
        return Network(**entries | {level: Link(**entries[level]) for level in ("inside", "between")}).of(ranks)
    except (TypeError, ValueError, KeyError):
        raise TraceFileError("its entry 'link' is invalid") from None


def _is_list(value: Any, kind: type) -> bool:
    """Whether a value read from JSON is a list of strings or of whole numbers, none of them too large for a trace."""
    return isinstance(value, list) and all(
        isinstance(item, kind) and not isinstance(item, bool) and (not isinstance(item, int) or abs(item) <= LARGEST)
        for item in value
    )


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
    """Read the arguments of `Trace` from a file; `TraceFileError` if it is no trace, damaged or cannot be read."""
    content = _json(path)
    listed = isinstance(content, dict) and isinstance(content.get("traceEvents"), list)
    _check(listed, "it is JSON, but has no list of traceEvents")
    other = content.get("otherData")
    own = isinstance(other, dict) and "zero_ns" in other
    _check(own, "it is a trace of another program: otherData lacks labkit's entries")
    try:
        return _arguments(content["traceEvents"], other)
    except TraceFileError:
        raise
    except KeyError as error:
        raise TraceFileError(f"it lacks {error}") from None
    except (ValueError, TypeError, AttributeError, IndexError, OverflowError):
        raise TraceFileError("one of its values is of another type, form or size than labkit writes") from None


def _json(path: Path) -> Any:
    try:
        data = path.read_bytes()
        return json.loads((gzip.decompress(data) if data.startswith(GZIP) else data).decode())
    except FileNotFoundError:
        raise
    except json.JSONDecodeError as error:
        cut = error.pos >= len(error.doc.rstrip()) - 1
        raise TraceFileError("it ends in the middle" if cut else f"it is not valid JSON: {error}") from None
    except OSError as error:
        raise TraceFileError(f"it cannot be read: {error.strerror or error}") from None
    except (EOFError, zlib.error, UnicodeDecodeError, RecursionError) as error:
        raise TraceFileError(f"it is damaged: {error}") from None


def _arguments(events: list[Any], other: dict[str, Any]) -> dict[str, Any]:
    info = TraceInfo.from_file(other)
    ranks = len(info.ranks)
    times = [other[name] for name in ("zero_ns", "start_ns", "end_ns")]
    _check(_is_list(times, int) and times[1] <= times[2], "its start and end are not valid times")
    _check(all(isinstance(event, dict) for event in events), "one of its events is not an object")
    spans, scalars, profile = read_events(events, times[0])
    columns = Columns.of(spans)
    _check_spans(columns, ranks, others=info.simulated > ranks)
    for scalar in scalars:
        _check_other(scalar, ranks)
    for event in profile:
        _check_other(event, ranks)
    found = {"spans": columns, "scalars": scalars, "profile": profile, "waits": _waits(other.get("waits", []), columns, ranks)}
    return found | {"start_ns": times[1], "end_ns": times[2]} | info.arguments()


def _waits(rows: Any, columns: Columns, ranks: int) -> Any:
    """Return the waits of a file, and add their groups to the names of `columns`."""
    names = {name: number for number, name in enumerate(columns.names)}
    valid = isinstance(rows, list) and all(
        isinstance(row, list) and len(row) == 4 and isinstance(row[0], str) and _is_list(row[1:], int) for row in rows
    )
    valid = valid and all(0 <= rank < ranks and abs(time_ns) < LARGEST for _, rank, _, time_ns in rows)
    _check(valid, "one of its waits is not a group, a rank, a number and a time")
    waits = [(rank, names.setdefault(group, len(names)), match, time_ns) for group, rank, match, time_ns in rows]
    columns.names = list(names)
    return np.array(waits, WAITS)


def _check_spans(columns: Columns, ranks: int, *, others: bool) -> None:
    """Check what the rest of labkit relies on; `others` is a rank that stands for those that the trace lacks."""
    data = columns.data
    _check(all(isinstance(name, str) for name in columns.names), "a span has a name that is not a string")
    fits = {
        "of an unknown rank": (data["rank"] >= 0) & (data["rank"] < ranks),
        "that ends before it starts": (data["end_ns"] >= data["start_ns"]) & (data["wait_end_ns"] >= data["wait_start_ns"]),
        "of a negative size": data["nbytes"] >= 0,
        "at an impossible time": (np.abs(data["start_ns"]) < LARGEST) & (np.abs(data["end_ns"]) < LARGEST),
        "with an unknown peer": (data["peer"] >= -1) & (data["peer"] < ranks + others),
        "with an unknown root": (data["root"] >= -1) & (data["root"] < ranks + others),
    }
    for words, right in fits.items():
        _check(right.all(), f"it has a span {words}")


def _check_other(one: Scalar | ProfilerEvent, ranks: int) -> None:
    time_ns = one.time_ns if isinstance(one, Scalar) else one.start_ns
    kind = "value" if isinstance(one, Scalar) else "profiled event"
    known = isinstance(one.name, str) and type(one.rank) is int and 0 <= one.rank < ranks and abs(time_ns) <= LARGEST
    _check(known, f"it has a {kind} of an unknown rank or at an impossible time")
    if isinstance(one, ProfilerEvent):
        ordered = one.start_ns <= one.end_ns and isinstance(one.track, str)
        _check(ordered, "it has a profiled event that ends before it starts")
