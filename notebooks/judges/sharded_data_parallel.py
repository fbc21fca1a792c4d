"""The exercises of lesson 03: who owns what, memory per rank, a ZeRO 1 step, a norm of sharded gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from labkit.errors.exceptions import RankError
from labkit.errors.lists import counted
from labkit.recording.operations import type_of
from labkit.teaching.exercises.comparisons import (
    AnswerError,
    compare,
    differ,
    equal,
    expect,
    expect_numbers,
    whole_numbers,
    wrong_if,
)
from labkit.teaching.exercises.exercise import Results, exercise

LESSON: Final = "03_sharded_data_parallel"
ONE_ROOT: Final = "all_reduce the sum of squares, then take the root, once"
# 3 first: no size below divides by it, and dividing by a constant 2 or 4 is wrong there.
WORLDS: Final = (3,), (4,), (2,), (1,)


@exercise(
    LESSON, "All shards are equally long, every number has one owner, and the padding fills the last shards.",
    [(10, 4), (12, 3), (5, 4), (3, 4), (7, 1), (1000, 3)], call="shard_range({numbers}, {ranks}, rank)",
    other=lambda random: (random.randint(10, 300), random.randint(2, 9)),
)
def shard_range(answer: Any, numbers: int, ranks: int) -> None:
    """shard_range(numbers, ranks, rank) returns (start, end, padding): rank's shard is numbers start to end
    of a flat tensor. All shards have the same size, the smallest that is enough; the last ones are filled
    with `padding` zeros."""
    given = [_as_triple(answer(numbers, ranks, rank), rank) for rank in range(ranks)]
    size = -(-numbers // ranks)
    ends = [min((rank + 1) * size, numbers) for rank in range(ranks)]
    expected = list(zip([0, *ends[:-1]], ends, strict=True))
    right = [(start, end, size - (end - start)) for start, end in expected]
    ranges, lengths = [(start, end) for start, end, _ in given], [end - start for start, end, _ in given]
    alike = len({end - start + padding for start, end, padding in given}) == 1
    shown = [f"rank {r}: given {given[r]}, expected {right[r]}" for r in range(ranks)]
    wrong_if(any(max(bounds) > numbers for bounds in ranges), "a shard reaches beyond the last number",
             "limit start and end with min(..., numbers)", *shown)
    wrong_if(min(lengths) < 0, "a shard ends before it starts; a rank that owns nothing has start == end",
             "", *shown)
    wrong_if(sum(lengths) < numbers and set(lengths) == {numbers // ranks},
             "the last numbers have no owner: // rounds down", "round the size up", *shown)
    wrong_if(not alike and ranges == expected, "the ranges are right, the padding is not: it is what this "
             "rank's own shard lacks to the common size", "", *shown)
    wrong_if(not alike,
             "the shards, with their padding, differ in length; reduce_scatter and all_gather need the same "
             "on every rank", "", *shown)
    wrong_if(ranges != expected and sum(lengths) == numbers,
             "the numbers are spread evenly, so several shards need padding, in the middle of the whole",
             "fill the ranks in order, so that all padding lies at the end", *shown)
    wrong_if(ranges != expected,
             "some numbers have no owner, or two; shard r begins where shard r - 1 ends", "", *shown)
    wrong_if(given != right, "more padding than needed",
             "the size of a shard is numbers / ranks, rounded up", *shown)


def _as_triple(given: Any, rank: int) -> tuple[int, ...]:
    expected, shown = "three numbers, (start, end, padding)", f"rank {rank} returned {given!r}"
    triple = whole_numbers(given, expected, shown)
    wrong_if(len(triple) != 3, f"expected {expected}", "", shown)
    return tuple(triple)


@exercise(
    LESSON, "Parameters, gradients and Adam's two moments for stages 0 to 3, and activations that no stage "
    "shards.",
    [
        (*sizes, stage)
        for stage in (1, 2, 3, 0)
        for sizes in ((1_200_000, 700_000, 5), (999_999, 50_000, 3), (300_000, 4_000_000, 1))
    ],
    other=lambda random: (
        random.randint(100_000, 9_000_000), random.randint(100_000, 9_000_000), random.randint(2, 9),
        random.randrange(4),
    ),
)
def memory_per_rank(answer: Any, parameters: int, activations: int, ranks: int, stage: int) -> None:
    """memory_per_rank(parameters, activations, ranks, stage) returns the bytes of a rank in float32 training
    with Adam, for ZeRO stages 0 to 3; `activations` are the bytes of one rank's activations."""
    whole = 4 * parameters  # bytes in float32

    def total(*divided: bool, moments: int = 2) -> float:
        parts = zip((whole, whole, moments * whole), divided, strict=True)
        return sum(part / (ranks if is_divided else 1) for part, is_divided in parts) + activations

    sharded = (stage >= 3, stage >= 2, stage >= 1)
    right = total(*sharded)
    expect_numbers(answer(parameters, activations, ranks, stage), right, [
        (right - activations, "the activations are missing"),
        (right - activations + activations / ranks,
         "activations are not sharded: they belong to this rank's own examples"),
        (total(*sharded, moments=1), "Adam keeps two moments for each parameter, not one"),
        (right - whole / (ranks if stage >= 2 else 1), "the gradients or the parameters are missing"),
        (total(stage == 3, stage == 2, stage == 1), "a stage keeps what the stages before it shard: stage 2 "
         "shards the optimizer state as well, stage 3 all three"),
        (total(True, True, True),
         "that divides everything; stages 1 and 2 keep all parameters on every rank"),
        (total(False, False, False), "that divides nothing; stage 1 shards the optimizer state"),
        (total(stage >= 1, stage >= 2, stage >= 3), "the stages are in another order: first the optimizer "
         "state, then the gradients, then the parameters"),
        ((right - activations) / 4 + activations,
         "these are numbers, not bytes: a float32 has 4 bytes"),
    ], "not the bytes of this stage: what does a rank keep in training with Adam, and which of it does the "
       "stage shard?",
       "start from 4 bytes each for parameters, gradients and two moments; divide what the stage shards",
       same=lambda a, b: abs(a - b) <= 64)  # bytes: shards may be rounded up


Step = Callable[[], object]


def _zero1_on_rank(answer: Callable[..., Step]) -> tuple[Weights, Weights, int, int]:
    """Train with the student's function; return weights before and after, the size of the optimizer's
    state, and the number of optimizers, or -1 if the function returned no `step`."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, made = network(), []

    def make_optimizer(tensors: Any) -> torch.optim.Optimizer:
        made.append(torch.optim.SGD(list(tensors), lr=0.1, momentum=0.9))
        return made[-1]

    before = weights(model)
    step = answer(list(model.parameters()), make_optimizer)
    if not callable(step):
        return before, before, 0, -1
    for number in range(STEPS):
        inputs, targets = (part.chunk(ranks)[rank] for part in batch(ranks, number))
        nn.functional.mse_loss(model(inputs), targets).backward()
        step()
    kept = sum(
        value.numel() for optimizer in made for state in optimizer.state.values() for value in state.values()
        if isinstance(value, Tensor) and value.dim()
    )
    return before, weights(model), kept, len(made)


@exercise(
    LESSON,
    "On 1, 2, 3 and 4 ranks: the parameters of one process with the whole batch, 1/p of the optimizer state "
    "on each rank, and no more bytes than data parallel sends.",
    WORLDS, call=lambda ranks: f"zero1(parameters, make_optimizer) on {counted(ranks, 'rank')}",
)
def zero1(answer: Any, ranks: int) -> None:
    """zero1(parameters, make_optimizer) prepares a ZeRO 1 optimizer and returns step(), which is called after
    each backward(). It averages the gradients, updates this rank's shards, and gives every rank all
    parameters; sizes need not divide by the number of ranks. It sends no more bytes than data parallel."""
    from labkit.plots.flows import flows_of

    try:
        results = answer.on(ranks, _zero1_on_rank, answer)
    except RankError as error:
        _explain_failure(error, ranks)
        raise
    before, after, kept, made = (list(column) for column in zip(*results, strict=True))
    _judge_weights(before, after, made, {span.name for span in results.trace.filter(kind="communication")})
    sizes = [value.size for value in before[0].values()]
    fair = sum(-(-size // ranks) for size in sizes)
    wrong_if(max(kept) > fair and min(kept) == max(kept), f"the parameters are right, but every rank keeps "
             f"optimizer state for {max(kept)} of {sum(sizes)} numbers",
             "give make_optimizer this rank's shards instead of the parameters")
    wrong_if(max(kept) > fair,
             f"the parameters are right, but the state is uneven: one rank keeps {max(kept)} numbers, {fair} "
             f"are enough on {ranks} ranks. Whole tensors are of different sizes",
             "cut each tensor, or all of them joined, into equal shards",
             f"numbers of state per rank: {kept}")
    padded = sum(sizes) + len(sizes) * (ranks - 1)
    sent = float(flows_of(results.trace).nbytes.sum()) / STEPS / ranks
    enough = 2 * (ranks - 1) / ranks * 4 * padded
    needed = 2 * (ranks - 1) / ranks * 4 * sum(sizes)
    wrong_if(sent < needed * (1 - 1e-6), "the result is right, but the ranks have not exchanged what it "
             "takes: every rank needs the gradients of all others for its shard, and the updated shards of "
             "all others", "", f"sent per rank and step: {sent:.0f} B, needed: {needed:.0f} B")
    wrong_if(sent > enough, f"the result is right, but each rank sends {sent / max(needed, 1):.2g} times the "
             "bytes of data parallel: an all_reduce gives every rank the mean of all gradients, and it needs "
             "only its shard's", "use dist.reduce_scatter",
             f"sent per rank and step: {sent:.0f} B, enough: {enough:.0f} B")


def _explain_failure(error: RankError, ranks: int) -> None:
    """Say why a rank failed, if the reason is a size that the number of ranks does not divide."""
    first = error.failures[0]
    words = ("must be equal to", "size", "shape", "divisible", "invalid tensor", "split")
    if any(word in first.headline.casefold() for word in words):
        raise AnswerError(
            f"{first.name} failed: not every tensor here divides by {ranks}", first.traceback,
            cure=f"add zeros at its end, as in F.pad(x, (0, -x.numel() % {ranks})), and cut them off after "
            "gathering",
        ) from None


def _judge_weights(
    before: Sequence[Weights], after: Sequence[Weights], made: Sequence[int], operations: set[str]
) -> None:
    wrong_if(-1 in made, "zero1 must return a function, step, that is called after each backward()")
    wrong_if(not all(made),
             "make_optimizer was never called: it makes the optimizer that updates this rank's shards")
    ranks = len(after)
    expected = serial(ranks)
    wrong = differ(after, expected)
    if not wrong:
        return
    shown = [
        f"wrong parameters: {', '.join(sorted(wrong))}",
        f"operations: {', '.join(sorted(operations)) or 'none'}",
    ]
    wrong_if(all(not differ([b], a) for a, b in zip(after, before, strict=True)),
             "the parameters are unchanged after step(): does anything write into the given tensors?",
             "write the gathered values into them, as p.data.copy_(...) does", *shown)
    wrong_if(ranks > 1 and not any(type_of(name).reduces for name in operations),
             "no operation added up the gradients of the ranks, so each shard learns from one rank's "
             "examples only", "", *shown)
    wrong_if(not differ(after, serial(ranks, scale=ranks)), "the gradients were summed, not averaged",
             "divide by the number of ranks", *shown)
    wrong_if(not differ(after, serial(ranks, clear=False)),
             "the gradients of earlier steps are still there", "set p.grad to None at the end of step()",
             *shown)
    wrong_if(any(differ([a], after[0]) for a in after), "the ranks have different parameters after step(): "
             "each updated its own shard, and the others must receive it",
             "dist.all_gather gives every rank the shards of all", *shown)
    compare(after, expected, subject="the parameters")


def _shards(rank: int, ranks: int) -> list[Tensor]:
    """The gradients of a rank's shards: sizes differ, and the last rank of several has an empty one."""
    random = torch.Generator().manual_seed(10 * ranks + rank)
    shapes = [(5 + rank,), (rank + 1, 3), (0,) if ranks > 1 and rank == ranks - 1 else (4,)]
    return [torch.randn(shape, generator=random) * (1 + rank) for shape in shapes]


def _norm_on_rank(answer: Callable[..., Any]) -> tuple[float | None, bool]:
    """Return the norm, and whether the gradients are unchanged."""
    own = _shards(dist.get_rank(), dist.get_world_size())
    given = [shard.clone() for shard in own]
    norm = answer(given)
    same = all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(own, given, strict=True))
    return (None if norm is None else float(norm)), same


@exercise(
    LESSON, "On 1, 2, 3 and 4 ranks: the norm of the whole gradient, on every rank, with one all_reduce.",
    WORLDS, on_ranks=_norm_on_rank,
    call=lambda ranks: f"global_norm(gradients) on {counted(ranks, 'rank')}",
)
def global_norm(results: Results, ranks: int) -> None:
    """global_norm(gradients) takes the gradients of this rank's shards, a list of tensors, and returns on
    every rank the norm of the whole gradient. It leaves the gradients as they are and communicates once."""
    given = [norm for norm, _ in results]
    shards = [_shards(rank, ranks) for rank in range(ranks)]
    own = [math.sqrt(sum(float(s.square().sum()) for s in of_rank)) for of_rank in shards]
    square = sum(norm**2 for norm in own)
    right = math.sqrt(square)
    shown = [
        f"rank {r}: given {g if g is None else f'{g:.4g}'}, expected {right:.4g}"
        for r, g in enumerate(given)
    ]
    wrong_if(None in given, "nothing is returned: dist.all_reduce works in place and returns None",
             "", *shown)
    of_tensors = sum(float(s.norm()) for of_rank in shards for s in of_rank)
    same = partial(equal, within=1e-3)
    otherwise = "not the norm of all shards of all ranks", "it is the root of the sum of all squares"
    if same(given[0], right):
        otherwise = "rank 0 has the norm, the others do not", "use all_reduce, not reduce"
    expect(given, [right] * ranks, [
        ([square] * ranks, "the square root is missing at the end"),
        (own, "each rank has the norm of its own shards", "add up the squares of all ranks"),
        ([sum(own)] * ranks, "norms of ranks were added up; what adds up is squares", ONE_ROOT),
        ([of_tensors] * ranks, "norms of tensors were added up; what adds up is squares", ONE_ROOT),
        ([right / math.sqrt(ranks)] * ranks,
         "the sum of squares was divided by the number of ranks: shards are parts, not copies"),
        ([right / ranks] * ranks,
         "the norm was divided by the number of ranks: shards are parts, not copies"),
        ([max(own)] * ranks, "that is the largest norm of a rank; the whole gradient has a larger one"),
        ([sum(own) / ranks] * ranks, "these are averages of norms; squares add up, norms do not"),
    ], *otherwise, *shown, same=same)
    wrong_if(not all(kept for _, kept in results), "the norm is right, but the gradients have changed: "
             "collectives and x.square_() work in place")
    spans = results.trace.filter(rank=0, kind="communication")
    calls = sum(span.nbytes > 0 for span in spans)  # not those to the store
    wrong_if(ranks > 1 and calls > 1, f"the norm is right, with {calls} operations; one is enough",
             "add up this rank's squares first, then all_reduce that one number")
    wrong_if(ranks > 1 and not calls,
             "the norm is right, but no operation was called: how can a rank know the shards of others?")


INPUTS, HIDDEN, OUTPUTS = 5, 7, 3
PER_RANK, STEPS = 4, 3  # examples of each rank in a step, and steps

Weights = dict[str, NDArray[Any]]


def network() -> nn.Module:
    """Build the network, with the same weights in every process: tensors of 35, 7, 21 and 3 numbers."""
    random = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, OUTPUTS))
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=random) / 2
    return model


def batch(ranks: int, step: int) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of all ranks together."""
    random = torch.Generator().manual_seed(100 + step)
    count = PER_RANK * ranks
    return torch.randn(count, INPUTS, generator=random), torch.randn(count, OUTPUTS, generator=random)


def weights(model: nn.Module) -> Weights:
    """Return a copy of each parameter."""
    return {name: p.detach().clone().numpy() for name, p in model.named_parameters()}


def serial(ranks: int, *, scale: float = 1.0, clear: bool = True) -> Weights:
    """Return the weights after one process has trained with the batches of all ranks.

    Each gradient is multiplied with `scale`; without `clear`, gradients of all steps add up.
    """
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(STEPS):
        inputs, targets = batch(ranks, number)
        (scale * nn.functional.mse_loss(model(inputs), targets)).backward()
        optimizer.step()
        if clear:
            optimizer.zero_grad()
    return weights(model)
