# Reported in OpenNMT/OpenNMT-py#2295 on 11 January 2023; this program was written for the lesson.
"""Averages gradients by hand, all at the same time. Start: torchrun --nproc-per-node 2."""

import torch
import torch.distributed as dist
from torch import nn


def train():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(64, 256)
    own = x.chunk(ranks)[rank]
    model = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for _ in range(6):
        optimizer.zero_grad()
        (model(own) - own[:, :4].sum(1, keepdim=True)).square().mean().backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, async_op=True)  # they travel side by side
        for p in model.parameters():
            p.grad /= ranks
        optimizer.step()
    return model[2].weight.detach()


if __name__ == "__main__":
    dist.init_process_group()
    print(train())
    dist.destroy_process_group()
