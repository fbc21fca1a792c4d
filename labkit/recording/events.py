"""Recorded events as plain data: `Scalar` for a single value, `Columns` for a million spans (one is `schema.Span`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from labkit.recording.operations import FOR_OTHERS, SERVE
from labkit.recording.ring_buffer import DTYPES
from labkit.recording.schema import (  # fmt: skip
    AUTOMATIC,
    CALL,
    CODES,
    COMMUNICATION,
    COMPUTE,
    CUDA,
    FIELDS,
    OPEN,
    PENDING_FIELDS,
    SERVED,
    UNKNOWN,
    Field,
    Pending,
    Span,
)

PIECE: Final = 100_000  # `Span` objects that are created at a time


@dataclass(frozen=True, slots=True)
class Scalar:
    """A value that a rank recorded with `record(name=value)`, and when it did."""

    rank: int
    name: str
    time_ns: int
    value: float


@dataclass(frozen=True, slots=True)
class ProfilerEvent:
    """An event that torch's profiler recorded in a rank: an operator, a kernel, or a call to the CUDA runtime."""

    rank: int
    track: str  # where the event ran: a thread of the rank, or a stream of a GPU
    name: str  # torch's name for it, such as "aten::mm" or the name of a kernel
    category: str  # torch's: "cpu_op", "kernel", "user_annotation", ...
    start_ns: int  # on the same clock as the spans
    end_ns: int


STORED: Final = tuple(f for f in FIELDS if f.place != "flag")  # one number each; the others are bits of `flags`
COLUMNS: Final = np.dtype([(f.name, DTYPES[f.code]) for f in STORED] + [("flags", "<u2")])
# Waits for operations that were complete already. The group is an index into `Columns.names`.
WAITS: Final = np.dtype([("rank", "<i4"), ("group", "<u4"), ("match", "<i8"), ("time_ns", "<i8")])


def blank(count: int, dtype: Any = COLUMNS) -> Any:
    """Return an array of `COLUMNS`, or of `record_dtype()`, in which every field has its default."""
    rows = np.zeros(count, dtype)
    for field in STORED:
        if isinstance(field.default, int):
            rows[field.name] = field.default
    return rows


class Columns:
    """Spans in one numpy array of `COLUMNS`, sorted by start time, so that a million of them can be counted and drawn.

    Strings are stored as indices into `names`, whose first is "", the kind as an index into `recording.schema.KINDS`.
    For a part of a trace, which may lack some of the ranks of an operation, or the operations inside a span, `ready_ns`
    and `around` are the values of these two properties, one per entry of `data`.
    """

    def __init__(
        self,
        data: Any,
        names: Sequence[str],
        ready_ns: NDArray[np.int64] | None = None,
        around: NDArray[np.bool_] | None = None,
    ) -> None:
        order = np.argsort(data["start_ns"], kind="stable")
        self.data = data[order]
        self.names = list(names)
        self._ready_ns = None if ready_ns is None else ready_ns[order]
        self._around = None if around is None else around[order]

    @classmethod
    def of(cls, spans: Iterable[Span]) -> Columns:
        """Build the columns from spans in any order."""
        ids: dict[str, int] = {"": 0}

        def number(text: str) -> int:
            return ids.setdefault(text, len(ids))

        spans = list(spans)
        data = np.zeros(len(spans), COLUMNS)
        for field in FIELDS:
            values = map(attrgetter(field.name), spans)
            if field.place == "flag":
                is_set = np.fromiter(values, bool, len(spans)) != field.default
                data["flags"] |= np.where(is_set, np.uint16(field.bit), np.uint16(0))
            else:
                data[field.name] = _as_numbers(field, values, number)
        return cls(data, list(ids))

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[Span]:
        for first in range(0, len(self.data), PIECE):
            rows = self.data[first : first + PIECE]
            yield from map(Span, *(_values(field, rows, self.names) for field in FIELDS))

    def by_field(self) -> dict[str, list[Any]]:
        """Return the values of all spans, for each field of `Span`."""
        return {field.name: list(_values(field, self.data, self.names)) for field in FIELDS}

    def where(self, keep: Any) -> Columns:
        """Return the spans for which `keep`, with one boolean per span, is true."""
        return Columns(self.data[keep], self.names, self.ready_ns[keep], self.around[keep])

    def name_id(self, text: str) -> int:
        """Return the index of a string in `names`; if it is absent, an index that no span has."""
        return self.names.index(text) if text in self.names else len(self.names)

    def named(self, chosen: Callable[[str], bool]) -> NDArray[np.bool_]:
        """A boolean per span: whether `chosen` is true of its name."""
        found: NDArray[np.bool_] = np.array([chosen(name) for name in self.names], bool)[self.data["name"]]
        return found

    @property
    def travels(self) -> NDArray[np.bool_]:
        """A boolean per span: whether it is a communication, and not only a label around one (`around`)."""
        found: NDArray[np.bool_] = (self.data["kind"] == COMMUNICATION) & ~self.around
        return found

    @cached_property
    def around(self) -> NDArray[np.bool_]:
        """A boolean per span: whether it is the program's own communication span around a recorded operation.

        Such a span is only a label. The operation counts as communication; what the program does before and after it
        does not. The operation must begin inside the span, but only most of it must be inside: TensorFlow's profiler
        sees its end slightly later than the program does.
        """
        if self._around is not None:
            return self._around
        data, around = self.data, np.zeros(len(self.data), bool)
        travels = data["kind"] == COMMUNICATION
        own = np.flatnonzero(travels & (data["group"] == 0) & (data["peer"] == -1) & (data["flags"] & OPEN == 0))
        for rank in np.unique(data["rank"][own]):
            of_rank = own[data["rank"][own] == rank]
            operations = data[travels & (data["rank"] == rank) & (data["group"] != 0)]
            issued = operations["start_ns"]
            middle = np.append((issued + operations["end_ns"]) // 2, np.iinfo(np.int64).max)
            first = np.searchsorted(issued, data["start_ns"][of_rank])
            beyond = np.searchsorted(issued, data["end_ns"][of_rank], side="right")
            earliest = np.minimum.reduceat(middle, np.stack([first, beyond], axis=1).ravel())[::2]
            around[of_rank] = (first < beyond) & (earliest <= data["end_ns"][of_rank])
        return around

    @cached_property
    def ready_ns(self) -> NDArray[np.int64]:
        """The time, per span, when the last participating rank had arrived and data could be sent; else its own start.

        The number of participating ranks is known from the group's completed operations. An incomplete operation is
        ready only at its end, so that all of its time counts as waiting, unless that many ranks have arrived.
        """
        if self._ready_ns is not None:
            return self._ready_ns
        ready: NDArray[np.int64] = self.data["start_ns"].copy()
        shared = np.flatnonzero(self.data["group"])
        if not len(shared):
            return ready
        shared = shared[np.lexsort((self.data["match"][shared], self.data["group"][shared]))]
        rows = self.data[shared]  # sorted by group and, within a group, by operation
        first = np.flatnonzero(_changes(rows["group"]) | _changes(rows["match"]))
        came = np.diff(first, append=len(rows))
        last_start = np.maximum.reduceat(rows["start_ns"], first)
        is_open = (np.bitwise_or.reduceat(rows["flags"], first) & OPEN) != 0
        group_first = np.flatnonzero(_changes(rows["group"][first]))
        taking_part = np.maximum.reduceat(np.where(is_open, 0, came), group_first)
        everybody = np.repeat(taking_part, np.diff(group_first, append=len(first)))
        last_start[is_open & (came != everybody)] = np.iinfo(np.int64).max
        ready[shared] = np.clip(np.repeat(last_start, came), None, np.maximum(rows["start_ns"], rows["end_ns"]))
        return ready


def under_way(
    start_ns: int, now_ns: int, number: Callable[[str], int], *, calls: Iterable[tuple[int, str]] = (),
    pending: Sequence[Sequence[Pending]] = (), silent: Iterable[tuple[int, int]] = (),
) -> Any:  # fmt: skip
    """Return an array of `COLUMNS` with everything that is still in progress, as if it ended now.

    `calls` are the ranks whose function has not returned since `start_ns`, each with its name; `number` returns a
    string's index in `Columns.names`. Where a rank's machine does not answer, which `silent` says with the time of its
    last report, what was in progress ends there, or at `start_ns` if that is later, and the rest is unknown.
    """
    began = list(calls)
    reported_ns = {rank: max(start_ns, at_ns) for rank, at_ns in silent}
    found = [(rank, *one) for rank, operations in enumerate(pending) for one in shown(operations)]
    rows = blank(len(began) + len(found))
    first, rest = rows[: len(began)], rows[len(began) :]
    first["rank"], first["name"] = [rank for rank, _ in began], [number(name) for _, name in began]
    first["kind"], first["flags"], first["start_ns"] = CALL, OPEN, start_ns
    for field in PENDING_FIELDS:
        rest[field.name] = _as_numbers(field, (getattr(p, field.name) for _, p, _, _ in found), number)
    rest["rank"], rest["kind"] = [rank for rank, *_ in found], [kind for *_, kind, _ in found]
    rest["flags"] = [flags for *_, flags in found]
    until = np.array([reported_ns.get(rank, now_ns) for rank in rows["rank"].tolist()], np.int64)
    rows["end_ns"] = np.maximum(rows["start_ns"], until)
    waits = rows["wait_start_ns"] != 0
    rows["wait_end_ns"][waits] = np.maximum(rows["wait_start_ns"], until)[waits]
    rows["match"][until < now_ns] = -1  # it is not known to be in the others' operation any more, so they wait
    unknown = blank(len(reported_ns))
    unknown["rank"], unknown["start_ns"] = list(reported_ns), list(reported_ns.values())
    unknown["name"], unknown["kind"], unknown["flags"], unknown["end_ns"] = number(UNKNOWN), CALL, OPEN, now_ns
    return np.concatenate([rows, unknown])


def shown(operations: Sequence[Pending]) -> Iterator[tuple[Pending, int, int]]:
    """Yield the pending operations of a rank that are drawn, each with its kind and its flags."""
    threads = {p.thread for p in operations if p.type is SERVE}
    for p in operations:
        if p.type is SERVE:
            yield p, COMPUTE, OPEN | AUTOMATIC | SERVED
        elif p.type not in FOR_OTHERS:  # a future owed to a caller takes no time; waiting for it is an operation of its own
            yield p, COMMUNICATION, OPEN | (SERVED if p.wait_start_ns and p.thread in threads else 0)


def device_number(rows: Any) -> Any:
    """Return the number of each span's device within its rank, from 1: 1 is "CPU:0"; 0 if no device is recorded."""
    return np.maximum(rows["device"], CUDA) - CUDA


def _as_numbers(field: Field, values: Iterable[Any], number: Callable[[str], int]) -> NDArray[Any]:
    """Encode a field's values as its column stores them; `number` returns a string's index."""
    given = list(values)
    if field.is_text or field.name in CODES:
        encode = number if field.is_text else CODES[field.name][0]
        known = {value: encode(value) for value in dict.fromkeys(given)}
        given = [known[value] for value in given]
    return np.array(given, COLUMNS[field.name])


def _values(field: Field, rows: Any, names: Sequence[str]) -> Iterable[Any]:
    if field.place == "flag":
        is_set = rows["flags"] & field.bit != 0
        values: list[Any] = (~is_set if field.default else is_set).tolist()
        return values
    numbers: list[Any] = rows[field.name].tolist()
    if field.is_text:
        return map(names.__getitem__, numbers)
    if field.name not in CODES:
        return numbers
    decode = CODES[field.name][1]
    known = {code: decode(code) for code in set(numbers)}
    return map(known.__getitem__, numbers)


def _changes(column: Any) -> NDArray[np.bool_]:
    """Return where a value differs from the previous one; the first value counts as different."""
    changes: NDArray[np.bool_] = np.append(True, column[1:] != column[:-1])[: len(column)]
    return changes
