"""The exercises of lesson 08: the gain of overlapping, two workers at once, a step across processes."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed.rpc as rpc
from torch import Tensor, nn

from labkit.errors.lists import counted
from labkit.teaching.exercises.comparisons import TOLERANCE, Hint, compare, equal, expect_numbers, wrong_if
from labkit.teaching.exercises.exercise import Results, exercise
from labkit.teaching.exercises.random_state import case_seed
from labkit.teaching.exercises.rpc_waits import MEET_S, Meeting, happens_within
from labkit.worker.comm.backward import context_id

LESSON = "08_rpc_hybrid"


@exercise(
    LESSON, "One part through both workers, and behind it the rest at the pace of the slower one.",
    # 5 parts first: with 2, half of something may be the time of a part.
    [(10.0, 4.0, 5), (10.0, 4.0, 2), (4.0, 10.0, 2), (6.0, 6.0, 4), (16.0, 0.5, 8), (10.0, 4.0, 1)],
    other=lambda random: (random.uniform(1, 20), random.uniform(1, 20), random.randint(3, 9)),
)
def overlapped_time(answer: Any, first: float, second: float, parts: int) -> None:
    """overlapped_time(first, second, parts): two workers that follow each other need `first` and `second` for
    the whole batch; return the time from end to end when the batch is cut in equal parts and everything
    overlaps that can."""
    both, slower, faster = first + second, max(first, second), min(first, second)
    distinct = parts > 1 and first != second
    expect_numbers(answer(first, second, parts), (both + (parts - 1) * slower) / parts, [
        (both, "that is the time of the whole batch without any overlap"),
        (slower,
         "the slower worker alone takes that long; it also waits for its first part, or the other finishes "
         "later"),
        (both + (parts - 1) * slower, "`first` and `second` belong to the whole batch",
         "a part takes 1/parts of them"),
        (parts * both - faster, "`first` and `second` belong to the whole batch, not to a part",
         "a part takes 1/parts of them"),
        ((both + (parts - 1) * faster) / parts, "the slower worker sets the pace, not the faster one"),
        (both / parts,
         "that is how long one part takes through both workers; the other parts follow it"),
        (both - faster / 2, "that is right for two parts, but the number of parts differs here"),
    ] if distinct else [], "that is not the time at which the last part ends")


NAMES = ["master", "worker1", "worker2"]
BATCH = 6


def _network() -> nn.Sequential:
    torch.manual_seed(case_seed(0))
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def _batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, 4, generator=generator), torch.randint(3, (BATCH,), generator=generator)


def _seed(random: Random) -> list[tuple[int]]:
    return [(random.getrandbits(30),)]


class _Half(nn.Module):
    """A module on a worker; its forward waits for the other half, then computes."""

    def __init__(self, meeting: Any) -> None:
        super().__init__()
        self.net, self.meeting = _network(), meeting

    def forward(self, x: Tensor) -> Tensor:
        """Wait for the other half, then compute."""
        self.meeting.rpc_sync(timeout=0).arrive(rpc.get_worker_info().name, len(x))
        out: Tensor = self.net(x)
        return out


def _both_on_rank(answer: Callable[..., Any], seed: int) -> Any:
    """Return what the master observed: the result, each call's worker and its examples, and `alone`."""
    if rpc.get_worker_info().name != "master":
        return None
    meeting = Meeting(len(NAMES) - 1)
    own = rpc.RRef(meeting)
    workers = [rpc.remote(name, _Half, args=(own,)) for name in NAMES[1:]]
    inputs, _ = _batch(seed)
    result = answer(workers, inputs)
    shown: Any = result.detach() if isinstance(result, Tensor) else type(result).__name__
    if isinstance(result, (list, tuple)):
        shown = [type(part).__name__ for part in result]
    return shown, meeting.visits, meeting.alone


@exercise(
    LESSON, "Both workers computed at the same time, each one half, and the scores are in order.",
    _seed, on_ranks=_both_on_rank, ranks=NAMES, runtime="rpc", call="both_workers(workers, images)",
    errors={"PyRRef' object": (
        "an RRef is not the module, which lives on its worker",
        "call a method there, as in workers[0].rpc_async().forward(half)",
    )},
)
def both_workers(results: Results, seed: int) -> None:
    """both_workers(workers, images) runs on the master: cut the batch in two, let the two remote modules
    (RRefs) compute their halves at the same time, and return the scores of the whole batch in order."""
    result, visits, alone = results[0]
    right = _network()(_batch(seed)[0]).detach()
    arrived, got = {name for name, _ in visits}, [f"{name} got {size} examples" for name, size in visits]
    kinds = sorted(set(result)) if isinstance(result, list) else []
    # A list is probably one of futures that were not waited for, so `arrived` may be incomplete.
    wrong_if(isinstance(result, list), f"the answer is a list of {' and '.join(kinds)}: expected one tensor",
             "wait for the parts and join them into one tensor with torch.cat")
    only = " and ".join(sorted(arrived)) or "the master"
    wrong_if(arrived != set(NAMES[1:]), f"only {only} worked: each worker gets one half", "", *got)
    wrong_if(isinstance(result, str),
             f"the answer is a {result}: expected one tensor with the scores of the whole batch, in order")
    wrong_if(alone,
             "the second worker started only when the first had finished: rpc_sync waits, and so does a "
             "wait() right after rpc_async", "", *got)
    wrong_if(max(size for _, size in visits) > BATCH // 2, "a worker got more than its half of the batch",
             "cut it with chunk(2)", *got)
    wrong_if(result.shape != right.shape, "the result has the wrong shape",
             "join the two parts along the batch with torch.cat",
             f"given {tuple(result.shape)}, expected {tuple(right.shape)}")
    wrong_if(torch.allclose(result, right.roll(BATCH // 2, 0), atol=1e-5),
             "the halves are joined in the wrong order: the first half of the batch comes first, even if it "
             "finishes last")
    wrong_if(not torch.allclose(result, right, atol=1e-5),
             "the scores are not those of the whole batch in one process")


class _Part:
    """A part of the model, on a worker."""

    def __init__(self, first: bool) -> None:
        # A warning about DistributedOptimizer's implementation, which would be printed above every verdict.
        deprecated = ".*TorchScript.* support for functional optimizers is deprecated"
        warnings.filterwarnings("ignore", message=deprecated)
        self.net = _network()[:2] if first else _network()[2:]
        self._lock = threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        """Compute this part."""
        out: Tensor = self.net(x)
        return out

    def parameter_rrefs(self) -> list[Any]:
        """Return references to this part's parameters, for DistributedOptimizer."""
        return [rpc.RRef(p) for p in self.net.parameters()]

    def values(self) -> list[Tensor]:
        """Return copies of this part's parameters."""
        return [p.detach().clone() for p in self.net.parameters()]


RATE = 0.5
LOCAL_BACKWARD = "INTERNAL ASSERT"  # torch's message
REUSED = "a context holds the parts of two batches"
OUTSIDE = (
    "the forward pass was outside a context, so its calls were not recorded and no gradient can be sent back",
    "forward, backward and step belong under one `with dist_autograd.context()`",
)
MISTAKES: dict[str, Hint] = {  # parts of torch's messages, and what they mean here
    "can only optimize Tensors": (
        "an optimizer of torch.optim needs the parameters themselves, which are on the workers",
        "DistributedOptimizer(torch.optim.SGD, references, lr=rate, momentum=0.9) takes references to them",
    ),
    "missing 1 required positional argument: 'context_id'": (
        "the gradients are in a context, which the optimizer does not know",
        "in `with dist_autograd.context() as context:`, call dist_autograd.backward(context, [loss]) and "
        "optimizer.step(context)",
    ),
    "no attribute 'zero_grad'":
        "zero_grad is not needed: the gradients of a batch are in its context, and end with it",
    "len() of a 0-d tensor": ("dist_autograd.backward takes a list of losses",
                              "write backward(context, [loss])"),
    "Could not find autograd context": (
        "the context ends with its `with` block, and the gradients with it",
        "optimizer.step(context) belongs inside",
    ),
    "torch.futures.Future": (
        "a future cannot be sent to another process", "a reference can: shard1.remote().forward(part)",
    ),
    "PyRRef' object": ("an RRef is not the shard",
                       "call a method there, as in shard1.remote().forward(part)"),
    LOCAL_BACKWARD: ("loss.backward() cannot leave this process",
                     "use dist_autograd.backward(context, [loss])"),
    REUSED: ("the gradients of earlier batches are still in this context", "each batch needs a new one"),
}


def _step_on_rank(answer: Callable[..., Any], seed: int) -> Any:
    """Return the remote parameters after the student's step; None if it was outside a context."""
    if rpc.get_worker_info().name != "master":
        return None
    from torch.distributed.optim import DistributedOptimizer

    parts = [rpc.remote(name, _Part, args=(i == 0,)) for i, name in enumerate(NAMES[1:])]
    references = [p for part in parts for p in part.rpc_sync().parameter_rrefs()]
    optimizer = DistributedOptimizer(torch.optim.SGD, references, lr=RATE)
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
    except RuntimeError as error:
        if any(outside) and not any(part in str(error) for part in MISTAKES if part != LOCAL_BACKWARD):
            return None
        raise
    after = [value for part in parts for value in part.rpc_sync().values()]
    if any(outside) and all(torch.equal(a, b) for a, b in zip(after, before, strict=True)):
        return None
    return [value.numpy() for value in after]


@exercise(
    LESSON, "One step over three processes, equal to the step of a single process.",
    _seed, on_ranks=_step_on_rank, ranks=NAMES, runtime="rpc", errors=MISTAKES,
    call="distributed_step(forward, optimizer, images, labels)",
)
def distributed_step(results: Results, seed: int) -> None:
    """distributed_step(forward, optimizer, images, labels) runs on the master: one training step with
    cross-entropy, in which forward(images) passes through modules on two workers, and optimizer is a
    DistributedOptimizer."""
    after = results[0]
    wrong_if(after is None, *OUTSIDE)
    model, (inputs, labels) = _network(), _batch(seed)
    before = [p.detach().clone().numpy() for p in model.parameters()]
    nn.functional.cross_entropy(model(inputs), labels).backward()
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    steps = {name: (b - a) / RATE for name, a, b in zip(gradients, after, before, strict=True)}
    wrong_if(not any(step.any() for step in steps.values()), "the parameters on the workers have not changed",
             "optimizer.step(context_id) applies the gradients that dist_autograd.backward(context_id, "
             "[loss]) has stored in that context")
    compare([steps], gradients, subject="the steps of the remote parameters", causes={
        -1.0: "have the wrong sign",
        float(BATCH): f"belong to the summed loss of {BATCH} examples, not to their mean",
    })


MOMENTUM = 0.9


class _Shard1(_Part):
    """The first shard: a part of a batch waits until the other parts of that batch are there as well.

    It refuses a context that holds more than one batch: `dist_autograd.backward` would wait for ever for
    gradients of the batch before.
    """

    def __init__(self, parts: int) -> None:
        super().__init__(first=True)
        self.parts, self.sizes, self.alone = parts, list[int](), False
        self.contexts: Counter[int | None] = Counter()
        self._arrived = threading.Condition()

    def forward(self, x: Tensor) -> Tensor:
        """Wait for the other parts of the batch, then compute; set `alone` if that takes over `MEET_S`."""
        context = context_id()
        with self._arrived:
            self.contexts[context] += 1
            if context is not None and self.contexts[context] > self.parts:
                raise ValueError(REUSED)
            self.sizes.append(len(x))
            wanted = -(-len(self.sizes) // self.parts) * self.parts
            self._arrived.notify_all()

        def wait(limit_s: float) -> bool:
            with self._arrived:
                return self._arrived.wait_for(lambda: len(self.sizes) >= wanted or self.alone, limit_s)

        if not self.alone and not happens_within(MEET_S, wait):
            with self._arrived:
                self.alone = True
                self._arrived.notify_all()
        with self._lock:
            out: Tensor = self.net(x)
        return out

    def seen(self) -> tuple[list[int], bool, bool]:
        """Return the sizes of the parts, and whether one was sent after another ended, or had no context."""
        return self.sizes, self.alone, self.contexts[None] > 0


class _Shard2(_Part):
    """The second shard: fetches features by reference; notes what it was given instead."""

    def __init__(self) -> None:
        super().__init__(first=False)
        self.calls: list[int] = []
        self.tensors = 0

    def score(self, *features: Any) -> Tensor:
        """Return the scores of all parts, in order."""
        with self._lock:
            self.calls.append(len(features))
            self.tensors += sum(isinstance(part, Tensor) for part in features)
            parts = [part if isinstance(part, Tensor) else part.to_here() for part in features]
            return torch.cat([self.net(part) for part in parts])

    def seen(self) -> tuple[list[int], int]:
        """Return the number of parts in each call, and how many of them were tensors, not references."""
        return self.calls, self.tensors


class _Seen(NamedTuple):
    """What happened on the three processes."""

    losses: list[Any] | str  # the answer, or the name of its type
    values: list[np.ndarray]  # all parameters, after the training
    sizes: list[int]  # of the parts that arrived at shard 1
    alone: bool  # whether a part was sent only when another had been computed
    outside: bool  # whether a part came outside a context
    calls: list[int]  # for each call of `score` its number of parts
    tensors: int  # the parts that came to shard 2 as tensors


Batches = list[tuple[Tensor, Tensor]]


def _on_rank(answer: Callable[..., Any], batches: Batches, parts: int, rate: float) -> _Seen | None:
    if rpc.get_worker_info().name != "master":
        return None
    shard1, shard2 = rpc.remote("worker1", _Shard1, args=(parts,)), rpc.remote("worker2", _Shard2)
    result = answer(shard1, shard2, batches, parts, rate)
    losses: list[Any] | str = type(result).__name__
    if isinstance(result, (list, tuple)):
        losses = [one if isinstance(one, (int, float)) else type(one).__name__ for one in result]
    values = [value.numpy() for shard in (shard1, shard2) for value in shard.rpc_sync().values()]
    return _Seen(losses, values, *shard1.rpc_sync().seen(), *shard2.rpc_sync().seen())


def _serial(
    batches: Batches, rate: float, momentum: float = MOMENTUM
) -> tuple[list[float], list[np.ndarray]]:
    model, losses = _network(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)
    for x, y in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach().numpy() for p in model.parameters()]


def _batches(random: Random) -> list[tuple[Batches, int, float]]:
    generator = torch.Generator().manual_seed(random.getrandbits(30))
    cases = []
    for parts, sizes in ((2, (5, 6, 8)), (3, (7, 6, 8))):
        batches = [(torch.randn(n, 4, generator=generator), torch.arange(n) % 3) for n in sizes]
        cases.append((batches, parts, random.uniform(0.2, 0.4)))
    return cases


@exercise(
    LESSON,
    "All parts were under way at once, the features went straight to worker2, and the model is that of one "
    "process.",
    _batches, on_ranks=_on_rank, ranks=NAMES, runtime="rpc", errors=MISTAKES,
    call="hybrid_master(shard1, shard2, batches, {parts}, {rate:.3g})",
)
def hybrid_master(results: Results, batches: Batches, parts: int, rate: float) -> None:
    """hybrid_master(shard1, shard2, batches, parts, rate) runs on the master: train the two remote shards on
    all batches, each cut in parts that are under way at the same time; return the list of losses."""
    seen = results[0]
    wrong_if(not seen.sizes,
             "shard1.forward was never called: each part of a batch passes through shard 1 first")
    wanted = [len(part) for x, _ in batches for part in x.chunk(parts)]
    shown = f"sizes of the parts: given {seen.sizes}, expected {wanted}"
    wrong_if(sorted(seen.sizes) != sorted(wanted), f"{len(batches)} batches came to shard 1 in "
             f"{counted(len(seen.sizes), 'part')}; parts is {parts} here",
             "cut each batch with chunk(parts)", shown)
    wrong_if(seen.tensors, "the features came to the master, which sent them on: they travelled twice",
             "shard1.remote().forward(part) returns a reference; give that to shard2.score, and worker2 "
             "fetches the features from worker1", shown)
    wrong_if(seen.alone, "a part was sent only when another had been computed, so the workers took turns",
             "send all parts of a batch with remote first, then call score", shown)
    wrong_if(len(seen.calls) > len(batches),
             f"score was called {len(seen.calls)} times for {len(batches)} batches: dist_autograd may lose "
             "gradients when a worker answers twice in a context",
             "call it once per batch, with the references of all parts", shown)
    _judge_training(seen, batches, rate)


def _judge_training(seen: _Seen, batches: Batches, rate: float) -> None:
    losses, right = _serial(batches, rate)
    start = [p.detach().numpy() for p in _network().parameters()]
    one, other = (equal(seen.values[half], start[half], TOLERANCE) for half in (slice(0, 2), slice(2, 4)))
    both = "the optimizer needs references to the parameters of both shards"
    wrong_if(seen.outside, *OUTSIDE)
    wrong_if(one and other, "no parameter has changed",
             "in each context, call dist_autograd.backward(context, [loss]), then optimizer.step(context)")
    wrong_if(one, "the parameters of shard 1 have not changed", both)
    wrong_if(other, "the parameters of shard 2 have not changed", both)
    wrong_if(equal(seen.values, _serial(batches, rate, 0.0)[1], TOLERANCE), "there was no momentum",
             f"make one optimizer before the loop, with momentum={MOMENTUM}")
    gap = max(float(np.abs(a - b).max()) for a, b in zip(seen.values, right, strict=True))
    wrong_if(not equal(seen.values, right, TOLERANCE),
             "the parameters are not those of one process. The loss of a batch is the mean cross-entropy of "
             "all its examples", "", f"largest difference {gap:.3g}")
    shown = f"given {seen.losses}", f"expected {[round(loss, 4) for loss in losses]}"
    wrong_if(isinstance(seen.losses, str),
             f"the answer is a {seen.losses}: expected the list of losses, one number for each batch",
             "", *shown)
    kinds = sorted({loss for loss in seen.losses if isinstance(loss, str)})
    wrong_if(kinds, f"the list contains a {''.join(kinds[:1])} in place of a number",
             "loss.item() is the number",
             *shown)
    wrong_if(not equal(seen.losses, losses, within=1e-3),
             "the losses are not those of the batches, in order", "", *shown)
