"""Programs as people publish them, each with something that slows it down, and cured of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining, rpc
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import labkit as lab

NEARER: Final = lab.Link(gbit_per_s=1, latency_us=1000)
FASTER: Final = lab.Link(gbit_per_s=0.2, latency_us=50)
STEPS: Final = 6
WIDTH: Final = 256
STAGE_S: Final = 0.02  # of a batch's forward pass through a stage


class Slow(torch.autograd.Function):
    """Takes time in both passes, without a core, so that ranks do not disturb one another."""

    @staticmethod
    def forward(context: Any, x: Tensor, seconds: float) -> Tensor:
        """Sleep, and return `x`."""
        context.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Sleep, and return the gradient."""
        time.sleep(context.seconds)
        return gradients[0], None


class Layer(nn.Module):
    """A layer whose passes take as long as they are told."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.layer, self.seconds = nn.Linear(WIDTH, WIDTH), seconds

    def forward(self, x: Tensor) -> Tensor:
        """Compute."""
        found: Tensor = Slow.apply(self.layer(x), self.seconds)
        return found


def _model(layers: int = 6, seconds: float = 0.002) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Layer(seconds) for _ in range(layers)])


def _nothing(_: int) -> None:
    pass


def _train(
    model: nn.Module, *, rows: int = 16, steps: int = STEPS, before: Callable[[int], object] = _nothing,
    reduce: Callable[[], object] | None = None, after: Callable[[int], object] = _nothing,
) -> None:  # fmt: skip
    """Steps of training, each between what the program does before and after it, given the step's number."""
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.01), torch.randn(rows, WIDTH)
    for step in lab.steps(range(steps)):
        before(step)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        if reduce:
            reduce()
        optimizer.step()
        after(step)


# ------------------------------------------------------------------------------------------------------- data parallel


def small_batches(_cured: bool) -> None:
    """All gradients travel for few samples."""
    _train(DistributedDataParallel(_model(seconds=0.0005)))


def straggler(cured: bool) -> None:
    """One rank does more before each step."""

    def augment(_: int) -> None:
        with lab.span("augment"):
            time.sleep(0.04 if dist.get_rank() == 1 and not cured else 0.004)

    _train(DistributedDataParallel(_model()), before=augment)


def tiny_buckets(cured: bool) -> None:
    """A bucket for each tensor."""
    _train(DistributedDataParallel(_model(24), bucket_cap_mb=1000 if cured else 0.01))


def large_bucket(cured: bool) -> None:
    """All gradients wait for the first layer's."""
    _train(DistributedDataParallel(_model(seconds=0.015), bucket_cap_mb=0.3 if cured else 1000))


def accumulation(cured: bool) -> None:
    """Four micro-batches, whose gradients are averaged each time."""
    model = DistributedDataParallel(_model())
    optimizer, batches = torch.optim.SGD(model.parameters(), lr=0.01), torch.randn(4, 16, WIDTH)
    for _ in lab.steps(range(STEPS)):
        optimizer.zero_grad()
        for i, batch in enumerate(batches):
            with model.no_sync() if cured and i < 3 else contextlib.nullcontext():
                (model(batch).square().mean() / 4).backward()
        optimizer.step()


def logged(cured: bool) -> None:
    """A loss that is averaged for a progress bar."""
    model = DistributedDataParallel(_model(2))
    optimizer, batches = torch.optim.SGD(model.parameters(), lr=0.01), torch.randn(4, 16, WIDTH)
    for step in lab.steps(range(STEPS)):
        for batch in batches:
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            if step % 4 == 0 or not cured:
                shown = loss.detach().clone()
                dist.all_reduce(shown)
                shown.item()


def by_hand(cured: bool) -> None:
    """An all-reduce for each parameter, after the backward pass."""
    model = _model()

    def average() -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    if cured:
        _train(DistributedDataParallel(model, bucket_cap_mb=0.3))
    else:
        _train(model, reduce=average)


def local_sgd(cured: bool) -> None:
    """Replicas that average their parameters."""
    model = _model()
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.01), torch.randn(16, WIDTH)
    for _ in lab.steps(range(STEPS)):
        for part in range(4):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            if part == 3 or not cured:
                for parameter in model.parameters():
                    dist.all_reduce(parameter.data)
                    parameter.data /= dist.get_world_size()


def small_ones(cured: bool) -> None:
    """200 small tensors are summed one by one."""
    tensors = [torch.ones(1000) for _ in range(200)]
    for _ in lab.steps(range(3)):
        for tensor in [torch.cat(tensors)] if cured else tensors:
            dist.all_reduce(tensor)


def few_small(_cured: bool) -> None:
    """Eight statistics of a batch."""
    for _ in lab.steps(range(STEPS)):
        for _ in range(8):
            with lab.span("statistic"):
                time.sleep(0.002)
            dist.all_reduce(torch.ones(WIDTH))


def uneven(cured: bool) -> None:
    """Sentences of different lengths, of which each rank gets others."""
    model, rank = DistributedDataParallel(_model()), dist.get_rank()

    def take(step: int) -> None:
        for layer in model.module:
            layer.seconds = 0.004 if cured else (0.001, 0.007)[step % 2 == rank]

    _train(model, steps=2 * STEPS, before=take)


def checkpoint(cured: bool) -> None:
    """The model is saved while the others wait at a barrier."""

    def save(_: int) -> None:
        if cured or dist.get_rank() == 0:
            time.sleep(0.02 if cured else 0.04)  # a slow disk
        dist.barrier()

    _train(DistributedDataParallel(_model()), after=save)


def evaluation(cured: bool) -> None:
    """One rank evaluates all samples."""
    model = DistributedDataParallel(_model())

    def evaluate(_: int) -> None:
        if cured or dist.get_rank() == 0:
            with torch.no_grad():
                for _ in range(3 if cured else 6):
                    model.module(torch.randn(16, WIDTH))
        dist.barrier()

    _train(model, after=evaluate)


def objects(cured: bool) -> None:
    """Numbers of each rank for a report."""
    ranks = dist.get_world_size()
    numbers, gathered = torch.zeros(ranks, 2), [None] * ranks

    def report(step: int) -> None:
        if cured:
            numbers[dist.get_rank()] = torch.tensor([step, 1.0])
            dist.all_reduce(numbers)
        else:
            dist.all_gather_object(gathered, {"step": step, "loss": 1.0})

    _train(DistributedDataParallel(_model(2)), after=report)


# --------------------------------------------------------------------------------------------- shards, layers, stages


def experts(cured: bool) -> None:
    """Tokens travel to their experts and back; most like the second one."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parts = [1024] * ranks if cured else [256, 1792]
    for _ in lab.steps(range(STEPS)):
        received = torch.empty(parts[rank] * ranks, WIDTH // 8)
        dist.all_to_all_single(received, torch.randn(2048, WIDTH // 8), [parts[rank]] * ranks, parts)
        with lab.span("expert"):
            time.sleep(2e-5 * len(received))
        dist.all_to_all_single(torch.empty(2048, WIDTH // 8), received, parts, [parts[rank]] * ranks)


def sharded(_cured: bool) -> None:
    """FSDP2."""
    model = _model(4)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    _train(model)


def split_layers(_cured: bool) -> None:
    """Columns and rows of pairs of layers."""
    model = _model(4)
    plan: dict[str, ParallelStyle] = {f"{i}.layer": RowwiseParallel() if i % 2 else ColwiseParallel() for i in range(4)}
    _train(parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan))


def _pipeline(parts: int, slow: float = 1) -> None:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    stage = Layer(STAGE_S / parts * 4 * (slow if rank == 1 else 1))
    optimizer, rows = torch.optim.SGD(stage.parameters(), lr=0.01), 64 // parts
    for _ in lab.steps(range(STEPS)):
        optimizer.zero_grad()
        kept = []
        for _ in range(parts):
            x = torch.randn(rows, WIDTH)
            if rank > 0:
                dist.recv(x, rank - 1)
                x.requires_grad_()
            y = stage(x)
            kept.append((x, y))
            if rank < last:
                dist.send(y.detach(), rank + 1)
        for x, y in kept:
            gradient = torch.ones_like(y)
            if rank < last:
                dist.recv(gradient, rank + 1)
            y.backward(gradient)
            if x.grad is not None:
                dist.send(x.grad, rank - 1)
        optimizer.step()


def halves(cured: bool) -> None:
    """The whole batch goes through one half of a model, then through the other."""
    _pipeline(2 if cured else 1)


def by_messages(cured: bool) -> None:
    """GPipe by hand."""
    _pipeline(8 if cured else 4)


def unbalanced(cured: bool) -> None:
    """One stage takes longer."""
    _pipeline(4, 1 if cured else 3)


def by_torch(cured: bool) -> None:
    """GPipe."""
    parts, rank, last = 8 if cured else 4, dist.get_rank(), dist.get_world_size() - 1
    ends = torch.empty(64 // parts, WIDTH, requires_grad=rank > 0), torch.empty(64 // parts, WIDTH, requires_grad=True)
    module = Layer(4 * STAGE_S / parts)
    stage = pipelining.PipelineStage(module, rank, last + 1, torch.device("cpu"), input_args=ends[0], output_args=ends[1])
    schedule, optimizer = pipelining.ScheduleGPipe(stage, parts, loss_fn=mse_loss), torch.optim.SGD(module.parameters(), lr=0.01)
    batch = torch.randn(64, WIDTH)
    given: Any = {"target": batch} if rank == last else {}
    for _ in lab.steps(range(STEPS)):
        optimizer.zero_grad()
        schedule.step(*([batch] if rank == 0 else []), **given)
        optimizer.step()


# ------------------------------------------------------------------------------------------------- data, threads, calls


class Files(Dataset[Tensor]):
    """Samples that are read slowly, or computed."""

    def __init__(self, read_s: float, products: int) -> None:
        self.read_s, self.products = read_s, products

    def __len__(self) -> int:
        """The number of samples."""
        return 64

    def __getitem__(self, index: int) -> Tensor:
        """A sample."""
        time.sleep(self.read_s)
        x = torch.ones(WIDTH, WIDTH)
        for _ in range(self.products):
            x = (x @ x).softmax(1)
        return x[0]


def _read(files: Files, workers: int, model: nn.Module) -> None:
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in lab.steps(DataLoader(files, batch_size=4, num_workers=workers)):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def no_workers(cured: bool) -> None:
    """Each rank reads its files between steps."""
    _read(Files(0.003, 0), 2 if cured else 0, _model())


def many_workers(cured: bool) -> None:
    """More processes than cores."""
    _read(Files(0, 1), 0 if cured else 8, nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(100)]))


def threads(cured: bool) -> None:
    """More threads than cores."""
    torch.set_num_threads(1 if cured else 2)
    model = DistributedDataParallel(nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(6)]))
    _train(model, rows=256)


def _looked_up(rows: Tensor) -> Tensor:
    return rows + 1


def calls(cured: bool) -> None:
    """A parameter server's client."""
    if rpc.get_worker_info().id:
        return
    rows = torch.zeros(64, WIDTH)
    for _ in lab.steps(range(STEPS)):
        if cured:
            torch.futures.wait_all([rpc.rpc_async(1 + i % 2, _looked_up, (rows,)) for i in range(6)])
        else:
            for i in range(6):
                rpc.rpc_sync(1 + i % 2, _looked_up, (rows,))


def keras_input(cured: bool) -> None:
    """A map over files, one after the other."""
    import tensorflow as tf

    def read(i: Any) -> tuple[Any, Any]:
        tf.numpy_function(lambda _: time.sleep(0.01), [i], [])
        return tf.ones(32), tf.ones(1)

    data = tf.data.Dataset.range(40 * 8).map(read, num_parallel_calls=8 if cured else None).batch(8)
    with tf.distribute.MirroredStrategy().scope():
        model = tf.keras.Sequential([tf.keras.layers.Dense(64, activation="relu"), tf.keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(data.prefetch(2) if cured else data, verbose=0)
