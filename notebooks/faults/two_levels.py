# Reported in pytorch/pytorch#130102 on 4 July 2024; this program was written for the lesson.
"""Adds numbers within two teams of ranks, then over both. Start: torchrun --nproc-per-node 4."""

import torch
import torch.distributed as dist


def train():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    numbers = torch.arange(16.0).chunk(ranks)[rank].sum()
    if ranks == 1:
        return numbers
    first, second = range(ranks // 2), range(ranks // 2, ranks)
    team = dist.new_group(first if rank in first else second)
    dist.all_reduce(numbers, group=team)
    if rank in (0, ranks // 2):  # the first rank of each team keeps the sum
        total = numbers.clone()
    else:
        total = torch.tensor(0.0)
    dist.all_reduce(total)
    return total


if __name__ == "__main__":
    dist.init_process_group()
    print(train())
    dist.destroy_process_group()
