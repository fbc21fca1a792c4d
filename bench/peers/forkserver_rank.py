"""A rank of the lower bound: joins the group, then answers bytes until its pipe is closed."""

from __future__ import annotations

from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory

from bench.peers import work

__all__ = ["serve"]


def serve(pipe: Connection, rank: int, port: int) -> None:
    """Send the sum, then serve.

    Args:
        pipe: to and from the parent.
        rank: this process's number.
        port: of the store to meet at.
    """
    import torch.distributed as dist

    pipe.send(work.summed(rank, work.RANKS, port))
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
