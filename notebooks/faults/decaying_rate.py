# Reported in huggingface/diffusers#6137 on 11 December 2023; this program was written for the lesson.
"""Trains with a learning rate that falls to zero. Start: torchrun --nproc-per-node 2."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH = 5, 16  # the batch of all ranks together


def train():
    torch.manual_seed(0)
    x = torch.randn(128, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True) + torch.randn(128, 1))
    own_batch = BATCH // dist.get_world_size()
    loader = DataLoader(data, batch_size=own_batch, sampler=DistributedSampler(data, shuffle=False))
    model = DDP(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    steps = EPOCHS * len(data) // own_batch
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    for _ in range(EPOCHS):
        for inputs, targets in loader:
            optimizer.zero_grad()
            (model(inputs) - targets).square().mean().backward()
            optimizer.step()
            schedule.step()
    return model.module.weight.detach()


if __name__ == "__main__":
    dist.init_process_group()
    print(train())
    dist.destroy_process_group()
