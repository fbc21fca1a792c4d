"""The byte flows of a trace, drawn by `traffic`: who sent how many bytes to whom, and when.

Messages and remote calls have a sender and a receiver. Collectives do not, and backends are free in how they move the
bytes. A collective with a root is counted as messages from the root to each other rank, or from each of them to the
root: a tree moves as many bytes, but along paths that differ between backends. An all-to-all is counted as messages
between all pairs. The others are counted as a ring of their ranks would move them, which is how all-reduce on few ranks
usually works.

Source: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009; and for
the other collectives the bus bandwidth factors in the documentation of NVIDIA's nccl-tests (doc/PERFORMANCE.md).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.plots.message_arrows import messages
from labkit.plots.rows import Ends, ends_of
from labkit.recording.group_keys import axis_of, ranks_of
from labkit.recording.operations import REPLY, OperationType, Traffic, type_of
from labkit.recording.schema import COMMUNICATION, OPEN, UNSIZED
from labkit.tracing.intervals import Intervals
from labkit.tracing.trace import Trace


@dataclass(frozen=True, slots=True)
class Flows:
    """Byte flows, with one entry per sending and receiving end of each operation.

    An end is a rank, or one device of a rank with several TensorFlow devices.
    """

    name: tuple[str, ...]  # the operations, most bytes first; those of a mesh with their axis, as "all_reduce tp"
    type: tuple[OperationType, ...]
    operation: NDArray[np.int64]  # for each entry, its operation as an index into `name`
    source: NDArray[np.int64]  # the sending end, as an index into `ends`
    destination: NDArray[np.int64]
    nbytes: NDArray[np.float64]
    start_ns: NDArray[np.int64]  # when the bytes can start to travel
    end_ns: NDArray[np.int64]  # when they have arrived
    count: tuple[int, ...]  # how often each operation was carried out; a collective counts once for all its ranks
    rings: bool  # whether any collectives are counted as rings
    roots: bool  # whether any collectives are counted as messages from or to their root
    # operations of unknown size, which have no entries, and how often each was carried out
    unsized: tuple[tuple[str, int], ...]
    ends: tuple[str, ...]
    rank: NDArray[np.int64]  # the number of each end's rank
    devices: bool  # whether any of the ends are devices
    # the number of each end's node, if the ranks communicated over a network of several; else empty
    node: NDArray[np.int64]

    def matrix(self) -> NDArray[np.float64]:
        """Return the bytes from end to end, shape (ends, ends): rows send, columns receive."""
        count = len(self.ends)
        return np.bincount(self.source * count + self.destination, self.nbytes, count**2).astype(np.float64).reshape(count, count)

    def between_ranks(self) -> float:
        """Return the bytes that went from one rank to another, rather than between devices of the same rank."""
        return float(self.nbytes[self.rank[self.source] != self.rank[self.destination]].sum())

    def between_nodes(self) -> float:
        """Return the bytes that went from one node to another."""
        return float(self.nbytes[self.node[self.source] != self.node[self.destination]].sum())

    def by_operation(self) -> NDArray[np.float64]:
        """Return the bytes of each operation, shape (names,)."""
        return np.bincount(self.operation, self.nbytes, len(self.name)).astype(np.float64)


def flows_of(trace: Trace, bounds: Intervals | None = None) -> Flows:
    """Return the flows of a trace; for a part of a trace, those of the operations that completed in it.

    `bounds` are, for each rank, when its operations count, shape (ranks, 2), in ns; default: the trace's window. Ranks
    do not start a step at the same time, so the window of a step includes parts of neighbouring steps.
    """
    data, names, ends = trace.columns.data, trace.columns.names, ends_of(trace)
    data_ready = trace.ready()
    complete = (data["kind"] == COMMUNICATION) & (data["flags"] & OPEN == 0)
    inside = data["end_ns"] <= trace.end_ns
    if bounds is not None:
        first, last = bounds[data["rank"]].T
        inside = (data["end_ns"] > first) & (data["end_ns"] <= last)
    mine = np.flatnonzero(complete & inside)
    rows, ready = data[mine], data_ready[mine]
    rings, roots = _rings(rows, names, ends, trace.simulated), _roots(rows, names, ends)
    parts = [*_messages(rows, names, ends), *rings, *roots]
    row = np.concatenate([np.empty(0, np.int64), *(p[0] for p in parts)])
    source, destination, nbytes = (np.concatenate([np.empty(0), *(p[i] for p in parts)]) for i in (1, 2, 3))
    keep = (nbytes > 0) & (source != destination)
    row, source, destination, nbytes = row[keep], source[keep].astype(np.int64), destination[keep].astype(np.int64), nbytes[keep]
    shown = ends.matter(np.concatenate([source, destination]))
    source, destination = (np.cumsum(shown) - 1)[source], (np.cumsum(shown) - 1)[destination]
    which, operations = _operations(rows, names)
    used, operation = np.unique(which[row], return_inverse=True)
    order = np.argsort(-np.bincount(operation, nbytes, len(used)), kind="stable")
    place = np.empty(len(used), np.int64)
    place[order] = np.arange(len(used))
    once = _times(rows, row, which)
    by_bytes = [operations[i] for i in used[order].tolist()]
    types = tuple(type_of(name) for name, _ in by_bytes)
    start, end = _on_its_way(trace, mine, rows, ready)
    # On which nodes the ranks are that a simulated trace lacks is not known.
    nodes = np.array(() if trace.simulated > len(trace.ranks) else trace.nodes, np.int64)
    return Flows(
        tuple(f"{name} {axis}".rstrip() for name, axis in by_bytes), types, place[operation], source, destination, nbytes,
        start[row], end[row], tuple(once[i] for i in used[order].tolist()),
        rings=any(kind.traffic is Traffic.RING for kind in types), roots=bool(roots), unsized=_unsized(rows, names),
        ends=tuple(itertools.compress(ends.names, shown)), rank=ends.rank[shown], devices=ends.devices,
        node=nodes[ends.rank[shown]] if len(set(nodes.tolist())) > 1 else np.empty(0, np.int64),
    )  # fmt: skip


def _operations(rows: Any, names: list[str]) -> tuple[NDArray[np.int64], list[tuple[str, str]]]:
    """Return the number of each row's operation, and by number the name of each operation and its axis in a mesh."""
    axes = [axis_of(text) for text in names]
    different = list(dict.fromkeys(axes))
    axis = np.array([different.index(axis) for axis in axes], np.int64)[rows["group"]]
    pairs, which = np.unique(np.stack([rows["name"], axis]), axis=1, return_inverse=True)
    return which.reshape(-1), [(names[name], different[place]) for name, place in pairs.T.tolist()]


def over_time(flows: Flows, edges: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the bytes that each operation moved in each bin, shape (names, bins), spread evenly over the transfer.

    `edges` of the bins are in ns, ascending and equidistant, shape (bins + 1,).
    """
    # The bytes that a flow has moved rise linearly from 0 at its start to all of them at its end: the sum of two ramps.
    # For all ramps together, it is enough to sum the slopes and the offsets up to each edge.
    start = np.minimum(flows.start_ns, flows.end_ns - 1).astype(np.float64)
    slope = flows.nbytes / (flows.end_ns - start)
    moved = np.zeros((len(flows.name), len(edges)))
    for operation in range(len(flows.name)):
        of_it = flows.operation == operation
        for begin, sign in ((start[of_it], 1.0), (flows.end_ns[of_it].astype(np.float64), -1.0)):
            order = np.argsort(begin)
            begin, weight = begin[order], sign * slope[of_it][order]
            origin = float(edges[0])
            sums = np.concatenate([[0.0], np.cumsum(weight)]), np.concatenate([[0.0], np.cumsum(weight * (begin - origin))])
            begun = np.searchsorted(begin, edges.astype(np.float64), side="right")
            moved[operation] += sums[0][begun] * (edges - origin) - sums[1][begun]
    return np.maximum(np.diff(moved, axis=1), 0)


def _on_its_way(trace: Trace, mine: NDArray[np.int64], rows: Any, ready: NDArray[np.int64]) -> tuple[Any, Any]:
    """Return the start and the end of each row's transfer.

    A transfer lasts from the arrival of the last rank to the end of the operation. The arguments of a remote call
    arrive before the call is served.
    """
    start, end = ready.copy(), np.maximum(rows["end_ns"], ready)
    if not any(type_of(trace.columns.names[number]) is REPLY for number in np.unique(rows["name"]).tolist()):
        return start, end
    place = {number: i for i, number in enumerate(mine.tolist())}
    for message in messages(trace):
        if message.call and message.span in place:
            i = place[message.span]
            start[i], end[i] = message.sent_ns, message.arrived_ns
    return start, end


def _messages(rows: Any, names: list[str], ends: Ends) -> list[tuple[Any, ...]]:
    """Return row, source, destination and bytes of messages and remote calls."""
    peer = rows["peer"] >= 0
    received, second = _travels(rows, names, Traffic.FROM_PEER), _travels(rows, names, Traffic.SECOND_END)
    here = np.flatnonzero(peer & ~second)
    mine, other = ends.of(rows[here]), ends.opposite(rows[here], rows[second])
    came = received[here]
    return [(here, np.where(came, other, mine), np.where(came, mine, other), rows["nbytes"][here].astype(np.float64))]


def _roots(rows: Any, names: list[str], ends: Ends) -> list[tuple[Any, ...]]:
    """Return row, source, destination and bytes of collectives with a root. The root's own entry is to itself."""
    here = np.flatnonzero(rows["root"] >= 0)
    leaves = _travels(rows[here], names, Traffic.FROM_ROOT)  # in the other collectives with a root, the root receives
    mine, root = ends.of(rows[here]), ends.root(rows["root"][here])
    part = (here, np.where(leaves, root, mine), np.where(leaves, mine, root), rows["nbytes"][here].astype(np.float64))
    return [part] if len(here) else []


def _rings(rows: Any, names: list[str], ends: Ends, simulated: int) -> list[tuple[Any, ...]]:
    """Return row, source, destination and bytes of collectives without a root, per process group.

    Of a simulation of so many ranks, what goes to ranks that the trace lacks goes to the last endpoint.
    """
    parts: list[tuple[Any, ...]] = []
    collective = np.flatnonzero((rows["peer"] < 0) & (rows["root"] < 0) & (rows["group"] != 0) & (rows["nbytes"] > 0))
    for group in np.unique(rows["group"][collective]).tolist():
        of_group = collective[rows["group"][collective] == group]
        members = np.unique(ends.of(rows[of_group]))
        n = len(ranks_of(names[group]) or range(simulated)) if simulated else len(members)
        if n > len(members):
            members = np.append(members, len(ends.names) - 1)
        after = np.zeros(int(members[-1]) + 1, np.int64)
        after[members] = np.roll(members, -1)
        for number in np.unique(rows["name"][of_group]).tolist():
            here = of_group[rows["name"][of_group] == number]
            mine, nbytes, kind = ends.of(rows[here]), rows["nbytes"][here].astype(np.float64), type_of(names[number])
            if kind.traffic is Traffic.PAIRWISE:
                for other in members.tolist():  # includes itself: does not travel
                    others = n - len(members) + 1 if other == members[-1] else 1
                    parts.append((here, mine, np.full(len(here), other), others * nbytes / n))
            elif kind.traffic is Traffic.RING and kind.cost is not None:
                parts.append((here, mine, after[mine], nbytes * kind.cost.share(n)))
    return parts


def _unsized(rows: Any, names: list[str]) -> tuple[tuple[str, int], ...]:
    second = _travels(rows, names, Traffic.SECOND_END)
    times = _times(rows, np.flatnonzero((rows["flags"] & UNSIZED != 0) & ~second), rows["name"])
    return tuple(sorted((names[number], count) for number, count in times.items()))


def _travels(rows: Any, names: list[str], how: Traffic) -> NDArray[np.bool_]:
    """Return for each row whether its bytes travel in the given way."""
    used, place = np.unique(rows["name"], return_inverse=True)
    return np.array([type_of(names[number]).traffic is how for number in used.tolist()], bool)[place]


def _times(rows: Any, used: NDArray[np.int64], which: NDArray[Any]) -> dict[int, int]:
    """Return how often each operation was carried out, by its number in `which`; a group and match count once."""
    used = np.unique(used)
    some, which = rows[used], which[used]
    alone = some["group"] == 0
    found: dict[int, int] = {}
    for number in np.unique(which).tolist():
        of_name = which == number
        shared = some[of_name & ~alone]
        together = len(np.unique(np.stack([shared["group"].astype(np.int64), shared["match"]]), axis=1).T) if len(shared) else 0
        found[number] = together + int((of_name & alone).sum())
    return found
