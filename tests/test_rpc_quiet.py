"""What torch warns about itself in an RPC group does not stand among a student's prints."""

from __future__ import annotations

import pytest

import labkit as lab

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
