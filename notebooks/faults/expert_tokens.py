# Reported in pytorch/pytorch#117486 in January 2024; this program was written for the lesson.
"""Sends each token to the rank that has its expert, and the result back. Start: torchrun --nproc-per-node 2."""

import torch
import torch.distributed as dist

EXPERTS = 4


def train():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    weights = torch.randn(EXPERTS, 8, 8)  # of all experts; a rank uses those of its own only
    tokens, expert_of = torch.randn(24, 8), torch.randint(EXPERTS, (24,))
    tokens, expert_of = tokens.chunk(ranks)[rank], expert_of.chunk(ranks)[rank]

    order = expert_of.argsort()
    home = expert_of[order] // (EXPERTS // ranks)  # the rank to which each token goes
    sent = home.bincount(minlength=ranks).tolist()
    arrived = torch.empty(len(tokens), 9)
    rows = torch.cat([tokens, expert_of[:, None]], 1)[order]
    dist.all_to_all_single(arrived, rows, output_split_sizes=sent, input_split_sizes=sent)

    results = torch.stack([row[:8] @ weights[int(row[8])] for row in arrived])
    back = torch.empty_like(tokens)
    dist.all_to_all_single(back, results, output_split_sizes=sent, input_split_sizes=sent)
    return back[order.argsort()]


if __name__ == "__main__":
    dist.init_process_group()
    print(train())
    dist.destroy_process_group()
