"""The raw records of a run: read while it is under way, counted, and made into a trace when somebody asks for one."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from labkit.crew import Member
from labkit.ring import CALL, COMMUNICATION, COMPUTE, OPEN, STEPS_IN_ALL, Pending, place_and_name, record_dtype
from labkit.stuck import amount
from labkit.thin import thin
from labkit.trace import Trace, from_records

__all__ = ["Records"]


class Records:
    """What the ranks of a run have written down, by rank, until somebody asks for the trace.

    Args:
        members: the ranks.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = [m.name for m in members]
        self._readers = [m.reader for m in members]
        self._chunks: list[list[Any]] = [[] for _ in members]
        self._dropped = [r.dropped for r in self._readers]
        self._names: list[list[str]] = [[] for _ in members]
        self._entered: list[dict[str, int]] = [{} for _ in members]
        self._counted = [0 for _ in members]  # chunks that `_entered` knows
        self._cut: dict[str, Any] = {}  # of a run that was stopped: what it was in the middle of
        for reader in self._readers:
            reader.read()  # what a rank did between the runs

    def drain(self) -> list[Any]:
        """Read what is new; per rank, the records."""
        new = [reader.read() for reader in self._readers]
        for chunks, records in zip(self._chunks, new, strict=True):
            if len(records):
                chunks.append(records)
        return new

    def cut(self, start_ns: int, end_ns: int, calls: Sequence[tuple[int, str]]) -> None:
        """The run was stopped: what had not come to its end belongs to its picture all the same.

        Args:
            start_ns: when the run began.
            end_ns: when it was stopped.
            calls: the ranks that called the function, each with what it is called.
        """
        self.drain()
        under_way = [(rank, name) for rank, name in calls if not any((c["kind"] == CALL).any() for c in self._chunks[rank])]
        pending = [r.pending() for r in self._readers]
        self._cut = {"start_ns": start_ns, "end_ns": end_ns, "calls": under_way, "pending": pending}

    def freeze(self) -> None:
        """Read for the last time: the rings serve the next run."""
        self.drain()
        self._names = [list(r.names()) for r in self._readers]
        self._dropped = [r.dropped - before for r, before in zip(self._readers, self._dropped, strict=True)]
        self._readers = []

    def part(self, new: list[list[Any]]) -> Trace:
        """What a picture is told of some records, given in pieces."""
        names = [list(r.names()) for r in self._readers]
        loops = [own.index(STEPS_IN_ALL) if STEPS_IN_ALL in own else -1 for own in names]
        thinned = [[thin(rows, loop) for rows in n] for n, loop in zip(new, loops, strict=True)]
        joined = [np.concatenate(n) if n else np.empty(0, record_dtype()) for n in thinned]
        return from_records(joined, names, self._members)

    def communicated(self) -> bool:
        """Whether any rank has finished a communication."""
        return any((chunk["kind"] == COMMUNICATION).any() for chunks in self._chunks for chunk in chunks)

    def entered(self, rank: int) -> dict[str, int]:
        """By process group or pair of ranks, the number of the last operation that a rank has completed."""
        found, names = self._entered[rank], self._readers[rank].names()
        chunks = self._chunks[rank]
        for chunk in chunks[self._counted[rank] :]:
            rows = chunk[chunk["kind"] == COMMUNICATION]
            for group in np.unique(rows["group"]).tolist():
                found[names[group]] = max(found.get(names[group], 0), int(rows["match"][rows["group"] == group].max()))
        self._counted[rank] = len(chunks)
        return found

    def failed(self, rank: int) -> list[Pending]:
        """The operations that a rank did not complete because they failed."""
        return [self._operation(rank, row) for chunk in self._chunks[rank] for row in chunk[_failed(chunk)]]

    def last_wait(self, rank: int) -> tuple[Pending, int] | None:
        """The communication that a rank was in last, of those that the student's code called for, and when it ended or failed."""
        last = None
        for chunk in self._chunks[rank]:
            rows = chunk[(chunk["kind"] == COMMUNICATION) & (chunk["line"] != 0)]  # 0 is no line: replies, say
            if len(rows):
                row = rows[rows["end_ns"].argmax()]
                last = row if last is None or row["end_ns"] >= last["end_ns"] else last
        if last is None:
            return None
        since_ns = int(last["wait_start_ns"]) or int(last["start_ns"])
        return dataclasses.replace(self._operation(rank, last), wait_start_ns=since_ns), int(last["end_ns"])

    def last_span(self, rank: int) -> str:
        """The name of the span that a rank has completed last; "" if there is none."""
        names, last = self._readers[rank].names(), ""
        for chunk in self._chunks[rank]:
            rows = chunk[chunk["kind"] == COMPUTE]
            if len(rows):
                last = place_and_name(names[rows[-1]["name"]])[1]
        return last

    def done(self, rank: int, which: Collection[tuple[str, int]]) -> list[Pending]:
        """Some operations, given by their group and number, as far as a rank has completed them."""
        names, found = self._readers[rank].names(), []
        for group, match in which:
            number = names.index(group) if group in names else -1
            for chunk in self._chunks[rank]:
                here = (chunk["kind"] == COMMUNICATION) & (chunk["match"] == match) & (chunk["group"] == number)
                found += [self._operation(rank, row) for row in chunk[here & ~_failed(chunk)]]
        return found

    def unequal_messages(self) -> list[tuple[str, Pending]]:
        """The first message that was received as something else than was sent: both sides, each with the name of its rank.

        A backend copies bytes, and tells nobody when a message is shorter than its receive, or of another type.
        """
        texts: dict[str, int] = {}
        sides = []  # of messages, in columns: rank, chunk, row in it; group, number; what, as a number in `texts`
        for rank, chunks in enumerate(self._chunks):
            names = self._names_of(rank) if chunks else []
            if not any(n.startswith("p2p ") for n in names):
                continue
            between = np.array([texts.setdefault(n, len(texts)) if n.startswith("p2p ") else -1 for n in names])
            amounts = np.array([texts.setdefault(amount(n), len(texts)) for n in names])
            for number, chunk in enumerate(chunks):
                told = (chunk["kind"] == COMMUNICATION) & (chunk["what"] != 0) & ~_failed(chunk)
                at = np.flatnonzero(told & (between[chunk["group"]] >= 0))
                rows = chunk[at]
                place = np.full_like(at, rank), np.full_like(at, number), at
                sides.append(np.stack([*place, between[rows["group"]], rows["match"].astype(at.dtype), amounts[rows["what"]]]))
        if not sides:
            return []
        every = np.concatenate(sides, axis=1)
        every = every[:, np.lexsort((every[4], every[3]))]
        left, right = every[:, :-1], every[:, 1:]
        unequal = np.flatnonzero((left[3:5] == right[3:5]).all(axis=0) & (left[5] != right[5]))
        if not len(unequal):
            return []
        both = left[:3, unequal[0]].tolist(), right[:3, unequal[0]].tolist()
        return [(self._members[rank], self._operation(rank, self._chunks[rank][chunk][row])) for rank, chunk, row in sorted(both)]

    def _names_of(self, rank: int) -> list[str]:
        return self._readers[rank].names() if self._readers else self._names[rank]

    def _operation(self, rank: int, row: Any) -> Pending:
        names = self._names_of(rank)
        texts = names[row["group"]], int(row["match"]), names[row["line"]], names[row["what"]]
        return Pending(names[row["name"]], int(row["start_ns"]), 0, int(row["nbytes"]), int(row["peer"]), *texts)

    def trace(self) -> Trace:
        """All of it; once frozen."""
        joined = [np.concatenate(c) if c else np.empty(0, record_dtype()) for c in self._chunks]
        return from_records(joined, self._names, self._members, dropped=self._dropped, **self._cut)


def _failed(chunk: Any) -> Any:
    return (chunk["kind"] == COMMUNICATION) & ((chunk["flags"] & OPEN) != 0)
