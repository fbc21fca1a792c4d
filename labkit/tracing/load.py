"""`load_trace`: reads a trace from a file of `Trace.save`, or from the folder of a traced script.

In such a folder, the script's ranks have left their records (`worker.script_recorder`).
"""

from __future__ import annotations

import json
import mmap
import struct
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from labkit.errors.exceptions import LabError
from labkit.errors.lists import counted, listed, numbers_in_words
from labkit.errors.wrong_calls import public_api
from labkit.recording import TRACE_FOLDER
from labkit.recording.clock import Reading, on_reference
from labkit.recording.events import blank, shown
from labkit.recording.ring_buffer import RING_BYTES, RingReader, record_dtype
from labkit.recording.schema import CALL, FIELDS, KINDS, PENDING_FIELDS, Pending
from labkit.tracing.trace import Trace, about_names, from_records
from labkit.tracing.trace_file import read_file

# The required keys of a rank's description, by type. In addition it has "readings" of the reference clock.
_DESCRIPTION: Final[dict[type, tuple[str, ...]]] = {
    int: ("rank", "world_size", "restart", "began_unix_ns", "began_ns", "ended_ns"),
    str: ("host", "machine", "script", "run_id", "run", "reference", "master"),
}
MAX_RANKS: Final = 1 << 20
TOGETHER_NS: Final = 60_000_000_000  # ranks of one run start within this time of each other, by their machines' clocks
LOOSE: Final = 4  # a clock reading that is this many times less certain than the best one is ignored


@dataclass(frozen=True, slots=True)
class _Left:
    """The files of one rank: its description, and the path of its ring."""

    about: dict[str, Any]
    path: Path

    @property
    def rank(self) -> int:
        return int(self.about["rank"])

    @property
    def began(self) -> int:
        return int(self.about["began_unix_ns"])


@public_api
def load_trace(path: str | Path, *, run: int = -1) -> Trace:
    """Read a trace from a file of `Trace.save`, or from the folder that LABKIT_TRACE named for a script.

    A folder may be read while the script is still running. Notes about missing data are printed, and kept in the
    trace's `notes`.

    Args:
        path: path of the file or the folder.
        run: for a folder with several runs: the number of the run, in order of their start; -1 is the newest.

    Returns:
        the trace.

    Raises:
        LabError: there is no such file, folder or run, or it is not a trace of labkit.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        trace = _from_folder(path, run)
        for note in trace.notes:
            print(f"labkit: {note}")
        return trace
    try:
        return Trace(**read_file(path))
    except FileNotFoundError:
        raise LabError(
            f"no trace at {str(path)!r}: run.trace.save(path) writes a file, LABKIT_TRACE=folder torchrun ... leaves a folder"
        ) from None
    except ValueError as error:
        raise LabError(f"{str(path)!r} is not a trace that labkit wrote (run.trace.save(path) writes one): {error}") from None


def _from_folder(folder: Path, run: int) -> Trace:
    runs = _runs(_left_in(folder))
    if not runs:
        raise LabError(_why_empty(folder))
    try:
        chosen = runs[run]
    except IndexError:
        found = "\n".join(f"  run={i}: {_described(r)}" for i, r in enumerate(runs))
        raise LabError(f"run={run}: the folder {str(folder)!r} holds\n{found}") from None
    notes = []
    if len(runs) > 1:
        notes.append(f"this is {_described(chosen)}; the folder holds {len(runs)} runs, run=0 to run={len(runs) - 1}")
    return _trace(chosen, notes)


def _why_empty(folder: Path) -> str:
    nothing = f"no trace in the folder {str(folder)!r}: "
    default = Path(TRACE_FOLDER)
    if default.absolute() != folder.absolute() and _left_in(default):
        return (
            f"{nothing}LABKIT_TRACE was not set when the script ran, and its trace is in {TRACE_FOLDER!r}. "
            f"LABKIT_TRACE={folder} before the command names the folder."
        )
    return (
        f"{nothing}either LABKIT_TRACE={folder} was not set when the script ran, or the script neither has `import labkit` nor "
        "was run with `torchrun ... -m labkit script.py`."
    )


def _left_in(folder: Path) -> list[_Left]:
    found = []
    for path in folder.glob("*.json"):
        try:
            about = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, OSError, RecursionError):  # not labkit's file
            continue
        if _is_description(about) and path.with_suffix(".ring").exists():
            found.append(_Left(about, path.with_suffix(".ring")))
    return sorted(found, key=lambda left: left.began)


def _is_description(about: Any) -> bool:
    """Whether a JSON value is a complete description of a rank by `worker.script_recorder`."""
    if not isinstance(about, dict):
        return False
    kinds = all(type(about.get(name)) is kind for kind, names in _DESCRIPTION.items() for name in names)
    readings = about.get("readings")
    return (
        kinds
        and 0 <= about["rank"] < max(1, about["world_size"]) <= MAX_RANKS
        and all(abs(about[name]) < 1 << 62 for name in ("began_unix_ns", "began_ns", "ended_ns"))
        and isinstance(readings, list)
        and all(isinstance(r, list) and len(r) == len(Reading._fields) and all(type(x) is int for x in r) for r in readings)
    )


def _runs(left: Iterable[_Left]) -> list[list[_Left]]:
    """Group ranks by run, the runs in order of their start, the ranks of each in rank order.

    Ranks that have met know the name of their run. A rank that ended before that belongs to the run that was started
    in the same way at about the same time, and in which this rank is still missing.
    """
    met: dict[str, list[_Left]] = {}
    alone: list[list[_Left]] = []
    for one in left:
        if one.about["run"]:
            met.setdefault(one.about["run"], []).append(one)
        elif own := next((g for g in reversed(alone) if _together([one], g)), None):
            own.append(one)
        else:
            alone.append([one])
    for ranks in alone:
        nearest = min(
            (g for g in met.values() if _together(ranks, g)), key=lambda g: abs(g[0].began - ranks[0].began), default=None
        )
        if nearest is not None:
            nearest += ranks
        else:
            met[str(ranks[0].path)] = ranks
    runs = sorted(met.values(), key=lambda g: min(one.began for one in g))
    return [sorted(g, key=lambda one: one.rank) for g in runs]


def _together(some: Sequence[_Left], others: Sequence[_Left]) -> bool:
    same = all(some[0].about[key] == others[0].about[key] for key in ("run_id", "restart", "master", "world_size", "script"))
    disjoint = not {one.rank for one in some} & {one.rank for one in others}
    return same and disjoint and abs(some[0].began - others[0].began) < TOGETHER_NS


def _described(run: Sequence[_Left]) -> str:
    about = run[0].about
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(min(one.began for one in run) / 1e9))
    restart = f", restart {about['restart']}" if about["restart"] else ""
    return f"{about['script']} on {counted(about['world_size'], 'rank')}{restart}, begun {began}"


@dataclass(slots=True)
class _Recorded:
    """The records of one rank: at first on its own clock, later on rank 0's."""

    rows: Any  # of `record_dtype()`
    names: list[str]
    lost: int
    began_ns: int
    end_ns: int
    no_room: Sequence[str]  # kinds of names for which the ring had no space


def _trace(run: Sequence[_Left], notes: list[str]) -> Trace:
    size = max(*(one.about["world_size"] for one in run), run[-1].rank + 1)
    found: dict[int, _Recorded] = {}
    clocks = _Clocks(run)
    for one in run:
        try:
            found[one.rank] = recorded = _read(one)
        except (OSError, ValueError, IndexError, OverflowError, struct.error) as error:
            notes.append(f"what rank {one.rank} left cannot be read: {error}")
            continue
        clocks.set(one, recorded)
        if not one.about["ended_ns"]:
            notes.append(f"rank {one.rank} did not come to its end, or has not yet")
    missing = [rank for rank in range(size) if rank not in {one.rank for one in run}]
    if missing:
        notes.append(f"rank{'s' * (len(missing) > 1)} {numbers_in_words(missing)} of {size} left no trace")
    notes += clocks.notes() + about_names(kind for r in found.values() for kind in r.no_room)
    written = [r for r in found.values() if len(r.rows)]
    start_ns = min((int(r.rows["start_ns"].min()) for r in written), default=0)
    end_ns = max((int(r.rows["end_ns"].max()) for r in written), default=start_ns)
    script = run[0].about["script"]
    for r in written:
        r.rows = np.append(r.rows, _row(r.names, CALL, script, max(start_ns, r.began_ns), min(end_ns, r.end_ns)))
    nothing = _Recorded(np.empty(0, record_dtype()), [""], 0, 0, 0, [])
    all_ranks = [found.get(rank, nothing) for rank in range(size)]
    names = {one.rank: one.about.get("name") for one in run}  # the names of RPC workers
    return from_records(
        [r.rows for r in all_ranks], [r.names for r in all_ranks], [names.get(rank) or f"rank {rank}" for rank in range(size)],
        dropped=[r.lost for r in all_ranks], notes=notes,
    )  # fmt: skip


def _read(left: _Left) -> _Recorded:
    older = np.empty(0, record_dtype())
    moved = left.path.with_suffix(".records")
    if moved.exists():
        # The last record may be incomplete.
        older = np.fromfile(moved, record_dtype(), moved.stat().st_size // record_dtype().itemsize)
    with open(left.path, "rb") as file:
        ring = mmap.mmap(file.fileno(), RING_BYTES, access=mmap.ACCESS_READ)
    last = int(older["commit"][-1]) if len(older) else 0
    reader = RingReader(ring, last + 1)
    newer = reader.read()
    pending, names = reader.pending(), list(reader.names())
    last = int(newer["commit"][-1]) if len(newer) else last
    end_ns = left.about["ended_ns"] or reader.alive_ns
    rows = np.concatenate([older, newer, *(_under_way(names, *one, end_ns) for one in shown(pending))])
    _check(rows, len(names))
    lost = max(0, last - len(older) - len(newer))
    return _Recorded(rows, names, lost, left.about["began_ns"], end_ns, reader.no_room)


def _check(rows: Any, names: int) -> None:
    valid = [rows["kind"] < len(KINDS), *(rows[f.name] < names for f in FIELDS if f.is_text)]
    valid += [rows["end_ns"] >= rows["start_ns"], np.abs(rows["start_ns"]) < 1 << 62]
    if not all(right.all() for right in valid):
        raise ValueError("its records are damaged")


def _row(names: list[str], kind: int, name: str, start_ns: int, end_ns: int) -> Any:
    """Return a new record, and append its name to the rank's interned strings."""
    row = blank(1, record_dtype())
    row["name"], row["kind"], row["start_ns"], row["end_ns"] = len(names), kind, start_ns, max(start_ns, end_ns)
    names.append(name)
    return row


def _under_way(names: list[str], p: Pending, kind: int, flags: int, end_ns: int) -> Any:
    """Return a record of a pending operation or open span that ends at `end_ns`, the last sign of life of its rank."""
    row = _row(names, kind, p.name, p.start_ns, end_ns)
    for field in PENDING_FIELDS:
        value = getattr(p, field.name)
        row[field.name] = names.index(value) if field.is_text else value
    row["flags"], row["wait_end_ns"] = flags, max(p.wait_start_ns, end_ns) if p.wait_start_ns else 0
    return row


class _Clocks:
    """Converts the times of records to the clock of rank 0's machine."""

    def __init__(self, run: Sequence[_Left]) -> None:
        references = [one.about["reference"] for one in run if one.about["reference"]]
        self._machine = references[0] if references else run[0].about["machine"]
        on_it = [one for one in run if one.about["machine"] == self._machine]
        self._reference = (on_it or run)[0]
        self._within: dict[str, int] = {}  # by host, the largest error of its times in nanoseconds
        self._unknown: list[str] = []  # hosts whose clock was not compared: only their own time of day is known

    def set(self, left: _Left, recorded: _Recorded) -> None:
        """Convert the times of one rank's records, in place."""
        about = left.about
        host = about["host"]
        if about["machine"] == self._machine:
            return
        readings = [Reading(*r) for r in about["readings"]]
        if readings:
            best = min(r.within_ns for r in readings)
            readings = [r for r in readings if r.within_ns <= LOOSE * best]
            self._within[host] = max(self._within.get(host, 0), *(r.within_ns for r in readings))
        else:
            self._unknown.append(host)
            wall_ns = self._reference.about["began_unix_ns"] - self._reference.about["began_ns"]
            readings = [Reading(0, about["began_unix_ns"] - about["began_ns"] - wall_ns, 0)]
        for field in (f for f in FIELDS if f.is_time):
            times = recorded.rows[field.name]
            applies = times != 0 if field.place == "tail" else np.ones(len(times), bool)
            times[applies] = on_reference(times[applies], readings)
        ends = on_reference(np.array([recorded.began_ns, recorded.end_ns]), readings)
        recorded.began_ns, recorded.end_ns = int(ends[0]), int(ends[1])

    def notes(self) -> list[str]:
        """How well the clocks agree."""
        notes = []
        if self._within:
            worst_us = max(self._within.values()) / 1e3
            notes.append(f"clocks of {_listed(self._within)} set to rank 0's, right to within {worst_us:.0f} µs")
        if self._unknown:
            those = _listed(self._unknown)
            notes.append(f"the clocks of {those} were not compared with rank 0's: they may be milliseconds or more apart")
        return notes


def _listed(hosts: Iterable[str]) -> str:
    return listed(sorted(set(hosts)))
