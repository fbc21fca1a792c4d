"""The exercises of lesson 02: average gradients, also in buckets, draw examples, scale the learning rate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from labkit.errors.lists import counted
from labkit.exercises.calculations import Expected, calculation
from labkit.exercises.comparisons import compare, differ, listing, whole_numbers
from labkit.exercises.judging import (
    NUMBER_FOR_LIST,
    AnswerError,
    Hint,
    OnRanks,
    exercise,
    explaining,
    judge_exchange,
    reject,
    showing,
)  # fmt: skip
from labkit.exercises.random_state import case_seed

LESSON = "02_data_parallel"
PER_RANK = 4  # examples of each rank in a batch
SUMMED = "were summed, not averaged", "divide by the number of ranks"


def _shares(ranks: int) -> list[tuple[Tensor, Tensor]]:
    """Return the inputs and targets of each rank."""
    inputs, targets = random_batch(PER_RANK * ranks)
    return list(zip(inputs.chunk(ranks), targets.chunk(ranks), strict=True))


def _serial_average(ranks: int) -> Gradients:
    """Return the expected gradients: one process with the whole batch, each rank's share through its own expert."""
    model = Experts(ranks)
    outputs = torch.cat([model(inputs, expert) for expert, (inputs, _) in enumerate(_shares(ranks))])
    nn.functional.mse_loss(outputs, torch.cat([targets for _, targets in _shares(ranks)])).backward()
    return gradients_of(model)


def _average_on_rank(answer: Callable[[nn.Module], object]) -> tuple[Gradients, Gradients]:
    """Return the gradients of this rank's share of the batch before and after the student's function."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = Experts(ranks)
    inputs, targets = _shares(ranks)[rank]
    nn.functional.mse_loss(model(inputs, rank), targets).backward()
    before = gradients_of(model)
    answer(model)
    return before, gradients_of(model)


@exercise(
    LESSON,
    "After backward() each rank has the gradients of its own examples. Average them over all ranks, in place, for every "
    "parameter that is not frozen; a rank whose examples did not use a parameter has no gradient of it (None).",
    "On 2 and on 3 ranks the gradients are those of one process with the whole batch, also where a rank had none.",
)
def _average_gradients(answer: Any, on: OnRanks) -> None:
    for ranks in (3, 2):  # 3 first: on two ranks, dividing by a constant 2 would be right by chance
        with showing(f"average_gradients(model) on {ranks} ranks"):
            _judge_averages(answer, on, ranks)


def _judge_averages(answer: Any, on: OnRanks, ranks: int) -> None:
    no_gradient = (
        "p.grad is None here. Is the parameter frozen, did no example of this rank use it, or was the return value of "
        "dist.all_reduce stored in it?"
    )
    cure = (
        "skip a frozen parameter, and take part with zeros for one that no example used. dist.all_reduce works in place and "
        "returns None"
    )
    with explaining({"NoneType": (no_gradient, cure)}):
        results = on(ranks, _average_on_rank, answer)
    before, after = zip(*results, strict=True)
    if not any(after):
        raise AnswerError(
            "afterwards all gradients are missing, on all ranks: what is assigned to p.grad?",
            cure="dist.all_reduce works in place and returns None: `p.grad = dist.all_reduce(p.grad)` discards the sum",
        )
    expected = _serial_average(ranks)
    _judge_participation(before, after, expected)
    if all(keeps(a, b) for a, b in zip(after, before, strict=True)):
        raise AnswerError(
            "the gradients are unchanged: each rank still has its own",
            cure="the sum must be stored in p.grad itself, as dist.all_reduce(p.grad) does; a new tensor in a variable changes "
            "nothing",
        )
    if all(keeps(a, before[0]) for a in after):
        raise AnswerError("every rank has rank 0's gradients: a broadcast copies one rank's, an all_reduce combines all of them")
    used_by_one = {n: array * (ranks if n.startswith("experts") else 1) for n, array in expected.items()}
    if not differ(after, used_by_one):
        raise AnswerError(
            f"the gradients of the experts are {ranks} times what they should be: ranks whose examples do not use an expert "
            "are part of the mean, too, with zero",
            cure="divide by the number of all ranks",
        )
    causes: dict[float, Hint] = {
        float(ranks): SUMMED,
        1 / ranks: "were divided by the number of ranks once too often",
        ranks / 2: ("were divided by 2, not by the number of ranks", "dist.get_world_size() gives the number of ranks"),
    }
    compare(after, expected, subject="the gradients", causes=causes)
    judge_exchange(results, sum(array.nbytes for array in expected.values()), "the gradients")


def _judge_participation(before: Sequence[Gradients], after: Sequence[Gradients], expected: Gradients) -> None:
    """Check that each rank ends with a gradient for each trainable parameter, and for no other."""
    for rank, (had, has) in enumerate(zip(before, after, strict=True)):
        frozen = [name for name in has if name not in expected]
        if frozen:
            raise AnswerError(
                f"{frozen[0]} is frozen (requires_grad is False), and now has a gradient on rank {rank}: an optimizer with "
                "weight decay would change it",
                cure="skip every parameter whose requires_grad is False",
            )
        missing = [name for name in expected if name not in has and name not in had]
        if missing and all(name in has for name in had):
            raise AnswerError(
                f"rank {rank} has no gradient of {missing[0]} afterwards: its own examples do not use it, those of another rank "
                "do, and all ranks must take the same step",
                "a rank that skips it goes on to its next all_reduce, and the sum there mixes gradients of different parameters",
                cure="where p.grad is None because no example of the rank used it, put zeros into p.grad and take part with them",
            )


def _layers() -> nn.Sequential:
    """Return a model whose gradients have, from the last parameter to the first, 12, 60, 20, 160, none and 192 bytes.

    With these sizes, each of the usual mistakes about `bucket_bytes` sends other messages.
    """
    torch.manual_seed(case_seed(0))
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3))
    model[0].bias.requires_grad_(False)
    return model


def _bucketed_on_rank(answer: Callable[[nn.Module, int], object], bucket_bytes: int) -> tuple[Gradients, Gradients]:
    """Return the gradients of this rank's share of the batch before and after the student's function."""
    inputs, targets = _shares(dist.get_world_size())[dist.get_rank()]
    model = _layers()
    nn.functional.mse_loss(model(inputs), targets).backward()
    before = gradients_of(model)
    answer(model, bucket_bytes)
    return before, gradients_of(model)


def _packed(sizes: Sequence[int], most: float) -> list[int]:
    """Return the sizes of buckets: a gradient that does not fit into the current bucket begins the next one."""
    buckets: list[int] = []
    for size in sizes:
        if buckets and buckets[-1] + size <= most:
            buckets[-1] += size
        else:
            buckets.append(size)
    return buckets


@exercise(
    LESSON,
    "average_in_buckets(model, bucket_bytes) averages all gradients over all ranks, in place, with one all_reduce for each "
    "bucket. A bucket holds as many gradients as fit into bucket_bytes, from the last parameter to the first; one that is "
    "larger travels alone.",
    "The gradients are those of one process with the whole batch, and each bucket was filled before the next one began.",
)
def _average_in_buckets(answer: Any, on: OnRanks) -> None:
    for ranks, bucket_bytes in ((3, 80), (2, 200), (2, 1000)):
        case = f"average_in_buckets(model, {bucket_bytes}) on {ranks} ranks"
        model = _layers()
        nn.functional.mse_loss(model((batch := random_batch(PER_RANK * ranks))[0]), batch[1]).backward()
        expected = gradients_of(model)
        frozen = f"{case}: a frozen parameter (requires_grad is False) has no gradient, p.grad is None"
        with explaining({"NoneType": (frozen, "leave it out of the buckets")}):
            results = on(ranks, _bucketed_on_rank, answer, bucket_bytes)
        before, after = zip(*results, strict=True)
        with showing(case):
            _judge_unpacked(case, before, after, expected)
            judge_exchange(results, sum(array.nbytes for array in expected.values()), "the gradients")
        sent = [span.nbytes for span in results.trace.filter(rank=0, kind="communication").spans]
        _judge_buckets(case, sent, [array.nbytes for array in reversed(expected.values())], bucket_bytes)


def _judge_unpacked(case: str, before: Sequence[Gradients], after: Sequence[Gradients], expected: Gradients) -> None:
    """Check that each rank has the average of each gradient in its place."""
    ranks = len(after)
    frozen = [name for has in after for name in has if name not in expected]
    if frozen:
        raise AnswerError(f"{case}: {frozen[0]} is frozen (requires_grad is False), and now has a gradient; leave it out")
    if all(keeps(has, had) for has, had in zip(after, before, strict=True)):
        raise AnswerError(
            f"{case}: the gradients are unchanged. A bucket is a copy: torch.cat([...]) copies",
            cure="after the all_reduce, copy its parts back: p.grad.copy_(part.view_as(p.grad)) writes into the gradient",
        )
    own = [
        n
        for n in expected
        if n in differ(after, expected) and all(keeps(a, {n: b[n]}) for a, b in zip(after, before, strict=True))
    ]
    if own and len(own) < len(expected):
        raise AnswerError(
            f"{case}: the gradients of {listing(own)} are still each rank's own. The last bucket is rarely full",
            cure="send the last bucket after the loop",
        )
    if differ(after, expected) and all(np.allclose(_sorted(has), _sorted(expected), rtol=1e-3, atol=1e-6) for has in after):
        raise AnswerError(
            f"{case}: the averages are right, but in the wrong places",
            cure="take the parts out of the bucket in the order in which you packed them",
        )
    causes: dict[float, Hint] = {
        float(ranks): SUMMED,
        1 / ranks: "were divided by the number of ranks once too often",
    }
    compare(after, expected, subject="the gradients", causes=causes)


def _sorted(gradients: Gradients) -> Any:
    """Return all values in ascending order."""
    return np.sort(np.concatenate([np.ravel(array) for array in gradients.values()]))


def _judge_buckets(case: str, sent: Sequence[int], sizes: Sequence[int], bucket_bytes: int) -> None:
    """Check the sizes of the messages against those of the gradients, given from the last parameter to the first."""
    right, four = _packed(sizes, bucket_bytes), 4 * bucket_bytes
    if max(sent) <= max(bucket_bytes, *sizes) and len(sent) <= len(right) and sum(sent) <= sum(sizes) + 64:
        return
    too_large = [n for n in sent if n > bucket_bytes and n not in sizes]
    faults = {
        (
            "the gradients are right, but each travelled alone",
            "put them into one tensor while they fit, and call all_reduce on that",
        ): list(sent) in (list(sizes), [*reversed(sizes)]),
        "all gradients travelled in one message; bucket_bytes limits its size": len(sent) == 1,
        (
            "the buckets are four times too large: numel() counts numbers, not bytes",
            "each number has 4 bytes; p.grad.nbytes is the size of a gradient in bytes",
        ): list(sent) in (_packed(sizes, four), _packed([*reversed(sizes)], four)),
        (
            f"a bucket of {max(too_large, default=0)} bytes was sent",
            "look whether the next gradient fits before you add it, not after",
        ): too_large,
        f"{counted(len(sent), 'message')} where {len(right)} are enough: one all_reduce for each bucket, and in it as many "
        "gradients as fit": True,
    }
    reject(faults, case, f"sent: {listing(sent)} bytes", f"gradients, from the last parameter: {listing(sizes)} bytes")


@exercise(
    LESSON,
    "What DistributedSampler does: draw_indices(examples, rank, ranks, epoch) returns the numbers of the examples of that "
    "rank in that epoch. All ranks have equally many, together they have every example, and every epoch has its own order.",
    "Every example is drawn in every epoch, by one rank, in an order that all ranks agree on and that changes.",
)
def _draw_indices(answer: Any, _: OnRanks) -> None:
    for examples, ranks in ((12, 3), (10, 4), (7, 2), (13, 4)):  # in the last, the nearest whole number is too small
        epochs = [[_indices(answer, examples, rank, ranks, epoch) for rank in range(ranks)] for epoch in (0, 1, 0)]
        case = f"draw_indices({examples}, rank, {ranks}, epoch)"
        for epoch, drawn in enumerate(epochs[:2]):
            _judge_epoch(drawn, examples, f"{case} of epoch {epoch}")
        if epochs[0] != epochs[2]:
            raise AnswerError(
                f"{case}: two calls for epoch 0 give two orders, so ranks could not agree on one", cure="seed with the epoch"
            )
        if epochs[0] == epochs[1]:
            raise AnswerError(
                f"{case}: epochs 0 and 1 have the same order, as when set_epoch is forgotten: every epoch would show the same "
                "batches",
                f"rank 0 in both: {epochs[0][0]}",
                cure="let the epoch be part of the seed",
            )


def _indices(answer: Any, examples: int, rank: int, ranks: int, epoch: int) -> list[int]:
    call = f"draw_indices{examples, rank, ranks, epoch}"
    with explaining(dict.fromkeys(NUMBER_FOR_LIST, f"`examples` is a number, not a list: {call}")):
        drawn = answer(examples, rank, ranks, epoch)
    with showing(f"{call} returned {drawn!r}"):
        return whole_numbers(drawn, "the numbers of this rank's examples, as a list")


def _judge_epoch(drawn: list[list[int]], examples: int, case: str) -> None:
    ranks, each = len(drawn), -(-examples // len(drawn))
    every = [index for indices in drawn for index in indices]
    unknown = sorted({index for index in every if index not in range(examples)})
    lost = [index for index in range(examples) if index not in every]
    faults = {
        f"there is no example {listing(unknown[:1])}; they are numbered 0 to {examples - 1}": unknown,
        (
            (
                "the ranks have different numbers of examples. The rank with one batch more would wait in its all_reduce for "
                "ranks that have finished"
            ),
            "repeat a few examples until all have as many",
        ): len({len(indices) for indices in drawn}) > 1,
        (
            f"{_examples(lost)} left out, and an epoch shows every example",
            f"round up and repeat some, so that each rank has {each}",
        ): lost and len(every) < examples,
        f"{_examples(lost)} drawn by no rank while others are drawn twice: do all ranks shuffle with the same seed, and take "
        "different parts of the result?": lost,
        f"each rank has {len(drawn[0])} examples, {each} are enough": len(every) - examples >= ranks,
    }
    reject(faults, case, *(f"rank {rank}: {indices}" for rank, indices in enumerate(drawn)))


def _examples(numbers: list[int]) -> str:
    return f"example {listing(numbers)} is" if len(numbers) == 1 else f"examples {listing(numbers)} are"


@calculation(
    LESSON,
    "scaled_learning_rate(base, base_batch, per_rank, ranks) returns the learning rate for `ranks` ranks with batches of "
    "`per_rank`, by the linear rule, given that `base` was right for batches of `base_batch`.",
    "The learning rate grows as the batch of all ranks together does. (A rule of thumb: warm up, and check.)",
    # The first case tells all rules apart. In the others the new batch is no multiple of the old one, smaller or equal.
    ((0.1, 256, 64, 12), (0.05, 256, 100, 3), (0.1, 256, 32, 2), (0.1, 64, 64, 1)),
    other=lambda random: (random.uniform(0.001, 1), random.randint(30, 300), random.randint(8, 128), random.randint(2, 16)),
)
def _scaled_learning_rate(base: float, base_batch: int, per_rank: int, ranks: int) -> Expected:
    times = per_rank * ranks / base_batch
    mistakes = {
        "that is the square-root rule; the task asks for the linear rule": base * times**0.5,
        "the number of ranks is not what counts, but the batch of all ranks together": base * ranks,
        "that is the batch of one rank; in a step the ranks learn together": base * per_rank / base_batch,
        "// rounds down; the new batch need not be a multiple of the old one": base * (per_rank * ranks // base_batch),
        "a larger batch has less noise and can take a larger step, not a smaller one": base / times,
    }
    otherwise = (
        f"that is not the linear rule: the batch of all ranks together is {per_rank * ranks}, {times:g} times the old one",
        "multiply by the batch of all ranks together and divide by the old one",
    )
    return Expected(base * times, mistakes, otherwise)


Gradients = dict[str, NDArray[Any]]


class Experts(nn.Module):
    """A trunk, partly frozen as in fine-tuning, and several experts of equal size; each example passes through one.

    Args:
        experts: the number of experts.
    """

    def __init__(self, experts: int) -> None:
        super().__init__()
        torch.manual_seed(case_seed(0))
        self.trunk = nn.Linear(6, 5)
        self.trunk.bias.requires_grad_(False)
        self.experts = nn.ModuleList(nn.Linear(5, 3) for _ in range(experts))

    def forward(self, inputs: Tensor, expert: int = 0) -> Tensor:
        """Send all inputs (batch, 6) through one expert: (batch, 3)."""
        outputs: Tensor = self.experts[expert](torch.tanh(self.trunk(inputs)))
        return outputs


def random_batch(examples: int) -> tuple[Tensor, Tensor]:
    """Return inputs (examples, 6) and targets (examples, 3), the same in every process."""
    random = torch.Generator().manual_seed(case_seed(1))
    return torch.randn(examples, 6, generator=random), torch.randn(examples, 3, generator=random)


def gradients_of(model: nn.Module) -> Gradients:
    """Return a copy of each parameter's `.grad`; parameters without a gradient are left out."""
    return {n: p.grad.detach().clone().numpy() for n, p in model.named_parameters() if p.grad is not None}


def keeps(a: Gradients, b: Gradients) -> bool:
    """Whether `a` contains all gradients of `b`, unchanged."""
    return all(n in a and np.array_equal(a[n], b[n]) for n in b)
