"""The last exercise of lesson 08: the program of a master that trains a model split over two workers."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed.rpc as rpc
from torch import Tensor, nn

from labkit.comm.rpc_backward import context_id
from labkit.errors.lists import counted
from labkit.exercises.judging import AnswerError, Exercise, Hint, OnRanks, showing
from labkit.exercises.rpc_waits import happens_within

__all__ = ["EXERCISES"]

LESSON = "08_rpc_hybrid"
NAMES = ["master", "worker1", "worker2"]
MEET_S = 5.0  # that the first part of a batch waits for the others; parts that are sent at once meet within milliseconds
MOMENTUM = 0.9
CLOSE = 1e-4  # absolute; the mistakes below move some parameter by 1e-2 and more

REUSED = "a context holds the parts of two batches"
OUTSIDE = (
    "the forward pass was outside a context, so its calls were not recorded",
    "forward, backward and step belong under one `with dist_autograd.context()`",
)
MISTAKES: dict[str, Hint] = {  # parts of torch's messages, and what they mean here
    "can only optimize Tensors": (
        "an optimizer of torch.optim needs the parameters themselves, which are on the workers",
        "DistributedOptimizer(torch.optim.SGD, references, lr=rate, momentum=0.9) takes references to them",
    ),
    "missing 1 required positional argument: 'context_id'": (
        "the gradients are in a context, which the optimizer does not know",
        "optimizer.step(context) needs it",
    ),
    "no attribute 'zero_grad'": "zero_grad is not needed: the gradients of a batch end with its context",
    "len() of a 0-d tensor": ("dist_autograd.backward takes a list of losses", "write backward(context, [loss])"),
    "Could not find autograd context": ("the context ends with its `with` block", "optimizer.step(context) belongs inside"),
    "torch.futures.Future": ("a future cannot be sent to another process", "a reference can: shard1.remote().forward(part)"),
    "PyRRef' object": ("an RRef is not the shard", "call a method there, as in shard1.remote().forward(part)"),
    "INTERNAL ASSERT": ("loss.backward() cannot leave the master", "use dist_autograd.backward(context, [loss])"),
    REUSED: ("the gradients of earlier batches are still in this context", "each batch needs a new one"),
}


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


class _Shard:
    """What both shards share: their parameters.

    Args:
        net: the part of the model.
    """

    def __init__(self, net: nn.Module) -> None:
        # A warning about DistributedOptimizer's implementation, which would be printed above every verdict.
        warnings.filterwarnings("ignore", message=".*TorchScript.* support for functional optimizers is deprecated")
        self.net = net
        self._lock = threading.Lock()

    def parameter_rrefs(self) -> list[Any]:
        """Return references to the parameters, for DistributedOptimizer."""
        return [rpc.RRef(p) for p in self.net.parameters()]

    def values(self) -> list[Tensor]:
        """Return copies of the parameters."""
        return [p.detach().clone() for p in self.net.parameters()]


class _Shard1(_Shard):
    """The first shard: a part of a batch waits until the other parts of that batch are there as well.

    It refuses a context that holds more than one batch: `dist_autograd.backward` would wait for ever for gradients of
    the batch before.

    Args:
        parts: the number of parts that a batch has.
    """

    def __init__(self, parts: int) -> None:
        super().__init__(_network()[:2])
        self.parts, self.sizes, self.alone = parts, list[int](), False
        self.contexts: Counter[int | None] = Counter()
        self._arrived = threading.Condition()

    def forward(self, x: Tensor) -> Tensor:
        """Wait for the other parts of the batch, then compute; set `alone` if they take longer than `MEET_S`."""
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
        """Return the sizes of the parts, whether one was sent after another ended, and whether one had no context."""
        return self.sizes, self.alone, self.contexts[None] > 0


class _Shard2(_Shard):
    """The second shard: fetches features by reference; notes what it was given instead."""

    def __init__(self) -> None:
        super().__init__(_network()[2:])
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
        """Return the number of parts in each call, and how many of them were tensors instead of references."""
        return self.calls, self.tensors


class _Seen(NamedTuple):
    """What happened on the three processes.

    Args:
        losses: the answer, or the name of its type.
        values: all parameters, after the training.
        sizes: of the parts that arrived at shard 1.
        alone: whether a part was sent only when another had been computed.
        outside: whether a part came outside a context.
        calls: for each call of `score` its number of parts.
        tensors: the parts that came to shard 2 as tensors.
    """

    losses: list[Any] | str
    values: list[np.ndarray]
    sizes: list[int]
    alone: bool
    outside: bool
    calls: list[int]
    tensors: int


Batches = list[tuple[Tensor, Tensor]]


def _on_rank(answer: Callable[..., Any], batches: Batches, parts: int, rate: float) -> _Seen | AnswerError | None:
    if rpc.get_worker_info().name != "master":
        return None
    shard1, shard2 = rpc.remote("worker1", _Shard1, args=(parts,)), rpc.remote("worker2", _Shard2)
    try:
        result = answer(shard1, shard2, batches, parts, rate)
    except (TypeError, AttributeError, RuntimeError, ValueError) as error:
        if meaning := next((meaning for part, meaning in MISTAKES.items() if part in str(error)), None):
            return AnswerError(meaning)
        raise
    losses: list[Any] | str = type(result).__name__
    if isinstance(result, (list, tuple)):
        losses = [one if isinstance(one, (int, float)) else type(one).__name__ for one in result]
    values = [value.numpy() for shard in (shard1, shard2) for value in shard.rpc_sync().values()]
    return _Seen(losses, values, *shard1.rpc_sync().seen(), *shard2.rpc_sync().seen())


def _serial(batches: Batches, rate: float, momentum: float = MOMENTUM) -> tuple[list[float], list[np.ndarray]]:
    model, losses = _network(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)
    for x, y in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach().numpy() for p in model.parameters()]


def _hybrid_master(answer: Any, on: OnRanks) -> str:
    random = np.random.default_rng()
    torch_random = torch.Generator().manual_seed(int(random.integers(1 << 30)))
    for parts, sizes in ((2, (5, 6, 8)), (3, (7, 6, 8))):
        batches = [(torch.randn(n, 4, generator=torch_random), torch.arange(n) % 3) for n in sizes]
        rate = float(random.uniform(0.2, 0.4))
        seen = on(NAMES, _on_rank, answer, batches, parts, rate, runtime="rpc")[0]
        with showing(f"hybrid_master(shard1, shard2, batches, {parts}, {rate:.3g})"):
            if isinstance(seen, AnswerError):
                raise seen
            _judge(seen, batches, parts, rate)
    return "All parts were under way at once, the features went straight to worker2, and the model is that of one process."


def _judge(seen: _Seen, batches: Batches, parts: int, rate: float) -> None:
    if not seen.sizes:
        raise AnswerError("shard1.forward was never called: each part of a batch passes through shard 1 first")
    wanted = [len(part) for x, _ in batches for part in x.chunk(parts)]
    if sorted(seen.sizes) != sorted(wanted):
        raise AnswerError(
            f"{len(batches)} batches came to shard 1 in {counted(len(seen.sizes), 'part')}; parts is {parts} here",
            f"sizes given {seen.sizes}, expected {wanted}",
            cure="cut each batch with chunk(parts)",
        )
    if seen.tensors:
        raise AnswerError(
            "the features came to the master, which sent them on: they travelled twice",
            cure="shard1.remote().forward(part) returns a reference; give that to shard2.score, and worker2 fetches the features "
            "from worker1",
        )
    if seen.alone:
        raise AnswerError(
            "a part was sent only when another had been computed, so the workers took turns",
            cure="send all parts of a batch with remote first, then call score",
        )
    if len(seen.calls) > len(batches):
        raise AnswerError(
            f"score was called {len(seen.calls)} times for {len(batches)} batches: dist_autograd may lose gradients when a "
            "worker answers twice in a context",
            cure="call it once per batch, with the references of all parts",
        )
    _judge_training(seen, batches, rate)


def _judge_training(seen: _Seen, batches: Batches, rate: float) -> None:
    losses, expected = _serial(batches, rate)
    start = [p.detach().numpy() for p in _network().parameters()]
    if seen.outside:
        raise AnswerError(OUTSIDE)
    one, other = (_close(seen.values[half], start[half]) for half in (slice(0, 2), slice(2, 4)))
    if one and other:
        raise AnswerError(
            "no parameter has changed",
            cure="in each context, call dist_autograd.backward(context, [loss]), then optimizer.step(context)",
        )
    if one or other:
        number = 1 if one else 2
        cure = "the optimizer needs references to the parameters of both shards"
        raise AnswerError(f"the parameters of shard {number} have not changed", cure=cure)
    if _close(seen.values, _serial(batches, rate, 0.0)[1]):
        raise AnswerError("there was no momentum", cure=f"make one optimizer before the loop, with momentum={MOMENTUM}")
    if not _close(seen.values, expected):
        gap = max(float(np.abs(a - b).max()) for a, b in zip(seen.values, expected, strict=True))
        raise AnswerError(
            "the parameters are not those of one process. The loss of a batch is the mean cross-entropy of all its examples",
            f"largest difference {gap:.3g}",
        )
    details = (f"given {seen.losses}", f"expected {[round(loss, 4) for loss in losses]}")
    if isinstance(seen.losses, str):
        raise AnswerError(f"the answer is a {seen.losses}: expected the list of losses, one number for each batch", *details)
    kinds = sorted({one for one in seen.losses if isinstance(one, str)})
    if kinds:
        raise AnswerError(f"the list contains a {kinds[0]} in place of a number", *details, cure="loss.item() is the number")
    if len(seen.losses) != len(losses) or not np.allclose(seen.losses, losses, rtol=1e-3):
        raise AnswerError("the losses are not those of the batches, in order", *details)


def _close(given: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> bool:
    return all(np.allclose(a, b, atol=CLOSE) for a, b in zip(given, expected, strict=True))


EXERCISES = (
    Exercise(
        "hybrid_master",
        LESSON,
        "hybrid_master(shard1, shard2, batches, parts, rate) runs on the master: train the two remote shards on all batches, "
        "each cut in parts that are under way at the same time; return the list of losses.",
        _hybrid_master,
    ),
)
