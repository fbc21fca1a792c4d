"""The lower bound: multiprocessing's forkserver with torch preloaded, pipes, shared memory; only the work itself."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from typing import Any

from bench.peers.work import ARRAY_BYTES, RANKS, Tool, free_port, summed


class Forkserver(Tool):
    """Four processes that answer one byte with one byte."""

    def __init__(self) -> None:
        super().__init__()
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "numpy", __name__])
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def ready(self) -> list[float]:
        """See `Tool`; the rest likewise."""
        port = free_port()
        for rank in range(RANKS):
            near, far = self._context.Pipe()
            process = self._context.Process(target=serve, args=(far, rank, port), daemon=True)
            process.start()
            far.close()
            self._pipes.append(near)
            self._processes.append(process)
        return [pipe.recv() for pipe in self._pipes]

    def call(self) -> object:
        """See `Tool`."""
        for pipe in self._pipes:
            pipe.send_bytes(b"c")
        return [pipe.recv_bytes() for pipe in self._pipes]

    def move(self) -> object:
        """See `Tool`."""
        given = SharedMemory(create=True, size=ARRAY_BYTES)
        assert given.buf is not None
        given.buf[:] = self.array.data
        for pipe in self._pipes:
            pipe.send_bytes(b"m" + given.name.encode())
        results = [SharedMemory(pipe.recv()) for pipe in self._pipes]
        for segment in (given, *results):
            segment.unlink()
            segment.close()
        return results

    def close(self) -> None:
        """See `Tool`."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
        self._pipes, self._processes = [], []


def serve(pipe: Connection, rank: int, port: int) -> None:
    """In a rank: send the sum, then answer bytes until the pipe is closed."""
    import torch.distributed as dist

    pipe.send(summed(rank, port))
    while True:
        try:
            command = pipe.recv_bytes()
        except EOFError:
            dist.destroy_process_group()
            return
        if command == b"c":
            pipe.send_bytes(b"c")
            continue
        given = SharedMemory(command[1:].decode())
        result = SharedMemory(create=True, size=given.size)
        assert given.buf is not None
        assert result.buf is not None
        result.buf[:] = given.buf
        pipe.send(result.name)
        given.close()
        result.close()
