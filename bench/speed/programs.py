"""Programs of each kind of parallel training: what is predicted for them is compared with real runs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining, rpc
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import labkit as lab

STEPS: Final = 6
WIDTH: Final = 256
ROWS: Final = 2048
PARTS: Final = 8  # micro-batches
PAUSE_S: Final = 0.004  # of a layer's forward pass, where layers sleep; the backward pass takes twice as long


@dataclass(frozen=True)
class Work:
    """What layers do.

    Attributes:
        sleeps: whether they sleep, which other ranks do not disturb, however few cores there are; else they compute.
    """

    sleeps: bool = True
    forward: int = 1  # how many times as long as usual a forward pass takes
    backward: int = 1  # the same for the backward pass, where they sleep
    straggler: int = 1  # how many times as long as the others rank 1 takes

    def __post_init__(self) -> None:
        if not self.sleeps and self.backward != 1:
            raise ValueError("a computed backward pass takes as long as it takes")

    def times(self, rank: int) -> tuple[int, int]:
        """How many times as long as usual the passes of a rank take."""
        slower = self.straggler if rank == 1 else 1
        return self.forward * slower, self.backward * slower


class Pause(torch.autograd.Function):
    """Sleeps in both passes."""

    @staticmethod
    def forward(context: Any, x: Tensor, forward: int, backward: int) -> Tensor:
        """Sleep, and return `x`."""
        context.backward = backward
        with lab.span("layer"):
            time.sleep(PAUSE_S * forward)
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Sleep twice as long, and return the gradient."""
        with lab.span("gradient"):
            time.sleep(2 * PAUSE_S * context.backward)
        return gradients[0], None, None


class Layer(nn.Module):
    """A product with a matrix, then a pause or a function of its result."""

    def __init__(self, work: Work, rank: int) -> None:
        super().__init__()
        self.product, self.sleeps, self.times = nn.Linear(WIDTH, WIDTH), work.sleeps, work.times(rank)
        self.ballast = torch.ones(WIDTH, WIDTH)  # for work of one rank alone

    def forward(self, x: Tensor) -> Tensor:
        """Compute, or sleep."""
        if self.sleeps:
            paused: Tensor = Pause.apply(self.product(x), *self.times)
            return paused
        with lab.span("extra work"):
            for _ in range(self.times[0] - 1):
                torch.relu(torch.ones(len(x), WIDTH) @ self.ballast)
        return torch.relu(self.product(x))


def layers(count: int, work: Work) -> nn.Sequential:
    """Equal layers, with the same parameters on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(*[Layer(work, dist.get_rank()) for _ in range(count)])


def _train(model: nn.Module, rows: int) -> None:
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.01), torch.randn(rows, WIDTH)
    for _ in lab.steps(range(STEPS)):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def data_parallel(work: Work, bucket_mb: float = 0.5) -> None:
    """A bucket for each layer or two."""
    _train(DistributedDataParallel(layers(6, work), bucket_cap_mb=bucket_mb), 8 if work.sleeps else ROWS)


def shards(work: Work) -> None:
    """FSDP2, each layer by itself."""
    model = layers(4, work)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    _train(model, 8 if work.sleeps else ROWS)


def tensor_parallel(work: Work) -> None:
    """Columns and rows of pairs of layers."""
    model = layers(4, work)
    plan: dict[str, ParallelStyle] = {f"{i}.product": RowwiseParallel() if i % 2 else ColwiseParallel() for i in range(4)}
    _train(parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan), 64 if work.sleeps else ROWS)


def pipeline(work: Work, schedule: str = "ScheduleGPipe") -> None:
    """Two layers in each stage."""
    rank, size, rows = dist.get_rank(), dist.get_world_size(), (16 if work.sleeps else ROWS) // PARTS
    ends = torch.empty(rows, WIDTH, requires_grad=rank > 0), torch.empty(rows, WIDTH, requires_grad=True)
    model = layers(2, work)
    stage = pipelining.PipelineStage(model, rank, size, torch.device("cpu"), input_args=ends[0], output_args=ends[1])
    order, optimizer = getattr(pipelining, schedule)(stage, PARTS, loss_fn=mse_loss), torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(PARTS * rows, WIDTH)
    given: Any = {"target": batch} if rank == size - 1 else {}
    for _ in lab.steps(range(STEPS)):
        optimizer.zero_grad()
        order.step(*([batch] if rank == 0 else []), **given)
        optimizer.step()


def looked_up(rows: Tensor, times: int) -> Tensor:
    """The work of a server."""
    with lab.span("look up"):
        time.sleep(PAUSE_S * times)
    return rows


def calls(work: Work) -> None:
    """Of three ranks, rank 0 sleeps while its calls to the others are under way."""
    if rpc.get_worker_info().id:
        return
    rows = torch.zeros(100, WIDTH)
    for _ in lab.steps(range(STEPS)):
        futures = [rpc.rpc_async(server, looked_up, (rows, work.times(server)[0])) for server in (1, 2)]
        with lab.span("forward"):
            time.sleep(PAUSE_S)
        torch.futures.wait_all(futures)
        with lab.span("backward"):
            time.sleep(2 * PAUSE_S)
