"""Two shards of a model on two workers; micro-batches pass as references, as in tutorials of RPC pipelines."""

import os
import threading

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn, optim
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef

ROWS, MICRO_BATCHES, STEPS = 12, 3, 2


class Shard(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        torch.manual_seed(inputs)
        self._lock = threading.Lock()
        self.layers = nn.Sequential(nn.Linear(inputs, outputs), nn.Tanh())

    def forward(self, x_rref):
        x = x_rref.to_here()
        with self._lock:
            return self.layers(x)

    def parameter_rrefs(self):
        return [RRef(p) for p in self.parameters()]


class Pipeline(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = rpc.remote("worker1", Shard, args=(8, 16))
        self.second = rpc.remote("worker2", Shard, args=(16, 4))

    def forward(self, batch):
        futures = []
        for x in batch.chunk(MICRO_BATCHES):
            y_rref = self.first.remote().forward(RRef(x))
            futures.append(self.second.rpc_async().forward(y_rref))
        return torch.cat(torch.futures.wait_all(futures))

    def parameter_rrefs(self):
        return [*self.first.rpc_sync().parameter_rrefs(), *self.second.rpc_sync().parameter_rrefs()]


def run_master():
    model = Pipeline()
    optimizer = DistributedOptimizer(optim.SGD, model.parameter_rrefs(), lr=0.1)
    torch.manual_seed(0)
    inputs, labels = torch.randn(ROWS, 8), torch.zeros(ROWS, 4)
    losses = []
    for _ in range(STEPS):
        with dist_autograd.context() as context_id:
            loss = nn.functional.mse_loss(model(inputs), labels)
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        losses.append(loss.item())
    print("the loss falls:", losses[1] < losses[0])
    return losses


def run_worker(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "29500"
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=32)
    rpc.init_rpc("master" if rank == 0 else f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    losses = run_master() if rank == 0 else None
    rpc.shutdown()
    return losses


if __name__ == "__main__":
    mp.spawn(run_worker, args=(3,), nprocs=3)
