"""The exercises of lesson 02: average gradients, draw each epoch's examples, accumulate, scale the learning rate."""

# No `from __future__ import annotations`: DDP reads the annotations of a communication hook, and needs types there.
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from labkit.errors.exceptions import RankError
from labkit.errors.lists import counted
from labkit.exercises.judging import AnswerError, Exercise, OnRanks, compare, differ, listing, takes_number_for_list

__all__ = ["EXERCISES"]

LESSON = "02_data_parallel"
PER_RANK = 4  # examples of each rank in a batch

Gradients = dict[str, NDArray[Any]]


class _Experts(nn.Module):
    """A trunk, partly frozen as in fine-tuning, and several experts of equal size; each example passes through one.

    Args:
        experts: the number of experts.
    """

    def __init__(self, experts: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(6, 5)
        self.trunk.bias.requires_grad_(False)
        self.experts = nn.ModuleList(nn.Linear(5, 3) for _ in range(experts))

    def forward(self, inputs: Tensor, expert: int = 0) -> Tensor:
        """Send all inputs (batch, 6) through one expert: (batch, 3)."""
        outputs: Tensor = self.experts[expert](torch.tanh(self.trunk(inputs)))
        return outputs


def _batch(examples: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    return torch.randn(examples, 6, generator=random), torch.randn(examples, 3, generator=random)


def _gradients(model: nn.Module) -> Gradients:
    """Return a copy of each parameter's `.grad`; parameters without a gradient are left out."""
    return {n: p.grad.detach().clone().numpy() for n, p in model.named_parameters() if p.grad is not None}


def _shares(ranks: int) -> list[tuple[Tensor, Tensor]]:
    """Return the inputs and targets of each rank."""
    inputs, targets = _batch(PER_RANK * ranks)
    return list(zip(inputs.chunk(ranks), targets.chunk(ranks), strict=True))


def _serial_average(ranks: int) -> Gradients:
    """Return the expected gradients: one process with the whole batch, each rank's share through its own expert."""
    model = _Experts(ranks)
    outputs = torch.cat([model(inputs, expert) for expert, (inputs, _) in enumerate(_shares(ranks))])
    nn.functional.mse_loss(outputs, torch.cat([targets for _, targets in _shares(ranks)])).backward()
    return _gradients(model)


def _average_on_rank(answer: Callable[[nn.Module], object]) -> tuple[Gradients, Gradients]:
    """Return the gradients of this rank's share of the batch before and after the student's function."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = _Experts(ranks)
    inputs, targets = _shares(ranks)[rank]
    nn.functional.mse_loss(model(inputs, rank), targets).backward()
    before = _gradients(model)
    answer(model)
    return before, _gradients(model)


def _average_gradients(answer: Any, on: OnRanks) -> str:
    for ranks in (3, 2):  # 3 first: on two ranks, dividing by a constant 2 would be right by chance

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
                f"{first.name} failed: p.grad is None here. Either the parameter is frozen (skip it) or no example of this rank "
                "used it (take part with zeros). And do not use the return value of dist.all_reduce: it works in place and "
                "returns None",
                first.traceback,
            ) from None
        if not any(after):
            raise AnswerError(
                "afterwards all gradients are missing, on all ranks",
                "dist.all_reduce works in place and returns None: `p.grad = dist.all_reduce(p.grad)` discards the sum",
            )
        expected = _serial_average(ranks)
        _judge_participation(before, after, expected)
        if all(_keeps(a, b) for a, b in zip(after, before, strict=True)):
            raise AnswerError(
                "the gradients are unchanged: each rank still has its own",
                "the sum must be stored in p.grad itself, as dist.all_reduce(p.grad) does; a new tensor in a variable changes "
                "nothing",
            )
        if all(_keeps(a, before[0]) for a in after):
            raise AnswerError(
                "every rank has rank 0's gradients: a broadcast copies one rank's, an all_reduce combines all of them"
            )
        used_by_one = {n: array * (ranks if n.startswith("experts") else 1) for n, array in expected.items()}
        if not differ(after, used_by_one):
            raise AnswerError(
                f"the gradients of the experts are {ranks} times what they should be: divide by the number of all ranks. Those "
                "whose examples do not use an expert are part of the mean, with zero"
            )
        compare(after, expected, subject="the gradients", explain=explain)
    return "On 2 and on 3 ranks the gradients are those of one process with the whole batch, also where a rank had none."


def _judge_participation(before: Sequence[Gradients], after: Sequence[Gradients], expected: Gradients) -> None:
    """Check that each rank ends with a gradient for each trainable parameter, and for no other.

    Raises:
        AnswerError: it does not.
    """
    for rank, (had, has) in enumerate(zip(before, after, strict=True)):
        frozen = [name for name in has if name not in expected]
        if frozen:
            raise AnswerError(
                f"{frozen[0]} is frozen (requires_grad is False), and now has a gradient on rank {rank}: an optimizer with "
                "weight decay would change it. Skip it"
            )
        missing = [name for name in expected if name not in has and name not in had]
        if missing and all(name in has for name in had):
            raise AnswerError(
                f"rank {rank} has no gradient of {missing[0]} afterwards: its own examples do not use it, those of another rank "
                "do, and all ranks must take the same step",
                "where p.grad is None because no example of the rank used it, put zeros into p.grad and take part with them",
                "a rank that skips it goes on to its next all_reduce, and the sum there is of gradients of different parameters",
            )


def _keeps(a: Gradients, b: Gradients) -> bool:
    """Whether `a` contains all gradients of `b`, unchanged."""
    return all(n in a and np.array_equal(a[n], b[n]) for n in b)


def _draw_indices(answer: Any, _: OnRanks) -> str:
    for examples, ranks in ((12, 3), (10, 4), (7, 2)):
        epochs = [[_indices(answer, examples, rank, ranks, epoch) for rank in range(ranks)] for epoch in (0, 1, 0)]
        case = f"{examples} examples on {ranks} ranks"
        for epoch, drawn in enumerate(epochs[:2]):
            _judge_epoch(drawn, examples, f"{case}, epoch {epoch}")
        if epochs[0] != epochs[2]:
            raise AnswerError(
                f"{case}: two calls for epoch 0 give two orders, so ranks could not agree on one. Seed with the epoch"
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
    unknown = sorted({index for index in every if index not in range(examples)})
    if unknown:
        raise AnswerError(f"{case}: there is no example {unknown[0]}; they are numbered 0 to {examples - 1}", *details)
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
    """Counts the buckets that DDP sends, and the losses that are computed after the last of them."""

    def __init__(self) -> None:
        self.buckets = 0
        self.late = 0

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the loss; passed to the student's function as its loss function."""
        self.late += 1
        return nn.functional.mse_loss(outputs, targets)

    def hook(self, _: object, bucket: dist.GradBucket) -> Future[Tensor]:
        """DDP's communication hook; DDP calls it for each bucket, once its gradients are complete."""
        self.buckets += 1
        self.late = 0
        assert dist.group.WORLD is not None
        return allreduce_hook(dist.group.WORLD, bucket)


SIZES = ((5, 1, 2), (2, 4, 6), (1, 1, 2))  # examples in each micro-batch of each rank; no mistake cancels out


def _micro_batches() -> list[list[tuple[Tensor, Tensor]]]:
    """Return the micro-batches of each rank."""
    inputs, targets = (iter(part.split([n for sizes in SIZES for n in sizes])) for part in _batch(sum(map(sum, SIZES))))
    return [[(next(inputs), next(targets)) for _ in sizes] for sizes in SIZES]


def _serial_accumulation(weights: Sequence[Sequence[float]]) -> Gradients:
    """Return the gradients of one process that multiplies each micro-batch's mean loss by its weight."""
    model = _Experts(1)
    for of_rank, batches in zip(weights, _micro_batches(), strict=True):
        for weight, (inputs, targets) in zip(of_rank, batches, strict=True):
            (weight * nn.functional.mse_loss(model(inputs), targets)).backward()
    return _gradients(model)


def _accumulate_on_rank(answer: Callable[..., object]) -> tuple[Gradients, int, int]:
    """Return the gradients after the student's function, and the numbers of buckets sent and losses computed later."""
    model = DistributedDataParallel(_Experts(1))
    counter = _Counter()
    model.register_comm_hook(None, counter.hook)
    answer(model, _micro_batches()[dist.get_rank()], counter.loss)
    return _gradients(model.module), counter.buckets, counter.late


def _accumulate(answer: Any, on: OnRanks) -> str:
    ranks, examples = len(SIZES), sum(map(sum, SIZES))
    mistakes = {  # with the weights of the micro-batches' mean losses that result, after DDP has divided by the ranks
        "every batch counts the same, however few examples it has: weight each loss by the number of its examples": [
            [1 / len(sizes) / ranks for _ in sizes] for sizes in SIZES
        ],
        "every rank counts the same, however few examples it has: divide by the examples of all ranks together (an all_reduce "
        "of the number), not by this rank's own": [[size / sum(sizes) / ranks for size in sizes] for sizes in SIZES],
        "the mean losses of the batches were added up: weight each by its share of the examples": [
            [1 / ranks for _ in sizes] for sizes in SIZES
        ],
    }

    def explain(times: float) -> str | None:
        if abs(times - 1 / ranks) < 1e-3:
            return "were divided by the number of ranks once too often (DDP averages over the ranks: it divides already)"
        if abs(times - examples / ranks) < 1e-3:
            return "were weighted by the number of examples, but not divided by that of all ranks"
        return None

    after, buckets, late = zip(*on(ranks, _accumulate_on_rank, answer), strict=True)
    if not any(after):
        raise AnswerError("no parameter has a gradient afterwards: backward() adds to .grad, and nothing may clear it at the end")
    if buckets[0] == 0 and not all(_keeps(gradients, after[0]) for gradients in after):
        raise AnswerError(
            "no rank sent its gradients: no_sync() was active for every batch. The last one must run outside it, and sends the "
            "sum of all"
        )
    right = _serial_accumulation([[size / examples for size in sizes] for sizes in SIZES])
    if buckets[0] and late[0] and differ(after, right):
        raise AnswerError(
            "gradients computed after the backward that sends stay on their rank: the batch outside no_sync() must be the last",
            f"computed after it: {late[0]} of {len(SIZES[0])} losses",
        )
    for mistake, weights in mistakes.items():
        if not differ(after, _serial_accumulation(weights)):
            each = "; ".join(f"rank {rank}: {listing(sizes)}" for rank, sizes in enumerate(SIZES))
            raise AnswerError(mistake, f"examples in the batches: {each}")
    compare(after, right, subject="the gradients", explain=explain)
    if buckets[0] > 1:
        raise AnswerError(
            f"the gradients are right, but were sent {counted(buckets[0], 'time')}; once is enough",
            "forward and backward of all batches but the last belong inside `with model.no_sync():`; DDP decides in the "
            "forward pass whether the backward will send",
        )
    most = max(map(max, SIZES))
    return f"{ranks} ranks, batches of 1 to {most} examples, sent once: the gradients of one process with all the examples."


def _scaled_learning_rate(answer: Any, _: OnRanks) -> str:
    # The first case tells all rules apart. In the others the new batch is no multiple of the old one, smaller or equal.
    for base, base_batch, per_rank, ranks in ((0.1, 256, 64, 12), (0.05, 256, 100, 3), (0.1, 256, 32, 2), (0.1, 64, 64, 1)):
        given = float(answer(base, base_batch, per_rank, ranks))
        times = per_rank * ranks / base_batch
        case = f"learning rate {base} for batches of {base_batch}, now {counted(ranks, 'rank')} with {per_rank} each"
        details = (f"given {given:.4g}, expected {base * times:.4g}",)
        if abs(given - base * times) <= 1e-6 * base * times:
            continue
        if abs(given - base * times**0.5) <= 1e-6 * base * times:
            raise AnswerError(f"{case}: that is the square-root rule; the task asks for the linear rule", *details)
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
        "parameter that is not frozen; a rank whose examples did not use a parameter has no gradient of it (None).",
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
        "accumulate(model, batches, loss_function) gives a DDP model the gradients of the mean loss over all examples of all "
        "ranks, and sends them only once. Batches and ranks have different numbers of examples.",
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
