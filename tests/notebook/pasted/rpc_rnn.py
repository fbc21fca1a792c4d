"""In the style of tutorials on models split over RPC: a recurrent model with a parameter server."""

import os

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn, optim
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef


class EmbeddingTable(nn.Module):
    def __init__(self, ntoken, ninp):
        super().__init__()
        self.encoder = nn.Embedding(ntoken, ninp)

    def forward(self, words):
        return self.encoder(words)


class Decoder(nn.Module):
    def __init__(self, ntoken, nhid):
        super().__init__()
        self.decoder = nn.Linear(nhid, ntoken)

    def forward(self, output):
        return self.decoder(output)


def _call_method(method, rref, *args):
    return method(rref.local_value(), *args)


def _remote_method(method, rref, *args):
    return rpc.rpc_sync(rref.owner(), _call_method, args=(method, rref, *args))


def _parameter_rrefs(module):
    return [RRef(param) for param in module.parameters()]


class RNNModel(nn.Module):
    def __init__(self, ps, ntoken=20, ninp=6, nhid=5):
        super().__init__()
        self.emb_table_rref = rpc.remote(ps, EmbeddingTable, args=(ntoken, ninp))
        self.rnn = nn.LSTM(ninp, nhid)
        self.decoder_rref = rpc.remote(ps, Decoder, args=(ntoken, nhid))

    def forward(self, words):
        emb = _remote_method(EmbeddingTable.forward, self.emb_table_rref, words)
        output, _ = self.rnn(emb)
        return _remote_method(Decoder.forward, self.decoder_rref, output)

    def parameter_rrefs(self):
        remote_params = _remote_method(_parameters_of, self.emb_table_rref) + _remote_method(_parameters_of, self.decoder_rref)
        return remote_params + _parameter_rrefs(self)


def _parameters_of(module):
    return _parameter_rrefs(module)


def _run_trainer():
    torch.manual_seed(0)
    model = RNNModel("ps")
    opt = DistributedOptimizer(optim.SGD, model.parameter_rrefs(), lr=0.5)
    words = torch.randint(0, 20, (4, 3))
    losses = []
    for _ in range(3):
        with dist_autograd.context() as context_id:
            output = model(words)
            loss = nn.functional.cross_entropy(output.view(-1, 20), words.view(-1))
            dist_autograd.backward(context_id, [loss])
            opt.step(context_id)
            losses.append(loss.item())
    return losses


def run_worker(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "29500"
    losses = []
    if rank == 1:
        rpc.init_rpc("trainer", rank=rank, world_size=world_size)
        losses = _run_trainer()
    else:
        rpc.init_rpc("ps", rank=rank, world_size=world_size)
    rpc.shutdown()
    return losses


if __name__ == "__main__":
    mp.spawn(run_worker, args=(2,), nprocs=2, join=True)
