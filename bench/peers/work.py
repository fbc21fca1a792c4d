"""The tasks of every tool: sum one number over four ranks, do nothing, return an array, and be idle."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

import psutil

__all__ = [
    "ARRAY_BYTES", "LOOPBACK", "RANKS", "Tool", "children_pss", "free_port", "own_store", "seconds", "summed", "torch_worker",
    "wait_until_children_rest",
]  # fmt: skip

RANKS: Final = 4
ARRAY_BYTES: Final = 64 << 20
TIMEOUT_S: Final = 60
LOOPBACK: Final = "lo0" if sys.platform == "darwin" else "lo"


class Tool(Protocol):
    """One way to start ranks, as the benchmarks drive it; results are in seconds, or in bytes for memory."""

    def ready(self) -> float:
        """From nothing to four ranks with a process group and the received sum of one all_reduce."""

    def call(self) -> float:
        """One call of an empty function on four ranks; the median of several."""

    def move(self) -> float:
        """An array of `ARRAY_BYTES` to each of four ranks and back."""

    def memory(self) -> float:
        """Proportional set size of all descendants, with four idle ranks that have made one all_reduce."""

    def close(self) -> None:
        """End all processes."""


def seconds(action: Callable[[], Any]) -> float:
    """The duration of an action."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def children_pss() -> float:
    """Proportional set size in bytes of all descendants of this process: shared pages are divided among their users."""
    return float(sum(p.memory_full_info().pss for p in psutil.Process().children(recursive=True)))


def wait_until_children_rest() -> None:
    """Wait until all descendants have been idle for half a second: spare ranks have finished their imports."""
    deadline = time.monotonic() + TIMEOUT_S
    before = -1.0
    while time.monotonic() < deadline:
        now = sum(sum(p.cpu_times()[:2]) for p in psutil.Process().children(recursive=True))
        if now == before:
            return
        before = now
        time.sleep(0.5)
    raise TimeoutError(f"processes still compute after {TIMEOUT_S} s")


def summed(rank: int, size: int, port: int, *, store_here: bool = False) -> float:
    """Join a gloo process group by the store on that port, and sum a one from each rank.

    Args:
        rank: this process's number.
        size: how many there are.
        port: of the store.
        store_here: whether this process keeps the store.
    """
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=store_here, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    total = torch.ones(1)
    dist.all_reduce(total)
    return float(total)


def own_store() -> Any:
    """A rendezvous store on a free port. Its thread holds locks at times: do not fork beside it."""
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def torch_worker(rank: int, task: str, port: int, answers: Any, release: Any, given: Any, results: Any) -> None:
    """The single task of a `torch.multiprocessing` process."""
    import torch

    torch.set_num_threads(1)  # OpenMP, which the parent may have used, hangs in a fork
    answer = 0.0
    if task in ("ready", "memory"):
        answer = summed(rank, RANKS, port, store_here=rank == 0)
    elif task == "move":
        results[rank].copy_(given)
    answers.put(answer)
    release.wait(TIMEOUT_S)  # idle until the others have been measured, too
