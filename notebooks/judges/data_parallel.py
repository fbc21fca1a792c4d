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
from labkit.teaching.exercises.comparisons import compare, differ, expect_numbers, listing, whole_numbers, wrong_if
from labkit.teaching.exercises.exercise import NUMBER_FOR_LIST, Results, exercise, explaining, judge_exchange, showing
from labkit.teaching.exercises.random_state import case_seed

LESSON = "02_data_parallel"
PER_RANK = 4  # examples of each rank in a batch
SUMMED = "were summed, not averaged", "divide by the number of ranks"
TWICE = "were divided by the number of ranks once too often"


def _shares(ranks: int) -> list[tuple[Tensor, Tensor]]:
    """Return the inputs and targets of each rank."""
    inputs, targets = random_batch(PER_RANK * ranks)
    return list(zip(inputs.chunk(ranks), targets.chunk(ranks), strict=True))


def _serial_average(ranks: int) -> Gradients:
    """Return the expected gradients: one process with the whole batch, each share through its own expert."""
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


NO_GRADIENT = (
    "p.grad is None here. Is the parameter frozen, did no example of this rank use it, or was the return "
    "value of dist.all_reduce stored in it?",
    "skip a frozen parameter, and take part with zeros for one that no example used. dist.all_reduce works "
    "in place and returns None",
)


@exercise(
    LESSON,
    "On 2 and on 3 ranks the gradients are those of one process with the whole batch, also where a rank had "
    "none.",
    [(3,), (2,)],  # 3 first: on two ranks, dividing by a constant 2 would be right by chance
    on_ranks=_average_on_rank, errors={"NoneType": NO_GRADIENT},
    call="average_gradients(model) on {ranks} ranks",
)
def average_gradients(results: Results, ranks: int) -> None:
    """After backward() each rank has the gradients of its own examples. Average them over all ranks, in
    place, for every parameter that is not frozen; a rank whose examples did not use a parameter has no
    gradient of it (None)."""
    before, after = zip(*results, strict=True)
    right = _serial_average(ranks)
    wrong_if(not any(after),
             "afterwards all gradients are missing, on all ranks: what is assigned to p.grad?",
             "dist.all_reduce works in place and returns None: `p.grad = dist.all_reduce(p.grad)` discards "
             "the sum")
    for rank, (had, has) in enumerate(zip(before, after, strict=True)):
        for name in has:
            wrong_if(name not in right, f"{name} is frozen (requires_grad is False), and now has a gradient "
                     f"on rank {rank}: an optimizer with weight decay would change it",
                     "skip every parameter whose requires_grad is False")
        for name in right:
            wrong_if(name not in has and name not in had and had.keys() <= has.keys(),
                     f"rank {rank} has no gradient of {name} afterwards: its own examples do not use it, "
                     "those of another rank do, and all ranks must take the same step",
                     "where p.grad is None because no example of the rank used it, put zeros into p.grad and "
                     "take part with them",
                     "a rank that skips it goes on to its next all_reduce, and the sum there mixes "
                     "gradients of different parameters")
    wrong_if(all(map(keeps, after, before)), "the gradients are unchanged: each rank still has its own",
             "the sum must be stored in p.grad itself, as dist.all_reduce(p.grad) does; a new tensor in a "
             "variable changes nothing")
    wrong_if(all(keeps(has, before[0]) for has in after), "every rank has rank 0's gradients: a broadcast "
             "copies one rank's, an all_reduce combines all of them")
    of_users = {n: array * (ranks if n.startswith("experts") else 1) for n, array in right.items()}
    wrong_if(not differ(after, of_users), f"the gradients of the experts are {ranks} times what they should "
             "be: ranks whose examples do not use an expert are part of the mean, too, with zero",
             "divide by the number of all ranks")
    compare(after, right, subject="the gradients", causes={
        float(ranks): SUMMED,
        1 / ranks: TWICE,
        ranks / 2: ("were divided by 2, not by the number of ranks",
                    "dist.get_world_size() gives the number of ranks"),
    })
    judge_exchange(results, sum(array.nbytes for array in right.values()))


def _layers() -> nn.Sequential:
    """Return a model whose gradients have, from last to first parameter, 12, 60, 20, 160, none and 192 bytes.

    With these sizes, each of the usual mistakes about `bucket_bytes` sends other messages.
    """
    torch.manual_seed(case_seed(0))
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3))
    model[0].bias.requires_grad_(False)
    return model


def _serial_layers(ranks: int) -> Gradients:
    """Return the expected gradients, of one process with the whole batch."""
    model = _layers()
    inputs, targets = random_batch(PER_RANK * ranks)
    nn.functional.mse_loss(model(inputs), targets).backward()
    return gradients_of(model)


def _bucketed_on_rank(answer: Callable[..., object], bucket_bytes: int) -> tuple[Gradients, Gradients]:
    """Return the gradients of this rank's share of the batch before and after the student's function."""
    inputs, targets = _shares(dist.get_world_size())[dist.get_rank()]
    model = _layers()
    nn.functional.mse_loss(model(inputs), targets).backward()
    before = gradients_of(model)
    answer(model, bucket_bytes)
    return before, gradients_of(model)


def _packed(sizes: Sequence[int], most: float) -> list[int]:
    """Return the sizes of buckets: a gradient that does not fit into a bucket begins the next one."""
    buckets: list[int] = []
    for size in sizes:
        if buckets and buckets[-1] + size <= most:
            buckets[-1] += size
        else:
            buckets.append(size)
    return buckets


FROZEN = (
    "a frozen parameter (requires_grad is False) has no gradient, p.grad is None", "leave it out of the "
    "buckets",
)


@exercise(
    LESSON,
    "The gradients are those of one process with the whole batch, and each bucket was filled before the next "
    "one began.",
    [(3, 80), (2, 200), (2, 1000)], on_ranks=_bucketed_on_rank, errors={"NoneType": FROZEN},
    call="average_in_buckets(model, {bucket_bytes}) on {ranks} ranks",
)
def average_in_buckets(results: Results, ranks: int, bucket_bytes: int) -> None:
    """average_in_buckets(model, bucket_bytes) averages all gradients over all ranks, in place, with one
    all_reduce for each bucket. A bucket holds as many gradients as fit into bucket_bytes, from the last
    parameter to the first; one that is larger travels alone."""
    before, after = zip(*results, strict=True)
    right = _serial_layers(ranks)
    for name in (name for has in after for name in has):
        wrong_if(name not in right, f"{name} is frozen (requires_grad is False), and now has a gradient; "
                 "leave it out")
    wrong_if(all(map(keeps, after, before)), "the gradients are unchanged. A bucket is a copy: "
             "torch.cat([...]) copies",
             "after the all_reduce, copy its parts back: p.grad.copy_(part.view_as(p.grad)) writes into the "
             "gradient")
    bad = differ(after, right)
    both = list(zip(after, before, strict=True))
    own = [name for name in right if name in bad and all(keeps(a, {name: b[name]}) for a, b in both)]
    wrong_if(own and len(own) < len(right), f"the gradients of {listing(own)} are still each rank's own. The "
             "last bucket is rarely full", "send the last bucket after the loop")
    wrong_if(bad and all(np.allclose(_sorted(has), _sorted(right), rtol=1e-3, atol=1e-6) for has in after),
             "the averages are right, but in the wrong places",
             "take the parts out of the bucket in the order in which you packed them")
    compare(after, right, subject="the gradients", causes={float(ranks): SUMMED, 1 / ranks: TWICE})
    judge_exchange(results, sum(array.nbytes for array in right.values()))
    sent = [span.nbytes for span in results.trace.filter(rank=0, kind="communication").spans]
    sizes = [array.nbytes for array in reversed(right.values())]
    fewest = len(_packed(sizes, bucket_bytes))
    if max(sent) <= max(bucket_bytes, *sizes) and len(sent) <= fewest and sum(sent) <= sum(sizes) + 64:
        return
    shown = f"sent: {listing(sent)} bytes", f"gradients, from the last parameter: {listing(sizes)} bytes"
    backwards = [*reversed(sizes)]
    wrong_if(sent in ([*sizes], backwards), "the gradients are right, but each travelled alone",
             "put them into one tensor while they fit, and call all_reduce on that", *shown)
    wrong_if(len(sent) == 1,
             "all gradients travelled in one message; bucket_bytes limits its size", "", *shown)
    wrong_if(sent in (_packed(sizes, 4 * bucket_bytes), _packed(backwards, 4 * bucket_bytes)),
             "the buckets are four times too large: numel() counts numbers, not bytes",
             "each number has 4 bytes; p.grad.nbytes is the size of a gradient in bytes", *shown)
    too_large = [n for n in sent if n > bucket_bytes and n not in sizes]
    wrong_if(too_large, f"a bucket of {max(too_large, default=0)} bytes was sent",
             "look whether the next gradient fits before you add it, not after", *shown)
    wrong_if(True, f"{counted(len(sent), 'message')} where {fewest} are enough: one all_reduce for each "
             "bucket, and in it as many gradients as fit", "", *shown)


def _sorted(gradients: Gradients) -> Any:
    """Return all values in ascending order."""
    return np.sort(np.concatenate([np.ravel(array) for array in gradients.values()]))


@exercise(
    LESSON, "Every example is drawn in every epoch, by one rank, in an order that all ranks agree on and "
    "that changes.",
    [(12, 3), (10, 4), (7, 2), (13, 4)],  # in the last, the nearest whole number is too small
    call="draw_indices({examples}, rank, {ranks}, epoch)",
)
def draw_indices(answer: Any, examples: int, ranks: int) -> None:
    """What DistributedSampler does: draw_indices(examples, rank, ranks, epoch) returns the numbers of the
    examples of that rank in that epoch. All ranks have equally many, together they have every example, and
    every epoch has its own order."""
    epochs = [
        [_indices(answer, examples, rank, ranks, epoch) for rank in range(ranks)] for epoch in (0, 1, 0)
    ]
    for epoch, drawn in enumerate(epochs[:2]):
        _judge_epoch(drawn, epoch, examples)
    wrong_if(epochs[0] != epochs[2], "two calls for epoch 0 give two orders, so ranks could not agree on one",
             "seed with the epoch")
    wrong_if(epochs[0] == epochs[1], "epochs 0 and 1 have the same order, as when set_epoch is forgotten: "
             "every epoch would show the same batches", "let the epoch be part of the seed",
             f"rank 0 in both: {epochs[0][0]}")


def _indices(answer: Any, examples: int, rank: int, ranks: int, epoch: int) -> list[int]:
    call = f"draw_indices{examples, rank, ranks, epoch}"
    with explaining(dict.fromkeys(NUMBER_FOR_LIST, f"`examples` is a number, not a list: {call}")):
        drawn = answer(examples, rank, ranks, epoch)
    with showing(f"{call} returned {drawn!r}"):
        return whole_numbers(drawn, "the numbers of this rank's examples, as a list")


def _judge_epoch(drawn: list[list[int]], epoch: int, examples: int) -> None:
    ranks, each = len(drawn), -(-examples // len(drawn))
    shown = [f"epoch {epoch}", *(f"rank {rank}: {indices}" for rank, indices in enumerate(drawn))]
    every = [index for indices in drawn for index in indices]
    unknown = sorted({index for index in every if index not in range(examples)})
    wrong_if(unknown, f"there is no example {listing(unknown[:1])}; they are numbered 0 to {examples - 1}",
             "", *shown)
    wrong_if(len({len(indices) for indices in drawn}) > 1, "the ranks have different numbers of examples. "
             "The rank with one batch more would wait in its all_reduce for ranks that have finished",
             "repeat a few examples until all have as many", *shown)
    lost = [index for index in range(examples) if index not in every]
    those = f"example {listing(lost)} is" if len(lost) == 1 else f"examples {listing(lost)} are"
    wrong_if(lost and len(every) < examples, f"{those} left out, and an epoch shows every example",
             f"round up and repeat some, so that each rank has {each}", *shown)
    wrong_if(lost, f"{those} drawn by no rank while others are drawn twice: do all ranks shuffle with the "
             "same seed, and take different parts of the result?", "", *shown)
    wrong_if(len(every) - examples >= ranks,
             f"each rank has {len(drawn[0])} examples, {each} are enough", "", *shown)


@exercise(
    LESSON, "The learning rate grows as the batch of all ranks together does. (A rule of thumb: warm up, and "
    "check.)",
    # The first case tells all rules apart. In the others the new batch is no multiple of the old one, smaller
    # or equal.
    [(0.1, 256, 64, 12), (0.05, 256, 100, 3), (0.1, 256, 32, 2), (0.1, 64, 64, 1)],
    other=lambda random: (
        random.uniform(0.001, 1), random.randint(30, 300), random.randint(8, 128), random.randint(2, 16)
    ),
)
def scaled_learning_rate(answer: Any, base: float, base_batch: int, per_rank: int, ranks: int) -> None:
    """scaled_learning_rate(base, base_batch, per_rank, ranks) returns the learning rate for `ranks` ranks
    with batches of `per_rank`, by the linear rule, given that `base` was right for batches of
    `base_batch`."""
    times = per_rank * ranks / base_batch
    expect_numbers(answer(base, base_batch, per_rank, ranks), base * times, [
        (base * times**0.5, "that is the square-root rule; the task asks for the linear rule"),
        (base * ranks, "the number of ranks is not what counts, but the batch of all ranks together"),
        (base * per_rank / base_batch, "that is the batch of one rank; in a step the ranks learn together"),
        (base * (per_rank * ranks // base_batch),
         "// rounds down; the new batch need not be a multiple of the old one"),
        (base / times, "a larger batch has less noise and can take a larger step, not a smaller one"),
    ], f"that is not the linear rule: the batch of all ranks together is {per_rank * ranks}, {times:g} times "
       "the old one", "multiply by the batch of all ranks together and divide by the old one")


Gradients = dict[str, NDArray[Any]]


class Experts(nn.Module):
    """A trunk, partly frozen as in fine-tuning, and experts of equal size; each example passes through one.

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
