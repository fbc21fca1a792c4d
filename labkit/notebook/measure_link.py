"""`measure_link` times messages of many sizes between the ranks of a group, and fits a link to the times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from labkit.costs.fit import fit
from labkit.costs.network import Network
from labkit.errors.exceptions import LabError
from labkit.errors.wrong_calls import public_api
from labkit.group.group import Group
from labkit.plots.measured_link import MeasuredLink, MeasuredNetwork

OPERATIONS: Final = {  # by runtime
    "torch": ("send", "all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all"),
    "rpc": ("rpc",),
}
BETWEEN_TWO: Final = ("send", "rpc")  # operations between two ranks, timed as round trips
SIZES: Final = tuple(4**i for i in range(3, 13))  # bytes, 64 to 16 Mi
FLOAT: Final = 4  # bytes
LONGEST_S: Final = 0.15  # if an operation takes longer, larger sizes are skipped
TRIES: Final = 3  # before it counts as longer: one of them may be lengthened by a stall of the machine
BUDGET_S: Final = 0.02  # for all repetitions of one operation with one size
FEWEST, MOST = 5, 20  # repetitions; fewer make a poor median, more do not improve it


@public_api
def measure_link(group: Group, *, operations: Sequence[str] | None = None) -> MeasuredLink | MeasuredNetwork:
    """Fit latency and bandwidth to real messages of many sizes between the ranks of a group.

    Each operation is repeated for each size, and the median of the times is used; sizes beyond one that takes 0.15 s
    are skipped. A collective follows a barrier; its time runs from the moment when the last rank starts to the moment
    when the last rank ends. Between machines, whose clocks differ, it is the longest time of a rank. The time of a
    message or a remote call is half a round trip between the first two ranks. The fitted model is that of
    `lab.predict`, so operations can be compared: with a perfect model, all would give the same link. The latency of
    a remote call is mostly CPU time of RPC.

    A group with a `labkit.Network`, or with ranks on several machines, has two links: `inside` is measured among the
    ranks of the first node that has several, `between` among the first ranks of all nodes.

    Args:
        group: a group of at least two ranks with runtime "torch" or "rpc".
        operations: some of "send", "all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", or with RPC
            "rpc"; default: all that the runtime has.

    Returns:
        the fits, which a notebook shows as a table; see `.link`, `["all_reduce"]` and `.plot()`. For a network with
        several ranks on a node, the fits of both levels, beside the emulated links if these are emulated; see also
        `.inside` and `.between`.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: an unknown operation, or none.
        LabError: a group of one rank, or of another runtime; all but the smallest size take too long.
        RankError: a rank failed; also the other errors of `Group.run`.

    With NCCL, each operation is followed by a wait for the GPU, which adds to the latency. This has not been tested on
    several GPUs yet.
    """
    if not isinstance(group, Group):
        raise TypeError(f"measure_link({group!r}): expected a group, as in measure_link(lab.Group(2))")
    if group.runtime not in OPERATIONS or len(group) < 2:
        raise LabError(f"measure_link({group!r}): expected at least two ranks of runtime='torch' or 'rpc'")
    known = OPERATIONS[group.runtime]
    operations = known if operations is None else [operations] if isinstance(operations, str) else list(operations)
    if unknown := [name for name in operations if name not in known]:
        raise ValueError(f"measure_link(operations=...): {unknown[0]!r} is none of {', '.join(known)}")
    if not operations:
        raise ValueError(f"measure_link(operations={operations}): expected an operation, one of {', '.join(known)}")
    network = group.link if isinstance(group.link, Network) else None
    nodes = network.nodes_among(len(group)) if network is not None else group.run(_nothing).trace.nodes if group.on else ()
    of_nodes = [[rank for rank, node in enumerate(nodes) if node == number] for number in sorted(set(nodes))]
    inside = next((ranks for ranks in of_nodes if len(ranks) > 1), [])
    one_clock = network is not None or len(of_nodes) < 2
    if len(of_nodes) < 2 or not inside:
        return _measured(group, operations, list(range(len(group))), one_clock=one_clock)
    return MeasuredNetwork(
        network,
        inside=_measured(group, operations, inside, one_clock=True),
        between=_measured(group, operations, [ranks[0] for ranks in of_nodes], one_clock=one_clock),
        nodes=len(of_nodes),
        ranks=len(group),
    )


def _nothing() -> None:
    """In a rank: let the notebook know where the ranks are."""


def _measured(group: Group, operations: Sequence[str], ranks: list[int], *, one_clock: bool) -> MeasuredLink:
    """Measure among some ranks, in ascending order; on several machines, each rank has a clock of its own."""
    members, running = (ranks, group) if group.runtime == "torch" else (ranks[:2], group[ranks[0]])
    parts = len(members)
    sizes = sorted({FLOAT * parts * _elements(size, parts) for size in SIZES})  # each rank has a part, equally large
    of_ranks = [measured for measured in running.run(_on_rank, operations, sizes, members).results if measured]
    fits = []
    for operation in operations:
        nbytes, seconds = [], []
        for size, *times in zip(*([m[1:] for m in of_rank if m[0] == operation] for of_rank in of_ranks), strict=True):
            nbytes.append(size[0])
            seconds.append(_median_s(operation, [size[1:], *(t[1:] for t in times)], one_clock=one_clock))
        if len(nbytes) < 2:
            raise LabError(
                f"measure_link: {operation} of {nbytes} bytes takes more than {LONGEST_S} s, too long to try larger ones"
            )
        fits.append(fit(operation, 2 if operation in BETWEEN_TWO else len(ranks), nbytes, seconds))
    return MeasuredLink(tuple(fits))


def _median_s(operation: str, of_ranks: list[Any], *, one_clock: bool) -> float:
    """Return the median time of the repetitions, each from the last rank's start to the last rank's end.

    Without a common clock, the longest time of a rank counts. It is longer than that by at most the difference of the
    starts after a barrier. The shortest would be too short: the root of a broadcast ends when its data is in a buffer.
    """
    if operation in BETWEEN_TWO:
        of_ranks = of_ranks[:1]
    repetitions = zip(*(zip(begins, ends, strict=True) for begins, ends in of_ranks), strict=True)
    if one_clock:
        times = [max(end for _, end in each) - max(begin for begin, _ in each) for each in repetitions]
    else:
        times = [max(end - begin for begin, end in each) for each in repetitions]
    return float(statistics.median(times)) / 1e9 / (2 if operation in BETWEEN_TWO else 1)


Measured = list[tuple[str, int, list[int], list[int]]]  # operation, bytes, starts and ends in ns


def _on_rank(operations: Sequence[str], sizes: list[int], members: list[int]) -> Measured:
    """In a rank: time each operation with each size, if it is a member; remote calls are timed on the first alone."""
    import torch
    import torch.distributed as dist

    from labkit.worker.runtimes.devices import devices

    ranks, together = len(members), "rpc" not in operations
    device, group = torch.device("cpu"), None
    made: Measured = []
    if together:
        device = devices()[0]
        group = dist.group.WORLD if ranks == dist.get_world_size() else dist.new_group(members)
        if dist.get_rank() not in members:
            return made

    def timed(action: Callable[[], object]) -> tuple[int, int]:
        if together:
            dist.barrier(group)
        begin_ns = time.perf_counter_ns()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return begin_ns, time.perf_counter_ns()

    def decided_s(action: Callable[[], object]) -> float:
        begin_ns, end_ns = timed(action)
        took_s = torch.tensor([(end_ns - begin_ns) / 1e9], device=device)
        if together:
            dist.broadcast(took_s, members[0], group)  # the first rank's time decides for all
        return float(took_s)

    for operation in operations:
        for size in sizes:
            part = _elements(size, ranks)
            x, parts = torch.ones(part * ranks, device=device), torch.ones(part, device=device)
            action = _action_of(operation, members, group, x, parts)
            timed(action)
            took_s = _shortest_s(partial(decided_s, action))
            if took_s > LONGEST_S and size != sizes[0]:
                break
            count = min(MOST, max(FEWEST, int(BUDGET_S / max(took_s, 1e-9))))
            times = [timed(action) for _ in range(count)]
            made.append((operation, x.nbytes, [b for b, _ in times], [e for _, e in times]))
    return made


def _shortest_s(timed_s: Callable[[], float]) -> float:
    """Return how long an operation takes: the first time that is not too long, else the shortest of `TRIES`."""
    shortest_s = timed_s()
    for _ in range(TRIES - 1):
        if shortest_s > LONGEST_S:
            shortest_s = min(shortest_s, timed_s())
    return shortest_s


def _elements(size: int, parts: int) -> int:
    """Return how many float32 numbers each of the equal parts of a tensor of about `size` bytes has."""
    return max(1, size // (FLOAT * parts))


def _same(x: Any) -> Any:
    """Return the argument; runs on the rank that is called."""
    return x


def _action_of(operation: str, members: list[int], group: Any, whole: Any, part: Any) -> Callable[[], object]:
    """Return what a rank does in one repetition; `part` is a tensor of one rank's share of `whole`."""
    import torch.distributed as dist
    from torch.distributed import rpc

    first, second = members[:2]

    def round_trip() -> None:
        rank = dist.get_rank()
        if rank == first:
            dist.send(whole, second)
            dist.recv(whole, second)
        elif rank == second:
            dist.recv(whole, first)
            dist.send(whole, first)

    pieces = list(whole.chunk(len(members)))
    others, other = [piece.clone() for piece in pieces], whole.clone()
    actions: dict[str, Callable[[], object]] = {
        "send": round_trip,
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, first, group),
        "all_gather": lambda: dist.all_gather(others, part, group),
        "reduce_scatter": lambda: dist.reduce_scatter(part, pieces, group=group),
        # torch 2.11: gloo does not support lists
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
        "rpc": lambda: rpc.rpc_sync(second, _same, args=(whole,)),
    }
    return actions[operation]
