"""The exercises of lesson 02: average gradients, draw each epoch's examples, accumulate, scale the learning rate."""

# No `from __future__ import annotations` here: DDP reads the annotations of a communication hook, and wants types, not strings.
import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from labkit.errors import RankError
from labkit.exercises.judging import AnswerError, Exercise, OnRanks, compare, listing, plural, takes_number_for_list

__all__ = ["EXERCISES"]

LESSON = "02_data_parallel"
PER_RANK = 4  # examples of each rank in a batch

Gradients = dict[str, NDArray[Any]]


def _model() -> nn.Sequential:
    """A small network, the same on every rank; one of its parameters is frozen, as in fine-tuning."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    model[0].bias.requires_grad_(False)
    return model


def _batch(examples: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    return torch.randn(examples, 6, generator=random), torch.randn(examples, 3, generator=random)


def _gradients(model: nn.Module) -> Gradients:
    """What each trainable parameter's `.grad` is now; those that have none are left out."""
    return {n: p.grad.detach().clone().numpy() for n, p in model.named_parameters() if p.requires_grad and p.grad is not None}


def _serial_gradients(examples: int) -> Gradients:
    """The oracle: one process with the whole batch."""
    model = _model()
    inputs, targets = _batch(examples)
    nn.functional.mse_loss(model(inputs), targets).backward()
    return _gradients(model)


def _average_on_rank(answer: Callable[[nn.Module], object]) -> tuple[Gradients, Gradients]:
    """The gradients of this rank's part of the batch before and after the student's function."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = _model()
    inputs, targets = (part.chunk(ranks)[rank] for part in _batch(PER_RANK * ranks))
    nn.functional.mse_loss(model(inputs), targets).backward()
    before = _gradients(model)
    answer(model)
    return before, _gradients(model)


def _average_gradients(answer: Any, on: OnRanks) -> str:
    for ranks in (3, 2):  # 3 first: whoever divides by a constant 2 is right by chance on two

        def explain(times: float, ranks: int = ranks) -> str | None:
            known = {
                float(ranks): "were summed, not averaged (divide by the number of ranks)",
                1 / ranks: "were divided by the number of ranks once too often",
                ranks / 2: "were divided by 2, not by the number of ranks (dist.get_world_size())",
            }
            return next((cause for factor, cause in known.items() if abs(times - factor) < 1e-3), None)

        try:
            before, after = zip(*on(ranks, _average_on_rank, answer), strict=True)
        except RankError as error:
            first = error.failures[0]
            if "NoneType" not in first.traceback:
                raise
            raise AnswerError(
                f"{first.name} failed: p.grad is None here. A frozen parameter has none: skip it. And keep nothing of what "
                "dist.all_reduce returns: it works in place and returns nothing",
                first.traceback,
            ) from None
        if not any(after):
            raise AnswerError(
                "afterwards all gradients are missing on rank 0 and on the others",
                "dist.all_reduce works in place and returns nothing: `p.grad = dist.all_reduce(p.grad)` throws the sum away",
            )
        if all(_same(a, b) for a, b in zip(after, before, strict=True)):
            raise AnswerError(
                "the gradients are what they were before: each rank still has its own",
                "the sum must land in p.grad itself, as dist.all_reduce(p.grad) does; a new tensor in a variable changes nothing",
            )
        if all(_same(a, before[0]) for a in after):
            raise AnswerError(
                "every rank has rank 0's gradients: a broadcast copies one rank's, an all_reduce combines all of them"
            )
        compare(after, _serial_gradients(PER_RANK * ranks), what="the gradients", explain=explain)
    return "On 2 and on 3 ranks the gradients are those of one process with the whole batch."


def _same(a: Gradients, b: Gradients) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[n], b[n]) for n in b)


def _draw_indices(answer: Any, _: OnRanks) -> str:
    for examples, ranks in ((12, 3), (10, 4), (7, 2)):
        epochs = [[_indices(answer, examples, rank, ranks, epoch) for rank in range(ranks)] for epoch in (0, 1, 0)]
        case = f"{examples} examples on {ranks} ranks"
        for epoch, drawn in enumerate(epochs[:2]):
            _judge_epoch(drawn, examples, f"{case}, epoch {epoch}")
        if epochs[0] != epochs[2]:
            raise AnswerError(
                f"{case}: epoch 0 asked for twice gives two orders; ranks could not agree on it. Seed with the epoch"
            )
        if epochs[0] == epochs[1]:
            raise AnswerError(
                f"{case}: epochs 0 and 1 have the same order, as when set_epoch is forgotten: every epoch would show the same "
                "batches. Let the epoch be part of the seed",
                f"rank 0 in both: {epochs[0][0]}",
            )
    return "Every example is drawn in every epoch, by one rank, in an order that all ranks agree on and that changes."


def _indices(answer: Any, examples: int, rank: int, ranks: int, epoch: int) -> list[int]:
    try:
        drawn = answer(examples, rank, ranks, epoch)
    except TypeError as error:
        if not takes_number_for_list(str(error)):
            raise
        raise AnswerError(f"`examples` is a number, not a list: draw_indices{examples, rank, ranks, epoch}", str(error)) from None
    try:
        return [int(index) for index in drawn]
    except (TypeError, ValueError):
        raise AnswerError(f"given {drawn!r} for rank {rank}: expected the numbers of its examples, as a list") from None


def _judge_epoch(drawn: list[list[int]], examples: int, case: str) -> None:
    details = tuple(f"rank {rank}: {indices}" for rank, indices in enumerate(drawn))
    ranks, each = len(drawn), -(-examples // len(drawn))
    every = [index for indices in drawn for index in indices]
    strangers = sorted({index for index in every if index not in range(examples)})
    if strangers:
        raise AnswerError(f"{case}: there is no example {strangers[0]}; they are numbered 0 to {examples - 1}", *details)
    if len({len(indices) for indices in drawn}) > 1:
        raise AnswerError(
            f"{case}: the ranks have different numbers of examples. The rank with one batch more would wait in its all_reduce "
            "for ranks that have finished; repeat a few examples until all have as many",
            *details,
        )
    lost = [index for index in range(examples) if index not in every]
    if lost and len(every) < examples:
        raise AnswerError(f"{case}: {_examples(lost)} left out; round up and repeat some, so that each rank has {each}", *details)
    if lost:
        raise AnswerError(
            f"{case}: {_examples(lost)} drawn by no rank while others are drawn twice: do all ranks shuffle with the same seed, "
            "and take different parts of the result?",
            *details,
        )
    if len(every) - examples >= ranks:
        raise AnswerError(f"{case}: each rank has {len(drawn[0])} examples, {each} are enough", *details)


def _examples(numbers: list[int]) -> str:
    return f"example {numbers[0]} is" if len(numbers) == 1 else f"examples {listing(numbers)} are"


class _Counter:
    """Counts the buckets that DDP sends."""

    def __init__(self) -> None:
        self.buckets = 0

    def hook(self, _: object, bucket: dist.GradBucket) -> Future[Tensor]:
        """DDP's communication hook: called once for each bucket when its gradients are complete."""
        self.buckets += 1
        assert dist.group.WORLD is not None
        return allreduce_hook(dist.group.WORLD, bucket)


ACCUMULATED = 4  # batches that make one large batch


def _accumulate_on_rank(answer: Callable[..., object]) -> tuple[Gradients, int]:
    """The gradients after the student's function and how many buckets went over the wire."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    plain = _model()
    model = DistributedDataParallel(copy.deepcopy(plain))
    counter = _Counter()
    model.register_comm_hook(None, counter.hook)
    inputs, targets = (part.chunk(ranks)[rank].chunk(ACCUMULATED) for part in _batch(PER_RANK * ranks))
    answer(model, list(zip(inputs, targets, strict=True)), nn.functional.mse_loss)
    return _gradients(model.module), counter.buckets


def _accumulate(answer: Any, on: OnRanks) -> str:
    ranks = 2

    def explain(times: float) -> str | None:
        if abs(times - ACCUMULATED) < 1e-3:
            return f"of the {ACCUMULATED} batches were summed (divide each loss by the number of batches)"
        return None

    after, buckets = zip(*on(ranks, _accumulate_on_rank, answer), strict=True)
    if not any(after):
        raise AnswerError("no parameter has a gradient afterwards: backward() adds to .grad, and nothing may clear it at the end")
    alike = all(_same(gradients, after[0]) for gradients in after)
    if buckets[0] == 0 and not alike:
        raise AnswerError(
            "each rank kept its gradients to itself: no_sync() was on for every batch. The last one runs outside it, and sends "
            "the sum of all"
        )
    compare(after, _serial_gradients(PER_RANK * ranks), what="the gradients", explain=explain)
    if buckets[0] > 1:
        raise AnswerError(
            f"the gradients are right, but went over the wire {plural(buckets[0], 'time')}; once is enough",
            "forward and backward of all batches but the last both stand inside `with model.no_sync():`; DDP decides in the "
            "forward pass whether the backward will send",
        )
    return f"{ACCUMULATED} batches, one all_reduce, and the gradients of one process with all the examples."


def _scaled_learning_rate(answer: Any, _: OnRanks) -> str:
    # The first case tells all rules apart. The batch of the last three: not a multiple of the old one, smaller, the same.
    for base, base_batch, per_rank, ranks in ((0.1, 256, 64, 12), (0.05, 256, 100, 3), (0.1, 256, 32, 2), (0.1, 64, 64, 1)):
        given = float(answer(base, base_batch, per_rank, ranks))
        times = per_rank * ranks / base_batch
        case = f"learning rate {base} for batches of {base_batch}, now {plural(ranks, 'rank')} with {per_rank} each"
        details = (f"given {given:.4g}, expected {base * times:.4g}",)
        if abs(given - base * times) <= 1e-6 * base * times:
            continue
        if abs(given - base * times**0.5) <= 1e-6 * base * times:
            raise AnswerError(f"{case}: that is the square-root rule; asked for is the linear one", *details)
        if abs(given - base * ranks) <= 1e-6 * base * ranks:
            raise AnswerError(
                f"{case}: the number of ranks is not what counts: the batch of all ranks together is {per_rank * ranks}, "
                f"{times:g} times the old one",
                *details,
            )
        if abs(given - base * per_rank / base_batch) <= 1e-6 * base * times:
            raise AnswerError(
                f"{case}: that is the batch of one rank; in a step the ranks together learn from {per_rank * ranks}",
                *details,
            )
        if abs(given - base * (per_rank * ranks // base_batch)) <= 1e-6 * base * times:
            raise AnswerError(f"{case}: // rounds down; the new batch need not be a multiple of the old one", *details)
        if abs(given - base / times) <= 1e-6 * base / times:
            raise AnswerError(f"{case}: a larger batch has less noise and can take a larger step, not a smaller one", *details)
        raise AnswerError(f"{case}: multiply by the batch of all ranks together and divide by the old one", *details)
    return "The learning rate grows as the batch of all ranks together does. (A rule of thumb: warm up, and check.)"


EXERCISES = (
    Exercise(
        "average_gradients",
        LESSON,
        "After backward() each rank has the gradients of its own examples. Average them over all ranks, in place, for every "
        "parameter that has a gradient.",
        _average_gradients,
    ),
    Exercise(
        "draw_indices",
        LESSON,
        "What DistributedSampler does: draw_indices(examples, rank, ranks, epoch) returns the numbers of the examples of that "
        "rank in that epoch. All ranks have equally many, together they have every example, and every epoch has its own order.",
        _draw_indices,
    ),
    Exercise(
        "accumulate",
        LESSON,
        "accumulate(model, batches, loss_function) gives a DDP model the gradients of the mean loss over all batches of all "
        "ranks, and sends them only once.",
        _accumulate,
    ),
    Exercise(
        "scaled_learning_rate",
        LESSON,
        "scaled_learning_rate(base, base_batch, per_rank, ranks) returns the learning rate for `ranks` ranks with batches of "
        "`per_rank`, by the linear rule, given that `base` was right for batches of `base_batch`.",
        _scaled_learning_rate,
    ),
)
