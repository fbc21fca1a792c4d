"""What operations cost on emulated links, and the schedule of these, shared so that all ranks agree on when each ends.

The schedule is in shared memory, and all ranks use the same clock. Each rank registers every operation that it issues.
The last of the participating ranks schedules it: it starts when all ranks have arrived and their links are free, takes
the model's time, and occupies the links meanwhile. The backend's real transfer does not matter.

A rank has a link to the ranks of its node and, in a network of several nodes, issues its collectives over the node's
connection one after another. The connection itself is occupied only while bytes pass through it, so that the latencies
of operations of several ranks overlap.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import zlib
from collections.abc import MutableMapping, Sequence
from functools import partial
from typing import Final, NamedTuple

from labkit.costs.network import Network
from labkit.costs.rounds import possible_rounds
from labkit.recording.ring_buffer import keep_from_forks

# Key, number of ranks that have arrived, (unused); in ns: last arrival, cost, occupation of ports and of shared ports,
# end (0: not scheduled).
ENTRY: Final = struct.Struct("<QiIqqqqq")
ENTRIES: Final = 1 << 14  # more than are ever pending: an entry is kept until another operation overwrites it
MAX_RANKS: Final = 1024
PORTS: Final = 3 * MAX_RANKS  # a rank's link has the rank's number; the others count from the end of the memory
ENTRIES_AT: Final = 2 * PORTS * 8  # before them: when each direction of a port becomes free, ns
SHARED_LINK_BYTES: Final = ENTRIES_AT + ENTRIES * ENTRY.size  # untouched pages cost nothing


def outer_port(rank: int) -> int:
    """Return the port by which a rank issues its collectives that leave its node."""
    return -1 - 2 * rank


def node_port(node: int) -> int:
    """Return the port by which a node is connected to the other nodes."""
    return -2 - 2 * node


class LinkCost(NamedTuple):
    """The cost of an operation on emulated links. A rank's own link is the port with the rank's number."""

    cost_ns: int  # its duration
    busy_ns: int  # how long it occupies ports, from its start
    senders: Sequence[int]  # the ports of which it occupies the direction out
    receivers: Sequence[int]  # and in
    of: int  # the number of participating ranks
    shared_ns: int = 0  # how long it occupies both directions of the shared ports
    shared: Sequence[int] = ()  # these ports, which several ranks use


def start_of(cost: LinkCost, arrived_ns: int, free_ns: MutableMapping[int, int] | memoryview) -> int:
    """Return when an operation starts: when its last rank has issued it, at `arrived_ns`, and its ports are free.

    It occupies them from then on: `free_ns` says when each direction becomes free, by 2 * port + direction; updated.
    """
    occupied = [(2 * port, cost.busy_ns) for port in cost.senders] + [(2 * port + 1, cost.busy_ns) for port in cost.receivers]
    occupied += [(2 * port + direction, cost.shared_ns) for port in cost.shared for direction in (0, 1)]
    start_ns = max([arrived_ns, *(free_ns[end] for end, _ in occupied)])
    for end, ns in occupied:
        free_ns[end] = start_ns + ns
    return start_ns


class SharedLink:
    """One rank's view of the schedule; thread-safe.

    `fd` is the shared memory, initially `SHARED_LINK_BYTES` zeros; `close` closes it. This process must not close any
    other descriptor of it, since that would release the lock.
    """

    def __init__(self, fd: int) -> None:
        import fcntl  # not available on every system, and not needed for SHARED_LINK_BYTES

        self._fd = fd
        self._lock_file = partial(fcntl.lockf, fd, fcntl.LOCK_EX)
        self._unlock_file = partial(fcntl.lockf, fd, fcntl.LOCK_UN)
        self._memory = mmap.mmap(fd, SHARED_LINK_BYTES)
        self._free_ns = memoryview(self._memory)[:ENTRIES_AT].cast("q")
        self._thread_lock = threading.Lock()  # the file's lock is shared by all threads of a process

    def keep_from_forks(self) -> None:
        """Disable the schedule in forks of this process."""
        keep_from_forks(self._memory)

    def arrive(self, group: str, match: int, at_ns: int, cost: LinkCost) -> None:
        """Register that this rank has issued an operation, at `at_ns`; the last rank to do so schedules it.

        Group and match are those of `recording.schema.Span`. If the ranks' costs differ, as in an uneven all-to-all,
        the highest counts.
        """
        key, at = _place(group, match)
        with self:
            known, arrived, _, last_ns, cost_ns, busy_ns, shared_ns, due_ns = ENTRY.unpack_from(self._memory, at)
            if known != key or arrived >= cost.of:  # the entry of an older operation
                arrived = last_ns = cost_ns = busy_ns = shared_ns = due_ns = 0
            arrived, last_ns = arrived + 1, max(last_ns, at_ns)
            cost_ns, busy_ns, shared_ns = max(cost_ns, cost.cost_ns), max(busy_ns, cost.busy_ns), max(shared_ns, cost.shared_ns)
            if arrived == cost.of:
                highest = cost._replace(busy_ns=busy_ns, shared_ns=shared_ns)
                due_ns = start_of(highest, last_ns, self._free_ns) + cost_ns
            ENTRY.pack_into(self._memory, at, key, arrived, 0, last_ns, cost_ns, busy_ns, shared_ns, due_ns)

    def withdraw(self, group: str, match: int) -> None:
        """Undo `arrive`, because the backend has rejected the operation."""
        key, at = _place(group, match)
        with self:
            known, arrived, _, last_ns, cost_ns, busy_ns, shared_ns, _ = ENTRY.unpack_from(self._memory, at)
            if known == key:
                ENTRY.pack_into(self._memory, at, key, arrived - 1, 0, last_ns, cost_ns, busy_ns, shared_ns, 0)

    def due_ns(self, group: str, match: int) -> int:
        """Return when an operation ends; 0 if unknown.

        A rank that completes an operation before another rank arrives, such as the root of a broadcast, does not need
        that rank: for it, the operation starts at the latest arrival so far.
        """
        key, at = _place(group, match)
        with self:
            known, _, _, last_ns, cost_ns, _, _, due_ns = ENTRY.unpack_from(self._memory, at)
        return 0 if known != key else due_ns or last_ns + cost_ns

    def __enter__(self) -> None:
        self._thread_lock.acquire()
        self._lock_file()  # the system releases it when a rank is killed

    def __exit__(self, *_: object) -> None:
        self._unlock_file()
        self._thread_lock.release()

    def close(self) -> None:
        """Release the memory."""
        self._free_ns.release()
        self._memory.close()
        os.close(self._fd)


def _place(group: str, match: int) -> tuple[int, int]:
    """Return the key and the offset of an operation's entry; the entries of a group are adjacent."""
    crc = zlib.crc32(group.encode())
    return (crc << 32 | match & 0xFFFFFFFF) or 1, ENTRIES_AT + (crc + match) % ENTRIES * ENTRY.size


def collective_cost(
    network: Network, name: str, nbytes: int, ranks: Sequence[int], alike: float = 1, *, fastest: bool = False
) -> LinkCost:
    """Return the cost of a collective. A rank's collectives use its link one after another, as on one NCCL stream.

    The network knows its number of ranks; `nbytes` is the n of `costs.link.rounds_and_share`. `alike` is how many equal
    collectives, this one included, share the connection of each node at the same time. With `fastest`, an all-reduce
    takes the fastest of the algorithms that `lab.predict` knows, such as NCCL's rings and trees; otherwise a ring.
    """
    nodes = network.nodes_among(ranks)
    found = []
    for choice in possible_rounds(name, nodes, fastest=fastest):
        shared = [each if each.between is None else each._replace(between=alike * each.between) for each in choice]
        found.append((network.rounds_s(shared, nbytes), shared))
    seconds, shortest = min(found, key=lambda each: each[0])
    cost_ns = round(seconds * 1e9)
    crossing = [each.between for each in shortest if each.between is not None]
    if not crossing:
        return LinkCost(cost_ns, cost_ns, ranks, ranks, len(ranks), 0, [])
    ports = [*ranks] if any(each.inside is not None for each in shortest) else []
    ports += map(outer_port, ranks)
    shared_ns = round(sum(crossing) * nbytes / network.between.bytes_per_s * 1e9)
    return LinkCost(cost_ns, cost_ns, ports, ports, len(ranks), shared_ns, [node_port(node) for node in sorted(set(nodes))])


def message_cost(network: Network, source: int, destination: int, nbytes: int, ends: int, alike: float = 1) -> LinkCost:
    """Return the cost of a message. Latencies of consecutive messages overlap.

    `ends` is 2 if it starts when both ranks have arrived, 1 if only its sender schedules it; `alike` is how many equal
    messages, this one included, leave the sender's node at the same time.
    """
    link, ports = network.inside, (source, destination)
    nodes = network.node_of(source), network.node_of(destination)
    if nodes[0] != nodes[1]:
        link, ports = network.between, (node_port(nodes[0]), node_port(nodes[1]))
        nbytes = round(nbytes * alike)
    busy_ns = round(nbytes / link.bytes_per_s * 1e9)
    return LinkCost(round(link.latency_s * 1e9) + busy_ns, busy_ns, [ports[0]], [ports[1]], ends)
