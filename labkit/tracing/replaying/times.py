"""Computes when each event of a graph happens: one pass over the events of all threads, also over emulated links."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from labkit.costs.link import Link
from labkit.costs.network import Network, as_network
from labkit.costs.shared_link import LinkCost, collective_cost, message_cost, node_port, outer_port, start_of
from labkit.errors.exceptions import LabError
from labkit.recording.operations import RECV, REPLY, RPC, SEND, TO_HERE, VALUE
from labkit.tracing.replaying.graph import END, ISSUE, WAIT, Gate, Graph


class Passage(NamedTuple):
    """How an operation passes the link."""

    start_ns: int  # when it starts
    due_ns: int  # when it ends
    after: int  # the span of the operation that occupied the link until it started; -1 if the link was free


class OverLink:
    """The schedule of a link, as the emulation computes it; `nbytes` and `faster` are those of `Rules`, by span."""

    def __init__(self, graph: Graph, link: Link | Network, nbytes: Sequence[int], faster: Sequence[float]) -> None:
        self._graph, self._nbytes, self._faster = graph, nbytes, faster
        self._network = as_network(link, len(graph.trace.ranks))
        data = graph.trace.columns.data
        self._rank, self._peer = data["rank"].tolist(), data["peer"].tolist()
        self._type = [graph.types[name] for name in data["name"].tolist()]
        self._free: defaultdict[int, int] = defaultdict(int)
        self._until: dict[int, int] = {}  # the operation that occupies a port until a time
        self._costs: dict[tuple[object, ...], LinkCost] = {}

    def call(self, call: int, at_ns: int) -> Passage:
        """Schedule the message that carries a remote call, given its span and when it is issued."""
        return self._pass(self._message(self._rank[call], self._peer[call], call, 1), at_ns, call)

    def through(self, gate: Gate, opened_ns: int, issued_ns: Sequence[int | None]) -> Passage | None:
        """Schedule an operation whose gate has opened; None if the link does not delay it.

        The gate opened when the last of the spans that it needs was issued. Every fourth time of `issued_ns`, as in
        `ThreadEvents.times`, says when a span was issued.
        """
        kind, first = gate.operation, gate.needs[0]
        if kind in (REPLY, VALUE) or self._faster[first] == math.inf:
            return None
        if kind in (SEND, RECV):
            if len(gate.needs) != 2:
                return None
            source, other = sorted(gate.needs, key=lambda row: self._type[row] is not SEND)
            ends = self._rank[source], self._rank[other]
            return self._pass(self._message(*ends, source, 2, gate.alike), opened_ns, first)
        if kind is RPC:
            if len(gate.needs) == 1:  # a function that C++ runs: there and back
                over = self._network.link(self._rank[first], self._peer[first])
                there_ns = round((over.seconds("send", self._nbytes[first]) + over.latency_s) * 1e9)
                return Passage(opened_ns, opened_ns + there_ns, -1)
            reply = gate.needs[1]
            return self._pass(self._message(self._rank[reply], self._rank[first], reply, 1), opened_ns, first)
        if kind is TO_HERE:
            asked_ns = issued_ns[4 * first] or 0
            asked_ns += round(self._network.link(self._rank[first], self._peer[first]).latency_s * 1e9)
            return self._pass(self._message(self._peer[first], self._rank[first], first, 1), max(asked_ns, opened_ns), first)
        if kind.cost is None or len(gate.ranks or gate.members) < 2:
            return None
        cost = self._collective(gate)
        if len(gate.needs) == len(gate.members):
            return self._pass(cost, opened_ns, first)
        return Passage(opened_ns, opened_ns + round(cost.cost_ns / self._faster[first]), -1)

    def _pass(self, cost: LinkCost, at_ns: int, row: int) -> Passage:
        faster = self._faster[row]
        if faster != 1:
            times = {name: round(getattr(cost, name) / faster) for name in ("cost_ns", "busy_ns", "shared_ns")}
            cost = cost._replace(**times)
        start_ns = start_of(cost, at_ns, self._free)
        after = self._until.get(start_ns, -1) if start_ns > at_ns else -1
        for ns in (cost.busy_ns, cost.shared_ns):
            self._until[start_ns + ns] = row
        return Passage(start_ns, start_ns + cost.cost_ns, after)

    def _message(self, source: int, destination: int, row: int, ends: int, alike: float = 1) -> LinkCost:
        key = source, destination, self._nbytes[row]
        if key not in self._costs:
            self._costs[key] = message_cost(self._network, *key, ends, alike)
        return self._costs[key]

    def _collective(self, gate: Gate) -> LinkCost:
        kind, rows = gate.operation, gate.members
        nbytes = max(self._nbytes[row] for row in rows)  # of the root, if it alone counts the parts of all
        present = tuple(sorted(self._rank[row] for row in rows))
        key = kind, nbytes, gate.ranks, present
        if key not in self._costs:
            cost = collective_cost(self._network, kind.name, nbytes, gate.ranks or present, gate.alike, fastest=gate.fastest)
            if gate.ranks:
                cost = self._of_present(cost, present)
            self._costs[key] = cost
        return self._costs[key]

    def _of_present(self, cost: LinkCost, ranks: Sequence[int]) -> LinkCost:
        """Return a cost with the ports of these ranks only: nobody of the graph waits for the others' ports."""
        ports = {*ranks, *map(outer_port, ranks), *(node_port(self._network.node_of(rank)) for rank in ranks)}
        senders, receivers, shared = (
            [port for port in side if port in ports] for side in (cost.senders, cost.receivers, cost.shared)
        )
        return cost._replace(senders=senders, receivers=receivers, shared=shared)


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
        return Rules(**{field.name: copy(getattr(self, field.name)) for field in fields(self)})


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
    of their next issue, as in a simulation. A `LabError` says that the records contradict each other.
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
