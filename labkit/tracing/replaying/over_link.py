"""What the operations of a graph occupy on an emulated link, and when they end on it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from labkit.costs.emulated_costs import collective_cost, message_cost
from labkit.costs.link import Link
from labkit.costs.network import Network, as_network
from labkit.costs.shared_link import LinkCost, node_port, outer_port, start_of
from labkit.recording.operations import RECV, REPLY, RPC, SEND, TO_HERE, VALUE
from labkit.tracing.replaying.graph import Gate, Graph


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
