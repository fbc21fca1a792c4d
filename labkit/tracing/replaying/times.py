"""Computes when each event of a graph happens: one pass over the events of all threads, in order of issue."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, fields

from labkit.costs.link import Link
from labkit.costs.network import Network
from labkit.errors.exceptions import LabError
from labkit.tracing.replaying.graph import END, ISSUE, WAIT, Graph
from labkit.tracing.replaying.over_link import OverLink


@dataclass
class Rules:
    """How long everything takes, in ns; lists without a remark have one entry per span."""

    gaps: list[list[int]]  # for each thread, the time before each event
    transfer: list[int]  # how long the backend takes for an operation, once all ranks that it needs have arrived
    late: list[int]  # how long after the link's own end an operation completes
    lag: list[int]  # how long after an operation's recorded completion the thread that waits for it can continue
    request: dict[int, int]  # how long the message with a remote call takes; by the span of the call
    request_late: dict[int, int]  # how long after the end of that message on the link the call is served
    link: Link | Network | None  # the emulated link, if any
    nbytes: list[int]  # the size of an operation
    faster: list[float]  # by how much an operation is faster than on the link; inf if it takes no time
    # operations that do not take place, each with the one that does its work
    instead: dict[int, int] = field(default_factory=dict)

    def copy(self) -> Rules:
        """Return rules that can be changed without these."""
        copied = {field.name: copy(getattr(self, field.name)) for field in fields(self)}
        return Rules(**copied)


@dataclass
class Times:
    """When everything happens, in ns, and why not earlier."""

    at_ns: list[int | None]  # the times of all spans, numbered as in `ThreadEvents.times`; None for those of no thread
    done_ns: list[int | None]  # for each span, when the backend had completed its operation
    begun_ns: list[int]  # for each span, when its operation began to be transferred
    # for each span, why its operation did not begin earlier: the span that was issued last, or ~span of the
    # operation that was transferred until then
    cause: list[int]
    waited: list[bool]  # for each span, whether a thread had to wait for its operation


def measured(graph: Graph) -> Rules:
    """Return the rules by which a replay gives the recorded times."""
    trace, data = graph.trace, graph.trace.columns.data
    count, link = len(data), trace.link
    ends, issued = data["end_ns"].tolist(), data["start_ns"].tolist()
    done, before = graph.done_ns.tolist(), graph.before.tolist()
    transfer, late, lag = [0] * count, [0] * count, [0] * count
    nbytes, faster = data["nbytes"].tolist(), [1.0] * count
    over = None if link is None else OverLink(graph, link, nbytes, faster)
    at_ns = [time for row in zip(issued, ends, ends, ends, strict=True) for time in row] if over else []
    request = {call: issued[row] - issued[call] for call, row in graph.served.items()}
    request_late: dict[int, int] = {}
    events = [(max(issued[row] for row in gate.needs), 0, number) for number, gate in enumerate(graph.gates)]
    if over:
        events += [(issued[call], 1, call) for call in graph.served]
        events.sort()
    for opened_ns, is_request, number in events:
        if is_request:
            assert over is not None
            request_late[number] = issued[graph.served[number]] - over.call(number, opened_ns).due_ns
            request[number] = 0
            continue
        gate = graph.gates[number]
        passage = over.through(gate, opened_ns, at_ns) if over else None
        for row in gate.opens:
            base = opened_ns if before[row] < 0 else max(opened_ns, done[before[row]])
            if passage is not None and not graph.done_known[row]:
                done[row] = base  # what the backend itself took is not known
            transfer[row] = done[row] - base
            late[row] = ends[row] - (done[row] if passage is None else max(done[row], passage.due_ns))
    blocked = (data["wait_end_ns"] > 0).tolist()
    gaps = [[*thread.gaps] for thread in graph.threads]
    for thread, own in zip(graph.threads, gaps, strict=True):
        for event, (kind, time, at) in enumerate(zip(thread.kinds, thread.times, thread.at_ns, strict=True)):
            if kind != WAIT:
                continue
            row, before_ns = time >> 2, thread.at_ns[event - 1] if event else at
            if blocked[row] and ends[row] <= before_ns + own[event]:  # another wait, until then, was longer
                own[event] = at - before_ns
            else:  # a wait for what is complete may end before a thread of the backend reports the completion
                lag[row] = at - ends[row] if blocked[row] else min(at - ends[row], 0)
    return Rules(gaps, transfer, late, lag, request, request_late, link, nbytes, faster)


def play(graph: Graph, rules: Rules) -> Times:
    """Compute when everything happens under these rules.

    Whoever issues first gets the link first, and that may change with the rules. Therefore threads advance in the order
    of their next issue, as in a simulation.

    Raises:
        LabError: some events never happen, since the records contradict each other.
    """
    return _Playback(graph, rules).run()


class _Playback:
    def __init__(self, graph: Graph, rules: Rules) -> None:
        self.graph, self.rules = graph, rules
        count = len(graph.trace)
        self.missing = [len(gate.needs) for gate in graph.gates]
        self.times = Times([None] * (4 * count), [None] * count, [0] * count, [-1] * count, [False] * count)
        self.ended: list[int | None] = [None] * count
        self.parked: dict[int, list[tuple[int, int, int]]] = defaultdict(list)  # threads that wait for an operation
        self.heap: list[tuple[int, int, int]] = []  # time of an event, thread, its number in the thread
        self.over = None if rules.link is None else OverLink(graph, rules.link, rules.nbytes, rules.faster)
        self.before: Sequence[int] = graph.before.tolist()
        self.left = sum(bool(thread.kinds) for thread in graph.threads)

    def run(self) -> Times:
        for number, thread in enumerate(self.graph.threads):
            if thread.request < 0 and thread.kinds:
                self.heap.append((thread.at_ns[0], number, 0))
        heapq.heapify(self.heap)
        while self.heap:
            self._advance(*heapq.heappop(self.heap))
        if self.left:
            raise LabError("replay: some operations never complete, because the records of the ranks contradict each other")
        return self.times

    def _advance(self, now: int, number: int, event: int) -> None:
        """Run a thread from an event to its next issue, if another thread comes first, or to a wait."""
        thread, gaps, heap = self.graph.threads[number], self.rules.gaps[number], self.heap
        kinds, times, at_ns = thread.kinds, thread.times, self.times.at_ns
        instead, last = self.rules.instead, len(thread.kinds) - 1
        while True:
            at_ns[times[event]] = now
            if kinds[event] == ISSUE:
                self._issue(times[event] >> 2, now)
            if event == last:
                self.left -= 1
                return
            event += 1
            now += gaps[event]
            kind = kinds[event]
            if kind == WAIT:
                row = times[event] >> 2
                for_row = instead.get(row, row) if instead else row
                ended = self.ended[for_row]
                if ended is None:
                    self.parked[for_row].append((now, number, event))
                    return
                now = self._after_wait(row, now, ended)
            elif kind == ISSUE and heap and heap[0][0] < now:
                heapq.heappush(heap, (now, number, event))
                return

    def _after_wait(self, row: int, now: int, ended: int) -> int:
        """Return when a thread continues that arrives at a wait now."""
        awake = ended + self.rules.lag[row]
        self.times.waited[row] = awake > now
        return max(awake, now)

    def _issue(self, row: int, now: int) -> None:
        if row in self.rules.instead:
            return
        for number in self.graph.gates_of[row]:
            self.missing[number] -= 1
            if not self.missing[number]:
                self._open(number, row, now)
        if row in self.graph.served:
            start = now + self.rules.request[row]
            if self.over is not None:
                start = max(start, self.over.call(row, now).due_ns) + self.rules.request_late.get(row, 0)
            heapq.heappush(self.heap, (start, self.graph.thread_of_call[row], 0))

    def _open(self, number: int, last: int, now: int) -> None:
        """Complete the operation whose last span has been issued."""
        gate, rules, times = self.graph.gates[number], self.rules, self.times
        passage = self.over.through(gate, now, times.at_ns) if self.over is not None else None
        for row in gate.opens:
            begun, cause, before = now, last, self.before[row]
            if before >= 0 and (of_before := times.done_ns[before]) is not None and of_before > now:
                begun, cause = of_before, ~before
            done = begun + rules.transfer[row]
            times.done_ns[row] = ended = done
            if passage is not None and passage.due_ns > done:
                ended, begun, cause = passage.due_ns, passage.start_ns, last if passage.after < 0 else ~passage.after
            ended += rules.late[row]
            self.ended[row] = times.at_ns[4 * row + END] = ended
            times.begun_ns[row], times.cause[row] = begun, cause
            for arrived, thread, event in self.parked.pop(row, ()):
                waiting = self.graph.threads[thread].times[event] >> 2
                heapq.heappush(self.heap, (self._after_wait(waiting, arrived, ended), thread, event))
