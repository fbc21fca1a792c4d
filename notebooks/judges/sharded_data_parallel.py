"""The exercises of lesson 03: which rank owns what, memory per rank, a ZeRO 1 step, the norm of sharded gradients."""

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
from labkit.teaching.exercises.calculations import Expected, calculation
from labkit.teaching.exercises.comparisons import compare, differ, equal, whole_numbers
from labkit.teaching.exercises.judging import AnswerError, Hint, OnRanks, exercise, judge_result, reject, showing
from labkit.teaching.exercises.random_state import other_cases

LESSON: Final = "03_sharded_data_parallel"
ONE_ROOT: Final = "all_reduce the sum of squares, then take the root, once"
WORLDS: Final = (3, 4, 2, 1)  # 3 first: no size below divides by it, and dividing by a constant 2 or 4 is wrong there


@exercise(
    LESSON,
    "shard_range(numbers, ranks, rank) returns (start, end, padding): rank's shard is numbers start to end of "
    "a flat tensor. All shards have the same size, the smallest that is enough; the last ones are filled with "
    "`padding` zeros.",
    "All shards are equally long, every number has one owner, and the padding fills the last shards.",
)
def _shard_range(answer: Any, _: OnRanks) -> None:
    cases = (10, 4), (12, 3), (5, 4), (3, 4), (7, 1), (1000, 3)
    for numbers, ranks in (*cases, *other_cases(lambda random: (random.randint(10, 300), random.randint(2, 9)))):
        given = [_as_triple(answer(numbers, ranks, rank), numbers, ranks, rank) for rank in range(ranks)]
        _judge_ranges(given, numbers, ranks)


def _as_triple(given: Any, numbers: int, ranks: int, rank: int) -> tuple[int, int, int]:
    expected = "three numbers, (start, end, padding)"
    with showing(f"shard_range({numbers}, {ranks}, {rank}) returned {given!r}"):
        triple = whole_numbers(given, expected)
        if len(triple) != 3:
            raise AnswerError(f"expected {expected}")
    return triple[0], triple[1], triple[2]


def _judge_ranges(given: list[tuple[int, int, int]], numbers: int, ranks: int) -> None:
    size = -(-numbers // ranks)
    ends = [min((rank + 1) * size, numbers) for rank in range(ranks)]
    expected = list(zip([0, *ends[:-1]], ends, strict=True))
    right = [(start, end, size - (end - start)) for start, end in expected]
    ranges, lengths = [(start, end) for start, end, _ in given], [end - start for start, end, _ in given]
    alike = len({end - start + padding for start, end, padding in given}) == 1
    faults = {
        ("a shard reaches beyond the last number", "limit start and end with min(..., numbers)"): any(
            max(bounds) > numbers for bounds in ranges
        ),
        "a shard ends before it starts; a rank that owns nothing has start == end": min(lengths) < 0,
        ("the last numbers have no owner: // rounds down", "round the size up"): (
            sum(lengths) < numbers and set(lengths) == {numbers // ranks}
        ),
        "the ranges are right, the padding is not: it is what this rank's own shard lacks to the common size": (
            not alike and ranges == expected
        ),
        "the shards, with their padding, differ in length; reduce_scatter and all_gather need the same on every rank": not alike,
        (
            "the numbers are spread evenly, so several shards need padding, in the middle of the whole",
            "fill the ranks in order, so that all padding lies at the end",
        ): ranges != expected and sum(lengths) == numbers,
        "some numbers have no owner, or two; shard r begins where shard r - 1 ends": ranges != expected,
        ("more padding than needed", "the size of a shard is numbers / ranks, rounded up"): given != right,
    }
    details = (f"rank {r}: given {given[r]}, expected {right[r]}" for r in range(ranks))
    reject(faults, f"shard_range({numbers}, {ranks}, rank)", *details)


@calculation(
    LESSON,
    "memory_per_rank(parameters, activations, ranks, stage) returns the bytes of a rank in float32 training "
    "with Adam, for ZeRO stages 0 to 3; `activations` are the bytes of one rank's activations.",
    "Parameters, gradients and Adam's two moments for stages 0 to 3, and activations that no stage shards.",
    [
        (*sizes, stage)
        for stage in (1, 2, 3, 0)
        for sizes in ((1_200_000, 700_000, 5), (999_999, 50_000, 3), (300_000, 4_000_000, 1))
    ],
    other=lambda random: (
        random.randint(100_000, 9_000_000),
        random.randint(100_000, 9_000_000),
        random.randint(2, 9),
        random.randrange(4),
    ),
    same=lambda a, b: abs(a - b) <= 64,  # bytes: shards may be rounded up
)
def _memory_per_rank(parameters: int, activations: int, ranks: int, stage: int) -> Expected:
    whole = 4 * parameters  # bytes in float32

    def total(*divided: bool, moments: int = 2) -> float:
        parts = zip((whole, whole, moments * whole), divided, strict=True)
        return sum(part / (ranks if is_divided else 1) for part, is_divided in parts) + activations

    sharded = (stage >= 3, stage >= 2, stage >= 1)
    right = total(*sharded)
    mistakes = {
        "the activations are missing": right - activations,
        "activations are not sharded: they belong to this rank's own examples": right - activations + activations / ranks,
        "Adam keeps two moments for each parameter, not one": total(*sharded, moments=1),
        "the gradients or the parameters are missing": right - whole / (ranks if stage >= 2 else 1),
        "a stage keeps what the stages before it shard: stage 2 shards the optimizer state as well, stage 3 all three": total(
            stage == 3, stage == 2, stage == 1
        ),
        "that divides everything; stages 1 and 2 keep all parameters on every rank": total(True, True, True),
        "that divides nothing; stage 1 shards the optimizer state": total(False, False, False),
        "the stages are in another order: first the optimizer state, then the gradients, then the parameters": total(
            stage >= 1, stage >= 2, stage >= 3
        ),
        "these are numbers, not bytes: a float32 has 4 bytes": (right - activations) / 4 + activations,
    }
    otherwise = (
        "not the bytes of this stage: what does a rank keep in training with Adam, and which of it does the stage shard?",
        "start from 4 bytes each for parameters, gradients and two moments; divide what the stage shards",
    )
    return Expected(right, mistakes, otherwise)


Step = Callable[[], object]


def _zero1_on_rank(answer: Callable[..., Step]) -> tuple[Weights, Weights, int, int]:
    """Train with the student's function; return weights before and after, and numbers about the optimizer.

    The numbers are those in its state, and how many optimizers there are; -1 if the function returned no `step`.
    """
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
    )  # fmt: skip
    return before, weights(model), kept, len(made)


@exercise(
    LESSON,
    "zero1(parameters, make_optimizer) prepares a ZeRO 1 optimizer and returns step(), which is called after "
    "each backward(). It averages the gradients, updates this rank's shards, and gives every rank all "
    "parameters; sizes need not divide by the number of ranks. It sends no more bytes than data parallel.",
    "On 1, 2, 3 and 4 ranks: the parameters of one process with the whole batch, 1/p of the optimizer state "
    "on each rank, and no more bytes than data parallel sends.",
)
def _zero1(answer: Any, on: OnRanks) -> None:
    for ranks in WORLDS:
        with showing(f"zero1(parameters, make_optimizer) on {counted(ranks, 'rank')}"):
            _judge_zero1(answer, on, ranks)


def _judge_zero1(answer: Any, on: OnRanks, ranks: int) -> None:
    try:
        results = on(ranks, _zero1_on_rank, answer)
    except RankError as error:
        _explain_failure(error, ranks)
        raise
    before, after, kept, made = (list(column) for column in zip(*results, strict=True))
    _judge_weights(before, after, made, ranks, _operations(results))
    sizes = [value.size for value in before[0].values()]
    fair = sum(-(-size // ranks) for size in sizes)
    if max(kept) > fair and min(kept) == max(kept):
        raise AnswerError(
            f"the parameters are right, but every rank keeps optimizer state for {max(kept)} of {sum(sizes)} numbers",
            cure="give make_optimizer this rank's shards instead of the parameters",
        )
    if max(kept) > fair:
        raise AnswerError(
            f"the parameters are right, but the state is uneven: one rank keeps {max(kept)} numbers, {fair} are enough on "
            f"{ranks} ranks. Whole tensors are of different sizes",
            f"numbers of state per rank: {kept}",
            cure="cut each tensor, or all of them joined, into equal shards",
        )
    _judge_traffic(results, ranks, sizes)


def _operations(results: Any) -> list[str]:
    return [span.name for span in results.trace.filter(kind="communication")]


def _explain_failure(error: RankError, ranks: int) -> None:
    """Say why a rank failed, if the reason is a size that the number of ranks does not divide."""
    first = error.failures[0]
    words = ("must be equal to", "size", "shape", "divisible", "invalid tensor", "split")
    if any(word in first.headline.casefold() for word in words):
        raise AnswerError(
            f"{first.name} failed: not every tensor here divides by {ranks}",
            first.traceback,
            cure=f"add zeros at its end, as in F.pad(x, (0, -x.numel() % {ranks})), and cut them off after gathering",
        ) from None


def _judge_weights(
    before: Sequence[Weights], after: Sequence[Weights], made: Sequence[int], ranks: int, operations: Sequence[str]
) -> None:
    if -1 in made:
        raise AnswerError("zero1 must return a function, step, that is called after each backward()")
    if not all(made):
        raise AnswerError("make_optimizer was never called: it makes the optimizer that updates this rank's shards")
    expected = serial(ranks)
    wrong = differ(after, expected)
    if not wrong:
        return
    faults = {
        (
            "the parameters are unchanged after step(): does anything write into the given tensors?",
            "write the gathered values into them, as p.data.copy_(...) does",
        ): all(not differ([b], a) for a, b in zip(after, before, strict=True)),
        "no operation added up the gradients of the ranks, so each shard learns from one rank's examples only": (
            ranks > 1 and not any(type_of(name).reduces for name in operations)
        ),
        ("the gradients were summed, not averaged", "divide by the number of ranks"): not differ(
            after, serial(ranks, scale=ranks)
        ),
        ("the gradients of earlier steps are still there", "set p.grad to None at the end of step()"): (
            not differ(after, serial(ranks, clear=False))
        ),
        (
            "the ranks have different parameters after step(): each updated its own shard, and the others must receive it",
            "dist.all_gather gives every rank the shards of all",
        ): any(differ([a], after[0]) for a in after),
    }
    called = f"operations: {', '.join(sorted(set(operations))) or 'none'}"
    reject(faults, f"wrong parameters: {', '.join(sorted(wrong))}", called)
    compare(after, expected, subject="the parameters")


def _judge_traffic(results: Any, ranks: int, sizes: Sequence[int]) -> None:
    """Check that the ranks sent what a reduce-scatter and an all-gather of everything need, and no more."""
    from labkit.plots.flows import flows_of

    padded = sum(sizes) + len(sizes) * (ranks - 1)
    sent = float(flows_of(results.trace).nbytes.sum()) / STEPS / ranks
    enough = 2 * (ranks - 1) / ranks * 4 * padded
    needed = 2 * (ranks - 1) / ranks * 4 * sum(sizes)
    if sent < needed * (1 - 1e-6):
        raise AnswerError(
            "the result is right, but the ranks have not exchanged what it takes: every rank needs the gradients of all others "
            "for its shard, and the updated shards of all others",
            f"sent per rank and step: {sent:.0f} B, needed: {needed:.0f} B",
        )
    if sent > enough:
        times = sent / needed
        raise AnswerError(
            f"the result is right, but each rank sends {times:.2g} times the bytes of data parallel: an all_reduce "
            "gives every rank the mean of all gradients, and it needs only its shard's",
            f"sent per rank and step: {sent:.0f} B, enough: {enough:.0f} B",
            cure="use dist.reduce_scatter",
        )


def _shards(rank: int, ranks: int) -> list[Tensor]:
    """The gradients of a rank's shards: sizes differ between ranks, and the last rank of several has an empty one."""
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
    LESSON,
    "global_norm(gradients) takes the gradients of this rank's shards, a list of tensors, and returns on "
    "every rank the norm of the whole gradient. It leaves the gradients as they are and communicates once.",
    "On 1, 2, 3 and 4 ranks: the norm of the whole gradient, on every rank, with one all_reduce.",
)
def _global_norm(answer: Any, on: OnRanks) -> None:
    for ranks in WORLDS:
        case = f"global_norm(gradients) on {counted(ranks, 'rank')}"
        results = on(ranks, _norm_on_rank, answer)
        _judge_norms([norm for norm, _ in results], ranks)
        if not all(same for _, same in results):
            hint = "the norm is right, but the gradients have changed: collectives and x.square_() work in place"
            raise AnswerError(hint, case)
        calls = sum(span.nbytes > 0 for span in results.trace.filter(rank=0, kind="communication"))  # not those to the store
        if ranks > 1 and calls > 1:
            raise AnswerError(
                f"the norm is right, with {calls} operations; one is enough",
                case,
                cure="add up this rank's squares first, then all_reduce that one number",
            )
        if ranks > 1 and not calls:
            raise AnswerError("the norm is right, but no operation was called: how can a rank know the shards of others?", case)


def _judge_norms(given: Sequence[float | None], ranks: int) -> None:
    shards = [_shards(rank, ranks) for rank in range(ranks)]
    own = [math.sqrt(sum(float(s.square().sum()) for s in of_rank)) for of_rank in shards]
    square = sum(norm**2 for norm in own)
    right = math.sqrt(square)
    case = f"global_norm(gradients) on {counted(ranks, 'rank')}"
    details = (case, *(f"rank {r}: given {g if g is None else f'{g:.4g}'}, expected {right:.4g}" for r, g in enumerate(given)))
    if any(norm is None for norm in given):
        raise AnswerError("nothing is returned: dist.all_reduce works in place and returns None", *details)
    norms = [norm for norm in given if norm is not None]

    of_tensors = sum(float(s.norm()) for of_rank in shards for s in of_rank)
    mistakes: dict[Hint, Sequence[float]] = {
        "the square root is missing at the end": [square] * ranks,
        ("each rank has the norm of its own shards", "add up the squares of all ranks"): own,
        ("norms of ranks were added up; what adds up is squares", ONE_ROOT): [sum(own)] * ranks,
        ("norms of tensors were added up; what adds up is squares", ONE_ROOT): [of_tensors] * ranks,
        "the sum of squares was divided by the number of ranks: shards are parts, not copies": [right / math.sqrt(ranks)] * ranks,
        "the norm was divided by the number of ranks: shards are parts, not copies": [right / ranks] * ranks,
        "that is the largest norm of a rank; the whole gradient has a larger one": [max(own)] * ranks,
        "these are averages of norms; squares add up, norms do not": [sum(own) / ranks] * ranks,
    }
    otherwise = "not the norm of all shards of all ranks", "it is the root of the sum of all squares"
    if equal(norms[0], right, within=1e-3):
        otherwise = "rank 0 has the norm, the others do not", "use all_reduce, not reduce"
    judge_result(norms, [right] * ranks, mistakes, otherwise, *details, same=partial(equal, within=1e-3))


INPUTS: Final = 5
HIDDEN: Final = 7
OUTPUTS: Final = 3
PER_RANK: Final = 4  # examples of each rank in a step
STEPS: Final = 3

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

    Args:
        ranks: how many ranks' batches to use.
        scale: what to multiply each gradient with.
        clear: whether to clear the gradients after each step.
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
