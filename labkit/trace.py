"""What a run leaves behind: `Span` and `Trace`, plain data on one clock, its arithmetic, and trace files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.errors import LabError
from labkit.ring import CALL, COMMUNICATION, COMPUTE, KINDS, SCALAR, STEP

__all__ = ["Scalar", "Share", "Span", "Trace", "load_trace"]

Intervals = NDArray[np.int64]  # shape (n, 2): start and end in ns, disjoint and ascending


@dataclass(frozen=True, slots=True)
class Span:
    """Something a rank did, from `start_ns` to `end_ns` on the machine's monotonic clock (`time.perf_counter_ns`).

    Args:
        rank: the number of the rank.
        name: what it did: "forward", "all_reduce", ...
        kind: "compute", "communication", "step" (one iteration of `steps`) or "call" (the whole function).
        start_ns: when it began; for a communication, when it was issued.
        end_ns: when it was over; for a communication, when it completed.
        wait_start_ns: when the rank began to be blocked until a communication completes; 0 if it never was.
        wait_end_ns: when it was no longer blocked.
        nbytes: size of the message or of the rank's tensors in a collective; 0 if unknown.
        peer: the other rank of a message; -1 for a collective.
        group: the process group, or the two ends of a message.
        match: the number of the operation within its group; spans of several ranks with the same group and match are one operation.
        line: where the student's code issued it: "cell 5, line 12" or "train.py, line 12".
        device: "cpu", or "cuda" where the times were taken by the GPU.
        done: False for an operation that never completed.
    """

    rank: int
    name: str
    kind: str
    start_ns: int
    end_ns: int
    wait_start_ns: int = 0
    wait_end_ns: int = 0
    nbytes: int = 0
    peer: int = -1
    group: str = ""
    match: int = 0
    line: str = ""
    device: str = "cpu"
    done: bool = True

    @property
    def duration_ns(self) -> int:
        """Length in nanoseconds."""
        return self.end_ns - self.start_ns


@dataclass(frozen=True, slots=True)
class Scalar:
    """One value that a rank recorded with `record(name=value)`, and when."""

    rank: int
    name: str
    time_ns: int
    value: float


@dataclass(frozen=True, slots=True)
class Share:
    """How one rank spent the time of a trace, in nanoseconds.

    The parts `compute_ns`, `exposed_ns` and `idle_ns` add up to `window_ns`. `overlap_ns` is the part of `compute_ns` during which
    data was travelling as well; `waiting_ns` is the part of `idle_ns` during which the rank was blocked until a peer came.
    """

    rank: int
    window_ns: int
    compute_ns: int
    communication_ns: int
    overlap_ns: int
    idle_ns: int
    waiting_ns: int

    @property
    def exposed_ns(self) -> int:
        """Communication that nothing hides: the rank computes nothing meanwhile."""
        return self.communication_ns - self.overlap_ns


class Trace:
    """The spans of all ranks on one clock.

    Args:
        spans: in any order.
        scalars: in any order.
        ranks: the names of the ranks, in rank order.
        start_ns: begin of the time looked at; default: the first span's start.
        end_ns: its end; default: the last span's end.
        dropped: records that were lost per rank, because they came faster than they could be read.
    """

    def __init__(
        self,
        spans: Iterable[Span] | _Columns = (),
        scalars: Iterable[Scalar] = (),
        *,
        ranks: Sequence[str],
        start_ns: int | None = None,
        end_ns: int | None = None,
        dropped: Sequence[int] = (),
    ) -> None:
        self._columns = spans if isinstance(spans, _Columns) else _Columns.of(spans)
        self.scalars = tuple(sorted(scalars, key=lambda s: s.time_ns))
        self.ranks = tuple(ranks)
        data = self._columns.data
        self.start_ns = start_ns if start_ns is not None else int(data["start_ns"].min(initial=np.iinfo(np.int64).max)) if len(data) else 0
        self.end_ns = end_ns if end_ns is not None else int(data["end_ns"].max(initial=0)) if len(data) else self.start_ns
        self.dropped = tuple(dropped) or (0,) * len(self.ranks)

    def __len__(self) -> int:
        return len(self._columns.data)

    def __iter__(self) -> Iterator[Span]:
        return self._columns.spans()

    def __repr__(self) -> str:
        return f"<Trace of {len(self.ranks)} ranks, {len(self)} spans, {len(self.scalars)} scalars>"

    @property
    def duration_ns(self) -> int:
        """Length of the time looked at, in nanoseconds."""
        return self.end_ns - self.start_ns

    @property
    def spans(self) -> tuple[Span, ...]:
        """All spans, by start."""
        return tuple(self)

    def of(self, *, rank: int | None = None, kind: str | None = None, name: str | None = None) -> Trace:
        """The same trace with only the spans (and scalars) of one rank, kind or name; the time looked at stays."""
        data, keep = self._columns.data, np.ones(len(self._columns.data), bool)
        if rank is not None:
            keep &= data["rank"] == rank
        if kind is not None:
            if kind not in KINDS:
                raise ValueError(f"kind={kind!r}: expected one of {', '.join(KINDS)}")
            keep &= data["kind"] == KINDS.index(kind)
        if name is not None:
            keep &= data["name"] == self._columns.index(name)
        scalars = [s for s in self.scalars if rank in (None, s.rank) and name in (None, s.name) and kind is None]
        return self._with(_Columns(data[keep], self._columns.names), scalars, self.start_ns, self.end_ns)

    def between(self, start_ns: int, end_ns: int) -> Trace:
        """The spans that touch a stretch of time, which becomes the time looked at; shares are taken inside it."""
        data = self._columns.data
        keep = (data["end_ns"] > start_ns) & (data["start_ns"] < end_ns)
        scalars = [s for s in self.scalars if start_ns <= s.time_ns <= end_ns]
        return self._with(_Columns(data[keep], self._columns.names), scalars, start_ns, end_ns)

    def step(self, number: int) -> Trace:
        """One step of `steps`, from the first rank's begin to the last rank's end; negative numbers count from the last one."""
        bounds = self.step_bounds()
        try:
            start, end = bounds[number]
        except IndexError:
            raise LabError(f"step {number}: this trace has {len(bounds)} steps (wrap the loop in lab.steps(...))") from None
        return self.between(int(start), int(end))

    def step_bounds(self) -> Intervals:
        """Start and end of each step over all ranks, shape (steps, 2), in ns."""
        per_rank = []
        for rank in range(len(self.ranks)):
            rows = self._rows(rank, STEP)
            if len(rows):
                per_rank.append(np.stack([rows["start_ns"], rows["end_ns"]], axis=1))
        if not per_rank:
            return np.empty((0, 2), np.int64)
        count = min(len(p) for p in per_rank)
        return np.stack([np.min([p[:count, 0] for p in per_rank], 0), np.max([p[:count, 1] for p in per_rank], 0)], axis=1)

    def shares(self) -> tuple[Share, ...]:
        """How each rank spent the time of the trace, in rank order.

        Compute is the time inside compute spans (where a rank recorded none: inside the function) minus the time it was blocked
        in a communication. Communication runs from the moment all its ranks have come to its completion, so that waiting for a
        slow peer counts as idle, not as communication.
        """
        return tuple(self._share(rank) for rank in range(len(self.ranks)))

    def activity(self, rank: int) -> dict[str, Intervals]:
        """The intervals of one rank, clipped to the time looked at: "compute", "communication", "waiting", each (n, 2) in ns."""
        window = np.array([[self.start_ns, self.end_ns]], np.int64)
        computing = self._rows(rank, COMPUTE)
        if not len(computing):
            computing = self._rows(rank, CALL)
        data = self._columns.data
        travelling = (data["rank"] == rank) & (data["kind"] == COMMUNICATION)
        rows, ready = data[travelling], self._columns.ready[travelling]
        blocked = union(rows["wait_start_ns"], rows["wait_end_ns"])
        compute = difference(union(computing["start_ns"], computing["end_ns"]), blocked)
        transfer = union(ready, rows["end_ns"])
        waiting = difference(blocked, transfer)
        parts = {"compute": compute, "communication": transfer, "waiting": waiting}
        return {name: intersection(part, window) for name, part in parts.items()}

    def ready(self) -> NDArray[np.int64]:
        """For each span, in order: when the last of the ranks taking part had come (its own start, if it was the last)."""
        return self._columns.ready

    def save(self, path: str | Path) -> Path:
        """Write the Chrome trace format, which https://ui.perfetto.dev and chrome://tracing open and `load_trace` reads.

        Source: "Trace Event Format", the Chromium project's Catapult documentation.
        """
        path = Path(path)
        path.write_text(json.dumps(self.to_chrome()))
        return path

    def to_chrome(self) -> dict[str, Any]:
        """The trace as the object that `save` writes: one process per rank, with rows for its steps, work and communication."""
        rows = {"call": 0, "step": 1, "compute": 2, "communication": 3}
        events: list[dict[str, Any]] = []
        for number, name in enumerate(self.ranks):
            events.append({"ph": "M", "pid": number, "name": "process_name", "args": {"name": name}})
            events += [{"ph": "M", "pid": number, "tid": t, "name": "thread_name", "args": {"name": k}} for k, t in rows.items()]
        for span in self:
            extra = {k: v for k, v in asdict(span).items() if k not in ("rank", "name", "kind", "start_ns", "end_ns")}
            events.append(
                {"ph": "X", "pid": span.rank, "tid": rows[span.kind], "name": span.name, "cat": span.kind}
                | {"ts": (span.start_ns - self.start_ns) / 1e3, "dur": span.duration_ns / 1e3}
                | {"args": extra | {"start_ns": span.start_ns, "end_ns": span.end_ns}}
            )
        for s in self.scalars:
            ts = (s.time_ns - self.start_ns) / 1e3
            events.append({"ph": "C", "pid": s.rank, "name": s.name, "ts": ts, "args": {"value": s.value}, "id": str(s.time_ns)})
        other = {"labkit": 1, "ranks": self.ranks, "start_ns": self.start_ns, "end_ns": self.end_ns, "dropped": self.dropped}
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}

    def _with(self, columns: _Columns, scalars: Iterable[Scalar], start_ns: int, end_ns: int) -> Trace:
        return Trace(columns, scalars, ranks=self.ranks, start_ns=start_ns, end_ns=end_ns, dropped=self.dropped)

    def _rows(self, rank: int, kind: int) -> Any:
        data = self._columns.data
        return data[(data["rank"] == rank) & (data["kind"] == kind)]

    def _share(self, rank: int) -> Share:
        parts = self.activity(rank)
        compute, communication = length(parts["compute"]), length(parts["communication"])
        overlap = length(intersection(parts["compute"], parts["communication"]))
        idle = self.duration_ns - compute - communication + overlap
        return Share(rank, self.duration_ns, compute, communication, overlap, idle, length(parts["waiting"]))


_SPAN_DTYPE = np.dtype(
    [
        ("rank", "<i4"), ("name", "<u4"), ("kind", "u1"), ("start_ns", "<i8"), ("end_ns", "<i8"), ("wait_start_ns", "<i8"),
        ("wait_end_ns", "<i8"), ("nbytes", "<i8"), ("peer", "<i4"), ("group", "<u4"), ("match", "<i8"), ("line", "<u4"),
        ("flags", "<i4"),
    ]
)  # fmt: skip
_CUDA, _OPEN = 1, 2  # bits of a record's flags


class _Columns:
    """Spans as one numpy array, by start, so that a million of them can be counted and drawn."""

    def __init__(self, data: Any, names: Sequence[str]) -> None:
        self.data = data[np.argsort(data["start_ns"], kind="stable")]
        self.names = list(names)

    @classmethod
    def of(cls, spans: Iterable[Span]) -> _Columns:
        ids: dict[str, int] = {"": 0}

        def number(text: str) -> int:
            return ids.setdefault(text, len(ids))

        rows = [
            (
                s.rank, number(s.name), KINDS.index(s.kind), s.start_ns, s.end_ns, s.wait_start_ns, s.wait_end_ns, s.nbytes,
                s.peer, number(s.group), s.match, number(s.line), (_CUDA if s.device == "cuda" else 0) | (0 if s.done else _OPEN),
            )
            for s in spans
        ]  # fmt: skip
        return cls(np.array(rows, _SPAN_DTYPE), list(ids))

    def index(self, name: str) -> int:
        return self.names.index(name) if name in self.names else len(self.names)

    def spans(self) -> Iterator[Span]:
        names = self.names
        for r, n, k, start, end, ws, we, size, peer, group, match, line, flags in self.data.tolist():
            device = "cuda" if flags & _CUDA else "cpu"
            yield Span(
                r, names[n], KINDS[k], start, end, ws, we, size, peer, names[group], match, names[line], device, not flags & _OPEN
            )

    @cached_property
    def ready(self) -> NDArray[np.int64]:
        """For each span: when the last of the ranks taking part had come; what never completed has waited to its end."""
        data = self.data
        ready: NDArray[np.int64] = data["start_ns"].copy()
        shared = np.flatnonzero((data["kind"] == COMMUNICATION) & (data["group"] != 0))
        if len(shared):
            shared = shared[np.lexsort((data["match"][shared], data["group"][shared]))]
            rows = data[shared]
            differs = (rows["group"][1:] != rows["group"][:-1]) | (rows["match"][1:] != rows["match"][:-1])
            first = np.flatnonzero(np.concatenate([[True], differs]))
            ready[shared] = np.repeat(np.maximum.reduceat(rows["start_ns"], first), np.diff(np.append(first, len(shared))))
        end = np.maximum(data["start_ns"], data["end_ns"])
        never = (data["flags"] & _OPEN) != 0
        ready[never] = end[never]
        np.minimum(ready, end, out=ready)
        return ready


def from_records(
    records: Sequence[Any], names: Sequence[Sequence[str]], ranks: Sequence[str], *, dropped: Sequence[int] = (), **window: int | None
) -> Trace:
    """The trace of a run from what `labkit.ring.RingReader.read` gave for each rank.

    Args:
        records: per rank, an array of `labkit.ring.record_dtype()`.
        names: per rank, the strings that the records' numbers stand for.
        ranks: the names of the ranks.
        dropped: records lost, per rank.
        window: `start_ns` and `end_ns` of the trace.
    """
    ids: dict[str, int] = {"": 0}
    tables = [np.array([ids.setdefault(n, len(ids)) for n in own] or [0], np.uint32) for own in names]
    every = list(ids)
    parts, scalars = [], []
    for rank, (rows, table) in enumerate(zip(records, tables, strict=True)):
        is_scalar = rows["kind"] == SCALAR
        for row in rows[is_scalar]:
            value = float(np.int64(row["end_ns"]).view(np.float64))
            scalars.append(Scalar(rank, every[table[row["name"]]], int(row["start_ns"]), value))
        rows = rows[~is_scalar]
        part = np.zeros(len(rows), _SPAN_DTYPE)
        part["rank"], part["peer"] = rank, -1
        for field in ("kind", "start_ns", "end_ns"):
            part[field] = rows[field]
        part["name"] = table[rows["name"]]
        tail = rows["kind"] == COMMUNICATION  # the other kinds leave what an older record wrote there
        for field in ("wait_start_ns", "wait_end_ns", "nbytes", "match", "peer", "flags"):
            part[field][tail] = rows[field][tail]
        for field in ("line", "group"):
            part[field][tail] = table[rows[field][tail]]
        parts.append(part)
    data = np.concatenate(parts) if parts else np.empty(0, _SPAN_DTYPE)
    return Trace(_Columns(data, every), scalars, ranks=ranks, dropped=dropped, **window)


def load_trace(path: str | Path) -> Trace:
    """Read a trace that `Trace.save` wrote.

    Raises:
        LabError: the file is missing, or is not a trace of labkit.
    """
    path = Path(path)
    try:
        content = json.loads(path.read_text())
        other = content["otherData"]
        ranks = [str(r) for r in other["ranks"]]
    except FileNotFoundError:
        raise LabError(f"no trace at {str(path)!r}: run.trace.save(path) writes one") from None
    except (ValueError, KeyError, TypeError):
        raise LabError(f"{str(path)!r} is not a trace that labkit wrote (run.trace.save(path) writes one)") from None
    known = {f.name for f in fields(Span)}
    spans, scalars = [], []
    for event in content["traceEvents"]:
        if event["ph"] == "X":
            values = {k: v for k, v in event["args"].items() if k in known}
            spans.append(Span(rank=event["pid"], name=event["name"], kind=event["cat"], **values))
        elif event["ph"] == "C":
            scalars.append(Scalar(event["pid"], event["name"], int(event["id"]), event["args"]["value"]))
    return Trace(spans, scalars, ranks=ranks, start_ns=other["start_ns"], end_ns=other["end_ns"], dropped=other["dropped"])


def union(start_ns: Any, end_ns: Any) -> Intervals:
    """Merge intervals, in any order and overlapping as they like, into disjoint ascending ones."""
    keep = end_ns > start_ns
    start, end = np.asarray(start_ns)[keep], np.asarray(end_ns)[keep]
    if not len(start):
        return np.empty((0, 2), np.int64)
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    first = np.concatenate([[True], start[1:] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.stack([start[first], reach[last]], axis=1).astype(np.int64)


def intersection(a: Intervals, b: Intervals) -> Intervals:
    """The time covered by both of two sets of disjoint ascending intervals."""
    if not len(a) or not len(b):
        return np.empty((0, 2), np.int64)
    edges = np.unique(np.concatenate([a.ravel(), b.ravel()]))
    inside = _covers(a, edges[:-1]) & _covers(b, edges[:-1])
    return union(edges[:-1][inside], edges[1:][inside])


def difference(a: Intervals, b: Intervals) -> Intervals:
    """The time covered by the first of two sets of disjoint ascending intervals, and not by the second."""
    if not len(a) or not len(b):
        return a
    edges = np.unique(np.concatenate([a.ravel(), b.ravel()]))
    inside = _covers(a, edges[:-1]) & ~_covers(b, edges[:-1])
    return union(edges[:-1][inside], edges[1:][inside])


def length(a: Intervals) -> int:
    """Total length of disjoint intervals in ns."""
    return int((a[:, 1] - a[:, 0]).sum())


def _covers(a: Intervals, moments: NDArray[np.int64]) -> NDArray[np.bool_]:
    at = np.searchsorted(a[:, 0], moments, side="right") - 1
    covered: NDArray[np.bool_] = (at >= 0) & (moments < a[np.maximum(at, 0), 1])
    return covered
