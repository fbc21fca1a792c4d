"""The exercise with a leaderboard, in lesson 02b: a step that is short on a slow link, with the same result.

The score is the simulated time of the step, so that it is the same on each machine and beside other programs.
The result is judged on real ranks, and both must communicate the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from labkit.costs.device import Device
from labkit.costs.link import Link
from labkit.errors.exceptions import LabError, RankError
from labkit.group.simulation.simulate import Simulation, simulate
from labkit.recording.record import steps
from labkit.teaching.exercises.answer_ranks import by_value
from labkit.teaching.exercises.comparisons import TOLERANCE, AnswerError, equal, expect, wrong_if
from labkit.teaching.exercises.exercise import exercise, judge_exchange
from labkit.teaching.exercises.random_state import case_seed
from labkit.tracing.trace import Trace

from .data_parallel import Gradients, gradients_of

LESSON = "02b_what_it_costs"
RANKS: Final = 4  # not two: there, factors coincide
LINK: Final = Link(gbit_per_s=1, latency_us=300)
DEVICE: Final = Device(tflop_per_s=0.005, gbyte_per_s=10, runs_ahead=False, name="a slow core")
LAYERS, WIDTH, EXAMPLES, STEPS = 8, 256, 64, 3  # examples of each rank in a step
# Forward and backward pass of a step; the first layer's backward pass computes no gradient of the inputs.
COMPUTE_MS: Final = 1e3 * DEVICE.seconds(2 * EXAMPLES * WIDTH**2 * (3 * LAYERS - 1), 0)
SIXTEEN_BITS: Final = 0.02  # relative; the largest error of gradients that travelled as float16 or bfloat16


def _model() -> nn.Sequential:
    torch.manual_seed(case_seed(0))
    return nn.Sequential(*itertools.chain(*((nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS))))


def _batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the inputs and targets of all ranks in each step."""
    random = torch.Generator().manual_seed(case_seed(1))
    for _ in range(STEPS):
        inputs, targets = torch.randn(2, RANKS * EXAMPLES, WIDTH, generator=random)
        yield inputs, targets


def _gradients_on_rank(answer: Callable[..., Any]) -> list[Gradients]:
    """Return the gradients after each step."""
    return list(_steps_on_rank(answer, gradients_of))


def _run_on_rank(answer: Callable[..., Any]) -> None:
    """Run the steps only: simulated tensors have no values."""
    list(_steps_on_rank(answer, lambda _: None))


def _steps_on_rank(answer: Callable[..., Any], after: Callable[[nn.Module], Any]) -> Iterator[Any]:
    model = _model()
    step = answer(model)
    if not callable(step):
        raise TypeError(f"fast_step(model) returned {type(step).__name__}: expected a function step(inputs, "
                        "targets)")
    own = [[part.chunk(RANKS)[dist.get_rank()].clone() for part in both] for both in _batches()]
    for inputs, targets in steps(own):
        model.zero_grad()
        step(inputs, targets)
        yield after(model)


def _serial(parts: int = 1, part: int = 0, divide: float = 1) -> list[Gradients]:
    """Return the gradients of one process that has one of several equal parts of each batch."""
    found = []
    for both in _batches():
        model = _model()
        inputs, targets = (each.chunk(parts)[part] for each in both)
        (functional.mse_loss(model(inputs), targets) / divide).backward()
        found.append(gradients_of(model))
    return found


@exercise(
    LESSON, "The gradients are those of one process with the whole batch. A step takes {score:.1f} ms "
    "(simulated).",
    call=f"fast_step(model) and {STEPS} steps on {RANKS} ranks",
)
def fast_step(answer: Any) -> float:
    """fast_step(model) returns a function step(inputs, targets) that gives every parameter the gradient of
    F.mse_loss(model(inputs), targets), averaged over the ranks. Who has the shortest step, on 4 ranks over 1
    Gbit/s with a latency of 300 µs?"""
    results = answer.on(RANKS, _gradients_on_rank, answer, link=LINK)
    wrong_if(any(not gradients for of_rank in results for gradients in of_rank),
             "no parameter has a gradient after the step: does it call backward()?")
    right, summed, divided = _serial(), _serial(divide=1 / RANKS), _serial(divide=RANKS)
    for rank, given in enumerate(results):
        own = _serial(RANKS, rank)
        difference = _largest_difference(given, right)
        otherwise = (
            "the gradients are not those of one process with the whole batch",
            "compare with an all_reduce of each gradient after backward(). Is every operation awaited before "
            "its tensor is read?",
        )
        if TOLERANCE < difference < SIXTEEN_BITS:
            otherwise = (
                "the gradients are nearly right: some of their digits were lost on the way",
                "the differences may be 1/10,000 of the largest gradient; numbers of 16 bits lose more",
            )
        expect(given, right, [
            (own, "the gradients are those of this rank's own examples", "average them over the ranks"),
            (summed, "the gradients were summed over the ranks, not averaged",
             "divide by the number of ranks"),
            (divided, "the gradients were divided by the number of ranks twice",
             "DDP and ReduceOp.AVG divide already"),
            ([own[0], *right[:-1]], "the gradients are those of the step before",
             "wait() for each operation before the step returns"),
        ], *otherwise, f"largest difference on rank {rank}: {difference:.1g} of the largest gradient",
               same=partial(equal, within=TOLERANCE))
    judge_exchange(results, STEPS * 2 * EXAMPLES * WIDTH * 4)
    simulated = _simulated(answer.answer)
    wrong_if(_communication(simulated.trace) != _communication(results.trace),
             "the simulated ranks communicate otherwise than the real ones: what does the step depend on?")
    wrong_if(simulated.step_ms < COMPUTE_MS,
             "the simulated step computes less than forward and backward pass need", "",
             f"{simulated.step_ms:.1f} ms, but {COMPUTE_MS:.1f} ms for both without communication")
    return simulated.step_ms


def _simulated(answer: Any) -> Simulation:
    try:
        with by_value():
            return simulate(_run_on_rank, answer, ranks=RANKS, link=LINK, device=DEVICE)
    except RankError:
        raise
    except LabError as error:
        raise AnswerError(f"the step cannot be simulated: {error}") from None


def _communication(trace: Trace) -> list[tuple[str, int]]:
    return [(span.name, span.nbytes) for span in trace.filter(rank=0, kind="communication").spans]


def _largest_difference(given: list[Gradients], right: list[Gradients]) -> float:
    return max(
        float(abs(one[name] - array).max() / abs(array).max())
        if name in one and one[name].shape == array.shape else 1.0
        for one, other in zip(given, right, strict=True)
        for name, array in other.items()
    )
