"""Ranks for the tests of `labkit.notebook.nccl_probe`, whose processes import them by name."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from labkit.notebook.nccl_probe import all_reduce


def needs_variable(rank: int, *others: Any) -> dict[str, Any]:
    """Works only with NCCL_P2P_DISABLE=1; else rank 0 says what NCCL would, and the other waits for it."""
    if "NCCL_P2P_DISABLE" not in os.environ and rank == 0:
        print("host:1:1 [0] misc/shmutils.cc:72 NCCL WARN Call to posix_fallocate failed: No space left on device", flush=True)
        raise RuntimeError("NCCL error")
    return all_reduce(rank, *others)


def hangs(rank: int, ranks: int, backend: str, meeting: str, limit_s: float) -> dict[str, Any]:
    """Rank 1 takes part in meeting, but does not connect: rank 0 waits for it."""
    if rank == 1:
        import torch.distributed as dist

        dist.FileStore(meeting, ranks).set(str(rank), "")
        time.sleep(100)
    return all_reduce(rank, ranks, backend, meeting, limit_s)


def wrong_sum(rank: int, ranks: int, *others: Any) -> dict[str, Any]:
    import torch

    if rank == 0:
        ones = torch.ones
        torch.ones = lambda *args, **kwargs: 2 * ones(*args, **kwargs)  # type: ignore[assignment]
    return all_reduce(rank, ranks, *others)


def killed(rank: int, *others: Any) -> dict[str, Any]:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGBUS)
    return all_reduce(rank, *others)
