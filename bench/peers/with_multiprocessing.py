"""`torch.multiprocessing`: four new processes for each piece of work, forked from the kernel or spawned."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp

from bench.peers import work
from bench.peers.work import ARRAY_BYTES, RANKS, children_pss


class Multiprocessing:
    """`torch.multiprocessing.start_processes`.

    Args:
        start: "fork", which fails once CUDA or OpenMP was used, or "spawn".
    """

    def __init__(self, start: str) -> None:
        self._start = start
        self._context = mp.get_context(start)
        self._array = torch.from_numpy(np.ones(ARRAY_BYTES, np.uint8))  # torch would fill it by OpenMP, and no fork would work
        self._results = [torch.empty(ARRAY_BYTES, dtype=torch.uint8).share_memory_() for _ in range(RANKS)]

    def ready(self) -> float:
        """See `work.Tool`; the rest likewise."""
        return self._do("ready")[0]

    def call(self) -> float:
        """See `work.Tool`."""
        return self._do("call")[0]

    def move(self) -> float:
        """See `work.Tool`."""
        return self._do("move")[0]

    def memory(self) -> float:
        """See `work.Tool`."""
        return self._do("memory")[1]

    def close(self) -> None:
        """See `work.Tool`."""

    def _do(self, task: str) -> tuple[float, float]:
        """Seconds until all have answered, and what the processes then hold in memory."""
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
