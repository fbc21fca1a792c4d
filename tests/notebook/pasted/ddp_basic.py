"""In the style of tutorials on DistributedDataParallel: each demo sets up its process group and cleans it up."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817  # as tutorials call it

CHECKPOINT = os.path.join(tempfile.gettempdir(), f"ddp_basic_{os.getpid()}.pt")


def setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12355"
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


def cleanup():
    dist.destroy_process_group()


class ToyModel(nn.Module):
    def __init__(self, first="cpu", second="cpu"):
        super().__init__()
        self.first, self.second = first, second
        self.net1 = nn.Linear(10, 10).to(first)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5).to(second)

    def forward(self, x):
        hidden = self.relu(self.net1(x.to(self.first)))
        return self.net2(hidden.to(self.second))


def step(model):
    loss_fn, optimizer = nn.MSELoss(), optim.SGD(model.parameters(), lr=0.001)
    optimizer.zero_grad()
    outputs = model(torch.randn(20, 10))
    loss_fn(outputs, torch.randn(20, 5)).backward()
    optimizer.step()
    return sum(p.sum().item() for p in model.parameters())


def demo_basic(rank, world_size):
    print(f"Running basic DDP example on rank {rank}.")
    setup(rank, world_size)
    checksum = step(DDP(ToyModel()))
    cleanup()
    return checksum


def demo_checkpoint(rank, world_size):
    print(f"Running DDP checkpoint example on rank {rank}.")
    setup(rank, world_size)
    model = DDP(ToyModel())
    if rank == 0:
        torch.save(model.state_dict(), CHECKPOINT)
    dist.barrier()
    model.load_state_dict(torch.load(CHECKPOINT, map_location="cpu"))
    checksum = step(model)
    dist.barrier()
    if rank == 0:
        os.remove(CHECKPOINT)
    cleanup()
    return checksum


def demo_model_parallel(rank, world_size):
    print(f"Running DDP with model parallel example on rank {rank}.")
    setup(rank, world_size)
    checksum = step(DDP(ToyModel("cpu", "cpu")))
    cleanup()
    return checksum


def run_demo(demo_fn, world_size):
    mp.spawn(demo_fn, args=(world_size,), nprocs=world_size, join=True)


if __name__ == "__main__":
    run_demo(demo_basic, 2)
    run_demo(demo_checkpoint, 2)
    run_demo(demo_model_parallel, 2)
