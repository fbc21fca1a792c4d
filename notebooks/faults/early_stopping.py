# Reported in talmolab/sleap-nn#471 on 2 March 2026; this program was written for the lesson.
"""Trains until the loss on held-out data has not improved for three steps. Start: torchrun --nproc-per-node 2."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def train():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x, noise = torch.randn(64, 12), torch.randn(64, 1)
    y = x.sum(1, keepdim=True) + 2 * noise
    own_x, own_y = x[:32].chunk(ranks)[rank], y[:32].chunk(ranks)[rank]
    model = DDP(nn.Linear(12, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    best, waited, stop = float("inf"), 0, False
    while not stop:
        optimizer.zero_grad()
        (model(own_x) - own_y).square().mean().backward()
        optimizer.step()
        if rank == 0:  # one rank is enough for this
            with torch.no_grad():
                loss = (model.module(x[32:]) - y[32:]).square().mean().item()
            best, waited = (loss, 0) if loss < best else (best, waited + 1)
            stop = waited == 3
        dist.barrier()  # keep the ranks together
    return model.module.weight.detach()


if __name__ == "__main__":
    dist.init_process_group()
    print(train())
    dist.destroy_process_group()
