"""In the style of tutorials that write distributed applications by hand: messages, collectives, a ring all-reduce."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def allreduce(send, recv):
    """A ring all-reduce: each rank adds what it receives from the left and sends it on to the right."""
    rank, size = dist.get_rank(), dist.get_world_size()
    send_buff, recv_buff = send.clone(), send.clone()
    accum = send.clone()
    left, right = (rank - 1 + size) % size, (rank + 1) % size
    for _ in range(size - 1):
        request = dist.isend(send_buff, right)
        dist.recv(recv_buff, left)
        accum += recv_buff
        request.wait()
        send_buff, recv_buff = recv_buff, send_buff
    recv[:] = accum


def run(rank, size):
    tensor = torch.zeros(1)
    if rank == 0:
        tensor += 1
        dist.send(tensor=tensor, dst=1)
    elif rank == 1:
        dist.recv(tensor=tensor, src=0)
    group = dist.new_group([0, 1])
    ones = torch.ones(1)
    if rank < 2:
        dist.all_reduce(ones, op=dist.ReduceOp.SUM, group=group)
    by_hand = torch.zeros(2)
    allreduce(torch.full((2,), float(rank)), by_hand)
    return tensor.item(), ones.item(), by_hand.tolist(), size


def init_process(rank, size, fn, backend="gloo"):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = "29500"
    dist.init_process_group(backend, rank=rank, world_size=size)
    return fn(rank, size)


if __name__ == "__main__":
    mp.spawn(init_process, args=(3, run), nprocs=3)
