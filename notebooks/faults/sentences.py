# Reported in modelscope/ms-swift#10165 on 16 September 2026; this program was written for the lesson.
"""Learns to predict the next word from sentences of different lengths. Start: torchrun --nproc-per-node 2."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP


def train():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    lengths = 3, 4, 3, 5, 4, 3, 19, 17, 21, 18, 22, 20
    sentences = [torch.randint(10, (1,)) + torch.arange(length + 1) for length in lengths]
    per_rank = len(sentences) // ranks
    own = sentences[rank * per_rank : (rank + 1) * per_rank]
    words = torch.cat([sentence[:-1] for sentence in own])
    following = torch.cat([sentence[1:] for sentence in own])
    model = DDP(nn.Sequential(nn.Embedding(33, 16), nn.Linear(16, 33)))
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    for _ in range(8):
        optimizer.zero_grad()
        cross_entropy(model(words), following).backward()  # the mean over the words
        optimizer.step()
    return model.module[1].weight.detach()


if __name__ == "__main__":
    dist.init_process_group()
    print(train())
    dist.destroy_process_group()
