"""The exercises of lesson 05: a pipeline's bubble, balanced stages, a GPipe and a 1F1B step over messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.errors.lists import counted
from labkit.teaching.exercises.comparisons import compare, differ, expect, expect_numbers, whole_numbers, wrong_if
from labkit.teaching.exercises.exercise import Results, exercise, messages_sent
from labkit.teaching.exercises.random_state import case_seed

from .data_parallel import Gradients, gradients_of

LESSON = "05_pipeline_parallel"


def _other_stages(random: Random) -> tuple[list[float], list[float], int]:
    forward, backward = ([random.uniform(1, 6) for _ in range(4)] for _ in range(2))
    stages = random.randint(2, 4)
    return forward[:stages], backward[:stages], random.randint(2, 12)


@exercise(
    LESSON,
    "The idle share of any GPipe pipeline whose messages take no time, with equal and unequal stages.",
    [
        ([1.0, 1.0, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0], 8),
        ([1.0, 2.0, 1.0], [2.0, 4.0, 2.0], 5),
        ([3.0, 1.0], [2.0, 5.0], 4),  # the slowest stage of the backward passes is another one
        ([1.5], [3.0], 3),
    ],
    other=_other_stages,
)
def bubble(answer: Any, forward: Sequence[float], backward: Sequence[float], m: int) -> None:
    """bubble(forward, backward, micro_batches) returns the idle share of all ranks in a GPipe step. `forward`
    and `backward` list the seconds of each stage's pass of one micro-batch; messages take no time."""
    s, work = len(forward), m * (sum(forward) + sum(backward))
    step = sum(forward) + sum(backward) + (m - 1) * (max(forward) + max(backward))
    right = 1 - work / (s * step)
    slowest = max(f + b for f, b in zip(forward, backward, strict=True))
    one_stage = sum(forward) + sum(backward) + (m - 1) * slowest
    expect_numbers(answer(forward, backward, m), right, [
        (100 * right, "right as a percentage: return a share between 0 and 1"),
        ((s * step - work) / work,
         "that is the idle time relative to the work; the bubble is relative to the whole step"),
        (s * step - work, "those are the idle seconds of all ranks, not a share",
         "divide by the seconds of all ranks"),
        (1 - right, "that is the share in which the ranks work; the bubble is the rest"),
        ((s - 1) / (m + s - 1),
         "that holds for equal stages; here the slowest stage sets the pace of all the others"),
        (s / (m + s), "one stage too many: the last stage waits for s - 1 others, not for s"),
        (1 - work / (s * one_stage),
         "the slowest forward pass and the slowest backward pass can belong to different stages",
         "GPipe runs all forward passes first, so take the two maxima separately"),
        (1 - work / step, "one rank's step is compared with the work of all ranks",
         "s ranks have s times the step"),
    ], "not the idle share of this pipeline: when does the first micro-batch leave the last stage, and how "
       "long after it does each of the others?")


def _splits(random: Random) -> list[tuple[list[int], int]]:
    fixed = [
        ([1, 1, 1, 1, 1, 1, 1, 1], 4),
        ([1, 1, 1, 6, 1, 1], 3),
        ([5, 5, 1, 1, 5, 5], 4),
        ([2, 3, 9], 3),
        ([4, 4, 4, 1, 1], 2),
    ]
    return [*fixed, *(([random.randint(1, 9) for _ in range(9)], stages) for stages in (2, 3, 4))]


@exercise(LESSON, "No other split into consecutive layers has a faster slowest stage.", _splits)
def balanced_stages(answer: Any, costs: list[int], stages: int) -> None:
    """balanced_stages(costs, stages) returns how many consecutive layers each stage gets, as a list, so that
    the slowest stage is as fast as possible. Every stage gets at least one layer."""
    given = answer(costs, stages)
    nested = isinstance(given, (list, tuple)) and given and all(isinstance(x, (list, tuple)) for x in given)
    wrong_if(nested, f"given {given}; expected the number of layers of each stage, not their costs")
    sizes = whole_numbers(given, "a list with the number of layers of each stage")
    wrong_if(len(sizes) == stages - 1,
             f"given {sizes}: {stages} stages have {stages - 1} cuts; expected each stage's number of layers")
    wrong_if(len(sizes) != stages, f"given {sizes}; expected one number per stage: {stages} numbers")
    wrong_if(min(sizes) < 1,
             f"given {sizes}; a rank without a layer would only pass messages on: at least 1 each")
    wrong_if(sum(sizes) != len(costs),
             f"given {sizes}: {sum(sizes)} layers in all, but the model has {len(costs)}")
    sums = [sum(costs[sum(sizes[:i]) : sum(sizes[: i + 1])]) for i in range(stages)]
    best, filled = _smallest_maximum(costs, stages), _filled(costs, stages)
    if max(sums) == best:
        return
    shown = f"given {sizes}: the stages cost {sums}", f"the slowest stage can cost {best}"
    wrong_if(max(sizes) - min(sizes) <= 1 and sizes != filled,
             "the stages have equal numbers of layers, but layers cost different amounts", "", *shown)
    wrong_if(sizes == filled,
             "filling each stage up to the mean cost leaves too much, or too little, for the last one",
             "look for the smallest limit that no stage has to exceed", *shown)
    wrong_if(True, "another split has a faster slowest stage, which sets the pace", "", *shown)


def _smallest_maximum(costs: Sequence[int], stages: int) -> int:
    """The smallest possible cost of the slowest stage, by trying where the last stage begins."""
    if stages == 1:
        return sum(costs)
    begins = range(stages - 1, len(costs))
    return min(max(_smallest_maximum(costs[:k], stages - 1), sum(costs[k:])) for k in begins)


def _filled(costs: Sequence[int], stages: int) -> list[int]:
    """The greedy split: close a stage when its cost reaches the mean, and leave a layer for each to come."""
    mean, cost, size = sum(costs) / stages, 0, 0
    sizes: list[int] = []
    for i, c in enumerate(costs):
        cost, size = cost + c, size + 1
        open_stages, left = stages - len(sizes) - 1, len(costs) - i - 1
        if open_stages and (cost >= mean or left == open_stages):
            sizes.append(size)
            cost = size = 0
    return [*sizes, size]


WIDTH = 6  # numbers per example: of the inputs, of every activation and of the targets


class _Passes(NamedTuple):
    """What one rank did."""

    order: str  # a letter for each pass: F forward, B backward
    sizes: list[int]  # the number of examples of each forward pass
    gradients: Gradients  # of the parameters of the rank's stage

    @property
    def peak(self) -> int:
        """The largest number of micro-batches whose activations the rank held at the same time."""
        begun = (self.order[:i] for i in range(len(self.order) + 1))
        return max(passes.count("F") - passes.count("B") for passes in begun)


def _stages(ranks: int) -> list[nn.Sequential]:
    torch.manual_seed(case_seed(0))
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(ranks)]


def _batch(examples: int, seed: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(examples, WIDTH, generator=random), torch.randn(examples, WIDTH, generator=random)


def _step_on_rank(answer: Callable[..., object], examples: int, micro_batches: int, seed: int) -> _Passes:
    """Call the student's function; inputs and targets that a rank must not use are full of NaN."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    inputs, targets = _batch(examples, seed)
    stage, order, sizes = _stages(ranks)[rank], list[str](), list[int]()

    def note(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        order.append("F")
        sizes.append(len(output))
        if output.requires_grad:
            output.register_hook(lambda _: order.append("B"))

    stage.register_forward_hook(note)
    inputs = inputs if rank == 0 else torch.full_like(inputs, torch.nan)
    targets = targets if rank == ranks - 1 else torch.full_like(targets, torch.nan)
    answer(stage, inputs, targets, micro_batches)
    return _Passes("".join(order), sizes, gradients_of(stage))


def _serial(ranks: int, seed: int, sizes: Sequence[int], weights: Sequence[float]) -> list[Gradients]:
    """The gradients of each stage in one process, where each micro-batch's mean loss has a weight."""
    stages = _stages(ranks)
    whole, (inputs, targets) = nn.Sequential(*stages), _batch(sum(sizes), seed)
    for x, y, weight in zip(inputs.split(list(sizes)), targets.split(list(sizes)), weights, strict=True):
        (weight * nn.functional.mse_loss(whole(x), y)).backward()
    return [gradients_of(stage) for stage in stages]


def _judge_step(results: Results, ranks: int, examples: int, m: int, seed: int) -> None:
    """Check passes, messages and gradients, which GPipe and 1F1B have in common."""
    chunked = len(torch.empty(examples).chunk(m)) < m
    for rank, (step, sent) in enumerate(zip(results, messages_sent(results, 4 * WIDTH), strict=True)):
        passes = f"passes of rank {rank}, in order: {step.order or 'none'}"
        forward, backward = step.order.count("F"), step.order.count("B")
        wrong_if(forward != m or sum(step.sizes) != examples,
                 f"rank {rank} ran {forward} forward with {sum(step.sizes)} examples in all: expected one "
                 "per micro-batch, "
                 f"{m}{'. `chunk` may give fewer parts than you ask for' if chunked else ''}",
                 "`tensor_split(m)` always gives m parts" if chunked else "", passes)
        wrong_if(backward != m, f"rank {rank} ran {m} forward passes but {backward} backward: every "
                 "micro-batch needs its own",
                 "so do those that are still in the pipeline when the last forward pass is over", passes)
        neighbours = [other for other in (rank - 1, rank + 1) if 0 <= other < ranks]
        expected = [(other, size) for other in neighbours for size in step.sizes]
        wrong_if(sorted(sent) != sorted(expected),
                 f"rank {rank} sent {counted(len(sent), 'message')}, expected {len(expected)}: one "
                 "activation to the next rank and one gradient to the previous rank per micro-batch", "",
                 f"receiver and number of examples of each: {sent}")
    _judge_gradients([step.gradients for step in results], m, seed, results[0].sizes)


def _judge_gradients(given: list[Gradients], m: int, seed: int, sizes: Sequence[int]) -> None:
    ranks, examples = len(given), sum(sizes)
    wrong_if(any(np.isnan(array).any() for gradients in given for array in gradients.values()),
             "the gradients are not numbers. Only rank 0 may use `inputs`, and only the last rank `targets`",
             "the other ranks receive what they need from their neighbours")

    def weighted(weights: Sequence[float]) -> list[Gradients]:
        return _serial(ranks, seed, sizes, weights)

    right = weighted([n / examples for n in sizes])
    weigh = "weight each micro-batch's mean loss by its share of the examples"
    expect(given, right, [
        (weighted([1.0] * m), "the micro-batches' mean losses were added up", weigh),
        (weighted([1 / m] * m), "every micro-batch counts the same, however few examples it has", weigh),
        (weighted([0.0] * (m - 1) + [sizes[-1] / examples]),
         "only the last micro-batch's gradients are left",
         "gradients add up in .grad, so nothing may clear it in between"),
        (weighted(sizes), "the losses are neither divided by the number of examples nor means", weigh),
    ], same=lambda a, b: not any(map(differ, ([one] for one in a), b)))
    bad = [rank for rank in range(ranks) if differ([given[rank]], right[rank])]
    wrong_if(bad and bad == list(range(ranks - 1)), "the last rank's gradients are right and those before it "
             "are not. Which gradient do you send back, and from which one does your backward pass start?",
             "send back the gradient of your stage's input (the `.grad` of what you received), and start "
             "your backward pass from the gradient that you receive")
    for rank in bad:
        compare([given[rank]], right[rank], subject=f"the gradients of rank {rank}")


def _call(name: str) -> Callable[..., str]:
    return lambda ranks, examples, m, _: (
        f"{name}(stage, inputs, targets, {m}) on {counted(ranks, 'rank')}, {examples} examples in {m} "
        "micro-batches"
    )


NO_BATCH = (
    "a rank asked for a micro-batch that does not exist",
    "the warm-up has at most as many forward passes as there are micro-batches",
)
IN_STEPS = {
    "NoneType": (
        "a `.grad` is None: what a rank receives does not require a gradient",
        "let it require one, with requires_grad_(), before `stage` sees it",
    ),
    "IndexError": NO_BATCH,
    "StopIteration": NO_BATCH,
}


def _with_seed(*cases: tuple[int, int, int]) -> Callable[[Random], list[tuple[int, ...]]]:
    """Ranks, examples and micro-batches of each case, and a seed of the batches."""
    return lambda random: [(*case, random.getrandbits(31)) for case in cases]


@exercise(
    LESSON, "On 1 to 4 ranks the gradients are those of one process, with one message per micro-batch and "
    "direction.",
    _with_seed((3, 7, 3), (4, 11, 4), (2, 10, 4), (1, 5, 2)), on_ranks=_step_on_rank, errors=IN_STEPS,
    call=_call("gpipe_step"),
)
def gpipe_step(results: Results, ranks: int, examples: int, m: int, seed: int) -> None:
    """gpipe_step(stage, inputs, targets, micro_batches) runs on every rank: all forward passes, then all
    backward passes. Afterwards the .grad of the stage's parameters is that of mse_loss over the whole
    batch."""
    _judge_step(results, ranks, examples, m, seed)
    for rank, step in enumerate(results):
        ordered = step.order == "F" * m + "B" * m
        passes = f"passes of rank {rank}, in order: {step.order}"
        wrong_if(not ordered and results[0].peak == 1,
                 "the gradients are right, but a micro-batch comes back before the next one starts, so only "
                 "one rank works at a time",
                 "run all forward passes first", passes)
        wrong_if(not ordered, "GPipe runs all forward passes before the first backward pass", "", passes)


@exercise(
    LESSON, "On 1 to 4 ranks: the gradients of one process, one message per micro-batch and direction, at "
    "most s live activations.",
    _with_seed((2, 10, 5), (4, 13, 6), (1, 5, 2), (4, 5, 2), (3, 7, 3)), on_ranks=_step_on_rank,
    call=_call("one_f_one_b_step"), errors=IN_STEPS | {"deadlock": (
        "In the steady state a rank sends an activation while its neighbour sends a gradient: if both use "
        "dist.send, each waits until the other receives",
        "use dist.isend, and wait for it at the end",
    )},
)
def one_f_one_b_step(results: Results, ranks: int, examples: int, m: int, seed: int) -> None:
    """one_f_one_b_step(stage, inputs, targets, micro_batches) does the same in the order of 1F1B: no rank
    holds the activations of more micro-batches than there are stages."""
    _judge_step(results, ranks, examples, m, seed)
    for rank, step in enumerate(results):
        fill, before = min(m, ranks - rank), step.order.index("B")
        passes = f"passes of rank {rank}, in order: {step.order}"
        wrong_if(step.peak > ranks, f"the gradients are right, but rank {rank} holds the activations of "
                 f"{step.peak} micro-batches at once, as in GPipe. In 1F1B at most {ranks}, the number of "
                 "stages", "after the warm-up, each forward pass is followed by a backward pass", passes)
        wrong_if(before < fill, "the gradients are right, but the pipeline never fills: "
                 f"rank {rank} starts its first backward pass too early",
                 f"let {fill} forward passes come before it, here {before} did", passes)
