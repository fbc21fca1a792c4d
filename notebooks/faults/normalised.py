# Reported in LibreYOLO/libreyolo#531 on 6 July 2026; this program was written for the lesson.
"""Trains with batch normalisation on the images of two cameras; rank 0 saves. Start: torchrun --nproc-per-node 2."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def train():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x = torch.cat([torch.randn(32, 4), 12 + torch.randn(32, 4)])  # two cameras, one brighter
    y = x[:, :1] - x[:, 1:2]
    own_x, own_y = x.chunk(ranks)[rank], y.chunk(ranks)[rank]
    model = DDP(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(20):
        optimizer.zero_grad()
        (model(own_x) - own_y).square().mean().backward()
        optimizer.step()
    saved = {"mean": model.module[0].running_mean}  # rank 0 writes this
    return saved["mean"]


if __name__ == "__main__":
    dist.init_process_group()
    print(train())
    dist.destroy_process_group()
