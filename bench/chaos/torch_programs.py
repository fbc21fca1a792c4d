"""What ranks of torch do in a round of `make chaos`: a step of work, faults between ranks, and healthy programs.

The healthy ones have slow ranks, or several activities at once: none may be reported as a deadlock. Each is called on
every rank with the number of ranks and the slow one. It returns 1.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import rpc
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


def step(size: int) -> float:
    """A step of work, which a missing or stuck rank delays."""
    total = torch.ones(8, 8) @ torch.ones(8, 8)
    dist.all_reduce(total)
    return float(total[0, 0]) / size


def rpc_step(size: int) -> int:
    """The same with a remote call."""
    to = (int(os.environ["RANK"]) + 1) % size
    answer: int = rpc.rpc_sync(f"worker{to}", _served, args=(to,))
    return answer


def _served(number: int) -> int:
    return number + sum(range(1000)) * 0


def fault_between(fault: str, victim: int, pair: tuple[int, int]) -> object:
    """Do what the victim does otherwise than the other ranks; `pair` is the victim and its counterpart."""
    me, mine = int(os.environ["RANK"]), int(os.environ["RANK"]) == victim
    if fault == "another order":
        calls = [lambda: dist.all_reduce(torch.ones(3)), lambda: dist.broadcast(torch.ones(3), 0)]
        for call in reversed(calls) if mine else calls:
            call()
    elif fault == "another shape":
        dist.all_reduce(torch.ones(5 if mine else 4))
    elif fault == "another dtype":
        dist.all_reduce(torch.ones(4, dtype=torch.float64 if mine else torch.float32))
    elif fault == "another root":
        dist.broadcast(torch.ones(4), victim if mine else pair[1])
    elif fault == "calls without a thread left":
        return _call_back(1 - me, 60) if me < 2 else 0
    elif me in pair:  # "two send" or "two receive"
        peer = sum(pair) - me
        first, second = (dist.send, dist.recv) if fault == "two send" else (dist.recv, dist.send)
        first(torch.ones(5), peer)
        second(torch.ones(5), peer)
    return None


def _call_back(to: int, depth: int) -> int:
    return depth and 1 + int(rpc.rpc_sync(f"worker{to}", _call_back, args=(1 - to, depth - 1)))


def _total(size: int) -> float:
    total = torch.ones(1)
    dist.all_reduce(total)
    return float(total) / size


def _delay(slow: int, seconds: float = 1.3) -> None:
    if int(os.environ["RANK"]) == slow:
        time.sleep(seconds)


def _asynchronous(size: int, slow: int) -> float:
    tensors = [torch.ones(1 << 16) for _ in range(200)]  # more at a time than a rank can record
    works = [dist.all_reduce(t, async_op=True) for t in tensors[:100]]
    _delay(slow)
    works += [dist.all_reduce(t, async_op=True) for t in tensors[100:]]
    for work_ in reversed(works):
        work_.wait()
    return sum(float(t[0]) for t in tensors) / 200 / size


def _groups(size: int, slow: int) -> float:
    me = dist.get_rank()
    pairs = {pair: dist.new_group(pair) for pair in ((0, 1), (1, 2), (0, 2))}
    total = torch.ones(2, 2) if me == (slow + 1) % size else torch.ones(4)  # as many elements
    for pair, group in pairs.items():
        _delay(slow, 0.5)
        if me in pair:
            dist.all_reduce(torch.ones(3), group=group)
            dist.barrier(group=group)
    dist.all_reduce(total)
    return float(total.sum()) / 4 / size


def _messages(size: int, slow: int) -> float:
    me, size = dist.get_rank(), dist.get_world_size()
    outgoing, incoming = [torch.full((5,), float(i)) for i in range(8)], [torch.zeros(5) for _ in range(8)]
    sends = [dist.P2POp(dist.isend, t, (me + 1) % size) for t in outgoing]
    receives = [dist.P2POp(dist.irecv, t, (me - 1) % size) for t in incoming]
    _delay(slow)
    for work_ in dist.batch_isend_irecv([*sends, *receives]):
        work_.wait()
    if me == slow:
        for _ in range(size - 1):
            dist.recv(torch.zeros(3))  # from any rank
    else:
        dist.send(torch.ones(3), slow)
    return float(sum(t[0] for t in incoming)) / 28


def _large(size: int, slow: int) -> float:
    _delay(slow, 1.0)
    much = torch.ones(1 << 25)
    for _ in range(2):
        dist.all_reduce(much)
        dist.broadcast(much, slow)
    return float(much[-1]) / size**2


def _threads(size: int, slow: int) -> float:
    me, got = dist.get_rank(), torch.zeros(1)
    if me == slow:  # one thread waits for a message, and another will send the one that it depends on
        sender = threading.Timer(1.3, dist.send, (torch.ones(1), (slow + 1) % size))
        sender.start()
        dist.recv(got, (slow + 1) % size)
        sender.join()
    elif me == (slow + 1) % size:
        dist.recv(got, slow)
        dist.send(got, slow)
    return _total(size)


def _library_threads(size: int, slow: int) -> float:
    """A message is sent late, from a thread whose stack shows only the standard library until then."""
    me, got, other = dist.get_rank(), torch.zeros(1), (slow + 1) % size

    def send() -> None:
        dist.send(torch.ones(1), other)

    for number in range(2):
        if me == slow and number == 0:
            loop = asyncio.new_event_loop()
            loop.call_later(1.3, send)
            loop.call_later(1.3, loop.stop)
            threading.Thread(target=loop.run_forever).start()
        elif me == slow:
            pool = ThreadPoolExecutor(1)
            pool.submit(time.sleep, 1.3).add_done_callback(lambda _: send())
            pool.shutdown(wait=False)
        if me == slow:
            dist.recv(got, other)
        elif me == other:
            dist.recv(got, slow)
            dist.send(got, slow)
    return _total(size)


def _time_limit(size: int, slow: int) -> float:
    """A wait that fails by itself, as the program expects."""
    pair = dist.new_group([slow, (slow + 1) % size], timeout=timedelta(seconds=1.3))
    if dist.get_rank() == slow:
        try:
            dist.all_reduce(torch.ones(1), group=pair)
        except RuntimeError:
            return _total(size)
        return 0.0
    return _total(size)


def _train(slow: int, model: Any) -> float:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(4):
        if number == 2:
            _delay(slow)
        optimizer.zero_grad()
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
    return 1.0


def _model() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(layer for _ in range(3) for layer in (torch.nn.Linear(64, 64), torch.nn.ReLU())))


def _ddp(_: int, slow: int) -> float:
    return _train(slow, torch.nn.parallel.DistributedDataParallel(_model(), bucket_cap_mb=1))


def _fsdp(_: int, slow: int) -> float:
    model = _model()
    for layer in model[::2]:
        fully_shard(layer)
    return _train(slow, fully_shard(model))


def _dtensor(size: int, slow: int) -> float:
    mesh = init_device_mesh("cpu", (size,))
    rows: Any = distribute_tensor(torch.ones(6, 6), mesh, [Shard(0)])
    columns = distribute_tensor(torch.ones(6, 6), mesh, [Shard(1)])
    _delay(slow)
    product = (rows @ columns).redistribute(mesh, [Replicate()])
    return float(product.to_local()[0, 0]) / 6


HEALTHY: Final[dict[str, Callable[[int, int], float]]] = {
    "asynchronous": _asynchronous,
    "groups": _groups,
    "messages": _messages,
    "large messages": _large,
    "threads": _threads,
    "library threads": _library_threads,
    "time limit": _time_limit,
    "DDP": _ddp,
    "FSDP2": _fsdp,
    "DTensor": _dtensor,
}
