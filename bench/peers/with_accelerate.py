"""accelerate's `notebook_launcher`: four processes forked from the kernel for each task, by torch's elastic."""

from __future__ import annotations

import contextlib
import io
import os
import threading
import time
from typing import Any

import torch
import torch.multiprocessing as mp
from accelerate import notebook_launcher

from bench.peers.fresh_processes import FreshProcesses
from bench.peers.work import LOOPBACK, RANKS, children_pss, free_port


class Accelerate(FreshProcesses):
    """`accelerate.notebook_launcher`."""

    def __init__(self) -> None:
        super().__init__()
        os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK

    def _measure(self, task: str) -> tuple[float, float]:
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
