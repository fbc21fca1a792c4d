# Reported in texttron/tevatron#143 on 2 August 2024; this program was written for the lesson.
"""Trains a model whose loss is a mean over the batch. Start: torchrun --nproc-per-node 2."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def train():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    own = x.chunk(ranks)[rank]
    model = DDP(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(20):
        optimizer.zero_grad()
        loss = (model(own) - own.sum(1, keepdim=True)).square().mean()
        (loss * ranks).backward()  # DDP divides by the number of ranks
        optimizer.step()
    return model.module.weight.detach()


if __name__ == "__main__":
    dist.init_process_group()
    print(train())
    dist.destroy_process_group()
