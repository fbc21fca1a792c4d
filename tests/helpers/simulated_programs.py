"""Programs that run both in real groups and as simulated ranks: each kind of parallelism, with what belongs to it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, mse_loss, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import labkit as lab

WIDTH = 64


def layers(count: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[part for _ in range(count) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())])


def train(model: nn.Module, steps: int = 2) -> None:
    """Train without `lab.steps`, and look at the loss."""
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(8, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.3f}")


def ddp() -> None:
    """Several buckets, which torch rearranges after the first step; batches of a loader, `lab.steps`, a metric."""
    model = DistributedDataParallel(nn.Sequential(layers(), nn.Linear(WIDTH, 10)), bucket_cap_mb=0.02)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = TensorDataset(torch.randn(48, WIDTH), torch.randint(0, 10, (48,)))
    sampler = DistributedSampler(data)
    right = torch.tensor(0)
    sampler.set_epoch(1)
    for images, labels in lab.steps(DataLoader(data, batch_size=4, sampler=sampler)):
        optimizer.zero_grad()
        with lab.span("classify"):
            scores = model(images)
        cross_entropy(scores, labels).backward()
        optimizer.step()
        right += (scores.argmax(1) == labels).sum()
    dist.all_reduce(right)
    print("accuracy", right.item() / len(data))


def accumulation() -> None:
    """Gradients of two batches for each synchronization, and clipping."""
    model = DistributedDataParallel(layers(), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with model.no_sync():
            model(torch.randn(8, WIDTH)).mean().backward()
        model(torch.randn(8, WIDTH)).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def fsdp() -> None:
    model = layers()
    for layer in model[::2]:
        fully_shard(layer)
    train(fully_shard(model))


def tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    train(parallelize_module(layers(2), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}))


def mesh() -> None:
    """FSDP2 on the one axis, tensor parallel on the other."""
    both = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(layers(2), both["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    train(fully_shard(nn.Sequential(model, nn.Linear(WIDTH, 1)), mesh=both["dp"]))


def _pipeline(schedule: type[ScheduleGPipe] | type[Schedule1F1B]) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    given = torch.empty(2, WIDTH, requires_grad=rank > 0), torch.empty(2, WIDTH, requires_grad=True)
    stage = PipelineStage(layers(1)[0], rank, size, torch.device("cpu"), input_args=given[0], output_args=given[1])
    steps = schedule(stage, n_microbatches=4, loss_fn=mse_loss)
    for _ in range(2):
        batch, target = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
        steps.step(*([batch] if rank == 0 else []), **({"target": target} if rank == size - 1 else {}))


def gpipe() -> None:
    _pipeline(ScheduleGPipe)


def one_f_one_b() -> None:
    _pipeline(Schedule1F1B)


def interleaved() -> None:
    """Two stages on each rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    stages = []
    for number in (rank, rank + size):
        given = torch.empty(2, WIDTH, requires_grad=number > 0), torch.empty(2, WIDTH, requires_grad=True)
        part, where = layers(1)[0], torch.device("cpu")
        stages.append(PipelineStage(part, number, 2 * size, where, input_args=given[0], output_args=given[1]))
    steps = ScheduleInterleaved1F1B(stages, n_microbatches=size, loss_fn=mse_loss)
    batch, target = torch.randn(2 * size, WIDTH), torch.randn(2 * size, WIDTH)
    steps.step(*([batch] if rank == 0 else []), **({"target": target} if rank == size - 1 else {}))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out, self.norm = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.into(self.norm(x)).unflatten(-1, (3, 4, WIDTH // 4)).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.out(attended.transpose(1, 2).flatten(2))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = checkpoint(self.block, x, use_reentrant=False)
        return output


def transformer() -> None:
    """Shards in groups of two that are replicated, mixed precision, activations computed again, tokens."""
    both = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "shard"))
    parts = nn.Embedding(100, WIDTH), Checkpointed(), Checkpointed(), nn.Linear(WIDTH, 100), nn.LogSoftmax(-1)
    model = nn.Sequential(*parts)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (*model[:3], model):
        fully_shard(part, mesh=both, mp_policy=precision)
    optimizer = torch.optim.AdamW(model.parameters())
    text = torch.randint(0, 100, (200,))
    for start in torch.randint(0, 100, (2,)).tolist():
        tokens = text[start : start + 33]
        scores = model(tokens[:-1].unsqueeze(0))
        cross_entropy(scores.flatten(0, 1).float(), tokens[1:]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def zero() -> None:
    """Each rank steps the optimizer of its part of the parameters, and sends them to the others."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns when it is imported

    model = DistributedDataParallel(layers())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(8, WIDTH)).sum().backward()
        optimizer.step()


def by_hand() -> None:
    """Messages in pairs of ranks with tags, groups of the program's own, and collectives of each kind."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor, parts = torch.ones(6), [torch.empty(6) for _ in range(size)]
    if rank % 2 == 0:
        dist.send(tensor, rank + 1, tag=3)
        request = dist.irecv(parts[0], rank + 1)
    else:
        dist.recv(tensor, rank - 1, tag=3)
        request = dist.isend(tensor, rank - 1)
    assert request is not None
    request.wait()
    groups = [dist.new_group([0, 1]), dist.new_group([size - 1, 0])]
    for group in groups:
        if dist.get_rank(group) >= 0:
            dist.all_reduce(tensor, group=group)
    dist.broadcast(tensor, src=1)
    dist.all_gather(parts, tensor)
    dist.gather(tensor, parts if rank == 1 else None, dst=1)
    dist.scatter(tensor, parts if rank == 0 else None)
    dist.reduce(tensor, dst=1)
    dist.all_to_all_single(torch.empty(2 * size), torch.ones(2 * size))
    pending = dist.all_reduce(tensor, async_op=True)
    dist.barrier()
    pending.wait()
    names = [None] * size
    dist.all_gather_object(names, "same")
    assert names == ["same"] * size
    ends = [dist.P2POp(dist.isend, tensor, (rank + 1) % size), dist.P2POp(dist.irecv, parts[0], (rank - 1) % size)]
    for request in dist.batch_isend_irecv(ends):
        request.wait()
    dist.destroy_process_group()


PROGRAMS = (
    ddp, accumulation, zero, fsdp, transformer, tensor_parallel, mesh, gpipe, one_f_one_b, interleaved, by_hand,
)  # fmt: skip
