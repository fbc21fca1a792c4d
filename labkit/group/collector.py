"""The raw records of a run: read while it runs, shown in a picture, queried for operations, turned into a trace."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from labkit.costs.link import Link
from labkit.costs.network import Network, nodes_over
from labkit.errors.lists import listed
from labkit.group.mismatches import ProgramLine, first_unequal
from labkit.group.pool_state import Member
from labkit.launch.resource_usage import Load
from labkit.recording.events import ProfilerEvent, Scalar
from labkit.recording.ring_buffer import pending_of, record_dtype
from labkit.recording.schema import CALL, COMMUNICATION, COMPUTE, ENDED, OPEN, READING, STEPS_IN_ALL, UNSHOWN, Pending
from labkit.tracing.attempts import joined_attempts
from labkit.tracing.downsample import downsample
from labkit.tracing.trace import Trace, from_records
from labkit.worker.runtimes.tensorflow.profiler_events import COMPUTE as UNNAMED

_Who = TypeVar("_Who")  # a rank's number or its name


class Picture(Protocol):
    """A live picture of a run; its methods are called on the thread that called `watch`."""

    interval_s: float

    def begin(self, ranks: tuple[str, ...], title: str, start_ns: int, called: Sequence[int]) -> None:
        """The run starts; the ranks with the numbers `called` call the function, the others serve."""

    def update(
        self, now_ns: int, new: Trace, pending: Sequence[Sequence[Pending]], loads: Sequence[Load], silent: Mapping[int, int]
    ) -> None:
        """Receive newly completed spans, per rank its pending operations and its resource usage.

        `silent` has the ranks whose machine does not answer, with the time of its last report.
        """

    def restart(self, now_ns: int) -> None:
        """All ranks have been replaced, and the function starts again on them."""

    def hold(self, asking: Collection[int]) -> None:
        """The student is asked for a command for one of these ranks: no update follows while the student thinks."""

    def end(self, trace: Trace, stopped: str) -> None:
        """The run has ended; `stopped` says why it ended early, as in "stopped by an error"; "" if it did not."""


class Records:
    """The records of one run, by rank; `cores` is how many cores they share, 0 if unknown.

    If the ranks of the run were replaced, these are the records of one attempt, and `earlier` has those before.
    """

    def __init__(
        self, members: Sequence[Member], link: Link | Network | None = None, cores: float = 0.0, earlier: Records | None = None
    ) -> None:
        self._link, self._cores, self._earlier = link, cores, earlier
        self._nodes = nodes_over(link, len(members)) or nodes_of(members)
        self._clocks = [(m.process.place, m.process.clock) for m in members]
        self._clock_error_ns = 0
        self._members = [m.name for m in members]
        self._labels = [m.label for m in members]
        self._readers = [m.reader for m in members]
        self._chunks: list[list[Any]] = [[] for _ in members]
        self._shown = [0 for _ in members]  # chunks that the live picture has
        self._dropped = [r.dropped for r in self._readers]
        self._names: list[list[str]] = [[] for _ in members]
        self._numbers: list[dict[str, tuple[int, int]]] = [{} for _ in members]  # see `_counted_numbers`
        self._counted = [0 for _ in members]  # chunks that `_numbers` includes
        self._ended: list[Scalar] = []
        self._interrupted: dict[str, Any] = {}  # the calls and operations that were running when the run was stopped
        for reader in self._readers:
            reader.read()  # discard records from between the runs

    def drain(self) -> list[Any]:
        """Read the new records of each rank, and return them by rank."""
        new = [reader.read() for reader in self._readers]
        for chunks, records in zip(self._chunks, new, strict=True):
            if len(records):
                chunks.append(records)
        return new

    def end(self, rank: int, at_ns: int) -> None:
        """Mark that a rank failed, whether the run went on, without it or with fresh ranks, or not."""
        self._ended.append(Scalar(rank, ENDED, at_ns, 1.0))

    def cut(self, start_ns: int, end_ns: int, calls: Sequence[tuple[int, str]], silent: Sequence[tuple[int, int]]) -> None:
        """Add the calls and operations that were still running when the run was stopped.

        `calls` has the ranks that called the function, each with the function's name; `silent` has those whose machine
        does not answer, each with the time of its last report.
        """
        self.drain()
        under_way = [(rank, name) for rank, name in calls if not any((c["kind"] == CALL).any() for c in self._chunks[rank])]
        pending = [r.pending() for r in self._readers]
        others = {"calls": under_way, "pending": pending, "silent": silent}
        self._interrupted = {"start_ns": start_ns, "end_ns": end_ns, **others}

    def freeze(self) -> None:
        """Read for the last time, before the next run uses the same rings."""
        self.drain()
        self._names = [list(r.names()) for r in self._readers]
        self._dropped = [r.dropped - before for r, before in zip(self._readers, self._dropped, strict=True)]
        self._readers = []
        errors = {place.node: clock.error_ns for place, clock in self._clocks if place is not None}
        self._clock_error_ns = sum(sorted(errors.values())[-2:]) if len(errors) > 1 else 0  # each is that to this machine
        self._clocks = []

    def unshown(self) -> Trace:
        """Return a downsampled trace of the records read since the last call, for the live picture."""
        new = [chunks[shown:] for chunks, shown in zip(self._chunks, self._shown, strict=True)]
        self._shown = list(map(len, self._chunks))
        names = [list(r.names()) for r in self._readers]
        loops = [own.index(STEPS_IN_ALL) if STEPS_IN_ALL in own else -1 for own in names]
        sampled = [[downsample(rows, loop) for rows in n] for n, loop in zip(new, loops, strict=True)]
        joined = [np.concatenate(n) if n else np.empty(0, record_dtype()) for n in sampled]
        trace = from_records(joined, names, self._labels)
        trace.scalars += tuple(self._ended)
        return trace

    def communicated(self) -> bool:
        """Whether any rank has completed a communication operation."""
        return any((chunk["kind"] == COMMUNICATION).any() for chunks in self._chunks for chunk in chunks)

    def entered(self, rank: int) -> dict[str, int]:
        """Return the number of the last operation that a rank has completed, by process group or pair of ranks."""
        return {group: last for group, (_, last) in self._counted_numbers(rank).items()}

    def _counted_numbers(self, rank: int) -> dict[str, tuple[int, int]]:
        """The numbers of the first and last operation that a rank has completed, by process group or pair of ranks."""
        found, names, chunks = self._numbers[rank], self._names_of(rank), self._chunks[rank]
        for chunk in chunks[self._counted[rank] :]:
            rows = chunk[(chunk["kind"] == COMMUNICATION) & (chunk["match"] > 0)]
            for group in np.unique(rows["group"]).tolist():
                numbers = (*rows["match"][rows["group"] == group].tolist(), *found.get(names[group], ()))
                found[names[group]] = min(numbers), max(numbers)
        self._counted[rank] = len(chunks)
        return found

    def numbered(self, operations: Sequence[tuple[_Who, Pending]]) -> tuple[tuple[_Who, Pending], ...]:
        """Return operations with their numbers counted from the start of this run, as a student counts them.

        A process group counts from its own start, which may be many runs ago.
        """
        first = {p.group: p.match for _, p in operations if p.match}
        begun = [(p.group, p.match) for reader in self._readers for p in reader.pending()]
        begun += [(p.group, p.match) for _, p in operations]
        for rank in range(len(self._chunks)):
            begun += [(group, number) for group, (number, _) in self._counted_numbers(rank).items()]
        for group, number in begun:
            if number and group in first:
                first[group] = min(first[group], number)
        return tuple((who, dataclasses.replace(p, match=p.match and p.match - first[p.group] + 1)) for who, p in operations)

    def pending(self, rank: int) -> list[Pending]:
        """Return the operations that are pending on a rank, numbered as by `numbered`."""
        return [p for _, p in self.numbered([(rank, p) for p in self._readers[rank].pending()])]

    def failed(self, rank: int) -> list[Pending]:
        """Return the operations that failed on a rank."""
        return [self._operation(rank, row) for chunk in self._chunks[rank] for row in chunk[_failed(chunk)]]

    def last_wait(self, rank: int) -> tuple[Pending, int] | None:
        """Return the last communication operation that the student's code called on a rank, and when it ended.

        An operation that failed counts, too. None if there is none.
        """
        last = None
        for chunk in self._chunks[rank]:
            # Operations without a line, such as replies, were not called by the student's code.
            rows = chunk[(chunk["kind"] == COMMUNICATION) & (chunk["line"] != 0) & (chunk["flags"] & UNSHOWN == 0)]
            if len(rows):
                row = rows[rows["end_ns"].argmax()]
                last = row if last is None or row["end_ns"] >= last["end_ns"] else last
        if last is None:
            return None
        since_ns = int(last["wait_start_ns"]) or int(last["start_ns"])
        return dataclasses.replace(self._operation(rank, last), wait_start_ns=since_ns), int(last["end_ns"])

    def last_span(self, rank: int) -> str:
        """Return the name of the last span that a rank has completed, ignoring unspecific names; "" for none."""
        names, last = self._readers[rank].names(), ""
        for chunk in self._chunks[rank]:
            rows = chunk[chunk["kind"] == COMPUTE]
            shown = (names[number] for number in rows["name"][::-1])
            last = next((name for name in shown if name not in (READING, UNNAMED)), last)
        return last

    def done(self, rank: int, which: Collection[tuple[str, int]]) -> list[Pending]:
        """Return the operations that a rank has completed, out of some: pairs of a group's key and a number."""
        names, found = self._readers[rank].names(), []
        for group, match in which:
            number = names.index(group) if group in names else -1
            for chunk in self._chunks[rank]:
                here = (chunk["kind"] == COMMUNICATION) & (chunk["match"] == match) & (chunk["group"] == number)
                found += [self._operation(rank, row) for row in chunk[here & ~_failed(chunk)]]
        return found

    def lines_before(self, at_ns: int, rank: int, group: str) -> list[str]:
        """Return the lines of a rank's optimizer steps and of its operations in a group before a moment, in order."""
        names = self._names_of(rank)
        found = [(p.start_ns, p.line) for p in self._readers[rank].pending() if p.group == group]
        of_group, optimizer = (names.index(name) if name in names else -1 for name in (group, "optimizer"))
        for chunk in self._chunks[rank]:
            entered = (chunk["kind"] == COMMUNICATION) & (chunk["group"] == of_group)
            rows = chunk[entered | ((chunk["kind"] == COMPUTE) & (chunk["name"] == optimizer))]
            found += zip(rows["start_ns"].tolist(), (names[line] for line in rows["line"].tolist()), strict=True)
        return [line for start_ns, line in sorted(found) if start_ns < at_ns]

    def optimizer_steps(self, rank: int) -> int:
        """Return how many optimizer steps a rank has ended."""
        names = self._names_of(rank)
        optimizer = names.index("optimizer") if "optimizer" in names else -1
        return sum(int(((c["kind"] == COMPUTE) & (c["name"] == optimizer)).sum()) for c in self._chunks[rank])

    def unequal(self) -> tuple[list[tuple[str, Pending]], ...]:
        """Find the first operation whose result is wrong, and the first that reduced tensors of different shapes.

        Return for each rank its name and its side of the operation; [] for none.
        """
        self.drain()
        return tuple([self._side(place) for place in places] for places in first_unequal(self._chunks, self._names_of))

    def _side(self, at: ProgramLine) -> tuple[str, Pending]:
        (side,) = self.numbered([(self._members[at.rank], self._operation(at.rank, self._chunks[at.rank][at.chunk][at.row]))])
        return side

    def _names_of(self, rank: int) -> list[str]:
        return self._readers[rank].names() if self._readers else self._names[rank]

    def _operation(self, rank: int, row: Any) -> Pending:
        return dataclasses.replace(pending_of(row, self._names_of(rank)), wait_start_ns=0)  # it no longer waits

    def trace(self, profiled: Sequence[Sequence[Any]] = ()) -> Trace:
        """Return the trace of all records, with those of earlier attempts; call `freeze` first.

        `profiled` has by rank the fields of its `ProfilerEvent`s; it is empty if torch's profiler was off.
        """
        attempts, earlier = [self._own_trace(profiled)], self._earlier
        while earlier is not None:
            attempts.append(earlier._own_trace([]))
            earlier = earlier._earlier
        return joined_attempts(attempts[::-1]) if self._earlier else attempts[0]

    def _own_trace(self, profiled: Sequence[Sequence[Any]]) -> Trace:
        profile = [ProfilerEvent(rank, *row) for rank, rows in enumerate(profiled) for row in rows]
        unseen = [self._members[rank] for rank, rows in enumerate(profiled) if not rows]
        notes = [f"torch's profiler gave nothing for {listed(unseen)}"] if unseen else []
        joined = [np.concatenate(c) if c else np.empty(0, record_dtype()) for c in self._chunks]
        others: dict[str, Any] = {"dropped": self._dropped, "profile": profile, "notes": notes}
        others |= {"nodes": self._nodes, "link": self._link, "cores": self._cores}
        others["clock_error_ns"] = self._clock_error_ns
        trace = from_records(joined, self._names, self._labels, **others | self._interrupted)
        trace.scalars += tuple(self._ended)
        for scalar in self._ended:  # what was under way lasted until the run was stopped, a little later
            rows = trace.columns.data
            for end in ("end_ns", "wait_end_ns"):
                rows[end] = np.where(rows["rank"] == scalar.rank, np.minimum(rows[end], scalar.time_ns), rows[end])
        return trace


def nodes_of(members: Sequence[Member]) -> tuple[int, ...]:
    """The number of the machine of each rank; () if all are on one machine."""
    places = [m.process.place for m in members]
    return tuple(p.node for p in places if p is not None) if any(p is not None and p.nodes > 1 for p in places) else ()


def _failed(chunk: Any) -> Any:
    return (chunk["kind"] == COMMUNICATION) & ((chunk["flags"] & OPEN) != 0)
