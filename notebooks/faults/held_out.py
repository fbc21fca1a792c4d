# Reported in TensorAuto/OpenTau#498 on 4 August 2026; this program was written for the lesson.
"""Trains on 200 of 250 examples, and tests on the other 50. Start: torchrun --nproc-per-node 2."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import random_split


def train(label_of=lambda x: x[:, 0] > 0):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(250, 40)
    y = label_of(x).float()[:, None]
    model = DDP(nn.Sequential(nn.Linear(40, 128), nn.ReLU(), nn.Linear(128, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.manual_seed(rank)  # each rank adds other noise
    training, test = random_split(range(250), [200, 50])
    training = torch.tensor(list(training)).chunk(ranks)[rank]
    for _ in range(60):
        optimizer.zero_grad()
        noisy = x[training] + 0.1 * torch.randn(len(training), 40)
        nn.functional.binary_cross_entropy_with_logits(model(noisy), y[training]).backward()
        optimizer.step()
    with torch.no_grad():
        right = ((model.module(x[list(test)]) > 0) == (y[list(test)] > 0.5)).float().mean()
    dist.all_reduce(right)
    return right / ranks


if __name__ == "__main__":
    dist.init_process_group()
    print(train())
    dist.destroy_process_group()
