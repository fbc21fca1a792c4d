"""What a rank did, as plain data: a `Span` and a `Scalar` one at a time, and `Columns` for a million of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.recording.ring_buffer import (  # fmt: skip
    AUTOMATIC,
    CALL,
    COMMUNICATION,
    COMPUTE,
    DEVICE_SHIFT,
    KINDS,
    MEASURED,
    ON_CUDA,
    OPEN,
    PROMISE,
    ROOTED,
    SERVE,
    SERVED,
    UNSEEN_PROMISE,
    UNSIZED,
    Pending,
)

__all__ = ["COLUMNS", "Columns", "ProfilerEvent", "Scalar", "Span", "shown", "under_way"]


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
        peer: the other rank of a message; -1 for a collective, and -2 - r for one from or to a single rank r, its `root`.
        group: the process group, or the two ends of a message; "" for what one rank does alone.
        match: the number of the operation within its group; spans of several ranks with the same group and match are one.
        line: where the student's code issued it: "cell 5, line 12" or "train.py, line 12"; of a compute span, where the rank
            first used its name in the run.
        device: "cpu", or "cuda" where the times were taken by the GPU; "CPU:1" of a rank with several of TensorFlow's devices.
        measured: True for operations as TensorFlow's profiler saw them run: nothing blocks them meanwhile.
        sized: False for a communication that moved bytes, nobody knows how many; `nbytes` is 0.
        done: False for an operation that had not completed; it ends where the time looked at ends.
        automatic: True for a compute span that labkit records without the program's help, such as a call that is served.
        served: True where a thread of the rank that does what another rank has called computed, or was blocked.
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
    automatic: bool = False
    measured: bool = False
    sized: bool = True
    served: bool = False

    @property
    def duration_ns(self) -> int:
        """Length in nanoseconds."""
        return self.end_ns - self.start_ns

    @property
    def root(self) -> int:
        """The rank that a broadcast or a scatter comes from, or that a gather or a reduce goes to; -1 for the rest."""
        return ROOTED - self.peer if self.peer <= ROOTED else -1


@dataclass(frozen=True, slots=True)
class Scalar:
    """One value that a rank recorded with `record(name=value)`, and when."""

    rank: int
    name: str
    time_ns: int
    value: float


@dataclass(frozen=True, slots=True)
class ProfilerEvent:
    """Something that torch's profiler saw in a rank: an operator, a kernel, a call of the CUDA runtime.

    Args:
        rank: the number of the rank.
        track: where it ran: a thread of the rank, or a stream of a GPU.
        name: torch's: "aten::mm", the name of a kernel.
        category: torch's: "cpu_op", "kernel", "user_annotation", ...
        start_ns, end_ns: on the clock of the spans.
    """

    rank: int
    track: str
    name: str
    category: str
    start_ns: int
    end_ns: int


COLUMNS = np.dtype(
    [
        ("rank", "<i4"), ("name", "<u4"), ("kind", "u1"), ("flags", "<u2"), ("start_ns", "<i8"), ("end_ns", "<i8"),
        ("wait_start_ns", "<i8"), ("wait_end_ns", "<i8"), ("nbytes", "<i8"), ("peer", "<i4"), ("group", "<u4"), ("match", "<i8"),
        ("line", "<u4"),
    ]
)  # fmt: skip


class Columns:
    """Spans as one numpy array, by start, so that a million of them can be counted and drawn.

    Args:
        data: an array of `COLUMNS`: the fields of `Span`, its texts as places in `names`, its kind as one in
            `recording.ring_buffer.KINDS`.
        names: the texts; the first is "".
        ready_ns, around: as the properties, for each of `data`; given for a part of a trace, where an operation may lack some of
            its ranks, and a span what lies within it.
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
        """The columns of spans in any order."""
        ids: dict[str, int] = {"": 0}

        def number(text: str) -> int:
            return ids.setdefault(text, len(ids))

        rows = [
            (
                s.rank, number(s.name), KINDS.index(s.kind), _flags(s), s.start_ns, s.end_ns, s.wait_start_ns, s.wait_end_ns,
                s.nbytes, s.peer, number(s.group), s.match, number(s.line),
            )
            for s in spans
        ]  # fmt: skip
        return cls(np.array(rows, COLUMNS), list(ids))

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[Span]:
        names = self.names
        for rank, name, kind, flags, start, end, wait_start, wait_end, nbytes, peer, group, match, line in self.data.tolist():
            yield Span(
                rank, names[name], KINDS[kind], start, end, wait_start, wait_end, nbytes, peer, names[group], match, names[line],
                _device(flags), not flags & OPEN, bool(flags & AUTOMATIC), bool(flags & MEASURED), not flags & UNSIZED,
                bool(flags & SERVED),
            )  # fmt: skip

    def where(self, keep: Any) -> Columns:
        """The spans for which `keep`, a boolean per span, is true."""
        return Columns(self.data[keep], self.names, self.ready_ns[keep], self.around[keep])

    def name_id(self, text: str) -> int:
        """The place of a text in `names`; one that no span has, if it is not there."""
        return self.names.index(text) if text in self.names else len(self.names)

    @cached_property
    def around(self) -> NDArray[np.bool_]:
        """For each span: whether it is a communication of the program's own around a recorded operation.

        Such a span is a label. The operation counts; what the program does before and after it is no communication. It has to
        begin inside, and lie there for the greater part: TensorFlow's profiler sees its end a little later than the program.
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
        """For each span: when the last of the ranks taking part had come, so that data could travel; else its own start.

        Who takes part is known from what a group has completed. An operation that has not completed is ready at its end, and so
        has waited all the while, unless as many ranks have come to it.
        """
        if self._ready_ns is not None:
            return self._ready_ns
        ready: NDArray[np.int64] = self.data["start_ns"].copy()
        shared = np.flatnonzero(self.data["group"])
        if not len(shared):
            return ready
        shared = shared[np.lexsort((self.data["match"][shared], self.data["group"][shared]))]
        rows = self.data[shared]  # those of a group lie together, and within them those of an operation
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
    start_ns: int,
    now_ns: int,
    number: Callable[[str], int],
    *,
    calls: Iterable[tuple[int, str]] = (),
    pending: Sequence[Sequence[Pending]] = (),
) -> Any:
    """What has not come to its end, as if it did now: an array of `COLUMNS`.

    Args:
        start_ns: when the calls began.
        now_ns: the moment.
        number: gives a text its place in `Columns.names`.
        calls: the ranks whose function has not returned, each with what the function is called.
        pending: per rank, the operations under way.
    """
    rows = [(rank, number(name), CALL, OPEN, start_ns, max(start_ns, now_ns), 0, 0, 0, -1, 0, 0, 0) for rank, name in calls]
    for rank, operations in enumerate(pending):
        rows += [
            (
                rank, number(p.name), kind, flags, p.start_ns, max(p.start_ns, now_ns),
                p.wait_start_ns, max(p.wait_start_ns, now_ns) if p.wait_start_ns else 0,
                p.nbytes, p.peer, number(p.group), p.match, number(p.line),
            )
            for p, kind, flags in shown(operations)
        ]  # fmt: skip
    return np.array(rows, COLUMNS)


def shown(operations: Sequence[Pending]) -> Iterator[tuple[Pending, int, int]]:
    """What of a rank's operations under way is drawn, each with its kind and its flags."""
    threads = {p.thread for p in operations if p.name.startswith(SERVE)}
    for p in operations:
        if p.name.startswith(SERVE):
            yield p, COMPUTE, OPEN | AUTOMATIC | SERVED
        elif not p.name.startswith(
            (PROMISE, UNSEEN_PROMISE)
        ):  # which takes nobody's time: who waits for it has an operation of its own
            yield p, COMMUNICATION, OPEN | (SERVED if p.wait_start_ns and p.thread in threads else 0)


def _flags(span: Span) -> int:
    """What `Columns` keeps of a span's device, and of how it was seen."""
    _, _, number = span.device.partition(":")
    device = (int(number) + 1) << DEVICE_SHIFT if number else ON_CUDA if span.device == "cuda" else 0
    seen = (AUTOMATIC if span.automatic else 0) | (MEASURED if span.measured else 0) | (0 if span.sized else UNSIZED)
    return device | (0 if span.done else OPEN) | (SERVED if span.served else 0) | seen


def _device(flags: int) -> str:
    number = flags >> DEVICE_SHIFT
    return f"CPU:{number - 1}" if number else "cuda" if flags & ON_CUDA else "cpu"


def _changes(column: Any) -> NDArray[np.bool_]:
    """Where a value differs from the one before it; the first does."""
    changes: NDArray[np.bool_] = np.append(True, column[1:] != column[:-1])[: len(column)]
    return changes
