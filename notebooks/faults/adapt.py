# Reported in pytorch/pytorch#128949 on 18 June 2024; this program was written for the lesson.
"""Adapts one model to each of three tasks, by a single large step. Start: torchrun --nproc-per-node 2."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.score, self.spare = nn.Linear(8, 16), nn.Linear(16, 1), nn.Linear(16, 1)

    def forward(self, x):
        return self.score(self.body(x).tanh())


def train():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x, start, adapted = torch.randn(48, 8), Net(), []
    for target in x[:, :3].T:
        model = DDP(copy.deepcopy(start))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        guess, right = model(x.chunk(ranks)[rank])[:, 0], target.chunk(ranks)[rank]
        (guess - right).square().mean().backward()
        optimizer.step()
        adapted.append(model.module.score.weight.detach())
    return torch.cat(adapted)


if __name__ == "__main__":
    dist.init_process_group()
    print(train())
    dist.destroy_process_group()
