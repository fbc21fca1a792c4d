"""An RPC group is quiet: torch's warnings about itself stay out of a student's prints, and an idle rank computes
nothing."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import labkit as lab

pytestmark = pytest.mark.processes

pytest.importorskip("torch")


def _make_an_optimizer() -> None:
    import torch
    from torch.distributed import rpc
    from torch.distributed.optim import DistributedOptimizer

    parameters = [rpc.remote(name, torch.nn.Parameter, args=(torch.ones(2),)) for name in ("master", "worker")]
    DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1)


def test_a_distributed_optimizer_is_silent() -> None:
    with lab.Group(["master", "worker"], runtime="rpc", devices="cpu") as group:
        assert group["master"].run(_make_an_optimizer).output == ""


def threads() -> set[str]:
    return {Path(f"/proc/self/task/{number}/comm").read_text().strip() for number in os.listdir("/proc/self/task")}


@pytest.mark.skipif(sys.platform != "linux", reason="names of threads are read from /proc")
def test_no_thread_of_an_idle_rank_computes() -> None:
    """TensorPipe would poll its shared memory in an endless loop, in a thread that takes a whole core per rank."""
    with lab.Group(["master", "worker"], runtime="rpc") as group:
        for names in group.run(threads).results:
            assert "TP_UV_loop" in names
            assert "TP_SHM_reactor" not in names
