"""The tasks of every tool: sum one number over four ranks, do nothing, return an array, and be idle."""

from __future__ import annotations

import os
import socket
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final

import numpy as np
import psutil

RANKS: Final = 4
ARRAY_BYTES: Final = 64 << 20
TIMEOUT_S: Final = 60
LOOPBACK: Final = "lo0" if sys.platform == "darwin" else "lo"


class Tool(ABC):
    """One way to start ranks, in a kernel of its own.

    Attributes:
        times: how often a task is measured in a kernel.
        moves: the same for the array. The first ones get memory that the machine has not used before, which can take
            seconds in a virtual machine.
        calls: the same for an empty function.
        array: what is moved.
    """

    times = 3
    moves = 9
    calls = 200

    def __init__(self) -> None:
        self.array = np.ones(ARRAY_BYTES, np.uint8)

    @abstractmethod
    def ready(self) -> list[float]:
        """From nothing to four ranks with a process group: the sum that each has received in one all_reduce."""

    @abstractmethod
    def call(self) -> object:
        """An empty function on four ranks."""

    @abstractmethod
    def move(self) -> object:
        """The array to each of four ranks and back."""

    def memory(self) -> float:
        """Proportional set size of all descendants, in bytes, with ranks that are ready."""
        return children_pss()

    @abstractmethod
    def close(self) -> None:
        """End all ranks."""

    def prepare(self) -> None:  # noqa: B027  # most tools do nothing
        """Do what a tool does beforehand, before a later group is made."""


def measure(tool: Tool) -> dict[str, float]:
    """In a kernel in which the tool's first group is ready: seconds of its tasks, and bytes of memory; medians."""

    def later() -> float:
        tool.close()
        tool.prepare()
        return seconds(tool.ready)

    found = {"later": statistics.median(later() for _ in range(tool.times))}
    found["call"] = statistics.median(seconds(tool.call) for _ in range(tool.calls))
    found["move"] = statistics.median(seconds(tool.move) for _ in range(tool.moves))
    later()
    found["memory"] = tool.memory()
    tool.close()
    return found


def seconds(action: Callable[[], object]) -> float:
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


def summed(rank: int, port: int) -> float:
    """In a rank: join a gloo group by the store on that port, which rank 0 keeps, and sum a one from each rank."""
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    total = torch.ones(1)
    dist.all_reduce(total)
    return float(total)


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
