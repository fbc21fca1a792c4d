"""The exercises of lesson 08: the gain of overlapping, two workers at once, and one training step across processes."""

from __future__ import annotations

import random
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.rpc as rpc
from torch import Tensor, nn

from labkit.comm.rpc_backward import context_id
from labkit.exercises.judging import AnswerError, Exercise, Hint, OnRanks, compare, number_of, showing
from labkit.exercises.known_mistakes import judge_result
from labkit.exercises.rpc_waits import happens_within

__all__ = ["EXERCISES"]

LESSON = "08_rpc_hybrid"


def _overlapped_time(answer: Any, _: OnRanks) -> str:
    # 5 parts first: with 2, half of something may be the time of a part.
    for first, second, parts in ((10.0, 4.0, 5), (10.0, 4.0, 2), (4.0, 10.0, 2), (6.0, 6.0, 4), (16.0, 0.5, 8), (10.0, 4.0, 1)):
        both, slower, faster = first + second, max(first, second), min(first, second)
        expected = (both + (parts - 1) * slower) / parts
        case = f"overlapped_time({first:g}, {second:g}, {parts})"
        with showing(case):
            given = number_of(answer(first, second, parts))
        mistakes = {
            "that is the time of the whole batch without any overlap": both,
            "the slower worker alone takes that long; it also waits for its first part, or the other finishes later": slower,
            ("`first` and `second` belong to the whole batch", "a part takes 1/parts of them"): both + (parts - 1) * slower,
            ("`first` and `second` belong to the whole batch, not to a part", "a part takes 1/parts of them"): parts * both
            - faster,
            "the slower worker sets the pace, not the faster one": (both + (parts - 1) * faster) / parts,
            "that is how long one part takes through both workers; the other parts follow it": both / parts,
            "that is right for two parts, but the number of parts differs here": both - faster / 2,
        }
        judge_result(
            given, expected, mistakes if parts > 1 and first != second else {},
            "that is not the time at which the last part ends",
            f"{case}: given {given:g}, expected {expected:g}", same=lambda a, b: abs(a - b) < 1e-9,
        )  # fmt: skip
    return "One part through both workers, and behind it the rest at the pace of the slower one."


NAMES = ["master", "worker1", "worker2"]
BOTH_S = 5.0  # seconds that the first half waits for the second; calls that overlap meet within milliseconds
BATCH = 6


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def _batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, 4, generator=generator), torch.randint(3, (BATCH,), generator=generator)


NOT_THE_MODULE = (
    "an RRef is not the module, which lives on its worker",
    "call a method there, as in workers[0].rpc_async().forward(half)",
)


class _Meeting:
    """An object on the master at which the two halves wait for each other."""

    def __init__(self) -> None:
        self.arrived: list[str] = []
        self.sizes: list[int] = []
        self.both = threading.Event()
        self.alone = False

    def wait_for_both(self, name: str, size: int) -> None:
        """Wait until both workers have started on a half; set `alone` if that takes longer than `BOTH_S`.

        Args:
            name: the worker that calls.
            size: the number of examples in its half.
        """
        self.arrived.append(name)
        self.sizes.append(size)
        if len(set(self.arrived)) == len(NAMES) - 1:
            self.both.set()
        if not happens_within(BOTH_S, self.both.wait):
            self.alone = True


class _Half(nn.Module):
    """A module on a worker; its forward waits for the other half, then computes."""

    def __init__(self, meeting: Any) -> None:
        super().__init__()
        self.net, self.meeting = _network(), meeting

    def forward(self, x: Tensor) -> Tensor:
        """Wait for the other half, then compute."""
        self.meeting.rpc_sync(timeout=0).wait_for_both(rpc.get_worker_info().name, len(x))
        out: Tensor = self.net(x)
        return out


def _both_on_rank(answer: Callable[..., Any], seed: int) -> Any:
    """Return what the master observed: the student's result, the workers that started, their examples, and `alone`."""
    if rpc.get_worker_info().name != "master":
        return None
    meeting = _Meeting()
    own = rpc.RRef(meeting)
    workers = [rpc.remote(name, _Half, args=(own,)) for name in NAMES[1:]]
    inputs, _ = _batch(seed)
    try:
        result = answer(workers, inputs)
    except (TypeError, AttributeError) as error:
        if "PyRRef' object" in str(error):
            return AnswerError(NOT_THE_MODULE)
        raise
    if isinstance(result, (list, tuple)):
        return [type(part).__name__ for part in result], meeting.arrived, meeting.sizes, meeting.alone
    shown = result.detach() if isinstance(result, Tensor) else type(result).__name__
    return shown, meeting.arrived, meeting.sizes, meeting.alone


def _both_workers(answer: Any, on: OnRanks) -> str:
    seed = random.randrange(1 << 30)
    seen = on(NAMES, _both_on_rank, answer, seed, runtime="rpc")[0]
    with showing("both_workers(workers, images)"):
        if isinstance(seen, AnswerError):
            raise seen
        result, arrived, sizes, alone = seen
        _judge_both(result, arrived, sizes, alone, seed)
    return "Both workers computed at the same time, each one half, and the scores are in order."


def _judge_both(result: Any, arrived: list[str], sizes: list[int], alone: bool, seed: int) -> None:
    expected = _network()(_batch(seed)[0]).detach()
    visits = [f"{name} got {size} examples" for name, size in zip(arrived, sizes, strict=True)]
    if isinstance(result, list):  # probably of futures that were not waited for, so `arrived` may be incomplete
        raise AnswerError(
            f"the answer is a list of {' and '.join(sorted(set(result)))}: expected one tensor",
            cure="wait for the parts and join them into one tensor with torch.cat",
        )
    if set(arrived) != set(NAMES[1:]):
        only = " and ".join(sorted(set(arrived))) or "the master"
        raise AnswerError(f"only {only} worked: each worker gets one half", *visits)
    if isinstance(result, str):
        raise AnswerError(f"the answer is a {result}: expected one tensor with the scores of the whole batch, in order")
    if alone:
        raise AnswerError(
            "the second worker started only when the first had finished: rpc_sync waits, and so does a wait() right after "
            "rpc_async",
            *visits,
        )
    if max(sizes) > BATCH // 2:
        raise AnswerError("a worker got more than its half of the batch", *visits, cure="cut it with chunk(2)")
    if result.shape != expected.shape:
        raise AnswerError(
            "the result has the wrong shape",
            f"given {tuple(result.shape)}, expected {tuple(expected.shape)}",
            cure="join the two parts along the batch with torch.cat",
        )
    halves = expected.chunk(2)
    if torch.allclose(result, torch.cat([halves[1], halves[0]]), atol=1e-5):
        raise AnswerError(
            "the halves are joined in the wrong order: the first half of the batch comes first, even if it finishes last"
        )
    if not torch.allclose(result, expected, atol=1e-5):
        raise AnswerError("the scores are not those of the whole batch in one process")


class _Remote(nn.Module):
    """A part of the model, on a worker.

    Args:
        first: whether it is the first part.
    """

    def __init__(self, first: bool) -> None:
        super().__init__()
        # A warning about DistributedOptimizer's implementation, which would be printed above every verdict.
        warnings.filterwarnings("ignore", message=".*TorchScript.* support for functional optimizers is deprecated")
        net = _network()
        self.part = net[:2] if first else net[2:]

    def forward(self, x: Tensor) -> Tensor:
        """Compute this part."""
        out: Tensor = self.part(x)
        return out

    def parameter_rrefs(self) -> list[Any]:
        """Return references to this part's parameters, for DistributedOptimizer."""
        return [rpc.RRef(p) for p in self.part.parameters()]

    def values(self) -> list[Tensor]:
        """Return copies of this part's parameters."""
        return [p.detach().clone() for p in self.part.parameters()]


RATE = 0.5
OUTSIDE = (
    "`forward` was called outside the context, so no messages were recorded and no gradient can be sent back",
    "forward, backward and step belong under one `with dist_autograd.context()`",
)
MISTAKES: dict[str, Hint] = {  # torch's messages, and what they mean here
    "missing 1 required positional argument: 'context_id'": (
        "the gradients are in a context, so the optimizer has to be given it",
        "in `with dist_autograd.context() as context:`, call dist_autograd.backward(context, [loss]) and optimizer.step(context)",
    ),
    "no attribute 'zero_grad'": "zero_grad is not needed: the gradients of a step are in its context, and end with it",
    "len() of a 0-d tensor": ("dist_autograd.backward takes a list of losses", "write backward(context, [loss])"),
    "Could not find autograd context": (
        "the context ends with its `with` block, and the gradients with it",
        "optimizer.step(context) belongs inside",
    ),
}
LOCAL_BACKWARD = "loss.backward() cannot leave this process", "use dist_autograd.backward(context_id, [loss])"


def _step_on_rank(answer: Callable[..., Any], seed: int) -> Any:
    """Return the remote parameters after one step of the student's function, or why there was none."""
    if rpc.get_worker_info().name != "master":
        return None
    from torch.distributed.optim import DistributedOptimizer

    parts = [rpc.remote(name, _Remote, args=(i == 0,)) for i, name in enumerate(NAMES[1:])]
    optimizer = DistributedOptimizer(torch.optim.SGD, [p for part in parts for p in part.rpc_sync().parameter_rrefs()], lr=RATE)

    outside: list[bool] = []

    def forward(inputs: Tensor) -> Tensor:
        outside.append(context_id() is None)
        x = inputs
        for part in parts:
            x = part.rpc_sync().forward(x)
        return x

    before = [value for part in parts for value in part.rpc_sync().values()]
    try:
        answer(forward, optimizer, *_batch(seed))
    except (RuntimeError, TypeError, AttributeError) as error:
        if explanation := next((meaning for message, meaning in MISTAKES.items() if message in str(error)), None):
            return AnswerError(explanation)
        if isinstance(error, RuntimeError) and any(outside):
            return AnswerError(OUTSIDE)
        if "INTERNAL ASSERT" in str(error):
            return AnswerError(LOCAL_BACKWARD)
        raise
    after = [value for part in parts for value in part.rpc_sync().values()]
    if any(outside) and all(torch.equal(a, b) for a, b in zip(after, before, strict=True)):
        return AnswerError(OUTSIDE)
    return [value.numpy() for value in after]


def _distributed_step(answer: Any, on: OnRanks) -> str:
    seed = random.randrange(1 << 30)
    after = on(NAMES, _step_on_rank, answer, seed, runtime="rpc")[0]
    with showing("distributed_step(forward, optimizer, images, labels)"):
        if isinstance(after, AnswerError):
            raise after
        _judge_remote_step(after, seed)
    return "One step over three processes, equal to the step of a single process."


def _judge_remote_step(after: list[Any], seed: int) -> None:
    model, (inputs, labels) = _network(), _batch(seed)
    names = [name for name, _ in model.named_parameters()]
    before = [p.detach().clone().numpy() for p in model.parameters()]
    nn.functional.cross_entropy(model(inputs), labels).backward()
    gradients = [p.grad.numpy() for p in model.parameters() if p.grad is not None]
    steps = {n: (b - a) / RATE for n, a, b in zip(names, after, before, strict=True)}
    if not any(step.any() for step in steps.values()):
        raise AnswerError(
            "the parameters on the workers have not changed",
            cure="optimizer.step(context_id) applies the gradients that dist_autograd.backward(context_id, [loss]) has stored in "
            "that context",
        )

    causes = {
        -1.0: "have the wrong sign",
        float(BATCH): f"belong to the summed loss of {BATCH} examples, not to their mean",
    }
    compare([steps], dict(zip(names, gradients, strict=True)), subject="the steps of the remote parameters", causes=causes)


EXERCISES = (
    Exercise(
        "overlapped_time",
        LESSON,
        "overlapped_time(first, second, parts): two workers that follow each other need `first` and `second` for the whole "
        "batch; return the time from end to end when the batch is cut in equal parts and everything overlaps that can.",
        _overlapped_time,
    ),
    Exercise(
        "both_workers",
        LESSON,
        "both_workers(workers, images) runs on the master: cut the batch in two, let the two remote modules (RRefs) compute "
        "their halves at the same time, and return the scores of the whole batch in order.",
        _both_workers,
    ),
    Exercise(
        "distributed_step",
        LESSON,
        "distributed_step(forward, optimizer, images, labels) runs on the master: one training step with cross-entropy, in which "
        "forward(images) passes through modules on two workers, and optimizer is a DistributedOptimizer.",
        _distributed_step,
    ),
)
