"""Groups on real GPUs: NCCL where each rank has one, gloo where they share one, and the same numbers as on one
process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gpu_device import DEVICES, GPUS, REHEARSAL, gpu, needs_cuda, needs_two_gpus

import labkit as lab

pytestmark = gpu

SHARED = max(GPUS, 1) + 1  # ranks: one more than there are GPUs
KIND = "cpu" if REHEARSAL else "cuda"


@pytest.fixture(scope="module")
def alone() -> Iterator[lab.Group]:
    with lab.Group(1, devices=DEVICES) as group:
        yield group


@pytest.fixture(scope="module")
def shared() -> Iterator[lab.Group]:
    with lab.Group(SHARED, devices=DEVICES) as group:
        yield group


def where() -> tuple[str, str, int]:
    import torch.distributed as dist

    return dist.get_backend(), lab.device().type, torch.cuda.current_device() if torch.cuda.is_available() else -1


def collectives() -> dict[str, list[float]]:
    """Each collective once, on this rank's device."""
    import torch.distributed as dist

    rank, size, device = dist.get_rank(), dist.get_world_size(), lab.device()
    mine = torch.full((4,), float(rank + 1), device=device)
    found = {}
    x = mine.clone()
    dist.all_reduce(x)
    found["all_reduce"] = x.tolist()
    x = mine.clone()
    dist.broadcast(x, 0)
    found["broadcast"] = x.tolist()
    parts = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(parts, mine)
    found["all_gather"] = torch.stack(parts)[:, 0].tolist()
    whole = torch.empty(4 * size, device=device)
    dist.all_gather_into_tensor(whole, mine)
    found["all_gather_into_tensor"] = whole[::4].tolist()
    part = torch.empty(4, device=device)
    dist.reduce_scatter_tensor(part, whole.clone())
    found["reduce_scatter_tensor"] = part.tolist()
    part = torch.empty(4, device=device)
    dist.reduce_scatter(part, list(whole.chunk(size)))
    found["reduce_scatter"] = part.tolist()
    exchanged = torch.empty(size, device=device)
    dist.all_to_all_single(exchanged, mine[:1].repeat(size))
    found["all_to_all_single"] = exchanged.tolist()
    parts = [torch.empty_like(mine) for _ in range(size)]
    dist.gather(mine, parts if rank == 0 else None)
    found["gather"] = torch.stack(parts)[:, 0].tolist() if rank == 0 else []
    dist.scatter(part, parts if rank == 0 else None)
    found["scatter"] = part.tolist()
    dist.barrier()
    return found


def check_collectives(run: lab.Run, size: int) -> None:
    total = float(sum(range(1, size + 1)))
    for rank, found in enumerate(run.results):
        assert found["all_reduce"] == [total] * 4
        assert found["broadcast"] == [1.0] * 4
        assert found["all_gather"] == found["all_gather_into_tensor"] == [float(r + 1) for r in range(size)]
        assert found["reduce_scatter_tensor"] == found["reduce_scatter"] == [float(rank + 1) * size] * 4
        assert found["all_to_all_single"] == found["all_gather"]
        assert found["gather"] == (found["all_gather"] if rank == 0 else [])
        assert found["scatter"] == [float(rank + 1)] * 4
        spans = {s.name: s for s in run.trace.filter(rank=rank, kind="communication")}
        assert {*found, "barrier"} <= set(spans)
        assert spans["all_reduce"].nbytes == spans["broadcast"].nbytes == 16
        assert all(s.done and s.start_ns <= s.end_ns for s in spans.values())


@needs_cuda
def test_one_rank_with_a_gpu_of_its_own_uses_nccl(alone: lab.Group) -> None:
    (found,) = alone.run(where).results
    assert "nccl" in found[0]
    assert found[1:] == ("cuda", 0)
    run = alone.run(collectives)
    check_collectives(run, 1)
    assert {s.device for s in run.trace.filter(kind="communication") if s.name != "barrier"} == {"cuda"}


@needs_two_gpus
def test_each_rank_has_a_gpu_and_nccl_moves_the_tensors() -> None:
    with lab.Group(GPUS) as group:
        found = group.run(where).results
        assert all("nccl" in backend for backend, _, _ in found)
        assert [number for _, _, number in found] == list(range(GPUS))
        run = group.run(collectives)
        check_collectives(run, GPUS)
        assert {s.device for s in run.trace.filter(kind="communication") if s.name != "barrier"} == {"cuda"}
        assert group.run(ping_pong).results[0] == [2.0, 2.0]
        assert group.run(exchange_behind_kernels).results[0] == [2.0, 2.0, 0.0, 1.0, 1.0]


def ping_pong() -> list[float]:
    import torch.distributed as dist

    x = torch.ones(2, device=lab.device())
    if dist.get_rank() == 0:
        dist.send(x + 1, 1)
        dist.recv(x, 1)
    elif dist.get_rank() == 1:
        dist.recv(x, 0)
        dist.send(x, 0)
    return x.tolist()


def exchange_behind_kernels() -> list[float]:
    """Both ranks send what a kernel has yet to compute, and receive where an earlier kernel still reads."""
    import torch.distributed as dist

    rank, device = dist.get_rank(), lab.device()
    if rank > 1:
        return []
    x, y = torch.ones(1 << 20, device=device), torch.zeros(1 << 20, device=device)
    for _ in range(50):
        x = x.sqrt() * 1.0
        seen = y.clone()
    x = x + rank
    operations = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, y, 1 - rank)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    request = dist.isend(y, 1 - rank)
    z = torch.empty_like(y)
    dist.recv(z, 1 - rank)
    assert request is not None
    request.wait()
    return [float(y.min()), float(y.max()), float(seen.max()), float(z.min()), float(z.max())]


def test_ranks_that_share_a_gpu_use_gloo_and_say_so_once(capsys: pytest.CaptureFixture[str]) -> None:
    with lab.Group(SHARED, devices=DEVICES) as group:
        found = group.run(where).results
        group.run(where)
    assert {(backend, kind) for backend, kind, _ in found} == {("gloo", KIND)}
    if not REHEARSAL:
        assert capsys.readouterr().out.count(f"{SHARED} ranks share {GPUS} GPU") == 1


def test_collectives_of_ranks_that_share_a_gpu(shared: lab.Group) -> None:
    check_collectives(shared.run(collectives), SHARED)


def test_messages_between_ranks_that_share_a_gpu(shared: lab.Group) -> None:
    run = shared.run(ping_pong)
    assert run.results[0] == run.results[1] == [2.0, 2.0]
    spans = list(run.trace.filter(rank=0, kind="communication"))
    assert [(s.name, s.nbytes, s.through_host) for s in spans] == [("send", 8, not REHEARSAL), ("recv", 8, not REHEARSAL)]


def test_messages_behind_kernels(shared: lab.Group) -> None:
    first, second = shared.run(exchange_behind_kernels).results[:2]
    assert first == [2.0, 2.0, 0.0, 1.0, 1.0]
    assert second == [1.0, 1.0, 0.0, 2.0, 2.0]


def model_and_data() -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4)).double()
    return model, torch.randn(8 * 3 * 5, 16, dtype=torch.float64), torch.randint(4, (8 * 3 * 5,))


def trained(wrapper: str) -> list[float]:
    """The parameters after five steps, each on an equal part of the same batches."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    rank, size, device = dist.get_rank(), dist.get_world_size(), lab.device()
    model, inputs, labels = model_and_data()
    model = model.to(device)
    if wrapper == "FSDP2":
        fully_shard(model)
    trained_model = DistributedDataParallel(model) if wrapper == "DDP" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in zip(inputs.chunk(5), labels.chunk(5), strict=True):
        share = slice(rank * len(x) // size, (rank + 1) * len(x) // size)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(trained_model(x[share].to(device)), y[share].to(device))
        loss.backward()
        optimizer.step()
    whole = [p.full_tensor() if wrapper == "FSDP2" else p for p in model.parameters()]
    return torch.cat([p.detach().flatten() for p in whole]).tolist()


PAIR = pytest.param("FSDP2", 2, marks=() if REHEARSAL else needs_two_gpus)


@pytest.mark.parametrize(("wrapper", "ranks"), [("DDP", 2), PAIR, ("FSDP2", 1)])  # NCCL where there are two GPUs, else gloo
def test_data_parallel_training_on_gpus_equals_one_process(alone: lab.Group, wrapper: str, ranks: int) -> None:
    (expected,) = alone.run(trained, "").results
    with lab.Group(ranks, devices=DEVICES) as group:
        run = group.run(trained, wrapper)
    for found in run.results:
        assert found == pytest.approx(expected, rel=0, abs=1e-12)
    reductions = sum(s.name == "all_reduce" for s in run.trace.filter(rank=0, kind="communication"))
    assert wrapper != "DDP" or reductions == 5


def on_the_owners_device(x: Any) -> Any:
    """A callee moves its arguments to its own GPU and returns a CPU tensor: RPC sends nothing else."""
    return (x.to(lab.device()) * 2).cpu()


def asked() -> list[float]:
    from torch.distributed import rpc

    return list(rpc.rpc_sync("worker", on_the_owners_device, args=(torch.ones(3),)).tolist())


def test_rpc_with_callees_on_gpus() -> None:
    with lab.Group(["master", "worker"], runtime="rpc", devices=DEVICES) as group:
        run = group["master"].run(asked)
    assert run.results == [[2.0] * 3]


@needs_cuda
def test_tensors_of_a_gpu_come_back_as_tensors_of_the_cpu(alone: lab.Group, capsys: pytest.CaptureFixture[str]) -> None:
    def make(x: Any) -> Any:
        return x.to(lab.device()) + 1

    (found,) = alone.run(make, torch.ones(2)).results
    assert found.device.type == "cpu"
    assert found.tolist() == [2.0, 2.0]
    assert "CUDA tensors in results come back as CPU tensors" in capsys.readouterr().out


@needs_cuda
def test_the_process_that_forks_ranks_never_touched_cuda(shared: lab.Group) -> None:
    """Even counting the GPUs there would prevent CUDA from starting in forked ranks."""

    def poisoned() -> bool:
        return bool(torch.cuda._is_in_bad_fork())

    assert shared.run(poisoned).results == [False] * SHARED


def computed() -> float:
    return float((torch.ones(2, device=lab.device()) + 1).sum().item())


def test_groups_start_and_compute_after_cuda_was_initialised_in_the_notebook() -> None:
    """Ranks forked from the notebook's process could not: "Cannot re-initialize CUDA in forked subprocess"."""
    torch.zeros(1, device=KIND)
    assert torch.cuda.is_initialized() is (KIND == "cuda")
    for ranks in (1, 2):
        with lab.Group(ranks, devices=DEVICES) as group:
            assert group.run(computed).results == [4.0] * ranks
