"""What travels between ranks: messages, as arrows of a timeline; and byte flows, drawn by `traffic`.

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
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from labkit.plots.bars import COMMUNICATION_LANE, COMPUTE_LANE
from labkit.plots.view import Ends, Row, ends_of
from labkit.recording.group_keys import axis_of, ranks_of
from labkit.recording.operations import RECV, REPLY, SEND, SERVE, TO_HERE, VALUE, OperationType, Traffic, type_of
from labkit.recording.schema import COMMUNICATION, COMPUTE, CUDA, OPEN, UNSIZED
from labkit.tracing.intervals import Intervals
from labkit.tracing.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOUR: Final = "#F4F5F7"  # light, in a dark outline: visible on bars, and on light and dark pages
OUTLINE: Final = "#16191F"
APART_PX: Final = 16  # with fewer pixels of width per message between the same two ranks, no arrows are drawn
PASSING_PX: Final = 64  # the same for the messages that pass over one rank's row on their way between other ranks
MOST_ARROWS: Final = 200  # arrows in one figure


@dataclass(frozen=True, slots=True)
class MessageArrow:
    """A message, a remote call or its reply, from one rank to another."""

    source: int  # the sending rank
    sent_ns: int  # when it was sent
    destination: int  # the receiving rank
    arrived_ns: int  # when it arrived
    call: bool = False  # True for a remote procedure call, which arrives when the callee starts to execute it
    on_cuda: bool = False  # whether it was sent between GPUs
    span: int = -1  # index of the sender's span in the trace's columns


def messages(trace: Trace) -> list[MessageArrow]:
    """The messages and remote procedure calls whose two ends are both in the trace.

    Where the ranks' clocks differ, a message may seem to arrive before it was sent. It is left as it is if their error
    explains that.
    """
    data, names, ready = trace.columns.data, trace.columns.names, trace.ready()
    complete = (data["kind"] == COMMUNICATION) & (data["peer"] >= 0) & (data["group"] != 0) & (data["flags"] & OPEN == 0)
    ends: dict[tuple[int, int], dict[OperationType, int]] = {}
    for i in np.flatnonzero(complete).tolist():
        row = data[i]
        ends.setdefault((int(row["group"]), int(row["match"])), {})[type_of(names[row["name"]])] = i
    serving = data[(data["kind"] == COMPUTE) & trace.columns.named(lambda name: type_of(name) is SERVE)]
    served = {  # by rank, function and end
        (rank, SERVE.function_in(names[name]), end_ns): start_ns
        for rank, name, start_ns, end_ns in serving[["rank", "name", "start_ns", "end_ns"]].tolist()
    }
    found = []
    for both in ends.values():
        if SEND in both and RECV in both:
            send, recv = data[both[SEND]], data[both[RECV]]
            cuda, at = bool(send["device"] == CUDA), both[SEND]
            found.append(
                MessageArrow(int(send["rank"]), int(ready[at]), int(recv["rank"]), int(recv["end_ns"]), on_cuda=cuda, span=at)
            )
        elif VALUE in both and TO_HERE in both:  # a remote call's value, fetched from its owner
            value, fetch, since = data[both[VALUE]], data[both[TO_HERE]], ready[both[TO_HERE]]
            fetched = int(value["rank"]), int(since), int(fetch["rank"]), int(fetch["end_ns"])
            found.append(MessageArrow(*fetched, span=both[VALUE]))
        elif REPLY in both and len(both) > 1:
            at = next(i for kind, i in both.items() if kind is not REPLY)
            call, reply = data[at], data[both[REPLY]]
            caller, callee, replied_ns = int(call["rank"]), int(reply["rank"]), int(reply["start_ns"])
            # A call arrives when the callee starts to serve it. If the reply does not begin when that ends, because the
            # function has returned a future, it is not known which span served it.
            begun_ns = served.get((callee, REPLY.function_in(names[reply["name"]]), replied_ns))
            if begun_ns is not None:
                found.append(MessageArrow(caller, int(call["start_ns"]), callee, begun_ns, call=True, span=at))
            found.append(MessageArrow(callee, replied_ns, caller, int(call["end_ns"]), span=both[REPLY]))
    return [
        m
        for m in found
        if m.source != m.destination
        and m.sent_ns <= m.arrived_ns + trace.clock_error_ns
        and all(trace.start_ns <= time_ns <= trace.end_ns for time_ns in (m.sent_ns, m.arrived_ns))
    ]


def draw_messages(ax: Axes, trace: Trace, rows: list[Row], top: float, unit_ns: float, width_px: float) -> bool:
    """Draw arrows between the rows of a trace, if few enough to distinguish them; return whether any was drawn.

    X is in units of `unit_ns` since the trace's start, y in rows, the first of which begins at `top`. The trace's
    duration is `width_px` wide.
    """
    from matplotlib.patches import FancyArrowPatch
    from matplotlib.patheffects import withStroke

    data = trace.columns.data
    if ((data["kind"] == COMMUNICATION) & (data["peer"] >= 0)).sum() > 3 * MOST_ARROWS:
        return False  # a message has two or three spans
    found = messages(trace)
    places = [
        (
            _middle(rows, m.source, m.on_cuda, COMMUNICATION_LANE),
            _middle(rows, m.destination, m.on_cuda, COMPUTE_LANE if m.call else COMMUNICATION_LANE),
        )
        for m in found
    ]
    shown = [(m, start, end) for m, (start, end) in zip(found, places, strict=True) if start is not None and end is not None]
    pairs = Counter(tuple(sorted((m.source, m.destination))) for m in found)
    passed = Counter(row for _, *ends in shown for row in range(int(min(ends)) + 1, int(max(ends))))
    if (
        not shown
        or len(found) > MOST_ARROWS
        or max(pairs.values()) > width_px / APART_PX
        or max(passed.values(), default=0) > width_px / PASSING_PX
    ):
        return False
    for m, start, end in shown:
        x = [(t - trace.start_ns) / unit_ns for t in (m.sent_ns, m.arrived_ns)]
        thin = 1.0 if abs(int(start) - int(end)) == 1 else 0.7  # an arrow over the rows of other ranks hides less of them
        arrow = FancyArrowPatch(
            (x[0], top + start), (x[1], top + end), arrowstyle="-|>", mutation_scale=6, linewidth=0.8 * thin, color=COLOUR,
            zorder=4, shrinkA=0, shrinkB=0, label="message",
            path_effects=[withStroke(linewidth=1.8 * thin, foreground=OUTLINE)],
        )  # fmt: skip
        ax.add_patch(arrow)
    return True


def _middle(rows: list[Row], rank: int, on_cuda: bool, lane: tuple[float, float]) -> float | None:
    for number, row in enumerate(rows):
        if row.shows(rank, on_cuda):
            return number + lane[0] + lane[1] / 2
    return None


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
