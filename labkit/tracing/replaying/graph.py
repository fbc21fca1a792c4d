"""The graph of a trace: what each thread did, in which order, and which operations had to wait for which ranks.

A thread's events are the start and the end of its spans, the issue of each operation, and the end of each wait for one.
The time between two events, without the waits, is the thread's own work: a *gap*. An operation completes after its
*gate*: once all ranks that it needs have issued it.

Source: the same graph is the basis of dPRO (H. Hu et al., MLSys 2022) and of Daydream (H. Zhu et al., USENIX ATC 2020).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from labkit.errors.exceptions import LabError
from labkit.errors.lists import listed
from labkit.recording.group_keys import GroupKind, kind_of, ranks_of
from labkit.recording.operations import (
    GRADIENTS,
    RECEIVED_GRADIENTS,
    RECEIVED_REPLY,
    RECV,
    REMOTE,
    REPLY,
    RPC,
    SEND,
    SERVE,
    VALUE,
    OperationType,
    type_of,
)
from labkit.recording.schema import AUTOMATIC, CALL, CUDA, MEASURED, NUMBERED, OPEN, OWN_THREAD, SERVED
from labkit.tracing.intervals import union
from labkit.tracing.trace import Trace

START, END, WAIT_START, WAIT_END = range(4)  # which time of a span an event determines
TIMES: Final = ("start_ns", "end_ns", "wait_start_ns", "wait_end_ns")  # the fields of a span that have them
PLAIN, ISSUE, WAIT = range(3)  # kinds of events
IN_CPP: Final = (GRADIENTS, RECEIVED_GRADIENTS, RECEIVED_REPLY)  # records without duration of what C++ threads do
MEETING: Final = (GroupKind.COLLECTIVE, GroupKind.PAIR, GroupKind.CALL, GroupKind.RENDEZVOUS, GroupKind.CREATION)


@dataclass(slots=True)
class ThreadEvents:
    """The events of one thread in their order; the lists have one entry per event."""

    rank: int
    # the span of the remote call that it serves, an index into the trace's columns; -1: none, and it begins when it did
    request: int
    kinds: list[int]  # `PLAIN`, `ISSUE` or `WAIT`
    times: list[int]  # which time it determines: 4 * span + `START`, `END`, `WAIT_START` or `WAIT_END`
    at_ns: list[int]  # when it happened
    gaps: list[int]  # the time since the event before, without the waits
    inside: list[int]  # the innermost span in which that time lies; -1 if there is none


@dataclass(slots=True)
class Gate:
    """What must be issued before an operation can complete, and the spans that complete then."""

    operation: OperationType
    needs: list[int]  # the spans that must be issued
    opens: list[int]  # the spans that complete: all, or those of one rank that does not need the others
    members: list[int]  # all spans of the operation; it occupies a link once all are issued
    ranks: tuple[int, ...] = ()  # all its ranks, if the graph has spans of some only; () if it has those of all
    alike: float = 1  # how many such operations the ranks of a node carry out at the same time, counting those without spans
    fastest: bool = False  # whether the fastest algorithm carries it out, as in NCCL; otherwise that of emulated links


@dataclass
class Graph:
    """A trace as a graph."""

    trace: Trace
    gates: list[Gate]  # the gates of all operations
    done_ns: NDArray[np.int64]  # for each of them, when the backend had completed it, if that is known; else when it completed
    done_known: NDArray[np.bool_]  # for each of them, whether that is known
    before: NDArray[np.int64]  # for each of them, the operation of the same group after which the backend began it; -1 if none
    served: dict[int, int]  # the served call's span by the span of the call
    parent: list[int]  # for each span, the span of the same thread around it; -1 if there is none
    # its threads. Spans of no thread move with the other events of their rank.
    threads: list[ThreadEvents] = field(default_factory=list)

    def threads_of(self, *, followed: bool) -> list[ThreadEvents]:
        """Return the main threads and those that serve a call; or the others, for which nobody is known to wait."""
        ranks = len(self.trace.ranks)
        return [thread for i, thread in enumerate(self.threads) if (i < ranks or thread.request >= 0) is followed]

    @cached_property
    def gates_of(self) -> list[list[int]]:
        """For each span, the gates that need it."""
        found: list[list[int]] = [[] for _ in range(len(self.trace))]
        for number, gate in enumerate(self.gates):
            for row in gate.needs:
                found[row].append(number)
        return found

    @cached_property
    def types(self) -> list[OperationType]:
        """The type of each span's operation, by the number of its name."""
        return [type_of(name) for name in self.trace.columns.names]

    @cached_property
    def thread_of_call(self) -> dict[int, int]:
        """The thread that serves a remote call, by the span of the call."""
        return {thread.request: number for number, thread in enumerate(self.threads) if thread.request >= 0}


def graph_of(trace: Trace, function: str) -> Graph:
    """Build the graph of a trace, which is not empty; a `LabError`, which names `function`, says why it has none."""
    if reason := _why_not(trace):
        raise LabError(f"{function}: {reason}")
    return _Builder(trace).build()


def _why_not(trace: Trace) -> str:
    """Why a trace cannot be replayed; "" if it can."""
    data, names = trace.columns.data, trace.columns.names
    travels = data[trace.columns.travels]
    kinds = [kind_of(name) for name in names]
    if trace.simulated:
        return "this trace was simulated; simulate the changed program, or the same with another link or device"
    if any(trace.dropped):
        return f"{sum(trace.dropped)} records of this run were lost, so that the order of events is not known"
    tensorflow = np.array([kind is GroupKind.TENSORFLOW for kind in kinds], bool)[data["group"]]
    if ((data["flags"] & MEASURED) != 0).any() or (data["device"] >= NUMBERED).any() or tensorflow.any():
        return "TensorFlow's runs cannot be replayed: which operations its threads wait for is not recorded"
    if (data["device"] == CUDA).any():
        return "runs on a GPU cannot be replayed: what its streams wait for is not recorded"
    if opened := _named(trace, travels["name"][(travels["flags"] & OPEN) != 0]):
        return f"{opened} had not completed when the recording ended, so that its duration is not known"
    outside = (travels["start_ns"] < trace.start_ns) | (travels["end_ns"] > trace.end_ns)
    if cut := _named(trace, travels["name"][outside]):
        return f"this part of the run begins or ends in the middle of {cut}; replay the whole run"
    if lonely := _named(trace, _incomplete(trace, travels)):
        return f"some ranks of {lonely} are not in this trace; replay the trace of all ranks"
    return ""


def _named(trace: Trace, name_numbers: NDArray[Any]) -> str:
    return listed(dict.fromkeys(trace.columns.names[number] for number in name_numbers.tolist()), most=3)


def _incomplete(trace: Trace, travels: NDArray[Any]) -> NDArray[Any]:
    """Return the names of operations that fewer ranks recorded than others of the group, or only one end of two."""
    names = trace.columns.names
    is_message = np.array([type_of(name) in (SEND, RECV) for name in names], bool)
    of_ranks = np.array([kind_of(name) is GroupKind.COLLECTIVE for name in names], bool)
    rows = travels[of_ranks[travels["group"]] | is_message[travels["name"]]]
    keys = list(zip(rows["group"].tolist(), rows["match"].tolist(), strict=True))
    came = Counter(keys)
    expected = dict.fromkeys(rows["group"][is_message[rows["name"]]].tolist(), 2)
    for (group, _), count in came.items():
        listed_ranks = ranks_of(names[group])
        least = len(listed_ranks) if listed_ranks else len(trace.ranks) if names[group] == "world" else 0
        expected[group] = max(expected.get(group, 0), count, least)
    fewer = np.array([came[key] < expected[key[0]] for key in keys], bool)
    found: NDArray[Any] = rows["name"][fewer]
    return found


class _Builder:
    def __init__(self, trace: Trace) -> None:
        self.trace, columns = trace, trace.columns
        self.data, self.names = columns.data, columns.names
        self.types = [type_of(name) for name in self.names]
        self.travels = columns.travels
        self.rank = self.data["rank"].tolist()
        self.type = [self.types[name] for name in self.data["name"].tolist()]
        self.replies: dict[int, int] = {}  # the reply by the span of the served call
        self.done_known = self.data["backend_ns"] > 0
        self.done_ns = np.where(self.done_known, self.data["backend_ns"], self.data["end_ns"])

    def build(self) -> Graph:
        thread, requests, served = self._threads_of_spans()
        gates = self._gates(thread)
        before = self._before(gates)
        graph = Graph(self.trace, gates, self.done_ns, self.done_known, before, served, [-1] * len(self.data))
        graph.threads = list(self._threads(thread, requests, graph.parent))
        return graph

    def _threads_of_spans(self) -> tuple[NDArray[np.int64], list[int], dict[int, int]]:
        """Number the threads: the main threads in rank order, then one for each served call, and for other threads.

        Return the thread of each span, -1 if unknown; for each thread, the call that it serves, or -1; and the served
        call's span by the span of the call.
        """
        data, ranks = self.data, self.trace.ranks
        thread: NDArray[np.int64] = data["rank"].astype(np.int64)
        requests, served, calls = [-1] * len(ranks), {}, self._calls_by_served()
        serving: list[list[tuple[int, int]]] = [[] for _ in ranks]  # by rank: when a served call ends, and its thread
        main_until = [0] * len(ranks)  # when the rank's function ends
        other: dict[int, int] = {}  # by rank: the thread of its other threads' spans
        is_served, is_other, automatic = (((data["flags"] & flag) != 0).tolist() for flag in (SERVED, OWN_THREAD, AUTOMATIC))
        is_call, start, end = (data["kind"] == CALL).tolist(), data["start_ns"].tolist(), data["end_ns"].tolist()
        for row, (rank, kind) in enumerate(zip(self.rank, self.type, strict=True)):
            if is_call[row]:
                main_until[rank] = max(main_until[rank], end[row])
            elif kind is SERVE:
                thread[row] = -1
                if row in calls:
                    served[calls[row]], thread[row] = row, len(requests)
                    requests.append(calls[row])
                serving[rank].append((end[row], int(thread[row])))
            elif is_other[row] and (automatic[row] or kind in IN_CPP):
                thread[row] = -1  # such as the backward pass of a remote call, which C++ starts
            elif is_other[row]:
                if rank not in other:
                    other[rank] = len(requests)
                    requests.append(-1)
                thread[row] = other[rank]
            elif serving[rank] and (is_served[row] or end[row] > main_until[rank]):
                serving[rank] = [one for one in serving[rank] if one[0] >= start[row]]
                if serving[rank]:
                    thread[row] = serving[rank][-1][1]  # of several calls at a time, the one that began last
        unknown = [kind in (*IN_CPP, REPLY, VALUE) for kind in self.types]  # of replies, those of no served call's thread
        thread[self.travels & np.array(unknown, bool)[data["name"]]] = -1
        for row, reply in self.replies.items():
            thread[reply] = thread[row]
        requests = [call if call >= 0 and thread[call] >= 0 else -1 for call in requests]
        return thread, requests, {call: row for call, row in served.items() if thread[call] >= 0}

    def _calls_by_served(self) -> dict[int, int]:
        """Find the call of each served span: its reply begins where it ends, and has the call's group and number."""
        calls: dict[tuple[int, int], int] = {}
        by_name: defaultdict[tuple[OperationType, int, int, str], list[int]] = defaultdict(list)
        replies: defaultdict[tuple[int, str], dict[int, int]] = defaultdict(dict)  # by rank and function, then by start
        group, match, peer, start, end = (self.data[name].tolist() for name in ("group", "match", "peer", "start_ns", "end_ns"))
        for row, kind in enumerate(self.type):
            if kind is RPC:
                calls[group[row], match[row]] = row
            elif kind in (REPLY, VALUE, SERVE, REMOTE):
                function = kind.function_in(self.names[self.data["name"][row]])
                if kind in (REPLY, VALUE):
                    replies[self.rank[row], function][start[row]] = row
                else:
                    by_name[kind, self.rank[row], peer[row], function].append(row)
        found: dict[int, int] = {}
        kept: defaultdict[tuple[OperationType, int, int, str], list[tuple[int, int]]] = defaultdict(list)
        for (kind, rank, _, function), rows in by_name.items():
            if kind is not SERVE:
                continue
            of_function = replies[rank, function]
            pairs = {row: of_function.pop(end[row]) for row in rows if end[row] in of_function}
            rest = [row for row in rows if row not in pairs]
            if len(rest) == len(of_function):  # they returned futures, and replied when these had completed
                pairs |= zip(rest, sorted(of_function.values()), strict=True)
            self.replies |= pairs
            for row, reply in pairs.items():
                if (call := calls.get((group[reply], match[reply]))) is not None:
                    found[row] = call
                else:  # a result that stays there: calls of `remote` have no number of their own
                    kept[REMOTE, peer[reply], rank, function].append((match[reply], row))
        for key, numbered in kept.items():
            if len(numbered) == len(by_name[key]):
                found |= zip((row for _, row in sorted(numbered)), by_name[key], strict=True)
        return found

    def _gates(self, thread: NDArray[np.int64]) -> list[Gate]:
        """Find for each operation what must be issued before it completes."""
        gates: list[Gate] = []
        data, ended = self.data, self.done_ns.tolist()
        issued, root = data["start_ns"].tolist(), data["root"].tolist()
        meets = np.array([bool(name) and kind_of(name) in MEETING for name in self.names], bool)[data["group"]]
        known = self.travels & (thread >= 0)
        rows = np.flatnonzero(known & meets)
        rows = rows[np.lexsort((rows, data["match"][rows], data["group"][rows]))]
        together: dict[tuple[int, int], list[int]] = {}
        for row, group, match in zip(rows.tolist(), data["group"][rows].tolist(), data["match"][rows].tolist(), strict=True):
            together.setdefault((group, match), []).append(row)
        for row in np.flatnonzero(known & ~meets).tolist():
            gates.append(Gate(self.type[row], [row], [row], [row]))
        for members in together.values():
            kind = self.type[members[0]]
            answers = [row for row in members if self.type[row] in (REPLY, VALUE)]
            for row in answers:
                gates.append(Gate(self.type[row], [row], [row], [row]))
            if answers:
                for row in members:
                    if row not in answers:
                        gates.append(Gate(self.type[row], [row, *answers], [row], members))
                continue
            last = max(issued[row] for row in members)
            late = [row for row in members if ended[row] >= last]
            gates.append(Gate(kind, members, late, members))
            for row in members:
                if row not in late:  # such as the root of a broadcast, which does not need the receivers
                    came = [other for other in members if issued[other] <= ended[row] and other != row]
                    needs = [row, *(other for other in came if self.rank[other] == root[row])]
                    gates.append(Gate(kind, needs, [row], members))
        return gates

    def _before(self, gates: list[Gate]) -> NDArray[np.int64]:
        """Return for each operation the one before it in its group, if the backend carried them out in this order."""
        data, issued = self.data, self.data["start_ns"]
        opened, before = issued.copy(), np.full(len(data), -1, np.int64)
        for gate in gates:
            opened[gate.opens] = issued[gate.needs].max()
        in_order = np.array([kind_of(name) in (GroupKind.COLLECTIVE, GroupKind.PAIR) for name in self.names], bool)
        rows = np.flatnonzero(self.travels & in_order[data["group"]])
        rows = rows[np.lexsort((rows, data["group"][rows], data["rank"][rows]))]
        first, second = rows[:-1], rows[1:]
        follows = (data["group"][first] == data["group"][second]) & (data["rank"][first] == data["rank"][second])
        follows &= (self.done_ns[first] <= self.done_ns[second]) & (opened[first] <= opened[second])
        before[second[follows]] = first[follows]
        return before

    def _threads(self, thread: NDArray[np.int64], requests: list[int], parent: list[int]) -> Iterator[ThreadEvents]:
        data = self.data
        waits = self.travels & (data["wait_start_ns"] > 0)
        chosen = (~self.travels, self.travels, waits & (data["wait_start_ns"] > data["start_ns"]), waits)
        span, issue, block, wait = (np.flatnonzero(which & (thread >= 0)) for which in chosen)
        late, late_at = self._waits_when_complete(thread)
        common, common_at = self._common_waits(wait, thread)
        empty, instant = data["start_ns"] == data["end_ns"], data["wait_start_ns"] == data["wait_end_ns"]
        # The last number orders events at the same time: waits end first, since they delay all that follows; then spans
        # end, and begin; nothing ends before it begins.
        parts = (
            (span, data["start_ns"][span], START, PLAIN, 2),
            (span, data["end_ns"][span], END, PLAIN, np.where(empty[span], 5, 1)),
            (issue, data["start_ns"][issue], START, ISSUE, 3),
            (block, data["wait_start_ns"][block], WAIT_START, PLAIN, 4),
            (common, common_at, WAIT_END, WAIT, 0),
            (wait, data["wait_end_ns"][wait], WAIT_END, WAIT, np.where(instant[wait], 6, 0)),
            (late, late_at, WAIT_START, PLAIN, 4),
            (late, late_at, WAIT_END, WAIT, 6),
        )
        row, at, which, kind, order = (
            np.concatenate([np.broadcast_to(part[place], len(part[0])) for part in parts]) for place in range(5)
        )
        nested = np.where(which == END, -data["start_ns"][row], -data["end_ns"][row])  # inner spans end first, outer begin first
        of_thread = thread[row]
        sort = np.lexsort((nested, order, at, of_thread))
        bounds = np.searchsorted(of_thread[sort], np.arange(len(requests) + 1))
        for number, request in enumerate(requests):
            own = sort[bounds[number] : bounds[number + 1]]
            busy = _busy(at[own], data[row[own][kind[own] == WAIT]])
            rank = int(data["rank"][row[own[0]]]) if len(own) else number
            inside = self._innermost(row[own].tolist(), which[own].tolist(), kind[own].tolist(), parent)
            yield ThreadEvents(
                rank, request, kind[own].tolist(), (4 * row[own] + which[own]).tolist(), at[own].tolist(),
                np.diff(busy, prepend=busy[:1]).tolist(), inside,
            )  # fmt: skip

    def _waits_when_complete(self, thread: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the operations for which a main thread waited when they had completed already, and when it did so."""
        data = self.data
        mine = self.travels & (thread == data["rank"]) & (data["wait_end_ns"] == 0)
        keys = (data[name][mine].tolist() for name in ("rank", "group", "match"))
        rows = dict(zip(zip(*keys, strict=True), np.flatnonzero(mine).tolist(), strict=True))
        found: dict[int, int] = {}
        for *key, time_ns in self.trace.waits.tolist():
            if (row := rows.get(tuple(key))) is not None:
                found.setdefault(row, time_ns)  # a second wait for the same operation waits for nothing
        return np.array(list(found), np.int64), np.array(list(found.values()), np.int64)

    def _common_waits(self, waits: NDArray[np.intp], thread: NDArray[np.int64]) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
        """Return operations for which a thread waits together with others, as in `wait_all`, and when it did so.

        Such waits end one after another, once all operations are complete: the first to end, whichever it is, waits for
        all. It gets further events for this, at its end.
        """
        found = [(np.empty(0, np.intp), np.empty(0, np.int64))]
        starts, ends, completed = (self.data[name] for name in ("wait_start_ns", "wait_end_ns", "end_ns"))
        for number in np.unique(thread[waits]):
            own = waits[thread[waits] == number]
            in_order = np.sort(ends[own])
            first = in_order[np.searchsorted(in_order, np.maximum(completed[own], starts[own] + 1)).clip(max=len(own) - 1)]
            together = first < ends[own]
            found.append((own[together], first[together]))
        rows, at_ns = zip(*found, strict=True)
        return np.concatenate(rows), np.concatenate(at_ns)

    def _innermost(self, rows: list[int], which: list[int], kinds: list[int], parent: list[int]) -> list[int]:
        """Return for each event the innermost span that was open before it, and note each span's parent."""
        found, opened = [], [-1]
        for row, time, kind in zip(rows, which, kinds, strict=True):
            found.append(opened[-1])
            if kind == ISSUE:
                parent[row] = opened[-1]
            elif kind == PLAIN and time == START:
                parent[row] = opened[-1]
                opened.append(row)
            elif kind == PLAIN and time == END:
                if opened[-1] == row:
                    opened.pop()
                elif row in opened:  # another thread's span, which only overlaps
                    opened.remove(row)
        return found


def _busy(at_ns: NDArray[np.int64], waits: Any) -> NDArray[np.int64]:
    """Return times on a thread's busy clock, which stands still while the thread waits."""
    blocked = union(waits["wait_start_ns"], waits["wait_end_ns"])
    if not len(blocked):
        return at_ns
    before = np.append(0, np.cumsum(blocked[:, 1] - blocked[:, 0]))
    last = np.searchsorted(blocked[:, 0], at_ns, side="right")  # waits that have begun
    inside = np.where(last > 0, np.maximum(blocked[np.maximum(last - 1, 0), 1] - at_ns, 0), 0)
    busy: NDArray[np.int64] = at_ns - before[last] + inside
    return busy
