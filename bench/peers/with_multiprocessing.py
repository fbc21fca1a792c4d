"""`torch.multiprocessing`: four new processes for each piece of work, forked from the kernel or spawned."""

from __future__ import annotations

from typing import Any

import torch
import torch.multiprocessing as mp

from bench.peers.work import ARRAY_BYTES, RANKS, TIMEOUT_S, Tool, children_pss, free_port, summed


class Multiprocessing(Tool):
    """`start_processes`, by "fork", which fails once CUDA or OpenMP was used, or by "spawn"."""

    times = moves = calls = 1

    def __init__(self, start: str) -> None:
        super().__init__()
        self._start, self._context = start, mp.get_context(start)
        self._given = torch.from_numpy(self.array)  # torch would fill it by OpenMP, and no fork would work
        self._results = [torch.empty(ARRAY_BYTES, dtype=torch.uint8).share_memory_() for _ in range(RANKS)]

    def ready(self) -> list[float]:
        """See `Tool`; the rest likewise."""
        return self._run("sum")[0]

    def call(self) -> object:
        """See `Tool`."""
        return self._run("nothing")

    def move(self) -> object:
        """See `Tool`."""
        return self._run("move", self._given, self._results)

    def memory(self) -> float:
        """See `Tool`."""
        return self._run("sum")[1]

    def close(self) -> None:
        """See `Tool`: no process outlives its task."""

    def _run(self, task: str, *arrays: Any) -> tuple[list[float], float]:
        """What the processes answer, and what they hold in memory then."""
        answers, release = self._context.SimpleQueue(), self._context.Event()
        arguments: Any = task, free_port(), answers, release, *arrays
        processes = mp.start_processes(work, arguments, nprocs=RANKS, join=False, start_method=self._start)
        found = [answers.get() for _ in range(RANKS)]
        held = children_pss() if task == "sum" else 0.0
        release.set()
        while not processes.join():
            pass
        return found, held


def work(rank: int, task: str, port: int, answers: Any, release: Any, given: Any = None, results: Any = None) -> None:
    """The single task of a process."""
    torch.set_num_threads(1)  # OpenMP, which the parent may have used, hangs in a fork
    answer = 0.0
    if task == "sum":
        answer = summed(rank, port)
    elif task == "move":
        results[rank].copy_(given)
    answers.put(answer)
    release.wait(TIMEOUT_S)  # idle until the others have been measured, too
