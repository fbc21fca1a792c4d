"""`torch.multiprocessing`: four new processes for each piece of work, forked from the kernel or spawned."""

from __future__ import annotations

import time
from typing import Any

import torch.multiprocessing as mp

from bench.peers import work
from bench.peers.fresh_processes import FreshProcesses
from bench.peers.work import RANKS, children_pss


class Multiprocessing(FreshProcesses):
    """`torch.multiprocessing.start_processes`.

    Args:
        start: "fork", which fails once CUDA or OpenMP was used, or "spawn".
    """

    def __init__(self, start: str) -> None:
        super().__init__()
        self._start = start
        self._context = mp.get_context(start)

    def _measure(self, task: str) -> tuple[float, float]:
        start = time.perf_counter()
        given, results = (self._array, self._results) if task == "move" else (None, None)
        answers, release = self._context.SimpleQueue(), self._context.Event()
        arguments: Any = task, work.free_port(), answers, release, given, results
        processes = mp.start_processes(work.torch_worker, arguments, nprocs=RANKS, join=False, start_method=self._start)
        for _ in range(RANKS):
            answers.get()
        took_s = time.perf_counter() - start
        held = children_pss() if task == "memory" else 0.0
        release.set()
        while not processes.join():
            pass
        return took_s, held
