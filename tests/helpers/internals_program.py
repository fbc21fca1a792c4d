"""Small programs for a torch that lacks some private names: `python internals_program.py NAME`.

They print what the ranks return and what is recorded, as a line of JSON. In this process and in the ranks,
`sitecustomize` takes the names of the entry NAME out of labkit's table, as if torch had renamed them.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import labkit as lab

HIDE = """
import os
from labkit.comm import torch_internals
for name in os.environ["GONE"].split(","):
    entry = getattr(torch_internals, name)
    entry.paths = dict.fromkeys(entry.paths, "torch:_gone")
"""


def train() -> tuple[float, ...]:
    """Two steps of data parallel training on batches, a group of its own, a sparse all-reduce and a message."""
    torch.manual_seed(0)
    rank, size = dist.get_rank(), dist.get_world_size()
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in torch.utils.data.DataLoader(torch.arange(8.0).reshape(4, 2) + rank, batch_size=2):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
    group = dist.new_group([0, 1])
    number = torch.tensor(rank + 1.0)
    dist.all_reduce(number, group=group)
    sparse = torch.sparse_coo_tensor([[rank]], [1.0], (size,))
    dist.all_reduce(sparse)
    if rank == 0:
        dist.send(torch.tensor(7.0), 1)
    received = torch.zeros(())
    if rank == 1:
        dist.recv(received)  # from any rank
    return (float(number), float(sparse.coalesce().to_dense().sum()), float(received), float(model.module.bias))


def initialise_again() -> tuple[float, ...]:
    """Destroy the default group, make another one, and train."""
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    try:
        return train()
    finally:
        dist.destroy_process_group()


def compiled() -> float:
    """Run a compiled function that communicates after a graph break."""

    def total(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        dist.all_reduce(y)
        print(end="")
        return y + 1

    return float(torch.compile(total, backend="eager")(torch.ones(())))


def double(x: torch.Tensor) -> torch.Tensor:
    """Called remotely."""
    return 2 * x


def call() -> float | None:
    """Call the other rank in two ways, with a distributed backward pass."""
    from torch.distributed import autograd, rpc

    if rpc.get_worker_info().name != "one":
        return None
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context:
        y = rpc.rpc_sync("two", double, args=(x,)) + rpc.remote("two", double, args=(x,)).to_here()
        autograd.backward(context, [y.sum()])
        return float(y.sum()) + float(autograd.get_gradients(context)[x].sum())


def recorded(*runs: lab.Run) -> list[str]:
    """Return the names of all spans, without lines and numbers."""
    return sorted({span.name.split(",")[0] for run in runs for span in run.trace})


def main(name: str) -> None:
    """Run what this entry may concern."""
    seen: dict[str, Any] = {}
    if name.startswith(("REMOTE", "RPC")):
        with lab.Group(["one", "two"], runtime="rpc", timeout_s=200) as group:
            runs = [group.run(call)]
    else:
        with lab.Group(2, timeout_s=200) as group:
            runs = [group.run(f) for f in (train, initialise_again, train)]
            if name.startswith("COMPILED"):
                runs.append(group.run(compiled))
    seen["results"] = [run.results for run in runs]
    seen["recorded"] = recorded(*runs)
    print(json.dumps(seen))


if __name__ == "__main__":
    os.environ.setdefault("LABKIT_SLOW_S", "180")
    main(sys.argv[1])
