"""Functions that ranks call on each other in the RPC tests."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import torch
from torch import nn
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc
from torch.distributed.nn.api.remote_module import RemoteModule

from labkit.recording.record import here, span
from labkit.recording.ring_buffer import RingReader

WORKER = "worker"


def add(x: torch.Tensor, y: float) -> torch.Tensor:
    return x + y


def fail(word: str) -> None:
    raise ValueError(f"no {word}")


@rpc.functions.async_execution
def add_later(x: torch.Tensor) -> Any:
    """A function whose future another function completes: here, one of the same worker."""
    return rpc.rpc_async(WORKER, add, args=(x, 1.0)).then(lambda done: done.wait() * 2)


def timed() -> None:
    with span("inside"), span("a file", kind="communication"):
        pass


def call_timed() -> None:
    with span("outside"):
        rpc.rpc_sync(WORKER, timed)


def late_waits() -> None:
    """Waits for replies that have arrived, one of them from a function of torch's own."""
    futures = [rpc.rpc_async(WORKER, function, args=(torch.ones(1), 1.0)) for function in (add, torch.add)]
    while pending() or not all(future.done() for future in futures):
        pass
    for future in futures:
        future.wait()


class Shard(nn.Module):
    """A part of a model that lives on a worker."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))

    def parameter_rrefs(self) -> list[Any]:
        return [rpc.RRef(p) for p in self.parameters()]


def fetch(rref: Any) -> torch.Tensor:
    value: torch.Tensor = rref.to_here()
    return value


def passed_on(other: str) -> torch.Tensor:
    """A result that stays with one worker and is fetched by another."""
    reference = rpc.remote(WORKER, add, args=(torch.ones(1000), 1.0))
    fetched: torch.Tensor = rpc.rpc_sync(other, fetch, args=(reference,))
    return fetched


def pending() -> list[str]:
    """The names of this rank's operations that have not completed."""
    assert here.recorder is not None
    return [operation.name for operation in RingReader(here.recorder.ring.buffer).pending()]


def calls() -> list[Any]:
    x = torch.ones(1000)
    pair = [rpc.rpc_async(WORKER, add, args=(x, float(i))) for i in range(2)]
    return [
        rpc.rpc_sync(WORKER, add, args=(x, 2.0)),
        rpc.rpc_async(WORKER, add, args=(x, 3.0)).wait(),
        *torch.futures.wait_all(pair),
        rpc.rpc_async(WORKER, add, args=(x, 4.0)).then(lambda done: done.value() + 1).wait(),
        rpc.remote(WORKER, add, args=(x, 5.0)).to_here(),
        rpc.rpc_sync(WORKER, torch.add, args=(x, x)),
        rpc.remote(WORKER, torch.mul, args=(x, x)).to_here(),
        rpc.rpc_sync(WORKER, add_later, args=(x,)),
    ]


def by_reference() -> list[Any]:
    """Methods called through a reference, and the reference itself."""
    shard = rpc.remote(WORKER, Shard)
    x = torch.ones(2, 8)
    return [
        shard.rpc_sync().forward(x).detach(),
        shard.rpc_async().forward(x).wait().detach(),
        shard.remote().forward(x).to_here().detach(),
        shard.owner_name(),
    ]


def failing() -> list[str]:
    """A call that raises, one of a worker that does not exist, one that torch refuses, and again one that raises."""
    said = []
    for call in (
        lambda: rpc.rpc_sync(WORKER, fail, args=("luck",)),
        lambda: rpc.rpc_async("nobody", add, args=(torch.ones(1), 1.0)),
        lambda: rpc.rpc_async(WORKER, torch.add, args=("not a tensor",)),
        lambda: rpc.rpc_async(WORKER, fail, args=("time",)).wait(),
    ):
        try:
            call()
        except (RuntimeError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}"[:60])
    return [*said, str(pending())]


def train(optimizer_class: Any, steps: int) -> list[torch.Tensor]:
    """A model on the worker, trained from here with distributed autograd; its parameters afterwards."""
    from torch.distributed.optim import DistributedOptimizer

    shard = rpc.remote(WORKER, Shard)
    parameters = shard.rpc_sync().parameter_rrefs()
    optimizer = DistributedOptimizer(optimizer_class, parameters, lr=0.1)
    x = torch.arange(16.0).reshape(2, 8)
    for _ in range(steps):
        with dist_autograd.context() as context:
            loss = shard.rpc_sync().forward(x).square().mean()
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
    return [parameter.to_here().detach() for parameter in parameters]


class Descent(torch.optim.SGD):
    """Gradient descent that torch does not compile into a script."""


def train_alone(steps: int) -> list[torch.Tensor]:
    """The same in one process."""
    shard = Shard()
    optimizer = torch.optim.SGD(shard.parameters(), lr=0.1)
    x = torch.arange(16.0).reshape(2, 8)
    for _ in range(steps):
        optimizer.zero_grad()
        shard(x).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in shard.parameters()]


def both_ways() -> None:
    """A forward and backward pass through two shards of the worker; the second gets the output of the first."""
    shards = [rpc.remote(WORKER, Shard) for _ in range(2)]
    with dist_autograd.context() as context:
        x = torch.ones(4, 8)
        for shard in shards:
            x = shard.rpc_sync().forward(x)
        dist_autograd.backward(context, [x.sum()])


class Fetching(nn.Linear):
    """A shard that is given a reference to its input, as those of the pipeline tutorial are."""

    def forward(self, x: Any) -> torch.Tensor:
        return super().forward(x.to_here())


def pass_references_on() -> None:
    """A pass through two shards on two workers: the second fetches its input from the first."""
    first, second = rpc.remote("one", Fetching, args=(8, 16)), rpc.remote("two", Fetching, args=(16, 2))
    with dist_autograd.context() as context:
        y = first.remote().forward(rpc.RRef(torch.ones(4, 8)))
        dist_autograd.backward(context, [second.rpc_sync().forward(y).sum()])


class Embedding(nn.Embedding):
    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return super().forward(words)


class Decoder(nn.Linear):
    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        return super().forward(vectors)


def _call_method(method: Any, rref: Any, *args: Any) -> Any:
    """The helper function of many tutorials."""
    held = rref.local_value()
    return getattr(held, method)(*args) if isinstance(method, str) else method(held, *args)


def scaled(rref: Any, kind: str) -> str:
    """A function of a reference and a string that is not a method's name."""
    return f"{type(rref.local_value()).__name__} {kind}"


def made(rref: Any, kind: type) -> str:
    return f"{type(rref.local_value()).__name__} {kind.__name__}"


def call_helpers_that_call_no_method() -> list[Any]:
    """Functions that take a reference and another argument; and a module behind torch's `RemoteModule`."""
    decoder = rpc.remote(WORKER, Decoder, args=(4, 10))
    module = RemoteModule(WORKER, Decoder, args=(4, 10))
    return [
        rpc.rpc_sync(WORKER, scaled, args=(decoder, "adam")), rpc.rpc_sync(WORKER, made, args=(decoder, torch.optim.SGD)),
        module.forward(torch.ones(2, 4)).shape,
    ]  # fmt: skip


def through_a_helper(how: str) -> None:
    """Call methods of two modules on the worker through one helper."""
    table, decoder = rpc.remote(WORKER, Embedding, args=(10, 4)), rpc.remote(WORKER, Decoder, args=(4, 10))
    x = torch.tensor([1, 2])
    for rref, method in ((table, Embedding.forward), (decoder, Decoder.forward)):
        given = method if how == "by the method" else "forward"
        x = rpc.rpc_sync(WORKER, _call_method, args=(given, rref, x)).detach()


def call_each_other() -> None:
    """Each rank calls the other and records no span of its own."""
    name = rpc.get_worker_info().name
    rpc.rpc_sync("master" if name == WORKER else WORKER, add, args=(torch.ones(10), 1.0))
    for _ in range(100):
        torch.ones(100, 100) @ torch.ones(100, 100)


class _Shared(torch.futures.Future[torch.Tensor]):
    """Completes after labkit has added its callback for the first call, and before torch adds its own."""

    added, completed = threading.Event(), threading.Event()

    def add_done_callback(self, callback: Any) -> None:
        super().add_done_callback(callback)
        if not self.added.is_set():
            self.added.set()
            self.completed.wait(60)


_shared = _Shared()
_calls = itertools.count()  # `next` is atomic, and two threads may run `batched` at once


@rpc.functions.async_execution
def batched() -> Any:
    """A batched function: the second call completes the future that the first returned, and returns it, too."""
    if next(_calls):
        _Shared.added.wait(60)
        _shared.set_result(torch.ones(1000))
    return _shared


def release() -> None:
    _Shared.completed.set()


def two_callers() -> list[torch.Tensor]:
    """The reply that torch sends last is that of the first call, on another thread than the future's completion."""
    futures = [rpc.rpc_async(WORKER, batched) for _ in range(2)]
    while not any(future.done() for future in futures):
        time.sleep(0.001)
    rpc.rpc_sync(WORKER, release)
    return [future.wait() for future in futures]


class _Slow(torch.futures.Future[torch.Tensor]):
    """Calls labkit's callback too late: when torch has sent the reply."""

    def add_done_callback(self, callback: Any) -> None:
        threading.Timer(0.2, callback, (self,)).start()


@rpc.functions.async_execution
def soon() -> Any:
    future = _Slow()
    future.set_result(torch.ones(1000))
    return future


def call_soon() -> float:
    value: torch.Tensor = rpc.rpc_sync(WORKER, soon)
    time.sleep(0.5)
    return float(value.sum())
