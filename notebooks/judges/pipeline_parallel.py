"""The exercises of lesson 05: a pipeline's bubble, balanced stages, and a GPipe and a 1F1B step over messages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from labkit.errors.lists import counted
from labkit.teaching.exercises.calculations import Expected, calculation
from labkit.teaching.exercises.comparisons import compare, differ, whole_numbers
from labkit.teaching.exercises.judging import AnswerError, Hint, OnRanks, exercise, explaining, judge_result, showing
from labkit.teaching.exercises.random_state import case_seed

LESSON = "05_pipeline_parallel"


def _other_stages(random: Random) -> tuple[list[float], list[float], int]:
    forward, backward = ([random.uniform(1, 6) for _ in range(4)] for _ in range(2))
    stages = random.randint(2, 4)
    return forward[:stages], backward[:stages], random.randint(2, 12)


@calculation(
    LESSON,
    "bubble(forward, backward, micro_batches) returns the idle share of all ranks in a GPipe step. `forward` and `backward` "
    "list the seconds of each stage's pass of one micro-batch; messages take no time.",
    "The idle share of any GPipe pipeline whose messages take no time, with equal and unequal stages.",
    (
        ([1.0, 1.0, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0], 8),
        ([1.0, 2.0, 1.0], [2.0, 4.0, 2.0], 5),
        ([3.0, 1.0], [2.0, 5.0], 4),  # the slowest stage of the backward passes is another one
        ([1.5], [3.0], 3),
    ),
    other=_other_stages,
)
def _bubble(forward: Sequence[float], backward: Sequence[float], m: int) -> Expected:
    s, work = len(forward), m * (sum(forward) + sum(backward))
    step = sum(forward) + sum(backward) + (m - 1) * (max(forward) + max(backward))
    right = 1 - work / (s * step)
    slowest = max(f + b for f, b in zip(forward, backward, strict=True))
    one_stage = sum(forward) + sum(backward) + (m - 1) * slowest
    mistakes = {
        "right as a percentage: return a share between 0 and 1": 100 * right,
        "that is the idle time relative to the work; the bubble is relative to the whole step": (s * step - work) / work,
        ("those are the idle seconds of all ranks, not a share", "divide by the seconds of all ranks"): s * step - work,
        "that is the share in which the ranks work; the bubble is the rest": 1 - right,
        "that holds for equal stages; here the slowest stage sets the pace of all the others": (s - 1) / (m + s - 1),
        "one stage too many: the last stage waits for s - 1 others, not for s": s / (m + s),
        (
            "the slowest forward pass and the slowest backward pass can belong to different stages",
            "GPipe runs all forward passes first, so take the two maxima separately",
        ): 1 - work / (s * one_stage),
        ("one rank's step is compared with the work of all ranks", "s ranks have s times the step"): 1 - work / step,
    }
    otherwise = (
        "not the idle share of this pipeline: when does the first micro-batch leave the last stage, and how long after it "
        "does each of the others?"
    )
    return Expected(right, mistakes, otherwise)


@exercise(
    LESSON,
    "balanced_stages(costs, stages) returns how many consecutive layers each stage gets, as a list, so that the slowest "
    "stage is as fast as possible. Every stage gets at least one layer.",
    "No other split into consecutive layers has a faster slowest stage.",
)
def _balanced_stages(answer: Any, _: OnRanks) -> None:
    random = np.random.default_rng()
    drawn = [([int(c) for c in random.integers(1, 10, size=9)], stages) for stages in (2, 3, 4)]
    fixed = [
        ([1, 1, 1, 1, 1, 1, 1, 1], 4),
        ([1, 1, 1, 6, 1, 1], 3),
        ([5, 5, 1, 1, 5, 5], 4),
        ([2, 3, 9], 3),
        ([4, 4, 4, 1, 1], 2),
    ]
    for costs, stages in (*fixed, *drawn):
        given = answer(list(costs), stages)
        case = f"balanced_stages({costs}, {stages})"
        sizes = _as_sizes(given, len(costs), stages, case)
        slowest, best = _slowest(costs, sizes), _smallest_maximum(costs, stages)
        if slowest == best:
            continue
        sums = [sum(costs[sum(sizes[:i]) : sum(sizes[: i + 1])]) for i in range(stages)]
        details = (f"given {sizes}: the stages cost {sums}", f"the slowest stage can cost {best}")
        if max(sizes) - min(sizes) <= 1 and sizes != _filled(costs, stages):
            raise AnswerError(f"{case}: the stages have equal numbers of layers, but layers cost different amounts", *details)
        if sizes == _filled(costs, stages):
            raise AnswerError(
                f"{case}: filling each stage up to the mean cost leaves too much, or too little, for the last one",
                *details,
                cure="look for the smallest limit that no stage has to exceed",
            )
        raise AnswerError(f"{case}: another split has a faster slowest stage, which sets the pace", *details)


def _as_sizes(given: Any, layers: int, stages: int, case: str) -> list[int]:
    """The answer as a list of whole numbers, one per stage, that add up to the number of layers."""
    if isinstance(given, (list, tuple)) and given and all(isinstance(part, (list, tuple)) for part in given):
        raise AnswerError(f"{case}: given {given}; expected the number of layers of each stage, not their costs")
    sizes = whole_numbers(given, "a list with the number of layers of each stage", case)
    if len(sizes) == stages - 1:
        raise AnswerError(
            f"{case}: given {sizes}: {stages} stages have {stages - 1} cuts; expected each stage's number of layers"
        )
    if len(sizes) != stages:
        raise AnswerError(f"{case}: given {sizes}; expected one number per stage: {stages} numbers")
    if min(sizes) < 1:
        raise AnswerError(f"{case}: given {sizes}; a rank without a layer would only pass messages on: at least 1 each")
    if sum(sizes) != layers:
        raise AnswerError(f"{case}: given {sizes}: {sum(sizes)} layers in all, but the model has {layers}")
    return sizes


def _slowest(costs: Sequence[int], sizes: Sequence[int]) -> int:
    ends = np.cumsum(sizes)
    return max(sum(costs[end - size : end]) for end, size in zip(ends, sizes, strict=True))


def _smallest_maximum(costs: Sequence[int], stages: int) -> int:
    """The smallest possible cost of the slowest stage, by trying where the last stage begins."""
    if stages == 1:
        return sum(costs)
    return min(max(_smallest_maximum(costs[:k], stages - 1), sum(costs[k:])) for k in range(stages - 1, len(costs)))


def _filled(costs: Sequence[int], stages: int) -> list[int]:
    """The greedy split: close a stage when its cost reaches the mean, and leave one layer for each stage to come."""
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
CHUNKED = ". `chunk` may give fewer parts than you ask for"

Gradients = dict[str, NDArray[Any]]


class _Case(NamedTuple):
    """A batch that is split into micro-batches, on some ranks."""

    ranks: int
    examples: int
    micro_batches: int

    def __str__(self) -> str:
        return f"{counted(self.ranks, 'rank')}, {self.examples} examples in {self.micro_batches} micro-batches"


class _Step(NamedTuple):
    """What one rank did.

    Args:
        order: a letter for each pass: F forward, B backward.
        sizes: the number of examples of each forward pass.
        sent: receiving rank and number of examples of each message.
        gradients: of the parameters of the rank's stage.
    """

    order: str
    sizes: list[int]
    sent: list[tuple[int, int]]
    gradients: Gradients

    @property
    def peak(self) -> int:
        """The largest number of micro-batches whose activations the rank held at the same time."""
        return max((self.order[:i].count("F") - self.order[:i].count("B") for i in range(len(self.order) + 1)), default=0)


class _Mark(torch.autograd.Function):
    """Passes a tensor on, and notes when its gradient arrives."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, order: list[str]) -> Tensor:
        """Remember where to note it."""
        ctx.order = order
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Note the backward pass."""
        ctx.order.append("B")
        return gradients[0], None


class _NotedStage(nn.Module):
    """A stage that notes its passes."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.order, self.sizes = inner, list[str](), list[int]()

    def forward(self, inputs: Tensor) -> Tensor:
        """Note the pass, then compute."""
        self.order.append("F")
        self.sizes.append(len(inputs))
        marked: Tensor = _Mark.apply(self.inner(inputs), self.order)
        return marked


def _stages(ranks: int) -> list[nn.Sequential]:
    torch.manual_seed(case_seed(0))
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(ranks)]


def _batch(case: _Case, seed: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(case.examples, WIDTH, generator=random), torch.randn(case.examples, WIDTH, generator=random)


@contextlib.contextmanager
def _noting_messages(sent: list[tuple[int, int]]) -> Iterator[None]:
    """Note each message that this rank sends, by whichever function of torch.distributed."""
    group: Any = dist.group.WORLD
    send = group.send

    def noted(tensors: list[Tensor], to: int, tag: int) -> Any:
        sent.append((to, tensors[0].numel() // WIDTH))
        return send(tensors, to, tag)

    group.send = noted
    try:
        yield
    finally:
        group.send = send


def _step_on_rank(answer: Callable[..., object], case: _Case, seed: int) -> _Step:
    """Call the student's function; ranks that must not use the inputs or the targets get tensors full of NaN."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    inputs, targets = _batch(case, seed)
    stage, sent = _NotedStage(_stages(case.ranks)[rank]), list[tuple[int, int]]()
    inputs = inputs if rank == 0 else torch.full_like(inputs, torch.nan)
    targets = targets if rank == last else torch.full_like(targets, torch.nan)
    with _noting_messages(sent):
        answer(stage, inputs, targets, case.micro_batches)
    gradients = {n: p.grad.numpy() for n, p in stage.inner.named_parameters() if p.grad is not None}
    return _Step("".join(stage.order), stage.sizes, sent, gradients)


def _serial(case: _Case, seed: int, sizes: Sequence[int], weights: Sequence[float]) -> list[Gradients]:
    """The gradients of each stage in one process, where each micro-batch's mean loss has a weight."""
    stages = _stages(case.ranks)
    whole, (inputs, targets) = nn.Sequential(*stages), _batch(case, seed)
    for x, y, weight in zip(inputs.split(list(sizes)), targets.split(list(sizes)), weights, strict=True):
        (weight * nn.functional.mse_loss(whole(x), y)).backward()
    return [{n: p.grad.numpy() for n, p in stage.named_parameters() if p.grad is not None} for stage in stages]


def _run(answer: Any, on: OnRanks, case: _Case, seed: int) -> list[_Step]:
    no_batch = (
        f"{case}: a rank asked for a micro-batch that does not exist",
        "the warm-up has at most as many forward passes as there are micro-batches",
    )
    no_gradient = (
        f"{case}: a `.grad` is None: what a rank receives does not require a gradient",
        "let it require one, with requires_grad_(), before `stage` sees it",
    )
    with explaining({"NoneType": no_gradient, "IndexError": no_batch, "StopIteration": no_batch}):
        return on(case.ranks, _step_on_rank, answer, case, seed)


def _judge_step(steps: Sequence[_Step], case: _Case, seed: int) -> None:
    """Check passes, messages and gradients, which GPipe and 1F1B have in common."""
    m, last = case.micro_batches, case.ranks - 1
    for rank, step in enumerate(steps):
        details = (f"passes of rank {rank}, in order: {step.order or 'none'}",)
        if step.order.count("F") != m or sum(step.sizes) != case.examples:
            chunked = len(torch.empty(case.examples).chunk(m)) < m
            raise AnswerError(
                f"{case}: rank {rank} ran {step.order.count('F')} forward with {sum(step.sizes)} examples in all: expected one "
                f"per micro-batch, {m}{CHUNKED if chunked else ''}",
                *details,
                cure="`tensor_split(m)` always gives m parts" if chunked else "",
            )
        if step.order.count("B") != m:
            raise AnswerError(
                f"{case}: rank {rank} ran {m} forward passes but {step.order.count('B')} backward: every micro-batch needs its "
                "own",
                *details,
                cure="so do those that are still in the pipeline when the last forward pass is over",
            )
        expected = sorted([(rank + 1, n) for n in step.sizes if rank < last] + [(rank - 1, n) for n in step.sizes if rank > 0])
        if sorted(step.sent) != expected:
            raise AnswerError(
                f"{case}: rank {rank} sent {counted(len(step.sent), 'message')}, expected {len(expected)}: one activation to "
                "the next rank and one gradient to the previous rank per micro-batch",
                f"receiver and number of examples of each: {step.sent}",
            )
    _judge_gradients(steps, case, seed, steps[0].sizes)


def _judge_gradients(steps: Sequence[_Step], case: _Case, seed: int, sizes: Sequence[int]) -> None:
    m, got = case.micro_batches, [step.gradients for step in steps]
    expected = _serial(case, seed, sizes, [n / case.examples for n in sizes])
    if any(np.isnan(array).any() for gradients in got for array in gradients.values()):
        raise AnswerError(
            f"{case}: the gradients are not numbers. Only rank 0 may use `inputs`, and only the last rank `targets`",
            cure="the other ranks receive what they need from their neighbours",
        )
    ends = [0.0] * (m - 1) + [sizes[-1] / case.examples]
    weigh = "weight each micro-batch's mean loss by its share of the examples"
    weights: dict[Hint, Sequence[float]] = {
        ("the micro-batches' mean losses were added up", weigh): [1.0] * m,
        ("every micro-batch counts the same, however few examples it has", weigh): [1 / m] * m,
        (
            "only the last micro-batch's gradients are left",
            "gradients add up in .grad, so nothing may clear it in between",
        ): ends,
        ("the losses are neither divided by the number of examples nor means", weigh): list(sizes),
    }
    mistakes = {hint: _serial(case, seed, sizes, [float(w) for w in tried]) for hint, tried in weights.items()}
    judge_result(got, expected, mistakes, "", same=lambda a, b: not any(map(differ, ([one] for one in a), b)))
    wrong = [r for r in range(case.ranks) if differ([got[r]], expected[r])]
    if not wrong:
        return
    if wrong == list(range(case.ranks - 1)):
        raise AnswerError(
            f"{case}: the last rank's gradients are right and those before it are not. Which gradient do you send back, and from "
            "which one does your backward pass start?",
            cure="send back the gradient of your stage's input (the `.grad` of what you received), and start your backward pass "
            "from the gradient that you receive",
        )
    compare([got[wrong[0]]], expected[wrong[0]], subject=f"{case}: the gradients of rank {wrong[0]}")


CASES = (_Case(3, 7, 3), _Case(4, 11, 4), _Case(2, 10, 4), _Case(1, 5, 2), _Case(4, 5, 2))


@exercise(
    LESSON,
    "gpipe_step(stage, inputs, targets, micro_batches) runs on every rank: all forward passes, then all backward passes. "
    "Afterwards the .grad of the stage's parameters is that of mse_loss over the whole batch.",
    "On 1 to 4 ranks the gradients are those of one process, with one message per micro-batch and direction.",
)
def _gpipe_step(answer: Any, on: OnRanks) -> None:
    seed = int(torch.seed() % 2**31)
    for case in CASES[:4]:
        with showing(f"gpipe_step(stage, inputs, targets, {case.micro_batches}) on {counted(case.ranks, 'rank')}"):
            _judge_gpipe(_run(answer, on, case, seed), case, seed)


def _judge_gpipe(steps: Sequence[_Step], case: _Case, seed: int) -> None:
    _judge_step(steps, case, seed)
    for rank, step in enumerate(steps):
        if step.order == "F" * case.micro_batches + "B" * case.micro_batches:
            continue
        passes = f"passes of rank {rank}, in order: {step.order}"
        if steps[0].peak == 1:
            raise AnswerError(
                f"{case}: the gradients are right, but a micro-batch comes back before the next one starts, so only one "
                "rank works at a time",
                passes,
                cure="run all forward passes first",
            )
        raise AnswerError(f"{case}: GPipe runs all forward passes before the first backward pass", passes)


@exercise(
    LESSON,
    "one_f_one_b_step(stage, inputs, targets, micro_batches) does the same in the order of 1F1B: no rank holds the "
    "activations of more micro-batches than there are stages.",
    "On 1 to 4 ranks: the gradients of one process, one message per micro-batch and direction, at most s live activations.",
)
def _one_f_one_b_step(answer: Any, on: OnRanks) -> None:
    seed = int(torch.seed() % 2**31)
    for case in (_Case(2, 10, 5), _Case(4, 13, 6), *CASES[3:], _Case(3, 7, 3)):
        with showing(f"one_f_one_b_step(stage, inputs, targets, {case.micro_batches}) on {counted(case.ranks, 'rank')}"):
            _judge_one_f_one_b(answer, on, case, seed)


def _judge_one_f_one_b(answer: Any, on: OnRanks, case: _Case, seed: int) -> None:
    try:
        steps = _run(answer, on, case, seed)
    except AnswerError as wrong:
        if not wrong.waits_in:
            raise
        raise AnswerError(
            f"{wrong.message}. In the steady state a rank sends an activation while its neighbour sends a gradient: if both "
            "use dist.send, each waits until the other receives",
            str(case),
            *wrong.details,
            cure="use dist.isend, and wait for it at the end",
        ) from None
    _judge_step(steps, case, seed)
    for rank, step in enumerate(steps):
        fill = min(case.micro_batches, case.ranks - rank)
        passes = f"passes of rank {rank}, in order: {step.order}"
        if step.peak > case.ranks:
            raise AnswerError(
                f"{case}: the gradients are right, but rank {rank} holds the activations of {step.peak} micro-batches at "
                f"once, as in GPipe. In 1F1B at most {case.ranks}, the number of stages",
                passes,
                cure="after the warm-up, each forward pass is followed by a backward pass",
            )
        if step.order.index("B") < fill:
            raise AnswerError(
                f"{case}: the gradients are right, but the pipeline never fills: rank {rank} starts its first "
                "backward pass too early",
                passes,
                cure=f"let {fill} forward passes come before it, here {step.order.index('B')} did",
            )
