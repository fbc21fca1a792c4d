"""accelerate's `notebook_launcher`: four processes forked from the kernel for each task, by torch's elastic."""

from __future__ import annotations

import contextlib
import io
import os
import threading
import time
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp
from accelerate import notebook_launcher

from bench.peers.work import ARRAY_BYTES, LOOPBACK, RANKS, children_pss, free_port


class Accelerate:
    """`accelerate.notebook_launcher`."""

    def __init__(self) -> None:
        self._array = torch.from_numpy(np.ones(ARRAY_BYTES, np.uint8))  # torch would fill it by OpenMP, and no fork would work
        self._results = [torch.empty(ARRAY_BYTES, dtype=torch.uint8).share_memory_() for _ in range(RANKS)]
        os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK

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
        context = mp.get_context("fork")
        answers, release, held = context.SimpleQueue(), context.Event(), [0.0]
        if task != "memory":
            release.set()

        def work() -> None:
            import torch.distributed as dist

            torch.set_num_threads(1)
            if task in ("ready", "memory"):
                dist.init_process_group("gloo")
                total = torch.ones(1)
                dist.all_reduce(total)
            elif task == "move":
                self._results[int(os.environ["RANK"])].copy_(self._array)
            answers.put(0.0)
            release.wait(60)

        def weigh() -> None:
            for _ in range(RANKS):
                answers.get()
            held[0] = children_pss()
            release.set()

        scales: Any = threading.Thread(target=weigh) if task == "memory" else contextlib.nullcontext()
        if task == "memory":
            scales.start()
        with contextlib.redirect_stdout(io.StringIO()):
            notebook_launcher(work, num_processes=RANKS, use_port=str(free_port()))
        if task == "memory":
            scales.join()
        return time.perf_counter() - start, held[0]
