"""`lab.schedule`: ideal GPipe, 1F1B and interleaved 1F1B pipelines as a `Trace`, to compare with measured ones.

A schedule is an order of passes per rank. A pass starts when the rank has finished the previous pass and its input has
arrived: the activations of the previous stage for a forward pass, the gradients of the next stage for a backward pass.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from labkit.costs.prediction import GPIPE, INTERLEAVED, ONE_F_ONE_B, check_arguments, schedule_name
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
) -> Trace:
    """One step of an ideal pipeline as a trace: `lab.timeline` draws it, `.bubble` is its idle share.

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
    order = _ORDERS[kind]
    ranks = stages if ranks is None else ranks
    check_arguments(stages=stages, micro_batches=micro_batches, ranks=ranks)
    if order is not _interleaved and ranks != stages:
        raise ValueError(
            f"schedule({kind!r}): ranks={ranks}, stages={stages}: only 'interleaved 1f1b' has several stages per rank"
        )
    if order is _interleaved and (stages % ranks or micro_batches % ranks):
        raise ValueError(f"schedule({kind!r}): ranks={ranks} has to divide stages={stages} and micro_batches={micro_batches}")
    if stages * micro_batches > MOST:
        raise ValueError(f"schedule: {stages} stages and {micro_batches} micro-batches: expected at most {MOST:,} passes")
    times_ns = (_in_ns("backward", backward, stages), _in_ns("forward", forward, stages))
    (travel_ns,) = _in_ns("communication", communication, 1, zero=True)
    plans = [list(order(rank, ranks, stages, micro_batches)) for rank in range(ranks)]
    return _IdealPipeline(plans, stages, times_ns, travel_ns).trace()


def _in_ns(name: str, times: Times, stages: int, *, zero: bool = False) -> list[int]:
    expected = f"schedule: {name}={times!r}: expected seconds, {'0 or more' if zero else 'more than 0'}"
    one = isinstance(times, numbers.Real) or not isinstance(times, Iterable) or isinstance(times, str)
    given: list[Any] = [times] * stages if one else list(times)  # type: ignore[arg-type]
    if len(given) != stages:
        raise ValueError(f"schedule: {name} has {len(given)} times for {stages} stages; expected one number, or one per stage")
    for time in given:
        check_number(time, expected, at_least=0, above=-1 if zero else 0, below=LONGEST_S)
    return [max(round(float(t) * 1e9), 0 if zero else 1) for t in given]


def _gpipe(rank: int, _ranks: int, _stages: int, micro_batches: int) -> Iterator[_Pass]:
    for forward in (True, False):
        for microbatch in range(micro_batches):
            yield _Pass(forward, rank, microbatch)


def _one_forward_one_backward(rank: int, ranks: int, _stages: int, micro_batches: int) -> Iterator[_Pass]:
    ahead = min(ranks - rank - 1, micro_batches)  # forward passes before the first gradients can arrive
    return _in_turn(
        [_Pass(True, rank, i) for i in range(micro_batches)], [_Pass(False, rank, i) for i in range(micro_batches)], ahead
    )


def _interleaved(rank: int, ranks: int, stages: int, micro_batches: int) -> Iterator[_Pass]:
    """Groups of as many micro-batches as ranks pass through a rank's stages in turn; backward, in reverse order."""
    chunks, forwards, backwards = stages // ranks, [], []
    for first in range(0, micro_batches, ranks):
        for chunk in range(chunks):
            for microbatch in range(first, first + ranks):
                forwards.append(_Pass(True, chunk * ranks + rank, microbatch))
                backwards.append(_Pass(False, (chunks - 1 - chunk) * ranks + rank, microbatch))
    if chunks == 1:
        return _in_turn(forwards, backwards, min(ranks - rank - 1, len(forwards)))
    return _in_turn(forwards, backwards, min(2 * (ranks - rank - 1) + (chunks - 1) * ranks, len(forwards)))


def _in_turn(forwards: list[_Pass], backwards: list[_Pass], ahead: int) -> Iterator[_Pass]:
    yield from forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(forwards) - ahead :]


_ORDERS: Final[dict[str, Callable[[int, int, int, int], Iterator[_Pass]]]] = {
    GPIPE: _gpipe,
    ONE_F_ONE_B: _one_forward_one_backward,
    INTERLEAVED: _interleaved,
}


class _IdealPipeline:
    """Simulates a pipeline: the passes of each rank in order; durations per stage, of backward and of forward."""

    def __init__(self, plans: list[list[_Pass]], stages: int, times_ns: tuple[list[int], list[int]], travel_ns: int) -> None:
        self.plans, self.stages, self.times_ns, self.travel_ns = plans, stages, times_ns, travel_ns
        self.done_ns: dict[_Pass, int] = {}
        self.spans: list[Span] = []

    def trace(self) -> Trace:
        """Let every rank do the passes whose inputs are known, until all passes are done."""
        ranks = len(self.plans)
        free_ns, next_of = [0] * ranks, [0] * ranks
        while any(n < len(plan) for n, plan in zip(next_of, self.plans, strict=True)):
            before = sum(next_of)
            for rank, plan in enumerate(self.plans):
                while next_of[rank] < len(plan) and (start_ns := self._ready_ns(plan[next_of[rank]])) is not None:
                    free_ns[rank] = self._do(rank, plan[next_of[rank]], max(start_ns, free_ns[rank]))
                    next_of[rank] += 1
            assert sum(next_of) > before, "the ranks of a schedule wait for one another"
        end_ns = max(free_ns)
        for rank in range(ranks):
            self.spans.append(Span(rank, "step", "step", 0, end_ns))
        return Trace(self.spans, ranks=[f"rank {rank}" for rank in range(ranks)], start_ns=0, end_ns=end_ns)

    def _needs(self, work: _Pass) -> _Pass | None:
        """The pass whose result this pass needs; None for the first pass of a micro-batch."""
        if work.forward:
            return work._replace(stage=work.stage - 1) if work.stage else None
        if work.stage == self.stages - 1:
            return work._replace(forward=True)
        return work._replace(stage=work.stage + 1)

    def _travels(self, before: _Pass, work: _Pass) -> bool:
        return before.stage % len(self.plans) != work.stage % len(self.plans)

    def _ready_ns(self, work: _Pass) -> int | None:
        """When the input of a pass arrives; None while that is unknown."""
        before = self._needs(work)
        if before is None:
            return 0
        done_ns = self.done_ns.get(before)
        return done_ns if done_ns is None or not self._travels(before, work) else done_ns + self.travel_ns

    def _do(self, rank: int, work: _Pass, start_ns: int) -> int:
        end_ns = self.done_ns[work] = start_ns + self.times_ns[work.forward][work.stage]
        name = f"{'forward' if work.forward else 'backward'} {work.microbatch}"
        several = f" of stage {work.stage}" if self.stages > len(self.plans) else ""
        self.spans.append(Span(rank, name + several, "compute", start_ns, end_ns))
        before = self._needs(work)
        if before is not None and self.travel_ns and self._travels(before, work):
            sent_ns, source = self.done_ns[before], before.stage % len(self.plans)
            pair, number = f"{'forward' if work.forward else 'backward'} to stage {work.stage}", work.microbatch + 1
            for own, peer, operation in ((source, rank, "send"), (rank, source, "recv")):
                self.spans.append(
                    Span(own, operation, "communication", sent_ns, sent_ns + self.travel_ns, peer=peer, group=pair, match=number)
                )
        return end_ns
