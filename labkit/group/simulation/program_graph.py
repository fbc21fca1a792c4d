"""When the executed ranks do what: from programs without times to a trace, computed by the engine of replay.

In the graph of the replay, each stream is a thread, with kernels as the time between its events. That a stream waits
for an event of another is an operation of that rank, which takes no time.

Two orders differ in what waits. On a CPU, the host computes: a rank does everything in program order, and a wait blocks
it. On a GPU, the host runs ahead: each stream does its part in program order, waits for a communication if the program
says so or if it uses the data, and for other streams if it was told to. In both, a communication begins when all ranks
have come to it and their links are free.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from labkit.costs.device import Device, Kernel
from labkit.costs.link import Link
from labkit.costs.network import Network, as_network, nodes_over
from labkit.errors.exceptions import LabError
from labkit.errors.lists import listed
from labkit.errors.units import bytes_in_words
from labkit.group.simulation.program import (
    Communication,
    Elapsed,
    Mark,
    Memory,
    OnStream,
    Program,
    StreamEvent,
    Value,
    Wait,
)
from labkit.recording.events import Columns, Scalar
from labkit.recording.group_keys import GroupKind, ends_of, kind_of, of_ranks, pair_key
from labkit.recording.operations import OTHER, type_of
from labkit.recording.schema import COMMUNICATION, MEMORY, MEMORY_KINDS, Span
from labkit.tracing.replaying.graph import END, ISSUE, PLAIN, START, TIMES, WAIT, WAIT_END, WAIT_START, Gate, Graph, ThreadEvents
from labkit.tracing.replaying.times import Rules, Times, play
from labkit.tracing.trace import Trace

OTHERS: Final = MEMORY + MEMORY_KINDS[-1]  # all tensors that `track_memory` does not count as of another kind

Operation = tuple[str, int]  # the key of its group and its number in it


class ProgramGraph:
    """The graph of some ranks' programs.

    Without a device, the programs were measured on a CPU; without a link, communication takes no time. `late_ns` is how
    much longer it takes than on the link. LabError: a rank waits for a communication that another never issues.
    """

    def __init__(
        self, programs: Mapping[int, Program], device: Device | None, link: Link | Network | None, name: str, late_ns: int
    ) -> None:
        self.size = next(iter(programs.values())).size  # the number of ranks, those without a program included
        # The recorded values: the span whose start is their time, the rank, the name and the value.
        self.values: list[tuple[int, int, str, float]] = []
        # For each span of a wait by which a default stream waits for another: the communication for which that one
        # waited last, or -1; and the communications for which another than the default stream waits.
        self.stream_waits: list[tuple[int, int]] = []
        self.waits_of_other_streams: list[int] = []
        self._programs = programs
        self._node_of = as_network(link, self.size).nodes_among(self.size) if link is not None else ()
        self._spans: list[Span] = []
        self._members: defaultdict[Operation, list[tuple[int, Communication]]] = defaultdict(list)
        self.gates: list[Gate] = []
        threads = [thread for program in programs.values() for thread in _SimulatedRank(self, program, device).threads(name)]
        self._check_answers()
        stands_for, ahead = self._ranks_like(), device is not None and device.runs_ahead
        for members in self._members.values():
            rows, (_, first) = [row for row, _ in members], members[0]
            everyone, alike = () if first.peer >= 0 else first.group, self._alike(rows, first, stands_for)
            self.gates.append(Gate(type_of(first.name), rows, rows, rows, everyone, alike, ahead))
        count = len(self._spans)
        trace = Trace(Columns.of(self._spans), ranks=[f"rank {rank}" for rank in range(self.size)])
        none = np.zeros(count, np.int64)
        # Its spans have no times, and those without a name only take part in it.
        self.graph = Graph(trace, self.gates, none, none > 0, none - 1, {}, [-1] * count, threads)
        late = [late_ns if span.kind == "communication" else 0 for span in self._spans]
        gaps, nbytes = [thread.gaps for thread in threads], [span.nbytes for span in self._spans]
        self.rules = Rules(gaps, [0] * count, late, [0] * count, {}, {}, link, nbytes, [1.0] * count)

    def add(self, rank: int, name: str = "", kind: str = "compute", **fields: Any) -> int:
        """Add a span, and return its number."""
        self._spans.append(Span(rank, name, kind, 0, 0, **fields))
        return len(self._spans) - 1

    def communicate(self, rank: int, communication: Communication, matches: Counter[str]) -> int:
        """Add the span of a communication, count it in `matches` by group, and return its number."""
        of = communication
        if of.peer >= 0:
            source, destination = of.group
            key = pair_key(source, destination, of.tag, f"group {of.process_group}")
        else:
            key = "world" if len(of.group) == self.size else of_ranks(f"group {of.process_group}", of.group)
        match, matches[key] = matches[key], matches[key] + 1
        row = self.add(
            rank, of.name, "communication", nbytes=of.nbytes, peer=of.peer, root=of.root, group=key, match=match, line=of.line
        )
        self._members[key, match].append((row, of))
        return row

    @staticmethod
    def key_of_pair(text: str, place: NDArray[Any]) -> str:
        """Return the key of messages between ranks with other numbers, or a text that is no such key."""
        if kind_of(text) is not GroupKind.PAIR:
            return text
        source, destination, tag = ends_of(text)
        return pair_key(int(place[source]), int(place[destination]), tag, text.partition(" group ")[2])

    def _check_answers(self) -> None:
        for members in self._members.values():
            (row, first), *others = members
            came = {self._spans[row].rank for row, _ in members}
            if missing := sorted((self._programs.keys() & set(first.group)) - came):
                ranks = listed([f"rank {rank}" for rank in missing], most=3)
                takes = "take" if len(missing) > 1 else "takes"
                raise LabError(
                    f"simulate: rank {min(came)} waits in {_in_words(first)} for {ranks}, which never {takes} part in it. "
                    "The same program would wait for ever in a group, too."
                )
            kind = type_of(first.name)
            for other_row, other in others if first.peer < 0 else ():
                if type_of(other.name) is not kind or (kind.reduces and other.nbytes != first.nbytes):
                    given = [
                        f"rank {self._spans[of].rank} calls {_in_words(one)} with {bytes_in_words(one.nbytes)}"
                        for of, one in ((row, first), (other_row, other))
                    ]
                    raise LabError(f"simulate: {given[0]}, and {given[1]}. The ranks of a group must call the same.")

    def _ranks_like(self) -> dict[int, float]:
        """Return for each rank with a program for how many ranks of its node it stands."""
        if not self._node_of:
            return dict.fromkeys(self._programs, 1.0)
        node_of, programs = self._node_of, self._programs
        all_ranks, ours = Counter(node_of), Counter(node_of[rank] for rank in programs)
        return {rank: all_ranks[node_of[rank]] / ours[node_of[rank]] for rank in programs}

    def _alike(self, rows: Sequence[int], first: Communication, stands_for: Mapping[int, float]) -> float:
        """Return how many equal communications share a node's connection: those along an axis of a mesh, say.

        All ranks of a node do the same as those with a program, each in a group of its own with as many ranks.
        """
        if not self._node_of:
            return 1
        ranks = [self._spans[row].rank for row in rows]
        if first.peer >= 0:
            return max(map(stands_for.__getitem__, ranks))
        members, taking_part = Counter(self._node_of[rank] for rank in first.group), Counter[int]()
        for rank in ranks:
            taking_part[self._node_of[rank]] += stands_for[rank]  # type: ignore[assignment]  # not whole
        return max(1.0, *(count / members[node] for node, count in taking_part.items()))


def _in_words(communication: Communication) -> str:
    return communication.name + (f" ({communication.line})" if communication.line else "")


class _SimulatedRank:
    """Makes the threads of one rank."""

    def __init__(self, whole: ProgramGraph, program: Program, device: Device | None) -> None:
        self._whole, self._program, self._rank, self._device = whole, program, program.rank, device
        self._ahead = device is not None and device.runs_ahead
        self._threads: dict[int, ThreadEvents] = {}  # by stream
        self._work_ns: defaultdict[int, float] = defaultdict(float)  # of each stream since its last event
        self._stream = 0
        self._matches: Counter[str] = Counter()
        self._issued: dict[int, int] = {}  # the span of each communication
        self._waited: defaultdict[int, int] = defaultdict(lambda: -1)  # the communication for which a stream waited last
        self._events: dict[int, tuple[int, int, int]] = {}  # of streams: the span, the stream, and what it had waited for
        self._open: defaultdict[tuple[str, str], list[int]] = defaultdict(list)  # spans that have begun

    def threads(self, name: str) -> list[ThreadEvents]:
        call = self._whole.add(self._rank, name, "call")
        self._append(PLAIN, call, START)
        counted = self._device is not None  # of measured ranks, only `track_memory` knows the memory, as of real ones
        kinds: dict[str, float] = {}  # what `track_memory` counts
        live_bytes, most = 0, self._value(OTHERS, 0) if counted else -1  # and which value holds the most since it was begun
        for event in self._program.events:
            if isinstance(event, Elapsed):
                self._work_ns[0] += event.ns
            elif isinstance(event, Kernel):
                assert self._device is not None
                self._work_ns[self._stream] += event.seconds(self._device) * 1e9
            elif isinstance(event, Memory) and counted:
                live_bytes = event.live_bytes
                row, rank, of_others, value = self._whole.values[most]
                self._whole.values[most] = row, rank, of_others, max(value, live_bytes - sum(kinds.values()))
            elif isinstance(event, Mark):
                self._mark(event)
                most = self._value(OTHERS, max(0, live_bytes - sum(kinds.values()))) if counted else -1
            elif isinstance(event, Communication):
                self._issued[event.number] = row = self._whole.communicate(self._rank, event, self._matches)
                self._append(ISSUE, row, START, self._stream)
            elif isinstance(event, Wait):
                self._wait(self._issued[event.communication])
            elif isinstance(event, Value):
                self._value(event.name, event.value)
                if counted and event.name.startswith(MEMORY):
                    kinds[event.name] = event.value
                    most = self._value(OTHERS, max(0, live_bytes - sum(kinds.values())))
            elif self._ahead and isinstance(event, OnStream):
                self._stream = event.stream
            elif self._ahead and isinstance(event, StreamEvent):
                self._synchronize(event)
        self._append(PLAIN, call, END)
        return list(self._threads.values())

    def _append(self, kind: int, row: int, which: int, stream: int = 0) -> None:
        if stream not in self._threads:
            first = row if not stream else self._whole.add(self._rank)
            self._threads[stream] = ThreadEvents(self._rank, -1, [PLAIN], [4 * first + START], [0], [0], [-1])
            if first == row:
                return
        thread = self._threads[stream]
        thread.kinds.append(kind)
        thread.times.append(4 * row + which)
        thread.at_ns.append(0)
        thread.gaps.append(max(round(self._work_ns.pop(stream, 0.0)), 0))
        thread.inside.append(-1)

    def _value(self, name: str, value: float) -> int:
        row = self._whole.add(self._rank)
        self._append(PLAIN, row, START)
        self._whole.values.append((row, self._rank, name, value))
        return len(self._whole.values) - 1

    def _mark(self, mark: Mark) -> None:
        begun = self._open[mark.kind, mark.name]
        if mark.begins:
            begun.append(self._whole.add(self._rank, mark.name, mark.kind, line=mark.line))
            self._append(PLAIN, begun[-1], START)
        else:
            self._append(PLAIN, begun.pop(), END)

    def _wait(self, row: int) -> None:
        self._append(PLAIN, row, WAIT_START, self._stream)
        self._append(WAIT, row, WAIT_END, self._stream)
        self._waited[self._stream] = row
        if self._stream:
            self._whole.waits_of_other_streams.append(row)

    def _synchronize(self, event: StreamEvent) -> None:
        if not event.waits:
            row = self._whole.add(self._rank)
            self._append(ISSUE, row, START, event.stream)
            self._events[event.number] = row, event.stream, self._waited[event.stream]
            return
        recorded, stream, waited = self._events[event.number]
        if stream == event.stream:
            return
        row = self._whole.add(self._rank)  # completes as soon as the event has been issued
        self._whole.gates.append(Gate(OTHER, [recorded], [row], [recorded]))
        self._append(PLAIN, row, WAIT_START, event.stream)
        self._append(WAIT, row, WAIT_END, event.stream)
        if event.stream:
            self._waited[event.stream] = max(self._waited[event.stream], waited)
        else:
            self._whole.stream_waits.append((row, waited))


def simulated_trace(
    programs: Mapping[int, Program],
    device: Device | None,
    link: Link | Network | None,
    *,
    name: str,
    show: Sequence[int] = (),
    notes: Sequence[str] = (),
    late_ns: int = 0,
) -> Trace:
    """Compute the times of executed ranks; return the trace of those that are to be shown (default: all).

    The other arguments are as for `ProgramGraph`; `notes` are for the reader.
    """
    whole = ProgramGraph(programs, device, link, name, late_ns)
    try:
        times = play(whole.graph, whole.rules)
    except LabError:
        raise LabError("simulate: ranks wait for one another for ever, as they communicate in different orders") from None
    size, shown = whole.size, sorted(set(show) or programs)
    nodes = nodes_over(link, size)
    place = np.full(size + 1, len(shown))  # ranks that are not shown have this number
    place[shown], place[-1] = range(len(shown)), -1  # -1 stands for no rank
    data, at_ns = _data(whole, times)
    columns = whole.graph.trace.columns
    chosen = np.array([bool(text) for text in columns.names], bool)[data["name"]] & (place[data["rank"]] < len(shown))
    data = data[chosen]
    for field in ("rank", "peer", "root"):
        data[field] = place[data[field]]
    names = [whole.key_of_pair(text, place) for text in columns.names]
    values = [
        Scalar(int(place[rank]), text, int(at_ns[row, 0]), value)
        for row, rank, text, value in whole.values
        if place[rank] < len(shown)
    ]
    return Trace(
        Columns(data, names), values, ranks=[f"rank {rank}" for rank in shown], simulated=size, link=link, notes=notes,
        nodes=[nodes[rank] for rank in shown] if nodes else ()
    )  # fmt: skip


def _data(whole: ProgramGraph, times: Times) -> tuple[Any, Any]:
    """Return the rows of all spans with their times, and these as an array of shape (spans, 4)."""
    data = whole.graph.trace.columns.data.copy()
    at_ns = np.array([time or 0 for time in times.at_ns], np.int64).reshape(-1, 4)
    for row in whole.waits_of_other_streams:
        at_ns[row, 2:] = 0
    for row, communication in whole.stream_waits:  # the first time that the default stream has to wait
        since_ns, until_ns = at_ns[row, 2:]
        if communication >= 0 and until_ns > since_ns and not at_ns[communication, 3]:
            at_ns[communication, 2:] = since_ns, until_ns
    at_ns[at_ns[:, 3] <= at_ns[:, 2], 2:] = 0
    for column, name in enumerate(TIMES):
        data[name] = at_ns[:, column]
    travels = data["kind"] == COMMUNICATION
    data["wait_start_ns"][~travels] = data["wait_end_ns"][~travels] = 0
    return data, at_ns
