"""`lab.schedule`: ideal GPipe, 1F1B and interleaved 1F1B pipelines as a `Trace`, to compare with measured ones.

A schedule is an order of passes per rank. A pass starts when the rank has finished the previous pass and its input has
arrived: the activations of the previous stage for a forward pass, the gradients of the next stage for a backward pass.
"""

from __future__ import annotations

import numbers
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from labkit.costs.prediction import GPIPE, INTERLEAVED, check_arguments, schedule_name
from labkit.errors.wrong_calls import check_number, public_api
from labkit.recording.schema import Span
from labkit.tracing.trace import Trace

MOST: Final = 100_000  # passes of micro-batches through stages
LONGEST_S: Final = 1e9  # of one pass: more nanoseconds would not fit into a trace
Times = float | Sequence[float]  # in seconds: one for all stages, or one per stage


class _Pass(NamedTuple):
    """One pass of one micro-batch through one stage."""

    forward: bool
    stage: int
    microbatch: int


class IdealPipeline(Trace):
    """The trace of `schedule`, with the arguments for which it was computed."""

    arguments: dict[str, Any]


@public_api
def schedule(
    kind: str,
    *,
    stages: int,
    micro_batches: int,
    ranks: int | None = None,
    forward: Times = 1.0,
    backward: Times = 2.0,
    communication: float = 0.0,
) -> IdealPipeline:
    """One step of an ideal pipeline as a trace: `lab.timeline` draws it, `.bubble` is its idle share.

    `lab.explore(lab.schedule("1f1b", stages=4, micro_batches=8))` has sliders for its arguments.

    With p equal stages on p ranks and m micro-batches, the bubble of GPipe and of 1F1B is (p - 1) / (m + p - 1); that
    of interleaved 1F1B with v stages on each of p ranks is (p - 1) / (v·m + p - 1).

        lab.timeline({"ideal": lab.schedule("1f1b", stages=4, micro_batches=8), "measured": run.trace.step(1)})

    Args:
        kind: "gpipe": all forward passes, then all backward passes. "1f1b": forward passes until the pipeline is full,
            then one backward and one forward pass in turn, so that fewer activations are kept. "interleaved 1f1b": 1F1B
            where each rank has several stages that are not neighbours: of 2 ranks, the first has the stages 0 and 2,
            the second 1 and 3.
        stages: the number of stages.
        micro_batches: the number of micro-batches.
        ranks: for "interleaved 1f1b"; must divide `stages` and `micro_batches`. Default: one rank per stage.
        forward: seconds of a stage's forward pass of one micro-batch; one number for all stages, or one per stage.
        backward: seconds of the backward pass, usually about twice as long.
        communication: seconds that activations or gradients take between two ranks; ranks compute meanwhile.

    Returns:
        a trace with a compute span for each pass, and messages if `communication` is not 0.

    Raises:
        TypeError, ValueError: an unknown kind, or numbers that are invalid or do not fit together.

    Source: Y. Huang et al., "GPipe", 2019; 1F1B: D. Narayanan et al., "PipeDream", 2019; interleaved 1F1B: D. Narayanan
        et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM", 2021.
    """
    kind = schedule_name(kind, "schedule: kind")
    ranks = stages if ranks is None else ranks
    check_arguments(stages=stages, micro_batches=micro_batches, ranks=ranks)
    if kind != INTERLEAVED and ranks != stages:
        raise ValueError(
            f"schedule({kind!r}): ranks={ranks}, stages={stages}: only 'interleaved 1f1b' has several stages per rank"
        )
    if kind == INTERLEAVED and (stages % ranks or micro_batches % ranks):
        raise ValueError(f"schedule({kind!r}): ranks={ranks} has to divide stages={stages} and micro_batches={micro_batches}")
    if stages * micro_batches > MOST:
        raise ValueError(f"schedule: {stages} stages and {micro_batches} micro-batches: expected at most {MOST:,} passes")
    times_ns = (_in_ns("backward", backward, stages), _in_ns("forward", forward, stages))
    (travel_ns,) = _in_ns("communication", communication, 1, zero=True)
    plans = [list(_order(kind, rank, ranks, stages, micro_batches)) for rank in range(ranks)]
    found = _simulated(plans, stages, times_ns, travel_ns)
    found.arguments = {"kind": kind, "stages": stages, "micro_batches": micro_batches, "ranks": ranks}
    found.arguments |= {"forward": forward, "backward": backward, "communication": communication}
    return found


def _in_ns(name: str, times: Times, stages: int, *, zero: bool = False) -> list[int]:
    expected = f"schedule: {name}={times!r}: expected seconds, {'0 or more' if zero else 'more than 0'}"
    one = isinstance(times, numbers.Real) or not isinstance(times, Iterable) or isinstance(times, str)
    given: list[Any] = [times] * stages if one else list(times)  # type: ignore[arg-type]
    if len(given) != stages:
        raise ValueError(f"schedule: {name} has {len(given)} times for {stages} stages; expected one number, or one per stage")
    for time in given:
        check_number(time, expected, at_least=0, above=-1 if zero else 0, below=LONGEST_S)
    return [max(round(float(t) * 1e9), 0 if zero else 1) for t in given]


def _order(kind: str, rank: int, ranks: int, stages: int, micro_batches: int) -> Iterator[_Pass]:
    """Yield the passes of a rank in their order.

    Groups of as many micro-batches as ranks pass through a rank's stages in turn; backward, in reverse order.
    """
    chunks, forwards, backwards = stages // ranks, [], []
    for first in range(0, micro_batches, ranks):
        for chunk in range(chunks):
            for microbatch in range(first, min(first + ranks, micro_batches)):
                forwards.append(_Pass(True, chunk * ranks + rank, microbatch))
                backwards.append(_Pass(False, (chunks - 1 - chunk) * ranks + rank, microbatch))
    ahead = ranks - rank - 1  # forward passes before the first gradients can arrive
    if kind == GPIPE:
        ahead = len(forwards)
    elif chunks > 1:
        ahead = 2 * ahead + (chunks - 1) * ranks
    yield from forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[max(len(forwards) - ahead, 0) :]


def _simulated(plans: list[list[_Pass]], stages: int, times_ns: tuple[list[int], list[int]], travel_ns: int) -> IdealPipeline:
    """Let every rank do its passes in order, each as soon as its input has arrived, until all are done."""
    ranks, queues = len(plans), [deque(plan) for plan in plans]
    free_ns, spans = [0] * ranks, list[Span]()
    done_ns: dict[_Pass | None, int] = {None: 0}
    while any(queues):
        before = len(done_ns)
        for rank, queue in enumerate(queues):
            while queue and (needed := _needs(queue[0], stages)) in done_ns:
                work = queue.popleft()
                arrived_ns = sent_ns = done_ns[needed]
                travels = needed is not None and needed.stage % ranks != rank
                if travels:
                    arrived_ns += travel_ns
                start_ns = max(arrived_ns, free_ns[rank])
                free_ns[rank] = done_ns[work] = start_ns + times_ns[work.forward][work.stage]
                way = "forward" if work.forward else "backward"
                several = f" of stage {work.stage}" if stages > ranks else ""
                spans.append(Span(rank, f"{way} {work.microbatch}{several}", "compute", start_ns, free_ns[rank]))
                if needed is not None and travels and travel_ns:
                    source, group, number = needed.stage % ranks, f"{way} to stage {work.stage}", work.microbatch + 1
                    for own, peer, name in ((source, rank, "send"), (rank, source, "recv")):
                        message = Span(own, name, "communication", sent_ns, arrived_ns, peer=peer, group=group, match=number)
                        spans.append(message)
        assert len(done_ns) > before, "the ranks of a schedule wait for one another"
    spans += [Span(rank, "step", "step", 0, max(free_ns)) for rank in range(ranks)]
    return IdealPipeline(spans, ranks=[f"rank {rank}" for rank in range(ranks)], start_ns=0, end_ns=max(free_ns))


def _needs(work: _Pass, stages: int) -> _Pass | None:
    """The pass whose result this pass needs; None for the first pass of a micro-batch."""
    if work.forward:
        return work._replace(stage=work.stage - 1) if work.stage else None
    if work.stage == stages - 1:
        return work._replace(forward=True)
    return work._replace(stage=work.stage + 1)
