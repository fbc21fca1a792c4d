"""Faults that raise no error and give wrong numbers, as far as a run's trace shows them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import numpy as np

from labkit.errors.lists import counted, listed
from labkit.recording.events import Scalar
from labkit.recording.group_keys import ranks_of
from labkit.recording.operations import Traffic, type_of
from labkit.recording.schema import CALL, COMMUNICATION, COMPUTE, MEASURED, OPTIMIZER, UNWAITED
from labkit.tracing.patterns import BACKWARD, in_backward
from labkit.tracing.trace import Trace

METRICS_BYTES: Final = 64  # a larger message than a few losses and counts may carry parameters
MESSAGES: Final = frozenset({Traffic.TO_PEER, Traffic.FROM_PEER, Traffic.SECOND_END, Traffic.PAIRWISE})


class FaultKind(Enum):
    """What is wrong, what to do about it, and whether it is a fault in any program; otherwise it may be intended."""

    NEVER_WAITED_FOR = "Keep what it returns, and call wait() on it before you use the tensor."
    OPTIMIZER_STEPS = "All ranks must decide together whether to step: all-reduce what the decision depends on."
    OPTIMIZER_STEPS_BY_HAND = (
        "If the ranks train one model, they must decide together whether to step: all-reduce what the decision depends on.",
        False,
    )
    OTHER_ROOT = (
        "If that is not intended: src and dst are ranks of the whole world, group_src and group_dst those of the group.",
        False,
    )
    GRADIENTS_DIFFER = (
        "A parameter that takes no part in the loss keeps DistributedDataParallel from averaging those in its bucket: leave it "
        "out of the model, or pass find_unused_parameters=True. A forward pass inside no_sync() has the same effect."
    )
    BYPASSED = "Call the DistributedDataParallel itself: only its forward pass arranges that the backward pass averages."
    NO_GRADIENTS = "The loss does not reach them: was the optimizer made before fully_shard, or of another model or copy?"
    OTHER_RATES = "Compute learning rates from what is the same on all ranks, as the number of steps."
    OTHER_SEEDS = "Give all ranks' samplers the same seed: only then do they divide one order of the data."
    SAME_DATA = "Give each rank its own part of the data, for example by a DistributedSampler."
    SAME_INPUTS = "If the model does not divide them itself, give each rank its own part, as by a DistributedSampler.", False
    OTHER_BATCH_SIZES = (
        "If the loss is a mean over the batch, averaging gradients over ranks gives rows of a small batch more weight.",
        False,
    )
    REPLICAS_DIFFER = "Between two steps, nothing but an optimizer with averaged gradients may change the parameters."
    PARAMETERS_DIFFER = (
        "If the ranks train one model, average its gradients before each step, as DistributedDataParallel does.",
        False,
    )
    BUFFERS_DIFFER = (
        "With GPUs, torch.nn.SyncBatchNorm takes statistics of all ranks' data. On CPUs, average running means in each step.",
        False,
    )
    SAME_OPERANDS = "If that is not intended: equal seeds give equal random numbers on all ranks.", False
    SAME_ORDER = "Call sampler.set_epoch(epoch) before each epoch."
    PADDED_EVALUATION = (
        "If they count twice in a mean over all ranks: to evaluate, give each rank indices[rank::ranks], which repeats none.",
        False,
    )
    NO_SYNC = "Put the forward pass inside no_sync(), too."
    LOSS = "Find the first values that are not finite by x.isfinite().all(): inputs, parameters, or what a module returns."
    NOT_DIVIDED = "If the model's first input is the batch, divide it: rank r of p takes batch[r::p].", False
    OTHER_SAMPLES = "Let each sample of a batch go to exactly one rank."
    REPEATED_SAMPLES = "If a backward pass follows for all of them, let each sample go to exactly one rank.", False
    SUM_FOR_MEAN = "This is their sum over the ranks: divide it by the number of ranks."
    SCALED = "Divide the sum over all ranks by what the loss is a mean of: all samples, or all tokens."
    NOT_AVERAGED = "Before the optimizer steps, reduce them over all ranks, as DistributedDataParallel does, and wait for that."
    UNEQUAL_PARTS = (
        "Possible causes: a mean of the ranks' means, which must be weighted by their numbers of samples; dropout, BatchNorm.",
        False,
    )
    OTHER_GRADIENTS = (
        (
            "Possible causes: dropout, BatchNorm, 16-bit numbers, clipping before the average, a loss that is a mean over "
            "unequal numbers of tokens, that weights samples, or that compares them with one another."
        ),
        False,
    )
    EMPTY_REPLICAS = (
        "A mean over no samples is nan: divide a sum by the samples of all replicas, or batch with drop_remainder=True.",
        False,
    )
    RECORDED = ""
    NOT_FINITE = "", False

    def __init__(self, cure: str, certain: bool = True) -> None:
        self.cure, self.certain = cure, certain


@dataclass(frozen=True, slots=True)
class SilentFault:
    """A fault that raises no error."""

    kind: FaultKind  # what is wrong
    ranks: tuple[int, ...]  # the numbers of the ranks on which it shows
    line: str  # the student's line, or ""
    sentence: str  # what the record shows
    tensors: tuple[str, ...] = ()  # the names of the tensors, if it is about tensors

    def __str__(self) -> str:
        return f"{'' if self.kind.certain else 'Perhaps: '}{self.sentence} {self.kind.cure}".rstrip()


def faults_in(trace: Trace) -> list[SilentFault]:
    """Find the faults that a trace shows by itself."""
    return [*_never_waited_for(trace), *_steps_of_some_ranks(trace), *_other_roots(trace), *_recorded_values(trace)]


def _never_waited_for(trace: Trace) -> Iterator[SilentFault]:
    data, names = trace.columns.data, trace.columns.names
    found = data[(data["kind"] == COMMUNICATION) & (data["flags"] & UNWAITED != 0)]
    places: dict[tuple[str, str], set[int]] = defaultdict(set)
    for name, line, rank in found[["name", "line", "rank"]].tolist():
        places[names[name], names[line]].add(rank)
    for (name, line), ranks in places.items():
        where = "" if len(ranks) == len(trace.ranks) else f" on {listed(trace.ranks[rank] for rank in sorted(ranks))}"
        moves = type_of(name).traffic is not Traffic.TOGETHER
        follows = "have used its tensor" if moves else "have run"
        sentence = (
            f"The asynchronous {name}{at(line)} was never waited for{where}: what follows may {follows} before it completed."
        )
        yield SilentFault(FaultKind.NEVER_WAITED_FOR, tuple(sorted(ranks)), line, sentence)


def _steps_of_some_ranks(trace: Trace) -> Iterator[SilentFault]:
    """Find optimizers that stepped on some ranks less often than on others, if nothing made the ranks equal later.

    Only steps after a reduction count, be it of DistributedDataParallel in a backward pass, or by hand: ranks that
    reduce nothing train models of their own.
    """
    data, names = trace.columns.data, trace.columns.names
    # A profiler, as TensorFlow's, does not see all of a run.
    own = (data["kind"] == COMPUTE) & (data["flags"] & MEASURED == 0)
    steps = data[own & (data["name"] == trace.columns.name_id(OPTIMIZER))]
    called = np.unique(data["rank"][data["kind"] == CALL]).tolist()
    operations = np.flatnonzero(data["kind"] == COMMUNICATION)
    within = in_backward(trace)
    reducing = np.array([type_of(name).reduces for name in names] or [False])
    reductions = operations[reducing[data["name"][operations]] & (data["nbytes"][operations] > METRICS_BYTES)]
    reductions = np.union1d(reductions, within[reducing[data["name"][within]]])
    counted_steps = {rank: _after_reductions(data[reductions], steps, rank) for rank in called}
    if len({len(own) for own in counted_steps.values()}) < 2 or may_have_own_tasks(trace):
        return
    every = np.concatenate(list(counted_steps.values()))
    # Ranks without an optimizer may receive the parameters after each step.
    since_ns = every["end_ns"].max() if all(map(len, counted_steps.values())) else every["end_ns"].min()
    later = np.setdiff1d(operations[data["start_ns"][operations] > since_ns], within)
    if any(_may_equalize(names[data["name"][number]], int(data["nbytes"][number])) for number in later):
        return
    line = names[every["line"][0]]
    times = [f"{counted(len(own), 'time')} on {trace.ranks[rank]}" for rank, own in counted_steps.items()]
    sentence = f"The optimizer{at(line)} stepped {listed(times)}, and nothing made the ranks' parameters equal afterwards."
    kind = FaultKind.OPTIMIZER_STEPS if len(np.intersect1d(reductions, within)) else FaultKind.OPTIMIZER_STEPS_BY_HAND
    yield SilentFault(kind, tuple(called), line, sentence)


def exchanges_by_hand(trace: Trace) -> bool:
    """Whether the ranks exchange, after a first backward pass and outside of others, what may be gradients."""
    data = trace.columns.data
    backward = data[(data["kind"] == COMPUTE) & (data["name"] == trace.columns.name_id(BACKWARD))]
    since_ns = backward["start_ns"].min() if len(backward) else 0
    large = (data["kind"] == COMMUNICATION) & (data["nbytes"] > METRICS_BYTES) & (data["start_ns"] > since_ns)
    return bool(len(np.setdiff1d(np.flatnonzero(large), in_backward(trace))))


def _after_reductions(reductions: Any, steps: Any, rank: int) -> Any:
    """Return those steps of a rank before which it has reduced something since the step before."""
    own = steps[steps["rank"] == rank]
    before = np.searchsorted(np.sort(reductions["start_ns"][reductions["rank"] == rank]), own["start_ns"])
    return own[np.diff(before, prepend=0) > 0]


def _may_equalize(name: str, nbytes: int) -> bool:
    """Whether an operation may give all ranks the same parameters, which may be few."""
    return (type_of(name).traffic is Traffic.FROM_ROOT and nbytes > 0) or nbytes > METRICS_BYTES


def may_have_own_tasks(trace: Trace) -> bool:
    """Whether messages or calls travel between the ranks, which may have different tasks, like a pipeline's stages."""
    columns = trace.columns
    names = np.unique(columns.data["name"][columns.data["kind"] == COMMUNICATION]).tolist()
    return any(type_of(columns.names[name]).traffic in MESSAGES for name in names)


def _other_roots(trace: Trace) -> Iterator[SilentFault]:
    """Find calls of one line that have the root at another place in one group than in a group of the same size."""
    data, names = trace.columns.data, trace.columns.names
    rooted = data[(data["kind"] == COMMUNICATION) & (data["root"] >= 0)]
    calls: dict[tuple[str, str, int], dict[tuple[int, ...], set[int]]] = defaultdict(lambda: defaultdict(set))
    for name, line, group, root in np.unique(rooted[["name", "line", "group", "root"]]).tolist():
        members = ranks_of(names[group])
        if members and names[line]:
            calls[names[name], names[line], len(members)][tuple(members)].add(root)
    for (name, line, _), groups in calls.items():
        if any(len(roots) > 1 for roots in groups.values()):  # the program chooses it anew for each call
            continue
        placed = [(members, root, members.index(root)) for members, (root,) in groups.items()]
        if len({place for _, _, place in placed}) > 1:
            said = [f"{trace.ranks[root]}, number {place} of ranks {listed(members)}" for members, root, place in placed]
            ranks = tuple(sorted({rank for members in groups for rank in members}))
            yield SilentFault(FaultKind.OTHER_ROOT, ranks, line, f"{name}{at(line)}: the root is {listed(said)}.")


def _recorded_values(trace: Trace) -> Iterator[SilentFault]:
    """Find the first value of each name on each rank that `lab.record` was given and that is not finite."""
    first: dict[tuple[str, int], Scalar] = {}
    for scalar in trace.scalars:
        if not math.isfinite(scalar.value):
            first.setdefault((scalar.name, scalar.rank), scalar)
    for (name, rank), scalar in first.items():
        steps = int((trace.step_bounds(rank)[:, 1] < scalar.time_ns).sum())
        sentence = f"The recorded {name} was {scalar.value} on {trace.ranks[rank]} after {counted(steps, 'step')}."
        yield SilentFault(FaultKind.RECORDED, (rank,), "", sentence)


def at(line: str) -> str:
    """Return a line in parentheses, after a name; "" if it is not known."""
    return f" ({line})" if line else ""
