"""In the style of tutorials on fully sharded data parallel: a small network, its layers sharded over the ranks."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12355"
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=world_size)


def cleanup():
    dist.destroy_process_group()


def fsdp_main(rank, world_size, epochs):
    setup(rank, world_size)
    mesh = dist.init_device_mesh("cpu", (world_size,))
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    losses = []
    for _ in range(epochs):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 8)).square().sum()
        loss.backward()
        optimizer.step()
        totals = torch.tensor([loss.item(), 1.0])
        dist.all_reduce(totals, op=dist.ReduceOp.SUM)
        losses.append((totals[0] / totals[1]).item())
    dist.barrier()
    sharded = all(isinstance(p, DTensor) for p in model.parameters())
    cleanup()
    return sharded, losses[-1] < losses[0]


if __name__ == "__main__":
    WORLD_SIZE = 2
    mp.spawn(fsdp_main, args=(WORLD_SIZE, 3), nprocs=WORLD_SIZE, join=True)
