"""Functions that ranks run in the tests of Stop and of lifetimes. Fresh ranks import this by name, so it imports
little."""

from __future__ import annotations

import os
import threading
from typing import Any

LARGE = 1 << 25  # bytes: far more than a pipe or a socket holds


def rank() -> int:
    print("here")
    return int(os.environ["RANK"])


def hang() -> None:
    print("here")
    threading.Event().wait()


def measure_and_make(*given: Any) -> Any:
    """Takes large arguments and returns large results."""
    import numpy as np

    return sum(map(len, given)), np.ones(LARGE, np.uint8), bytes(LARGE)


def in_a_collective() -> None:
    import torch
    import torch.distributed as dist

    print("here")
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))
    threading.Event().wait()


def slow_answer() -> None:
    threading.Event().wait()


def in_an_rpc() -> None:
    from torch.distributed import rpc

    print("here")
    if rpc.get_worker_info().id == 0:
        rpc.rpc_sync("worker1", slow_answer)
    threading.Event().wait()


def in_tensorflow() -> None:
    import tensorflow as tf

    print("here")

    @tf.function
    def count(n: Any) -> Any:
        return tf.while_loop(lambda i: i < n, lambda i: i + 1, [tf.constant(0, tf.int64)])

    count(tf.constant(10**18, tf.int64))


def in_a_strategy() -> None:
    import tensorflow as tf

    print("here")
    if os.environ["RANK"] == "0":
        tf.distribute.MultiWorkerMirroredStrategy()  # waits for the other worker
    threading.Event().wait()


def computing() -> None:
    print("here")
    sum(range(10**13))  # lets no other thread run


def sum_of_ranks(runtime: str) -> int:
    """Uses the runtime's own communication if it has any."""
    rank = int(os.environ["RANK"])
    if runtime == "torch":
        import torch
        import torch.distributed as dist

        one = torch.tensor([float(rank)])
        dist.all_reduce(one)
        return int(one.item())
    if runtime == "rpc":
        from torch.distributed import rpc

        return sum(rpc.rpc_sync(f"worker{i}", int, args=(str(i),)) for i in range(2))
    return 1
