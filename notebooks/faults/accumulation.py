# Reported in baidu-baige/LoongForge#163 on 14 August 2026; this program was written for the lesson.
"""Adds the gradients of four micro-batches before each step. Start: torchrun --nproc-per-node 2."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def train():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(128, 64)
    parts = x.chunk(ranks)[rank].chunk(4)
    model = DDP(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(5):
        optimizer.zero_grad()
        for number, part in enumerate(parts):
            loss = (model(part) - part[:, :1]).square().mean() / 4
            with model.no_sync() if number < 3 else contextlib.nullcontext():
                loss.backward()
        optimizer.step()
    return model.module[2].weight.detach()


if __name__ == "__main__":
    dist.init_process_group()
    print(train())
    dist.destroy_process_group()
