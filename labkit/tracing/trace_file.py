"""Trace files, plain or gzip: writes them, and reads them with validation."""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from typing import Any, Final, TextIO

import numpy as np

from labkit.errors.exceptions import LabError
from labkit.recording.events import WAITS, Columns, ProfilerEvent, Scalar
from labkit.tracing.perfetto import read_events
from labkit.tracing.trace_info import LARGEST, TraceFileError, TraceInfo, is_list

GZIP: Final = b"\x1f\x8b"  # the first bytes of every gzip file


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give the path of a new file, which takes the place of another one once all is written: an older one is not lost.

    Raises:
        OSError: it cannot be written.
    """
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
    """Open a text file for writing, compressed if its name ends in ".gz".

    Raises:
        LabError: the file cannot be written.
    """
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
    """Read the arguments of `Trace` from a file.

    Raises:
        FileNotFoundError: there is no such file.
        TraceFileError: the file is not a trace, is damaged, or cannot be read.
    """
    content = _json(path)
    if not isinstance(content, dict) or not isinstance(content.get("traceEvents"), list):
        raise TraceFileError("it is JSON, but has no list of traceEvents")
    other = content.get("otherData")
    if not isinstance(other, dict) or "zero_ns" not in other:
        raise TraceFileError("it is a trace of another program: otherData lacks labkit's entries")
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
        if data.startswith(GZIP):
            data = gzip.GzipFile(fileobj=io.BytesIO(data)).read()
    except FileNotFoundError:
        raise
    except EOFError:
        raise TraceFileError("its compressed data end early") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise TraceFileError(f"its compressed data are damaged ({error})") from None
    except OSError as error:
        raise TraceFileError(f"it cannot be read: {error.strerror or error}") from None
    if not data.strip():
        raise TraceFileError("it is empty")
    try:
        return json.loads(data.decode("utf-8"))
    except UnicodeDecodeError:
        raise TraceFileError("it is not a text file") from None
    except json.JSONDecodeError as error:
        cut = error.pos >= len(error.doc.rstrip()) - 1
        raise TraceFileError("it ends in the middle" if cut else f"it is not valid JSON: {error}") from None
    except RecursionError:
        raise TraceFileError("it is nested too deeply for a trace") from None


def _arguments(events: list[Any], other: dict[str, Any]) -> dict[str, Any]:
    info = TraceInfo.from_file(other)
    ranks = len(info.ranks)
    times = [other[name] for name in ("zero_ns", "start_ns", "end_ns")]
    if not is_list(times, int) or any(abs(t) > LARGEST for t in times) or times[2] < times[1]:
        raise TraceFileError("its start and end are not valid times")
    if not all(isinstance(event, dict) for event in events):
        raise TraceFileError("one of its events is not an object")
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
        isinstance(row, list) and len(row) == 4 and isinstance(row[0], str) and is_list(row[1:], int) for row in rows
    )
    if not valid or not all(0 <= rank < ranks and abs(time_ns) < LARGEST for _, rank, _, time_ns in rows):
        raise TraceFileError("one of its waits is not a group, a rank, a number and a time")
    waits = [(rank, names.setdefault(group, len(names)), match, time_ns) for group, rank, match, time_ns in rows]
    columns.names = list(names)
    return np.array(waits, WAITS)


def _check_spans(columns: Columns, ranks: int, *, others: bool) -> None:
    """Check what the rest of labkit relies on; `others` is a rank that stands for those that the trace lacks."""
    data = columns.data
    if not all(isinstance(name, str) for name in columns.names):
        raise TraceFileError("a span has a name that is not a string")
    fits = {
        "of an unknown rank": (data["rank"] >= 0) & (data["rank"] < ranks),
        "that ends before it starts": (data["end_ns"] >= data["start_ns"]) & (data["wait_end_ns"] >= data["wait_start_ns"]),
        "of a negative size": data["nbytes"] >= 0,
        "at an impossible time": (np.abs(data["start_ns"]) < LARGEST) & (np.abs(data["end_ns"]) < LARGEST),
        "with an unknown peer": (data["peer"] >= -1) & (data["peer"] < ranks + others),
        "with an unknown root": (data["root"] >= -1) & (data["root"] < ranks + others),
    }
    for words, right in fits.items():
        if not right.all():
            raise TraceFileError(f"it has a span {words}")


def _check_other(one: Scalar | ProfilerEvent, ranks: int) -> None:
    time_ns = one.time_ns if isinstance(one, Scalar) else one.start_ns
    if not isinstance(one.name, str) or type(one.rank) is not int or not 0 <= one.rank < ranks or abs(time_ns) > LARGEST:
        raise TraceFileError(
            f"it has a {'value' if isinstance(one, Scalar) else 'profiled event'} of an unknown rank or at an impossible time"
        )
    if isinstance(one, ProfilerEvent) and (one.end_ns < one.start_ns or not isinstance(one.track, str)):
        raise TraceFileError("it has a profiled event that ends before it starts")
