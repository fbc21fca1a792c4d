# Reported in InternLM/InternLM#405 on 9 October 2023; this program was written for the lesson.
"""Divides the rows of a layer over the ranks, and gathers its outputs. Start: torchrun --nproc-per-node 2."""

import torch
import torch.distributed as dist
from torch import nn


def train():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same inputs on all ranks
    x = torch.randn(5, 8)
    shard = nn.Linear(8, 16 // ranks, bias=False)  # this rank's rows
    with torch.no_grad():
        own = shard(x)
    parts = [torch.empty_like(own) for _ in range(ranks)]
    dist.all_gather(parts, own)
    print(f"rank {rank} has {len(shard.weight)} of 16 rows")
    return torch.cat(parts, dim=1)


if __name__ == "__main__":
    dist.init_process_group()
    print(train())
    dist.destroy_process_group()
