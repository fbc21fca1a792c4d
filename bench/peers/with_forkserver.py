"""The lower bound: multiprocessing's forkserver with torch preloaded, pipes, shared memory; only the work itself."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np

from bench.peers import work
from bench.peers.work import ARRAY_BYTES, RANKS, children_pss, seconds


class Forkserver:
    """Four processes that answer one byte with one byte."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(
            ["torch", "torch.distributed", "torch._dynamo", "numpy", "bench.peers.forkserver_rank"]
        )
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._array = np.ones(ARRAY_BYTES, np.uint8)

    def ready(self) -> float:
        """See `work.Tool`; the rest likewise."""
        from bench.peers import forkserver_rank

        self.close()
        start = time.perf_counter()
        store = work.own_store()
        for rank in range(RANKS):
            near, far = self._context.Pipe()
            process = self._context.Process(target=forkserver_rank.serve, args=(far, rank, store.port), daemon=True)
            process.start()
            far.close()
            self._pipes.append(near)
            self._processes.append(process)
        results = [pipe.recv() for pipe in self._pipes]
        took_s = time.perf_counter() - start
        assert results == [RANKS] * RANKS
        return took_s

    def call(self) -> float:
        """See `work.Tool`."""

        def round_trip() -> None:
            for pipe in self._pipes:
                pipe.send_bytes(b"c")
            for pipe in self._pipes:
                pipe.recv_bytes()

        self._run()
        return statistics.median(seconds(round_trip) for _ in range(200))

    def move(self) -> float:
        """See `work.Tool`."""
        self._run()
        start = time.perf_counter()
        given = SharedMemory(create=True, size=ARRAY_BYTES)
        assert given.buf is not None
        given.buf[:] = self._array.data
        for pipe in self._pipes:
            pipe.send_bytes(b"m" + given.name.encode())
        results = [SharedMemory(pipe.recv()) for pipe in self._pipes]
        took_s = time.perf_counter() - start
        for segment in (given, *results):
            segment.unlink()
            segment.close()
        return took_s

    def memory(self) -> float:
        """See `work.Tool`."""
        self.ready()
        return children_pss()

    def close(self) -> None:
        """See `work.Tool`."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
        self._pipes, self._processes = [], []

    def _run(self) -> None:
        if not self._processes:
            self.ready()
