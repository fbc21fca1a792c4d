"""What limits a run: the largest loss among its ranks' time, and the numbers that show it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from labkit.costs.network import as_network
from labkit.recording.group_keys import GroupKind, ends_of, kind_of, ranks_of
from labkit.recording.operations import RPC, RPC_SHUTDOWN, TO_HERE, type_of
from labkit.recording.schema import COMPUTE, OPEN, READING
from labkit.tracing.intervals import Intervals, difference, intersection, length, union
from labkit.tracing.step_times import step_ms, steps_in_turn, undisturbed_steps
from labkit.tracing.trace import Trace

SMALL_BYTES: Final = 16_384  # the time of a smaller message is latency: at 1 Gbit/s it carries these in 0.13 ms
MOSTLY: Final = 0.6  # from this share on, one cause explains a loss
BUSY: Final = 0.85  # computing for this share of the time leaves little to gain
FEW: Final = 3  # operations: from fewer nobody sees who is usually late
FEW_STEPS: Final = 3  # fewer do not stand for a run


class Limit(Enum):
    """The largest loss."""

    COMPUTE = "the ranks compute nearly all the time"
    DATA = "the ranks wait for data"
    LATE_RANK = "one rank comes late and the others wait for it"
    UNEVEN_RANKS = "ranks wait for each other, each time for a different one"
    TURNS = "ranks wait for what others compute"
    CALLS = "ranks wait for remote calls that are under way"
    LATENCY = "the latency of many small messages"
    OVERHEAD = "what each operation takes beside its bytes and the latency of an emulated link"
    BANDWIDTH = "many bytes"
    UNRECORDED = "time that no rank recorded as work"


@dataclass(frozen=True, slots=True)
class LimitFinding:
    """The numbers behind an explanation, as means over the ranks."""

    limit: Limit  # the largest loss
    duration_ns: int  # the time looked at: all steps but the first, or the whole trace if there are fewer than three
    steps: int  # how many steps that is; 0 if the trace has none
    step_ns: float  # the median step; 0 if the trace has none
    mean_step_ns: float  # the mean of these steps; 0 if the trace has none
    compute: float  # this and the next four are shares of that time, from 0 to 1; overlap is a part of compute
    data: float
    overlap: float
    exposed: float
    waiting: float
    reading: float  # the share in which labkit read TensorFlow's profiler and the rank did nothing else
    standing: float  # the share in which a rank recorded nothing while another one, with which it communicates, computed
    absent: float  # the share in which a rank recorded nothing while others communicated or waited, and no rank computed
    # the share in which nobody recorded anything; if the ranks do not communicate, the mean of each rank's own share
    unrecorded: float
    working: float  # how many ranks compute at the same time, while any does
    late_rank: int  # the rank for which the others waited most; -1 if there were no collectives
    late_share: float  # its share of all waiting in collectives
    late_data: float  # the share of the time in which this rank waited for data
    late_ns: float  # how long after the first rank it came, as the median of the collectives at which it came last
    messages: float  # operations of each rank
    nbytes: float  # bytes of each rank's operations
    under_way: float  # the share of the time in which some rank waited for a remote call and no rank computed
    call_ns: float  # the median time from a remote call to its result; 0 if there were none
    call_bytes: float  # the median bytes of a remote call; 0 if there were none
    operation_ns: float  # the median time of a small operation; of any operation, if there are no small ones
    latency_ns: float  # what an emulated link's latency takes of an operation, as a median; 0 without one
    transfer_ns: float  # the time in which each rank's operations moved data


def limit_of(trace: Trace) -> LimitFinding:
    """Find what limits a run; its trace is not empty."""
    settled, part = _settled(trace)
    shares = part.shares()
    ranks, window = len(shares), max(part.duration_ns, 1)
    spent = {
        name: float(np.mean([getattr(share, f"{name}_ns") for share in shares])) / window
        for name in ("compute", "data", "overlap", "exposed", "waiting", "idle")
    }
    idle = spent.pop("idle")
    activities = [part.activity(rank) for rank in range(ranks)]
    reading = float(np.mean([_reading_ns(part, rank) for rank in range(ranks)])) / window
    spent["compute"] -= reading
    computing = [activity["compute"] for activity in activities]
    anybody = _union(computing)
    unrecorded = 1 - length(_union([kind for activity in activities for kind in activity.values()])) / window
    standing = float(np.mean(_standing_ns(part, activities))) / window
    absent = max(idle - spent["waiting"] - unrecorded - standing, 0.0)
    rows, transfer = _operations(part)
    calls = _calls(part, rows)
    whole = np.array([[part.start_ns, part.end_ns]], np.int64)
    under_way_ns = length(difference(intersection(_waits(calls), whole), anybody))
    served = float(np.mean([_served_ns(a, calls[calls["rank"] == i], anybody) for i, a in enumerate(activities)])) / window
    late_rank, late_share, late_ns = _late(rows[_collectives(part, rows)], ranks, part.clock_error_ns)
    causes, latency_ns = _causes_ns(part, rows, _one_by_one(rows, transfer))
    if not len(rows):
        standing, absent, unrecorded = 0.0, 0.0, idle
        losses = {Limit.COMPUTE: spent["compute"], Limit.UNRECORDED: idle}
        limit = Limit.DATA if spent["data"] > max(idle, 1 - BUSY) else _largest(losses)
    elif spent["compute"] >= BUSY:
        limit = Limit.COMPUTE
    else:
        # Of equal losses, the first counts. The kinds of communication and of waiting are told apart below.
        waiting = spent["waiting"] + standing
        losses = {Limit.UNRECORDED: unrecorded, Limit.BANDWIDTH: spent["exposed"], Limit.TURNS: waiting}
        limit = _largest(losses | {Limit.DATA: spent["data"]})
        if limit in (Limit.BANDWIDTH, Limit.TURNS):
            if under_way_ns > max(length(anybody), MOSTLY * (window - length(anybody))):
                limit = Limit.CALLS
            elif spent["exposed"] - served >= waiting + served:
                limit = _largest(causes)
            elif standing + served > spent["waiting"] or _in_collectives(part) < 1 - MOSTLY:
                limit = Limit.TURNS
            else:
                limit = Limit.LATE_RANK if late_share >= MOSTLY else Limit.UNEVEN_RANKS
    small = rows["nbytes"] <= SMALL_BYTES
    return LimitFinding(
        limit=limit, duration_ns=part.duration_ns, steps=len(settled), step_ns=1e6 * step_ms(trace) if settled else 0.0,
        mean_step_ns=_mean_ns(trace, settled), **spent, reading=reading, standing=standing, absent=absent,
        unrecorded=unrecorded, working=sum(map(length, computing)) / length(anybody) if len(anybody) else 0.0,
        late_rank=late_rank, late_share=late_share, late_ns=late_ns,
        late_data=shares[late_rank].data_ns / window if late_rank >= 0 else 0.0,
        messages=len(rows) / ranks, nbytes=float(rows["nbytes"].sum()) / ranks, under_way=under_way_ns / window,
        call_ns=_median(calls["end_ns"] - calls["start_ns"]), call_bytes=_median(calls["nbytes"]),
        operation_ns=_median(transfer[small] if small.any() else transfer), latency_ns=latency_ns,
        transfer_ns=float(transfer.sum()) / ranks,
    )  # fmt: skip


def _largest(losses: dict[Limit, float]) -> Limit:
    return max(losses, key=losses.__getitem__)


def _median(values: NDArray[Any]) -> float:
    return float(np.median(values)) if len(values) else 0.0


def _union(sets: Iterable[Intervals]) -> Intervals:
    return union(*np.concatenate(list(sets)).T)


def _reading_ns(part: Trace, rank: int) -> int:
    """The time in which labkit read the rank's profiler, and in which no other span of the rank was open."""
    own = part.columns.data[(part.columns.data["rank"] == rank) & (part.columns.data["kind"] == COMPUTE)]
    reads = own["name"] == part.columns.name_id(READING)
    reading, others = (union(own["start_ns"][which], own["end_ns"][which]) for which in (reads, ~reads))
    window = np.array([[part.start_ns, part.end_ns]], np.int64)
    return length(intersection(difference(reading, others), window))


def _standing_ns(part: Trace, activities: Sequence[dict[str, Intervals]]) -> list[int]:
    """For each rank, the time in which it recorded nothing while another one computed."""
    whole = np.array([[part.start_ns, part.end_ns]], np.int64)
    anybody = _union([whole[:0], *(activity["compute"] for activity in activities)])
    silent = [difference(whole, _union(activity.values())) for activity in activities]
    return [length(intersection(of_rank, anybody)) for of_rank in silent]


def _settled(trace: Trace) -> tuple[range, Trace]:
    """The longest sequence of typical steps: their numbers, and that part of the trace.

    The first step is slower than the others; in some, labkit reads TensorFlow's profiler. If fewer than `FEW_STEPS` in
    a row are left, only the first is left out.
    """
    bounds = trace.step_bounds()
    if len(bounds) < 3:
        return range(len(bounds)), trace
    typical = undisturbed_steps(trace)
    typical = typical[typical > 0]
    longest = max(np.split(typical, np.flatnonzero(np.diff(typical) > 1) + 1), key=len)
    if len(longest) < FEW_STEPS:
        longest = np.arange(1, len(bounds))
    first, last = int(longest[0]), int(longest[-1])
    return range(first, last + 1), trace.between(int(bounds[first, 0]), int(bounds[last, 1]))


def _mean_ns(trace: Trace, steps: range) -> float:
    """The mean length of these steps; 0 if there are none."""
    if not steps:
        return 0.0
    bounds = steps_in_turn(trace)
    return float(bounds[steps[-1], 1] - bounds[steps[0], 0]) / len(steps)


def _operations(part: Trace) -> tuple[Any, NDArray[np.int64]]:
    """The operations that began and completed in this time, and how long the data of each travelled, in ns."""
    data = part.columns.data
    here = part.columns.travels & (data["flags"] & OPEN == 0) & (data["start_ns"] >= part.start_ns)
    rows = data[here]
    return rows, np.maximum(rows["end_ns"] - part.ready()[here], 0)


def _one_by_one(rows: Any, transfer: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the time of each operation since the one before it on its rank ended, in ns."""
    order = np.lexsort((rows["end_ns"], rows["rank"]))
    rank, end_ns = rows["rank"][order], rows["end_ns"][order]
    before_ns = np.append(0, end_ns)[:-1]
    before_ns[np.append(True, np.diff(rank) != 0)[: len(rank)]] = 0
    found = np.empty_like(transfer)
    found[order] = np.minimum(transfer[order], end_ns - before_ns)
    return found


def _causes_ns(part: Trace, rows: Any, transfer: NDArray[np.int64]) -> tuple[dict[Limit, float], float]:
    """Divide the time of some operations into what bytes, latency and overhead take, in ns.

    Over an emulated link, its model knows the first two. Without one, overhead is what a small operation takes. The
    second result is the median of what the link's latency takes of an operation.
    """
    of_link, latency = (np.minimum(transfer, _modelled_ns(part, rows, empty)) for empty in (False, True))
    small = rows["nbytes"] <= SMALL_BYTES
    overhead = np.minimum(transfer, np.median(transfer[small]) if small.any() else 0)
    overhead = np.where(small, transfer, overhead)
    overhead = np.where(of_link > 0, transfer - of_link, overhead)
    causes = {Limit.BANDWIDTH: transfer - latency - overhead, Limit.LATENCY: latency, Limit.OVERHEAD: overhead}
    return {cause: float(took.sum()) for cause, took in causes.items()}, _median(latency)


def _modelled_ns(part: Trace, rows: Any, empty: bool) -> NDArray[np.float64]:
    """Return for each operation what it takes over the run's link by the link's model, in ns; 0 if that is unknown."""
    found = np.zeros(len(rows))
    if part.link is None:
        return found
    names, everybody = part.columns.names, range(part.simulated or len(part.ranks))
    network = as_network(part.link, len(everybody))
    for name, group, nbytes in np.unique(rows[["name", "group", "nbytes"]]).tolist():
        kind, key, size = type_of(names[name]), names[group], 0 if empty else nbytes
        if kind_of(key) is GroupKind.PAIR:
            took_s = network.link(*ends_of(key)[:2]).seconds("send", size)
        elif kind_of(key) is GroupKind.COLLECTIVE and kind.cost is not None:
            took_s = network.seconds(kind.name, size, ranks_of(key) or everybody)
        else:
            continue
        found[(rows["name"] == name) & (rows["group"] == group) & (rows["nbytes"] == nbytes)] = took_s * 1e9
    return found


def _calls(part: Trace, rows: Any) -> Any:
    """The remote calls among some operations, and the fetches of remote results."""
    names = [i for i, name in enumerate(part.columns.names) if type_of(name) in (RPC, TO_HERE)]
    return rows[np.isin(rows["name"], names)]


def _waits(rows: Any) -> Intervals:
    return union(rows["wait_start_ns"], rows["wait_end_ns"])


def _served_ns(activity: dict[str, Intervals], calls: Any, anybody: Intervals) -> int:
    """The time of a rank's communication in which its remote calls were probably served: some rank computed."""
    waits = intersection(_waits(calls), anybody)
    return length(intersection(difference(activity["communication"], activity["compute"]), waits))


def _collectives(part: Trace, rows: Any) -> NDArray[np.bool_]:
    """Which operations are collectives; not `rpc.shutdown`, in which a rank waits for the other programs' ends."""
    types = [type_of(name) for name in part.columns.names]
    named = np.array([kind.collective and kind is not RPC_SHUTDOWN for kind in types], bool)
    found: NDArray[np.bool_] = named[rows["name"]]
    return found


def _late(rows: Any, ranks: int, clock_error_ns: int) -> tuple[int, float, float]:
    """Which rank comes last to these collectives: its number, its share of the others' waiting, by how much, in ns.

    Waiting for less than the error between the ranks' clocks does not count.
    """
    shared = rows[rows["group"] != 0]
    shared = shared[np.lexsort((shared["start_ns"], shared["match"], shared["group"]))]
    if not len(shared):
        return -1, 0.0, 0.0
    changes = np.append(True, (np.diff(shared["group"].astype(np.int64)) != 0) | (np.diff(shared["match"]) != 0))
    first = np.flatnonzero(changes)
    last = np.append(first[1:], len(shared)) - 1
    several = last > first
    if several.sum() < FEW:
        return -1, 0.0, 0.0
    number, came_last = np.cumsum(changes) - 1, shared["rank"][last]
    waits = shared["start_ns"][last][number] - shared["start_ns"]
    waits[waits < clock_error_ns] = 0
    waited = np.bincount(came_last, np.bincount(number, waits), ranks)
    worst = int(waited.argmax())
    gaps = (shared["start_ns"][last] - shared["start_ns"][first])[several & (came_last == worst)]
    return worst, float(waited[worst] / max(waited.sum(), 1)), _median(gaps)


def _in_collectives(part: Trace) -> float:
    """The share of the ranks' blocked time that is in collectives, and not in messages and calls."""
    rows = part.columns.data[part.columns.travels]
    waits = np.maximum(rows["wait_end_ns"] - rows["wait_start_ns"], 0)
    return float(waits[_collectives(part, rows)].sum() / max(waits.sum(), 1))
