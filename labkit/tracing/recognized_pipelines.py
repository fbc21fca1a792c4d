"""Recognizes the pipelines of a run: chains of ranks that hand micro-batches on, from one stage to the next."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from labkit.recording.group_keys import GroupKind, ends_of, kind_of
from labkit.recording.operations import RECV, SEND, type_of
from labkit.recording.schema import COMMUNICATION
from labkit.tracing.overlapping import BACKWARD, FORWARD, passes
from labkit.tracing.trace import Trace

Pair = tuple[int, int]  # the ranks that send and receive


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
                per_step = [np.sort(own[field][_begin(own, step)]) for step in steps]
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


def _begin(rows: Any, step: Any) -> Any:
    """Which operations begin in a step."""
    return (rows["start_ns"] >= step[0]) & (rows["start_ns"] < step[1])
