"""Models divided over ranks, measured and predicted: the time of a tensor-parallel layer, the memory of ZeRO."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention

import labkit as lab
from bench.speed.repetitions import Times, in_turns, seconds
from labkit.plots.memory import memory_uses
from labkit.recording.schema import MEMORY_KINDS

BATCH, SEQUENCE, HIDDEN, HEAD = 4, 128, 512, 64
FLOAT: Final = 4  # bytes
KEPT: Final = ("parameters", "gradients", "optimizer state")
WIDTH, LAYERS = 512, 8


class Layer(nn.Module):
    """A transformer layer. Heads follow one another in `qkv`, so that a block of its rows is a set of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, sequence, hidden) in and out."""
        heads = self.qkv(x).view(*x.shape[:2], -1, 3, HEAD).transpose(1, 2)
        seen = scaled_dot_product_attention(*heads.unbind(3))
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(x)))  # type: ignore[no-any-return]  # a module's call is untyped


def layers() -> dict[str, Times]:
    """In a rank: forward and backward of the whole layer alone, and of this rank's part of it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"qkv": ColwiseParallel(), "out": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    whole, part = Layer(), parallelize_module(Layer(), mesh, plan)
    x = torch.randn(BATCH, SEQUENCE, HIDDEN, requires_grad=True)

    def both_ways(layer: Any) -> None:
        layer(x).sum().backward()

    return in_turns({"whole": lambda: both_ways(whole), "part": lambda: both_ways(part)})


def tensor_parallel() -> Iterator[tuple[str, float, float]]:
    """A layer divided over two ranks, over a fast and a slow link, in seconds."""
    for link in (lab.Link(gbit_per_s=4, latency_us=50), lab.Link.ethernet_1g):
        with lab.Group(2, link=link, threads=1) as group:
            results = group.run(layers).results
        whole_s, part_s = (seconds([r[name] for r in results]) for name in ("whole", "part"))
        predicted = lab.predict.tensor_parallel_layer(BATCH, SEQUENCE, HIDDEN, 2, link, value_bytes=FLOAT, compute_s=whole_s)
        yield f"tensor-parallel layer, 2 ranks, {link.gbit_per_s:g} Gbit/s, {link.latency_us:g} µs", predicted, part_s


def train(stage: int) -> int:
    """In a rank: some steps of training with Adam, and how many parameters the whole model has."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    parameters = sum(p.numel() for p in model.parameters())
    if stage == 3:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    adam = torch.optim.Adam
    optimizer = ZeroRedundancyOptimizer(model.parameters(), adam) if stage == 1 else adam(model.parameters())
    with lab.track_memory(model):
        for _ in range(3):
            model(torch.randn(64, WIDTH)).square().mean().backward()
            optimizer.step()
    return int(parameters)


def memory() -> Iterator[tuple[str, float, float]]:
    """The memory of plain data parallel, ZeRO 1 and FSDP2 (ZeRO 3) in the fullest of two ranks, in bytes."""
    with lab.Group(2) as group:
        for stage, name in ((0, "DistributedDataParallel"), (1, "ZeroRedundancyOptimizer"), (3, "fully_shard")):
            run = group.run(train, stage)
            kinds = [MEMORY_KINDS.index(kind) for kind in KEPT]
            measured = max(usage.nbytes[kinds].sum(axis=0).max() for usage in memory_uses(run.trace))
            predicted = lab.predict.zero_memory(
                run.results[0], 2, stage, parameter_bytes=FLOAT, gradient_bytes=FLOAT, optimizer_bytes=2 * FLOAT
            )
            yield f"memory of {name} with Adam, 2 ranks", predicted, float(measured)
