"""Mismatched arguments of one operation are reported, even if the backend completes it; healthy programs are not
affected."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from reported import Reported

import labkit as lab
from labkit.errors.exceptions import MismatchError

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402  # after the check that it is there
from torch import nn  # noqa: E402

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def four() -> Iterator[lab.Group]:
    with lab.Group(4, timeout_s=200) as group:
        yield group


def reduce_types(first: Any, second: Any) -> None:
    dist.all_reduce(torch.ones(4, dtype=first if dist.get_rank() == 0 else second))


def reduce_operations() -> None:
    dist.all_reduce(torch.ones(4), op=dist.ReduceOp.SUM if dist.get_rank() == 0 else dist.ReduceOp.MAX)


def broadcast_sizes() -> None:
    dist.broadcast(torch.ones(4 if dist.get_rank() == 0 else 8), 0)


def gather_sizes() -> None:
    first = dist.get_rank() == 0
    dist.gather(torch.ones(4 if first else 2), [torch.ones(4), torch.ones(4)] if first else None, 0)


def scatter_sizes() -> None:
    first = dist.get_rank() == 0
    dist.scatter(torch.ones(4 if first else 8), [torch.ones(4), torch.ones(4)] if first else None, 0)


def all_to_all_sizes() -> None:
    received, sent = ([1, 2], [1, 3]) if dist.get_rank() == 0 else ([4, 2], [2, 2])
    dist.all_to_all_single(torch.ones(sum(received)), torch.ones(sum(sent)), received, sent)


def all_to_all_types() -> None:
    dtype = torch.float32 if dist.get_rank() == 0 else torch.int32
    dist.all_to_all_single(torch.ones(4, dtype=dtype), torch.ones(4, dtype=dtype))


@pytest.mark.parametrize(
    ("function", "arguments", "gave"),
    [
        (reduce_types, (torch.float32, torch.int32), ("all_reduce of float32 [4]", "all_reduce of int32 [4]")),
        (reduce_types, (torch.bfloat16, torch.float16), ("all_reduce of bfloat16 [4]", "all_reduce of float16 [4]")),
        (reduce_operations, (), ("all_reduce of float32 [4]", "all_reduce of float32 [4], max")),
        (broadcast_sizes, (), ("broadcast of float32 [4], root 0", "broadcast of float32 [8], root 0")),
        (gather_sizes, (), ("gather of float32 [4], root 0", "gather of float32 [2], root 0")),
        (scatter_sizes, (), ("scatter of float32 [4], root 0", "scatter of float32 [8], root 0")),
        (
            all_to_all_sizes,
            (),
            ("all_to_all_single of float32 1,3 sent, 1,2 received", "all_to_all_single of float32 2,2 sent, 4,2 received"),
        ),
        (all_to_all_types, (), ("all_to_all_single of float32 [4]", "all_to_all_single of int32 [4]")),
    ],
    ids=["types", "half types", "reductions", "broadcast", "gather", "scatter", "all-to-all sizes", "all-to-all types"],
)
def test_a_collective_with_mismatched_arguments_is_an_error(
    two: lab.Group, function: Callable[..., None], arguments: tuple[Any, ...], gave: tuple[str, str]
) -> None:
    """gloo completes all of these with garbage."""
    with pytest.raises(MismatchError) as caught:
        two.run(function, *arguments)
    line = caught.value.doings[0].rpartition(" (")[2]
    assert line.startswith("test_mismatches.py, line ")
    assert caught.value.doings == [f"rank {rank}: {words} ({line}" for rank, words in enumerate(gave)]
    assert two.run(dist.get_rank).results == [0, 1], "fresh ranks serve the next run"


def rows_that_do_not_fit() -> None:
    to_each = [3, 1] if dist.get_rank() == 0 else [2, 2]
    dist.all_to_all_single(torch.ones(4, 2), torch.ones(4, 2), to_each, to_each)


def test_split_sizes_that_do_not_fit(two: lab.Group) -> None:
    """gloo ends the process that receives too much."""
    with pytest.raises(lab.RankError) as caught:
        two.run(rows_that_do_not_fit)
    line = rows_that_do_not_fit.__code__.co_firstlineno + 2
    assert f"(test_mismatches.py, line {line}): rank 1 sends 2 rows to rank 0, which expects 1. " in " ".join(
        str(caught.value).split()
    )


def test_the_first_of_many_mismatches_is_reported(two: lab.Group, reported: Reported) -> None:
    def train() -> None:
        for step in range(20):
            dist.all_reduce(torch.ones(3, dtype=torch.int32 if step > 6 and dist.get_rank() else torch.float32))

    with pytest.raises(MismatchError):
        two.run(train)
    assert [(p.name, p.match, p.signature) for _, p in reported.mismatches[-1]] == [
        ("all_reduce", 8, "float32 [3]"),
        ("all_reduce", 8, "int32 [3]"),
    ]


def test_a_completed_mismatch_explains_a_later_failure(two: lab.Group, reported: Reported) -> None:
    def train() -> None:
        value = torch.full((1,), 3.0 if dist.get_rank() else 2)
        dist.broadcast(value if dist.get_rank() else value.to(torch.int32), 0)
        assert value == 2

    with pytest.raises(lab.RankError) as caught:
        two.run(train)
    assert reported.mismatches[-1][0][1].signature.startswith("int32 [1]")
    assert caught.value.hint


def test_a_reduction_of_other_shapes_is_only_a_note(two: lab.Group, capsys: pytest.CaptureFixture[str]) -> None:
    def train() -> None:
        dist.all_reduce(torch.ones(4, 1) if dist.get_rank() else torch.ones(4))
        dist.all_reduce(torch.ones(2, 3) if dist.get_rank() else torch.ones(3, 2))

    two.run(train)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("labkit: ")]
    assert len(said) == 1
    assert "combined float32 [3, 2] of rank 0 with float32 [2, 3] of rank 1" in said[0]


# Healthy programs, in which arguments may differ from rank to rank.


def objects() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    every: list[Any] = [None] * size
    dist.all_gather_object(every, "x" * 10**rank)
    assert [len(text) for text in every] == [10**other for other in range(size)]
    gathered: list[Any] | None = [None] * size if rank == 1 else None
    dist.gather_object(list(range(5 * rank)), gathered, dst=1)
    assert gathered is None or [len(part) for part in gathered] == [5 * other for other in range(size)]
    given: list[Any] = [list(range(100)), "b"] if rank == 0 else [None, None]
    dist.broadcast_object_list(given, 0)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, ["y" * 3**other for other in range(size)] if rank == 0 else [None] * size, 0)
    assert (len(given[0]), len(mine[0])) == (100, 3**rank)


def uneven_all_to_all() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(3):
        sent = torch.tensor([(rank + other + step) % 3 for other in range(size)])
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        mine = torch.cat([torch.full((count, 2), 10.0 * rank + other) for other, count in enumerate(sent.tolist())])
        got = torch.empty(int(received.sum()), 2)
        dist.all_to_all_single(got, mine, received.tolist(), sent.tolist())
        assert got[:, 0].tolist() == [10 * other + rank for other, count in enumerate(received.tolist()) for _ in range(count)]


def uneven_reduce_scatter() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.empty(1 + rank)
    dist.reduce_scatter(mine, [torch.full((1 + other,), float(rank)) for other in range(size)])
    assert (mine == sum(range(size))).all()


def messages() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for _ in range(3):
        mine, got = torch.full((rank + 1,), float(rank)), torch.empty((rank - 1) % size + 1)
        pairs = [dist.P2POp(dist.isend, mine, (rank + 1) % size), dist.P2POp(dist.irecv, got, (rank - 1) % size)]
        for work in dist.batch_isend_irecv(pairs):
            work.wait()
        assert (got == (rank - 1) % size).all()
    for _ in range(size - 1 if rank == 0 else 0):
        got = torch.empty(1)
        assert dist.recv(got) == got.item()
    if rank:
        dist.send(torch.tensor([float(rank)]), 0)


def data_parallel() -> None:
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)), find_unused_parameters=True, bucket_cap_mb=1e-3
    )
    for _ in range(3):
        model(torch.randn(4, 8)).sum().backward()


def uneven_inputs_and_sharded_optimizer() -> None:
    from torch.distributed.algorithms.join import Join
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)))
    optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
    with Join([model, optimizer]):
        for _ in range(2 + dist.get_rank()):
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    optimizer.consolidate_state_dict(to=0)


def fully_sharded() -> None:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(7, 13), nn.ReLU(), nn.Linear(13, 5))  # not divisible by the number of ranks
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        model(torch.randn(4, 7)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def tensors_on_a_mesh() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh, whole = init_device_mesh("cpu", (dist.get_world_size(),)), torch.arange(35.0).reshape(7, 5)
    parts = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(parts.redistribute(mesh, [Replicate()]).to_local(), whole)
    assert torch.equal(parts.redistribute(mesh, [Shard(1)]).full_tensor(), whole)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    model(torch.ones(3, 8)).sum().backward()


def pipeline() -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    rank, size = dist.get_rank(), dist.get_world_size()
    for kind in (ScheduleGPipe, Schedule1F1B):
        schedule = kind(
            PipelineStage(nn.Linear(4, 4), rank, size, torch.device("cpu")), n_microbatches=4, loss_fn=nn.functional.mse_loss
        )
        if rank == 0:
            schedule.step(torch.randn(8, 4))
        else:
            schedule.step(**({"target": torch.randn(8, 4), "losses": []} if rank == size - 1 else {}))


def odd_tensors() -> None:
    rank = dist.get_rank()
    dist.all_reduce(torch.ones(3, dtype=torch.cfloat))
    dist.all_reduce(torch.sparse_coo_tensor(torch.arange(rank + 1)[None], torch.ones(rank + 1), (4,)))
    dist.all_reduce_coalesced([torch.ones(2), torch.ones(3)])
    part = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(torch.ones(2), group=part)
    dist.monitored_barrier()


HEALTHY = (
    objects, uneven_all_to_all, uneven_reduce_scatter, messages, data_parallel, uneven_inputs_and_sharded_optimizer,
    fully_sharded, tensors_on_a_mesh, pipeline, odd_tensors,
)  # fmt: skip


@pytest.mark.parametrize("program", HEALTHY, ids=[program.__name__ for program in HEALTHY])
def test_a_healthy_program_keeps_its_ranks_and_prints_nothing(
    four: lab.Group, program: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    before = four.run(os.getpid).results
    four.run(program)
    assert four.run(os.getpid).results == before
    assert "labkit: " not in capsys.readouterr().out
