"""`measure_link`: real messages of many sizes between the ranks of a group, and the link that explains their times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from labkit.costs.fit import fit
from labkit.errors.exceptions import LabError
from labkit.errors.wrong_calls import public_api
from labkit.group.group import Group
from labkit.plots.link_fit import MeasuredLink

__all__ = ["measure_link"]

OPERATIONS: Final = {  # by runtime
    "torch": ("send", "all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all"),
    "rpc": ("rpc",),
}
BETWEEN_TWO: Final = ("send", "rpc")  # there and back
SIZES: Final = tuple(4**i for i in range(3, 13))  # bytes, 64 to 16 Mi
FLOAT: Final = 4  # bytes
LONGEST_S: Final = 0.15  # of one operation: a larger one is not tried
BUDGET_S: Final = 0.02  # for one size of one operation, in as many repetitions as find room
FEWEST, MOST = 5, 20  # repetitions; the median of fewer says little, and of more no more


@public_api
def measure_link(group: Group, *, operations: Sequence[str] | None = None, sizes: Sequence[int] = SIZES) -> MeasuredLink:
    """Fit latency and bandwidth to real messages of many sizes between the ranks of a group.

    Each operation is repeated for each size, those of torch after a barrier; its time is from the moment when the last rank has
    begun to the moment when the last has ended (a message or a remote call: half the way there and back between the first two
    ranks), and the median counts. What is fitted is the model of `labkit.predict`, so that operations can be compared: with a
    perfect model all would give one link. A call's latency is mostly what RPC itself takes of the processors at both ends.

    Args:
        group: at least two ranks, runtime "torch" or "rpc".
        operations: which of "send", "all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", with RPC "rpc";
            default: all that the runtime has.
        sizes: in bytes, at least two; as n in `labkit.predict`. The largest are left out where one takes more than 0.15 s.

    Returns:
        a table in the notebook; `.link`, `["all_reduce"]`, `.plot()`.

    Raises:
        TypeError, ValueError: an invalid argument.
        LabError: a group of one rank, or of another runtime; or what `Group.run` raises.

    With NCCL the GPU is waited for after each operation, which adds to the latency. That has not been run on several GPUs yet.
    """
    if not isinstance(group, Group):
        raise TypeError(f"measure_link({group!r}): expected a group, as in measure_link(lab.Group(2))")
    if group.runtime not in OPERATIONS or len(group) < 2:
        raise LabError(f"measure_link({group!r}): expected at least two ranks of runtime='torch' or 'rpc'")
    there = OPERATIONS[group.runtime]
    operations = there if operations is None else operations
    if unknown := [name for name in operations if name not in there]:
        raise ValueError(f"measure_link(operations=...): {unknown[0]!r} is none of {', '.join(there)}")
    if len(set(sizes)) < 2 or any(not isinstance(n, int) or n < FLOAT for n in sizes) or not operations:
        raise ValueError(f"measure_link(sizes={list(sizes)}): expected at least two sizes from {FLOAT} bytes, and an operation")
    plan = list(operations), sorted(set(sizes))
    of_ranks = (group.run(_on_rank, *plan) if group.runtime == "torch" else group[0].run(_on_caller, plan[1])).results
    fits = []
    for operation in operations:
        nbytes, seconds = [], []
        for size, *times in zip(*([m[1:] for m in of_rank if m[0] == operation] for of_rank in of_ranks), strict=True):
            nbytes.append(size[0])
            seconds.append(_median_s(operation, [size[1:], *(t[1:] for t in times)]))
        if len(nbytes) < 2:
            raise LabError(f"measure_link: {operation} of {nbytes} bytes takes too long for larger ones; give smaller sizes")
        fits.append(fit(operation, 2 if operation in BETWEEN_TWO else len(group), nbytes, seconds))
    return MeasuredLink(tuple(fits))


def _median_s(operation: str, of_ranks: list[Any]) -> float:
    """The median of the repetitions, each from the last rank's begin to the last rank's end."""
    if operation in BETWEEN_TWO:
        of_ranks = of_ranks[:1]
    repetitions = zip(*(zip(begins, ends, strict=True) for begins, ends in of_ranks), strict=True)
    times = [max(end for _, end in each) - max(begin for begin, _ in each) for each in repetitions]
    return float(statistics.median(times)) / 1e9 / (2 if operation in BETWEEN_TWO else 1)


Measured = list[tuple[str, int, list[int], list[int]]]  # operation, bytes, begins and ends in ns


def _on_rank(operations: list[str], sizes: list[int]) -> Measured:
    """In a rank: for each operation and size, the size that it came to, and when each repetition began and ended."""
    import torch
    import torch.distributed as dist

    from labkit.worker.runtimes.registry import devices

    device, rank, ranks = devices()[0], dist.get_rank(), dist.get_world_size()
    made = []

    def timed(action: Callable[[], object]) -> tuple[int, int]:
        dist.barrier()
        begin_ns = time.perf_counter_ns()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return begin_ns, time.perf_counter_ns()

    for operation in operations:
        for size in sizes:
            part = max(1, size // (FLOAT * ranks))
            x, parts = torch.ones(part * ranks, device=device), torch.ones(part, device=device)
            action = _action_of(operation, rank, x, parts)
            timed(action)
            begin_ns, end_ns = timed(action)
            plan = torch.tensor([(end_ns - begin_ns) / 1e9], device=device)
            dist.broadcast(plan, 0)  # how long it took rank 0 decides for all
            took_s = float(plan)
            if took_s > LONGEST_S and size != sizes[0]:
                break
            times = [timed(action) for _ in range(_repetitions(took_s))]
            made.append((operation, x.nbytes, [b for b, _ in times], [e for _, e in times]))
    return made


def _on_caller(sizes: list[int]) -> Measured:
    """In the first rank of an rpc group: calls that send the second one a tensor and get it back."""
    import torch
    from torch.distributed import rpc

    made: Measured = []

    def timed() -> tuple[int, int]:
        begin_ns = time.perf_counter_ns()
        rpc.rpc_sync(1, _same, args=(x,))
        return begin_ns, time.perf_counter_ns()

    for size in sizes:
        x = torch.ones(size // FLOAT)
        timed()
        begin_ns, end_ns = timed()
        took_s = (end_ns - begin_ns) / 1e9
        if took_s > LONGEST_S and size != sizes[0]:
            break
        times = [timed() for _ in range(_repetitions(took_s))]
        made.append(("rpc", x.nbytes, [b for b, _ in times], [e for _, e in times]))
    return made


def _same(x: Any) -> Any:
    """In the rank that is called."""
    return x


def _repetitions(took_s: float) -> int:
    return min(MOST, max(FEWEST, int(BUDGET_S / max(took_s, 1e-9))))


def _action_of(operation: str, rank: int, whole: Any, part: Any) -> Callable[[], object]:
    """What a rank does once; `whole` is as large as the size says, `part` a rank's share of it."""
    import torch.distributed as dist

    def there_and_back() -> None:
        if rank == 0:
            dist.send(whole, 1)
            dist.recv(whole, 1)
        elif rank == 1:
            dist.recv(whole, 0)
            dist.send(whole, 0)

    pieces = list(whole.chunk(dist.get_world_size()))
    others, other = [piece.clone() for piece in pieces], whole.clone()
    actions: dict[str, Callable[[], object]] = {
        "send": there_and_back,
        "all_reduce": lambda: dist.all_reduce(whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "all_gather": lambda: dist.all_gather(others, part),
        "reduce_scatter": lambda: dist.reduce_scatter(part, pieces),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),  # torch 2.11: gloo exchanges no lists
    }
    return actions[operation]
