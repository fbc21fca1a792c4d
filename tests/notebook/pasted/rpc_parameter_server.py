"""In the style of tutorials on parameter servers over RPC: each role calls `init_rpc` under a name of its own."""

import os
import threading

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn, optim
from torch.distributed.optim import DistributedOptimizer

param_server = None
global_lock = threading.Lock()


class ParameterServer(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Linear(4, 2)

    def forward(self, x):
        return self.model(x)

    def get_param_rrefs(self):
        return [rpc.RRef(param) for param in self.model.parameters()]


def get_parameter_server():
    global param_server
    with global_lock:
        if not param_server:
            param_server = ParameterServer()
        return param_server


def run_parameter_server(rank, world_size):
    rpc.init_rpc("parameter_server", rank=rank, world_size=world_size)
    rpc.shutdown()
    return "parameter_server"


def run_training_loop(rank, world_size):
    rpc.init_rpc(f"trainer_{rank}", rank=rank, world_size=world_size)
    server = rpc.remote("parameter_server", get_parameter_server)
    optimizer = DistributedOptimizer(optim.SGD, server.rpc_sync().get_param_rrefs(), lr=0.03)
    losses = []
    for _ in range(2):
        with dist_autograd.context() as context_id:
            output = server.rpc_sync().forward(torch.ones(3, 4))
            loss = output.pow(2).sum()
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
            losses.append(loss.item())
    rpc.shutdown()
    return losses[1] < losses[0]


def run_worker(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "29500"
    return run_parameter_server(rank, world_size) if rank == 0 else run_training_loop(rank, world_size)


if __name__ == "__main__":
    mp.spawn(run_worker, args=(3,), nprocs=3, join=True)
