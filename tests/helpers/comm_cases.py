"""Functions that ranks run in the communication tests: code as students write it, on a given process group."""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.distributed_c10d as c10d
from torch import nn
from torch._C._distributed_c10d import ProcessGroup as TorchsOwn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from labkit.recording.record import here
from labkit.recording.ring_buffer import RingReader
from labkit.recording.schema import Pending

# torch 2.13 has new names for two functions, and warns where the old ones are called.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Groups made here use torch's own class."""
    ours = c10d.ProcessGroup
    c10d.ProcessGroup = TorchsOwn
    try:
        yield
    finally:
        c10d.ProcessGroup = ours


def watched_and_bare(case: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """The results of a case on a group of ours and on one of torch's own."""
    watched = dist.new_group()
    with unwatched():
        bare = dist.new_group()
    assert type(bare) is TorchsOwn
    assert type(watched) is not TorchsOwn
    try:
        return case(watched, *args), case(bare, *args)
    finally:
        dist.destroy_process_group(watched)
        dist.destroy_process_group(bare)


def operations() -> list[Pending]:
    """This rank's operations that have not completed."""
    assert here.recorder is not None
    return RingReader(here.recorder.ring.buffer).pending()


def pending() -> list[str]:
    return [operation.name for operation in operations()]


def collectives(group: Any) -> list[Any]:
    """Every collective once, on 2 ranks, except those of `exchange`."""
    rank = dist.get_rank(group)
    x, parts, first = torch.arange(4.0) + 10 * rank, [torch.zeros(4), torch.zeros(4)], rank == 0
    everywhere, cast, sums = (x.clone() for _ in range(3))
    whole, scattered, half, single, mixed = (torch.zeros(size) for size in (8, 4, 2, 2, 4))
    gathered = [part.clone() for part in parts]
    dist.all_reduce(everywhere, group=group)
    dist.broadcast(cast, src=1, group=group)
    dist.reduce(sums, dst=0, group=group)
    dist.all_gather(parts, x, group=group)
    all_gather_single(whole, x, group=group)
    dist.gather(x, gathered if first else None, dst=0, group=group)
    dist.scatter(scattered, [x, x + 1] if first else None, src=0, group=group)
    dist.reduce_scatter(half, [x[:2].clone(), x[2:].clone()], group=group)
    reduce_scatter_single(single, x, group=group)
    dist.all_to_all_single(mixed, x, group=group)
    dist.barrier(group=group)
    dist.monitored_barrier(group=group)
    return [everywhere, cast, sums if first else x, *parts, whole, *gathered, scattered, half, single, mixed]


def exchange(group: Any) -> list[torch.Tensor]:
    x = torch.arange(4.0) + 10 * dist.get_rank(group)
    parts = [torch.zeros(2), torch.zeros(2)]
    dist.all_to_all(parts, [x[:2].clone(), x[2:].clone()], group=group)
    return parts


def objects(group: Any) -> list[Any]:
    """Collectives of objects, which are built from those of tensors."""
    rank = dist.get_rank(group)
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, {"rank": rank}, group=group)
    first = [f"from {rank}", rank]
    dist.broadcast_object_list(first, src=0, group=group)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, ["a", "b"] if rank == 0 else None, src=0, group=group)
    return [everyone, first, mine]


def asynchronous(group: Any) -> list[Any]:
    """The same with `async_op=True`, waited for by the work, by its future, and by a future derived from that."""
    x = torch.ones(3)
    work = dist.all_reduce(x, group=group, async_op=True)
    assert work is not None
    work.wait()
    y = torch.ones(3)
    work = dist.all_reduce(y, group=group, async_op=True)
    assert work is not None
    future = work.get_future().wait()
    z = torch.ones(3)
    work = dist.all_reduce(z, group=group, async_op=True)
    assert work is not None
    doubled = work.get_future().then(lambda f: f.value()[0] * 2).wait()
    return [x, y, future[0], z, doubled, len(work.get_future().value())]


def functional(group: Any) -> list[Any]:
    """Functional collectives, which go through C++, and the coalesced ones."""
    rank = dist.get_rank(group)
    x = torch.arange(4.0) + rank
    gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
    scatter = getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor
    made = [
        funcol.all_reduce(x, "sum", group),
        gather(x, 0, group),
        scatter(x, "sum", 0, group),
        funcol.all_to_all_single(x, [2, 2], [2, 2], group),
        funcol.broadcast(x, 1, group),
        *funcol.all_reduce_coalesced([x, x + 1], "sum", group),
    ]
    made = [funcol.wait_tensor(t) for t in made]
    with c10d._coalescing_manager(group, async_ops=True) as manager:
        y, z = x.clone(), x.clone()
        dist.all_reduce(y, group=group)
        dist.all_reduce(z, group=group)
    manager.wait()
    return [*made, y, z]


def ring_of_messages(group: Any) -> list[Any]:
    """Messages of every kind around a ring of ranks; `group` may hold only some of the ranks."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    after, before = (rank + 1) % size, (rank - 1) % size
    x, y = torch.full((3,), float(rank)), torch.zeros(3)
    made = []
    if rank == 0:
        dist.send(x, group_dst=after, group=group)
        dist.recv(y, group_src=before, group=group)
    else:
        dist.recv(y, group_src=before, group=group)
        dist.send(x, group_dst=after, group=group)
    made.append(y.clone())
    works = [dist.irecv(y, group_src=before, group=group, tag=7), dist.isend(x + 1, group_dst=after, group=group, tag=7)]
    for work in works:
        assert work is not None
        work.wait()
    made.append(y.clone())
    operations = [
        dist.P2POp(dist.isend, x + 2, group=group, group_peer=after),
        dist.P2POp(dist.irecv, y, group=group, group_peer=before),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    made.append(y.clone())
    work = dist.isend(x + 3, group_dst=after, group=group)
    made.append(torch.tensor(dist.recv(y, group=group)))  # from whoever sends
    assert work is not None
    work.wait()
    made.append(y.clone())
    return made


def late_wait(group: Any) -> list[str]:
    """A message whose receiver waits long after it has arrived; returns what was pending before the wait."""
    if dist.get_rank(group) == 0:
        dist.send(torch.ones(2), group_dst=1, group=group)
        return []
    y = torch.zeros(2)
    work = dist.irecv(y, group_src=0, group=group)
    assert work is not None
    while pending():  # the thread that waits for it has noticed its arrival
        pass
    before = y.tolist()
    assert work.wait()
    return [str(before), str(y.tolist())]


class Net(nn.Module):
    """A small network with a buffer and a part that only some passes use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last, self.unused = nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Linear(32, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *, every_part: bool = True) -> torch.Tensor:
        """A forward pass; `every_part` uses all parts."""
        y: torch.Tensor = self.last(torch.relu(self.norm(self.first(x))))
        return self.unused(y) if every_part else y


def data_parallel(group: Any, how: str) -> list[torch.Tensor]:
    """Two steps of DistributedDataParallel; returns its gradients."""
    rank = dist.get_rank(group)
    options: dict[str, Any] = {"bucket_cap_mb": 0.001}
    if how == "static_graph":
        options["static_graph"] = True
    if how == "find_unused":
        options["find_unused_parameters"] = True
    model = DistributedDataParallel(Net(), process_group=group, **options)
    if how == "allreduce_hook":
        model.register_comm_hook(group, default_hooks.allreduce_hook)
    if how == "fp16_hook":
        model.register_comm_hook(group, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = []
    for step in range(3):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(100 * step + rank))
        with model.no_sync() if how == "no_sync" and step == 1 else contextlib.nullcontext():
            model(x, every_part=how != "find_unused").square().mean().backward()
        made += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return made


def uneven_inputs(group: Any, divide: bool) -> list[torch.Tensor]:
    """Rank 1 takes a step more than rank 0; returns its gradients."""
    rank = dist.get_rank(group)
    model = DistributedDataParallel(Net(), process_group=group, bucket_cap_mb=0.001)
    with model.join(divide_by_initial_world_size=divide):
        for step in range(2 + rank):
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(100 * step + rank))
            model.zero_grad()
            model(x).square().mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def backward_beside_a_late_rank() -> list[bool]:
    """Rank 1 begins its backward pass only once rank 0 waits in its own; returns what was observed."""
    store = c10d._get_default_store()
    model = DistributedDataParallel(nn.Linear(4, 4))
    loss = model(torch.ones(2, 4)).sum()
    seen: list[bool] = []

    def look() -> None:
        until = time.monotonic() + 150
        while not any(operation.wait_start_ns for operation in operations()) and time.monotonic() < until:
            time.sleep(0.001)
        seen.append(time.monotonic() < until)
        store.set("rank 0 waits", "1")

    watcher = threading.Thread(target=look)
    if dist.get_rank() == 0:
        watcher.start()
    else:
        store.wait(["rank 0 waits"])
    loss.backward()
    if dist.get_rank() == 0:
        watcher.join()
    return seen


class _SumOfGradients(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        work = dist.all_reduce(gradient, async_op=True)
        assert work is not None
        work.wait()
        return gradient


def backward_passes_that_fail_and_nest() -> tuple[str, list[float]]:
    """A hook of the student's fails after a collective; then an operation is issued in a pass inside another pass."""

    def fail(_: torch.Tensor) -> None:
        raise ValueError("the student's own")

    x = torch.ones(3, requires_grad=True)
    failing, said = x * 1, ""
    failing.register_hook(fail)
    try:
        _SumOfGradients.apply(failing).sum().backward()
    except ValueError as error:
        said = str(error)
    inner = checkpoint(_SumOfGradients.apply, x, use_reentrant=True)
    _SumOfGradients.apply(inner).sum().backward()
    assert x.grad is not None
    return said, x.grad.tolist()


def gradients_by_hand(group: Any) -> list[torch.Tensor]:
    """Overlap as a student builds it: one all-reduce per gradient as soon as it exists, waited for after the pass."""
    model, works = Net(), []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: works.append(dist.all_reduce(p.grad, group=group, async_op=True)))
    model(torch.ones(4, 8) * dist.get_rank(group)).sum().backward()
    for work in works:
        assert work is not None
        work.wait()
    return [p.grad for p in model.parameters() if p.grad is not None]


def mesh_of(group: Any, name: str) -> DeviceMesh:
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=(name,))


def fully_sharded(group: Any) -> list[torch.Tensor]:
    """Two steps with FSDP2; returns its gathered parameters."""
    model, mesh = Net(), mesh_of(group, "dp")
    fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank(group)))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor().detach() for p in model.parameters()]


def tensor_parallel(group: Any) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    mesh = mesh_of(group, "tp")
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2))
    y = model(x)
    y.square().sum().backward()
    matrix = distribute_tensor(torch.arange(8.0).reshape(4, 2), mesh, [Shard(0)])
    whole = matrix.redistribute(mesh, [Replicate()]).to_local()
    gradients = [p.grad.full_tensor() for p in model.parameters() if p.grad is not None]  # type: ignore[attr-defined]
    return [y.detach(), whole, *gradients]


def sharded_optimizer(group: Any) -> list[torch.Tensor]:
    """DistributedDataParallel with the optimizer's state divided in two."""
    # Here, because importing it warns, and pytest takes that for an error.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(Net(), process_group=group)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, process_group=group, lr=0.01)
    for step in range(2):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank(group)))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def pipelined(group: Any, schedule: str) -> list[torch.Tensor]:
    rank = dist.get_rank(group)
    torch.manual_seed(3)
    stages = [nn.Linear(6, 6), nn.Linear(6, 6)]
    stage = PipelineStage(copy.deepcopy(stages[rank]), rank, 2, torch.device("cpu"), group=group)
    kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[schedule]
    runner = kind(stage, n_microbatches=4, loss_fn=nn.MSELoss())
    x, target = torch.ones(8, 6), torch.zeros(8, 6)
    losses: list[torch.Tensor] = []
    if rank == 0:
        runner.step(x)
    else:
        runner.step(target=target, losses=losses)
    return [*(p.grad for p in stage.submod.parameters() if p.grad is not None), *(loss.detach() for loss in losses)]


def same(a: Any, b: Any) -> bool:
    """Whether two results, which may be nested lists of tensors, are equal."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return len(a) == len(b) and all(map(same, a, b)) if isinstance(a, (list, tuple)) else a == b


# Programs for a pair of ranks: the function, its arguments, and an operation with its least number.
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[str, ...], str, int]] = {
    case.__name__: (case, (), "", 1)
    for case in (
        collectives, objects, asynchronous, functional, ring_of_messages, gradients_by_hand, fully_sharded, tensor_parallel,
        sharded_optimizer,
    )
}  # fmt: skip
PROGRAMS |= {
    f"data_parallel {how}": (data_parallel, (how,), "all_reduce", 6)
    for how in ("plain", "static_graph", "find_unused", "allreduce_hook", "fp16_hook")
}
PROGRAMS |= {f"pipelined {schedule}": (pipelined, (schedule,), "send", 8) for schedule in ("gpipe", "1f1b")}
