"""Programs that ranks run with and without `torch.compile`: code as students write it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

Compile = Callable[[Any], Any]  # `torch.compile` with a backend, or a function that returns what it gets
DDP_MODES = ("ddp_optimizer", "python_reducer", "python_reducer_without_compiled_forward", "no_optimization")


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def trained(compiled: Any) -> list[Any]:
    """The parameters after two steps on this rank's data."""
    torch.manual_seed(dist.get_rank() + 1)
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        inputs, targets = torch.randn(5, 8), torch.randn(5, 4)
        ((compiled(inputs) - targets) ** 2).mean().backward()
        optimizer.step()
    return list(compiled.parameters())


def ddp(compiles: Compile) -> Any:
    return [p.detach() for p in trained(compiles(DistributedDataParallel(model())))]


def ddp_in_each_mode(compiles: Compile) -> Any:
    results = []
    for mode in DDP_MODES:
        torch.compiler.reset()
        with torch._dynamo.config.patch(optimize_ddp=mode):
            results.append(ddp(compiles))
    return results


def fsdp(compiles: Compile) -> Any:
    whole, mesh = model(), init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (whole[0], whole[2], whole):
        fully_shard(part, mesh=mesh)
    return [p.full_tensor().detach() for p in trained(compiles(whole))]


def in_one_graph(compiles: Compile) -> Any:
    def mean(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        dist.all_reduce(y)
        return y / dist.get_world_size()

    return compiles(mean)(torch.arange(4.0) + dist.get_rank())


def functional(compiles: Compile) -> Any:
    group = dist.new_group()

    def gathered(x: torch.Tensor) -> torch.Tensor:
        y = funcol.all_reduce(x * 2, "sum", group)
        return funcol.all_gather_tensor(y, 0, dist.group.WORLD) + 1

    return compiles(gathered)(torch.arange(4.0) + dist.get_rank())


def with_graph_breaks(compiles: Compile) -> Any:
    """Messages and asynchronous operations, which `torch.compile` cannot put in a graph."""

    def exchanged(x: torch.Tensor) -> torch.Tensor:
        received = torch.zeros(4)
        if dist.get_rank() == 0:
            dist.send(x, 1)
            dist.recv(received, 1)
        else:
            dist.recv(received, 0)
            dist.send(x, 0)
        work = dist.all_reduce(received, async_op=True)
        assert work is not None
        work.wait()
        dist.barrier()
        return received + x

    return compiles(exchanged)(torch.arange(4.0) + dist.get_rank())


def compiled_and_not(backend: str, *cases: Callable[[Compile], Any], fullgraph: bool = False) -> list[tuple[Any, Any]]:
    """The results of each case, with `torch.compile` and without."""
    results = []
    for case in cases:
        torch.compiler.reset()
        compiled = case(lambda f: torch.compile(f, backend=backend, fullgraph=fullgraph))
        results.append((compiled, case(lambda f: f)))
    return results
