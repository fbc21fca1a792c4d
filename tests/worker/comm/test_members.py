"""Process groups whose ranks the program numbers itself: their operations are recorded with the group's ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from labkit.group.group import Group
from labkit.group.run import Run
from labkit.recording.group_keys import axis_of
from labkit.tracing.trace import Trace

pytestmark = pytest.mark.processes

NBYTES = 4000


@pytest.fixture(scope="module")
def four() -> Iterator[Group]:
    with Group(4) as group:
        yield group


def reported(run: Run | Trace) -> dict[int, list[tuple[str, int, int, int]]]:
    """By rank: name, root and peer of each communication, and how many ranks took part in it, by start."""
    trace = run if isinstance(run, Trace) else run.trace
    spans = [span for span in trace if span.kind == "communication" and span.nbytes]  # not the rendezvous
    parts = [(span.group, span.match) for span in spans]
    found: dict[int, list[tuple[str, int, int, int]]] = {}
    for span, part in zip(spans, parts, strict=True):
        assert span.nbytes == NBYTES
        found.setdefault(span.rank, []).append((span.name, span.root, max(span.peer, -1), parts.count(part)))
    return found


def another_world(store: str) -> None:
    """The last two ranks of four are a world of two; in it, one more group of both."""
    me = dist.get_rank()
    dist.destroy_process_group()
    if me >= 2:
        dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=me - 2, world_size=2)
        both, tensor = dist.new_group([0, 1]), torch.ones(NBYTES // 4)
        dist.broadcast(tensor, src=0)
        dist.broadcast(tensor, src=1, group=both)
        (dist.send if dist.get_rank() == 0 else dist.recv)(tensor, 1 - dist.get_rank())


def test_a_second_world_of_some_ranks(tmp_path: Path) -> None:
    with Group(4) as group:
        run = group.run(another_world, str(tmp_path / "store"))
    assert reported(run) == {
        2: [("broadcast", 2, -1, 2), ("broadcast", 3, -1, 2), ("send", -1, 3, 2)],
        3: [("broadcast", 2, -1, 2), ("broadcast", 3, -1, 2), ("recv", -1, 2, 2)],
    }


def two_worlds_at_once(folder: str) -> None:
    """The even ranks are a world of two, and so are the odd ones."""
    me = dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/{me % 2}", 2), rank=me // 2, world_size=2)
    dist.broadcast(torch.ones(NBYTES // 4), src=1)


def test_two_second_worlds_are_not_one(tmp_path: Path) -> None:
    with Group(4) as group:
        run = group.run(two_worlds_at_once, str(tmp_path))
    assert reported(run) == {rank: [("broadcast", 2 + rank % 2, -1, 2)] for rank in range(4)}


def a_group_by_hand(store: str) -> tuple[float, bool]:
    group: Any = dist.distributed_c10d.ProcessGroup(dist.FileStore(store, 2), dist.get_rank() // 2, 2)
    backend = dist.ProcessGroupGloo(dist.FileStore(store, 2), dist.get_rank() // 2, 2)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    tensor = torch.ones(1)
    group.allreduce([tensor]).wait()
    return tensor.item(), hasattr(group, "recorder")


def test_a_group_that_the_program_makes_itself_works_and_is_not_recorded(four: Group, tmp_path: Path) -> None:
    def odd_ranks(store: str) -> Any:
        return a_group_by_hand(store) if dist.get_rank() % 2 else None

    run = four.run(odd_ranks, str(tmp_path / "store"))
    made = 2.0, False
    assert (run.results, reported(run)) == ([None, made, None, made], {})


def through_a_mesh() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    dist.broadcast(torch.ones(NBYTES // 4), group=mesh["data"].get_group(), group_src=1)
    dist.all_reduce(torch.ones(NBYTES // 4), group=mesh["tensor"].get_group())


def test_the_groups_of_a_mesh(four: Group) -> None:
    run = four.run(through_a_mesh)
    assert reported(run) == {rank: [("broadcast", 2 + rank % 2, -1, 2), ("all_reduce", -1, -1, 2)] for rank in range(4)}
    axes = {(span.name, axis_of(span.group)) for span in run.trace.filter(kind="communication") if span.group}
    assert axes >= {("broadcast", "data"), ("all_reduce", "tensor")}


def along_a_pipeline() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    stages = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "stage"))["stage"].get_group()
    if dist.get_rank(stages):
        dist.recv(torch.ones(NBYTES // 4), group=stages, group_src=0)
    else:
        dist.send(torch.ones(NBYTES // 4), group=stages, group_dst=1)


def test_messages_along_a_mesh_know_their_axis(four: Group) -> None:
    spans = [span for span in four.run(along_a_pipeline).trace if span.name in ("send", "recv")]
    assert {(span.name, span.peer - span.rank, axis_of(span.group)) for span in spans} == {
        ("send", 1, "stage"), ("recv", -1, "stage"),
    }  # fmt: skip


def the_first_of_rpc(store: str) -> None:
    me = torch.distributed.rpc.get_worker_info().id
    if me:
        dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=2 - me, world_size=2)
        dist.broadcast(torch.ones(NBYTES // 4), src=0)
        dist.destroy_process_group()


def test_the_first_world_of_rpc_workers(tmp_path: Path) -> None:
    with Group(["master", "one", "two"], runtime="rpc") as group:
        run = group.run(the_first_of_rpc, str(tmp_path / "store"))
    assert reported(run) == {1: [("broadcast", 2, -1, 2)], 2: [("broadcast", 2, -1, 2)]}


def the_first_of_bare_ranks(store: str) -> None:
    me = int(os.environ["RANK"])
    if me:
        dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=2 - me, world_size=2)
        dist.broadcast(torch.ones(NBYTES // 4), src=0)
        dist.destroy_process_group()


def test_the_first_world_of_bare_ranks(tmp_path: Path) -> None:
    with Group(3, runtime="bare") as group:
        run = group.run(the_first_of_bare_ranks, str(tmp_path / "store"))
    assert reported(run) == {1: [("broadcast", 2, -1, 2)], 2: [("broadcast", 2, -1, 2)]}
