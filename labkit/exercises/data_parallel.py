"""The exercises of lesson 02: average gradients, also in buckets, draw examples, scale the learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.errors.exceptions import RankError
from labkit.errors.lists import counted
from labkit.exercises.gradients import Experts, Gradients, gradients_of, keeps, random_batch
from labkit.exercises.judging import (
    AnswerError,
    Exercise,
    Hint,
    OnRanks,
    compare,
    differ,
    judge_exchange,
    listing,
    number_of,
    showing,
    takes_number_for_list,
    whole_numbers,
)
from labkit.exercises.known_mistakes import judge_result

__all__ = ["EXERCISES"]

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


def _average_gradients(answer: Any, on: OnRanks) -> str:
    for ranks in (3, 2):  # 3 first: on two ranks, dividing by a constant 2 would be right by chance
        with showing(f"average_gradients(model) on {ranks} ranks"):
            _judge_averages(answer, on, ranks)
    return "On 2 and on 3 ranks the gradients are those of one process with the whole batch, also where a rank had none."


def _judge_averages(answer: Any, on: OnRanks, ranks: int) -> None:
    try:
        results = on(ranks, _average_on_rank, answer)
    except RankError as error:
        first = error.failures[0]
        if "NoneType" not in first.traceback:
            raise
        raise AnswerError(
            f"{first.name} failed: p.grad is None here. Is the parameter frozen, did no example of this rank use it, or was the "
            "return value of dist.all_reduce stored in it?",
            first.traceback,
            cure="skip a frozen parameter, and take part with zeros for one that no example used. dist.all_reduce works in place "
            "and returns None",
        ) from None
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
    """Check that each rank ends with a gradient for each trainable parameter, and for no other.

    Raises:
        AnswerError: it does not.
    """
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
                "a rank that skips it goes on to its next all_reduce, and the sum there is of gradients of different parameters",
                cure="where p.grad is None because no example of the rank used it, put zeros into p.grad and take part with them",
            )


def _layers() -> nn.Sequential:
    """Return a model whose gradients have, from the last parameter to the first, 12, 60, 20, 160, none and 192 bytes.

    With these sizes, each of the usual mistakes about `bucket_bytes` sends other messages.
    """
    torch.manual_seed(0)
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


def _average_in_buckets(answer: Any, on: OnRanks) -> str:
    for ranks, bucket_bytes in ((3, 80), (2, 200), (2, 1000)):
        case = f"average_in_buckets(model, {bucket_bytes}) on {ranks} ranks"
        model = _layers()
        nn.functional.mse_loss(model((batch := random_batch(PER_RANK * ranks))[0]), batch[1]).backward()
        expected = gradients_of(model)
        try:
            results = on(ranks, _bucketed_on_rank, answer, bucket_bytes)
        except RankError as error:
            if "NoneType" not in error.failures[0].traceback:
                raise
            raise AnswerError(
                f"{case}: a frozen parameter (requires_grad is False) has no gradient, p.grad is None",
                error.failures[0].traceback,
                cure="leave it out of the buckets",
            ) from None
        before, after = zip(*results, strict=True)
        with showing(case):
            _judge_unpacked(case, before, after, expected)
            judge_exchange(results, sum(array.nbytes for array in expected.values()), "the gradients")
        sent = [span.nbytes for span in results.trace.filter(rank=0, kind="communication").spans]
        _judge_buckets(case, sent, [array.nbytes for array in reversed(expected.values())], bucket_bytes)
    return "The gradients are those of one process with the whole batch, and each bucket was filled before the next one began."


def _judge_unpacked(case: str, before: Sequence[Gradients], after: Sequence[Gradients], expected: Gradients) -> None:
    """Check that each rank has the average of each gradient in its place.

    Raises:
        AnswerError: it does not.
    """
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
    """Check the sizes of the messages against those of the gradients, given from the last parameter to the first.

    Raises:
        AnswerError: there are more messages than needed, or one is larger than a bucket.
    """
    details = (f"sent: {listing(sent)} bytes", f"gradients, from the last parameter: {listing(sizes)} bytes")
    right = _packed(sizes, bucket_bytes)
    if max(sent) <= max(bucket_bytes, *sizes) and len(sent) <= len(right) and sum(sent) <= sum(sizes) + 64:
        return
    if list(sent) == list(sizes) or list(sent) == [*reversed(sizes)]:
        raise AnswerError(
            f"{case}: the gradients are right, but each travelled alone",
            *details,
            cure="put them into one tensor while they fit, and call all_reduce on that",
        )
    if len(sent) == 1:
        raise AnswerError(f"{case}: all gradients travelled in one message; bucket_bytes limits its size", *details)
    if list(sent) in ([*_packed(sizes, 4 * bucket_bytes)], [*_packed([*reversed(sizes)], 4 * bucket_bytes)]):
        raise AnswerError(
            f"{case}: the buckets are four times too large: numel() counts numbers, not bytes",
            *details,
            cure="each number has 4 bytes; p.grad.nbytes is the size of a gradient in bytes",
        )
    if max(sent) > max(bucket_bytes, *sizes) or any(n > bucket_bytes and n not in sizes for n in sent):
        raise AnswerError(
            f"{case}: a bucket of {max(n for n in sent if n > bucket_bytes and n not in sizes)} bytes was sent",
            *details,
            cure="look whether the next gradient fits before you add it, not after",
        )
    raise AnswerError(
        f"{case}: {counted(len(sent), 'message')} where {len(right)} are enough: one all_reduce for each bucket, and as many "
        "gradients in it as fit",
        *details,
    )


def _draw_indices(answer: Any, _: OnRanks) -> str:
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
    return "Every example is drawn in every epoch, by one rank, in an order that all ranks agree on and that changes."


def _indices(answer: Any, examples: int, rank: int, ranks: int, epoch: int) -> list[int]:
    try:
        drawn = answer(examples, rank, ranks, epoch)
    except RankError as error:
        headline = error.failures[0].headline
        if not takes_number_for_list(headline):
            raise
        raise AnswerError(f"`examples` is a number, not a list: draw_indices{examples, rank, ranks, epoch}", headline) from None
    with showing(f"draw_indices{examples, rank, ranks, epoch} returned {drawn!r}"):
        return whole_numbers(drawn, "the numbers of this rank's examples, as a list")


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
            "for ranks that have finished",
            *details,
            cure="repeat a few examples until all have as many",
        )
    lost = [index for index in range(examples) if index not in every]
    if lost and len(every) < examples:
        cure = f"round up and repeat some, so that each rank has {each}"
        raise AnswerError(f"{case}: {_examples(lost)} left out, and an epoch shows every example", *details, cure=cure)
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


def _scaled_learning_rate(answer: Any, _: OnRanks) -> str:
    # The first case tells all rules apart. In the others the new batch is no multiple of the old one, smaller or equal.
    for base, base_batch, per_rank, ranks in ((0.1, 256, 64, 12), (0.05, 256, 100, 3), (0.1, 256, 32, 2), (0.1, 64, 64, 1)):
        given = number_of(answer(base, base_batch, per_rank, ranks))
        times = per_rank * ranks / base_batch
        case = f"scaled_learning_rate({base}, {base_batch}, {per_rank}, {ranks})"
        details = (
            f"{case}: given {given:.4g}, expected {base * times:.4g}",
            f"the batch of all ranks together is {per_rank * ranks}, {times:g} times the old one",
        )
        mistakes = {
            "that is the square-root rule; the task asks for the linear rule": base * times**0.5,
            "the number of ranks is not what counts, but the batch of all ranks together": base * ranks,
            "that is the batch of one rank; in a step the ranks learn together": base * per_rank / base_batch,
            "// rounds down; the new batch need not be a multiple of the old one": base * (per_rank * ranks // base_batch),
            "a larger batch has less noise and can take a larger step, not a smaller one": base / times,
        }
        otherwise = (
            "that is not the linear rule: the learning rate grows as the batch of all ranks together does",
            "multiply by the batch of all ranks together and divide by the old one",
        )
        judge_result(given, base * times, mistakes, otherwise, *details, same=lambda a, b: math.isclose(a, b, rel_tol=1e-6))
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
        "average_in_buckets",
        LESSON,
        "average_in_buckets(model, bucket_bytes) averages all gradients over all ranks, in place, with one all_reduce for each "
        "bucket. A bucket holds as many gradients as fit into bucket_bytes, from the last parameter to the first; one that is "
        "larger travels alone.",
        _average_in_buckets,
    ),
    Exercise(
        "draw_indices",
        LESSON,
        "What DistributedSampler does: draw_indices(examples, rank, ranks, epoch) returns the numbers of the examples of that "
        "rank in that epoch. All ranks have equally many, together they have every example, and every epoch has its own order.",
        _draw_indices,
    ),
    Exercise(
        "scaled_learning_rate",
        LESSON,
        "scaled_learning_rate(base, base_batch, per_rank, ranks) returns the learning rate for `ranks` ranks with batches of "
        "`per_rank`, by the linear rule, given that `base` was right for batches of `base_batch`.",
        _scaled_learning_rate,
    ),
)
