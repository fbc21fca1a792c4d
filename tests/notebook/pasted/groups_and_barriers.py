"""In the style of notes on process groups: groups of some ranks, barriers, and initialisation by an address."""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def worker(i, world_size):
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:23456", rank=i, world_size=world_size)
    even = dist.new_group([0, 2])
    odd = dist.new_group([1, 3])
    mine = even if i % 2 == 0 else odd
    value = torch.tensor([float(i)])
    dist.all_reduce(value, group=mine)
    dist.barrier(group=mine)
    dist.barrier()
    gathered = [torch.zeros(1) for _ in range(world_size)]
    dist.all_gather(gathered, value)
    dist.destroy_process_group()
    return [tensor.item() for tensor in gathered]


if __name__ == "__main__":
    mp.spawn(worker, args=(4,), nprocs=4)
