"""Patterns of parallel training in a trace: pipelines, and which operations could run beside compute."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from labkit.recording.group_keys import GroupKind, ends_of, kind_of
from labkit.recording.operations import RECV, SEND, type_of
from labkit.recording.schema import COMMUNICATION, COMPUTE, OPTIMIZER
from labkit.tracing.intervals import Intervals
from labkit.tracing.trace import Trace

FORWARD: Final = "forward"
BACKWARD: Final = "backward"
Pair = tuple[int, int]  # the ranks that send and receive


def after_backward(trace: Trace) -> NDArray[np.int64]:
    """Return the reductions of gradients that begin when the backward pass of their step has ended, as rows of a trace.

    A layer's gradients are known when the backward pass has come to it. Therefore those of all layers but the first
    can be averaged while it goes on, as DistributedDataParallel does.
    """
    data, found = trace.columns.data, []
    reduces = _reduces(trace) & ~np.isin(data["group"], _groups_in_forward(trace))
    for rank in range(len(trace.ranks)):
        rows = np.flatnonzero(reduces & (data["rank"] == rank) & (data["wait_end_ns"] > 0))
        at_ns, forward, backward = data["start_ns"][rows], *(passes(trace, rank, which) for which in (FORWARD, BACKWARD))
        steps = trace.step_bounds(rank)
        updates = passes(trace, rank, OPTIMIZER)  # what is reduced after one are parameters
        since = np.max([_last_start(own, at_ns) for own in (forward, steps, updates)], axis=0)
        after = (_last_start(backward, at_ns) >= since) & (len(backward) > 0)
        found.append(rows[after & ~_inside(forward, at_ns) & ~_inside(backward, at_ns)])
    return np.sort(np.concatenate(found))


def in_backward(trace: Trace) -> NDArray[np.int64]:
    """Return the operations that begin within a backward pass, as rows of a trace."""
    return _within(trace, trace.columns.travels, BACKWARD)


def needed_at_once(trace: Trace) -> NDArray[np.int64]:
    """Return the operations of tensor parallelism, as rows of a trace: the next layer waits for their results.

    They are those of the process groups that reduce something within a forward pass: activations.
    """
    of_groups = np.isin(trace.columns.data["group"], _groups_in_forward(trace))
    return _within(trace, trace.columns.travels & of_groups, FORWARD, BACKWARD)


def _groups_in_forward(trace: Trace) -> NDArray[Any]:
    """Return the numbers of the process groups that reduce something within a forward pass."""
    return np.unique(trace.columns.data["group"][_within(trace, _reduces(trace), FORWARD)])


def _reduces(trace: Trace) -> NDArray[np.bool_]:
    return trace.columns.travels & trace.columns.named(lambda name: type_of(name).collective and type_of(name).reduces)


def _within(trace: Trace, chosen: NDArray[np.bool_], *names: str) -> NDArray[np.int64]:
    """Return those of the chosen spans that begin within a pass with one of these names of their rank, as rows."""
    data, found = trace.columns.data, [np.empty(0, np.int64)]
    for rank in range(len(trace.ranks)):
        rows = np.flatnonzero(chosen & (data["rank"] == rank))
        inside = [_inside(passes(trace, rank, name), data["start_ns"][rows]) for name in names]
        found.append(rows[np.any(inside, axis=0)])
    return np.sort(np.concatenate(found))


def passes(trace: Trace, rank: int, which: str) -> Intervals:
    """Return the bounds of a rank's passes of this name, such as "backward", in order of their start, in ns."""
    data = trace.columns.data
    # "backward", or with the number of a micro-batch, "backward 3"
    named = trace.columns.named(lambda name: name == which or name.startswith(f"{which} "))
    rows = data[named & (data["kind"] == COMPUTE) & (data["rank"] == rank)]
    return np.stack([rows["start_ns"], rows["end_ns"]], axis=1)


def _last_start(intervals: Intervals, at_ns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return when the last interval before each time started; the least number if none did."""
    starts = np.append(np.iinfo(np.int64).min, intervals[:, 0])
    found: NDArray[np.int64] = starts[np.searchsorted(intervals[:, 0], at_ns, side="right")]
    return found


def _inside(intervals: Intervals, at_ns: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return for each time whether it lies in one of some intervals, which are in order of their start."""
    latest = np.append(np.iinfo(np.int64).min, np.maximum.accumulate(intervals[:, 1]))
    found: NDArray[np.bool_] = at_ns < latest[np.searchsorted(intervals[:, 0], at_ns, side="right")]
    return found


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Pipelines of equal shape beside one another, usually one."""

    chains: tuple[tuple[int, ...], ...]  # of each pipeline, its ranks in the order of their stages
    micro_batches: int  # how many go through it in a step


def pipeline_of(trace: Trace) -> Pipeline | None:
    """Return the pipeline of a trace; None if there is none, or if it is not certain.

    It is certain if, in every step but the first, messages go along chains of ranks, equally many between all
    neighbours, as many as each rank has forward passes (and backward passes, if messages go back), and if each stage
    sends on only after it has received.
    """
    sent, received = _messages(trace)
    steps = {times.shape for times in [*sent.values(), *received.values()]}
    if not sent or sent.keys() != received.keys() or len(steps) != 1:
        return None
    ((_, count),) = steps
    if not count:
        return None
    after = {source: target for source, target in sent if source < target}
    heads = sorted(after.keys() - set(after.values()))
    chains = []
    for rank in heads:
        chain = [rank]
        while chain[-1] in after:
            chain.append(after[chain[-1]])
        chains.append(tuple(chain))
    there = [pair for chain in chains for pair in pairwise(chain)]
    back = [(target, source) for source, target in there]
    returns = set(sent) == {*there, *back}
    if len({len(chain) for chain in chains}) != 1 or not (returns or set(sent) == {*there}):
        return None
    whole = all(_passes_on(chain, sent, received, returns=returns) for chain in chains)
    names = (FORWARD, BACKWARD) if returns else (FORWARD,)
    counted = all(_counts(trace, rank, name) == {count} for chain in chains for rank in chain for name in names)
    return Pipeline(tuple(chains), count) if whole and counted else None


def slowest_stage(trace: Trace, pipeline: Pipeline) -> tuple[int, float]:
    """Return the rank that computes longest, and how many times as long as its pipeline's other stages on average."""
    steps = trace.step_bounds()
    compute_ns = [share.compute_ns for share in trace.between(int(steps[1, 0]), int(steps[-1, 1])).shares()]
    chain = max(pipeline.chains, key=lambda chain: max(compute_ns[rank] for rank in chain))
    slowest = max(chain, key=lambda rank: compute_ns[rank])
    others = [compute_ns[rank] for rank in chain if rank != slowest]
    return slowest, compute_ns[slowest] / max(float(np.mean(others)), 1.0)


def _messages(trace: Trace) -> tuple[dict[Pair, Any], dict[Pair, Any]]:
    """Return when messages were sent and when they were received, in ns, by their ranks: an array of (steps, messages).

    If steps have different numbers of messages, the array is empty.
    """
    data = trace.columns.data
    pairs = [ends_of(name)[:2] if kind_of(name) is GroupKind.PAIR else None for name in trace.columns.names]
    types = [type_of(name) for name in trace.columns.names]
    found: tuple[dict[Pair, Any], dict[Pair, Any]] = ({}, {})
    for rank in range(len(trace.ranks)):
        rows = data[(data["rank"] == rank) & (data["kind"] == COMMUNICATION)]
        steps = trace.step_bounds(rank)[1:]
        for kind, field, times in ((SEND, "start_ns", found[0]), (RECV, "end_ns", found[1])):
            for pair in {pair for pair in pairs if pair is not None and rank == pair[kind is RECV]}:
                chosen = np.array([one == pair for one in pairs])[rows["group"]]
                chosen &= np.array([one is kind for one in types])[rows["name"]]
                own = rows[chosen]
                begins = own["start_ns"]
                per_step = [np.sort(own[field][(begins >= start) & (begins < end)]) for start, end in steps.tolist()]
                equal = len({len(at_ns) for at_ns in per_step}) == 1
                times[pair] = np.stack(per_step) if equal else np.empty((0, 0))
    return found


def _passes_on(chain: tuple[int, ...], sent: dict[Pair, Any], received: dict[Pair, Any], *, returns: bool) -> bool:
    """Whether each stage sends each message after the one that it needs: activations onwards, then gradients back."""
    way = [*chain, *chain[-2::-1]] if returns else list(chain)
    needed = zip(way, way[1:], way[2:], strict=False)
    return all((sent[b, c] >= received[a, b]).all() for a, b, c in needed)


def _counts(trace: Trace, rank: int, name: str) -> set[int]:
    """How many passes of this name the steps of a rank have, without the first step."""
    starts = passes(trace, rank, name)[:, 0]
    return {int(((starts >= start) & (starts < end)).sum()) for start, end in trace.step_bounds(rank)[1:].tolist()}
