"""Objects that cloudpickle cannot send: locks are new in each rank, functions are decorated anew; what exists only in a
rank is an error that says what to return instead."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import cells as in_cells
import pytest

import labkit as lab
from labkit.ipc import pickling

pytestmark = pytest.mark.processes

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def bare() -> Iterator[lab.Group]:
    with lab.Group(2, runtime="bare", timeout_s=200) as group:
        yield group


@pytest.fixture(scope="module")
def ranks() -> Iterator[lab.Group]:
    with lab.Group(2, timeout_s=200) as group:
        yield group


# Locks, conditions, events and queues


def travel(value: Any) -> Any:
    return pickling.unpack(pickling.pack(value))


def test_module_level_ones_work_in_ranks(bare: lab.Group, cells: in_cells.Cells) -> None:
    cells("""
        import queue, threading
        global_lock, again = threading.Lock(), threading.RLock()
        ready, changed, slots = threading.Event(), threading.Condition(), threading.Semaphore(2)
        jobs, last_first = queue.Queue(5), queue.LifoQueue()

        class Store:
            lock = threading.Lock()
            def add(self, x):
                with global_lock, self.lock:
                    return x + 1

        def f():
            with again, again, changed, slots:
                changed.notify_all()
            ready.set()
            for each in (jobs, last_first):
                each.put(1)
                each.put(2)
            return Store().add(1), [each.get() for each in (jobs, last_first)], ready.is_set(), jobs.maxsize
    """)
    with cells.again:  # held by this thread
        assert bare.run(cells.f).results == [(2, [1, 2], True, 5)] * 2
    assert not cells.ready.is_set()
    assert cells.jobs.empty()


def test_state_is_sent_and_a_lock_that_two_objects_share_stays_one_lock() -> None:
    event, jobs, semaphore, lock = threading.Event(), queue.PriorityQueue(4), threading.Semaphore(0), threading.Lock()
    event.set()
    for item in (3, 1):
        jobs.put(item)
    event, jobs, semaphore, first, second, condition = travel((event, jobs, semaphore, lock, [lock], threading.Condition(lock)))
    assert event.is_set()
    assert [jobs.get(), jobs.get(), jobs.maxsize, jobs.unfinished_tasks] == [1, 3, 4, 2]
    assert not semaphore.acquire(blocking=False)
    assert second == [first]
    with condition:
        assert first.locked()


# Decorated functions


COMPILED = """
    import torch

    @torch.compile(backend="eager", dynamic=True)
    def double(x): return 2 * x

    @torch.compile(backend="eager", fullgraph=True)
    def broken(x):
        torch._dynamo.graph_break()
        return x

    class Net(torch.nn.Module):
        def forward(self, x): return self.tripled(x)

        @torch.compile(backend="eager")
        def tripled(self, x): return 3 * x

    net = torch.compile(Net(), backend="eager")

    def everything(x):
        import __main__
        assert double is __main__.double and double.__name__ == "double"
        return double(x), net(x), torch._dynamo.utils.counters["stats"]["unique_graphs"]

    def breaks(x):
        try:
            broken(x)
        except torch._dynamo.exc.Unsupported:
            return "not one graph"
"""


def test_functions_under_singledispatch_are_refused(bare: lab.Group, cells: in_cells.Cells) -> None:
    cells("import functools\n@functools.singledispatch\ndef shape(x): return 'one'")
    with pytest.raises(lab.LabError, match="WeakKeyDictionary objects cannot be pickled"):
        bare.run(lambda of: of(1), cells.shape)


@pytest.mark.parametrize("used", [False, True], ids=["new", "already compiled"])
def test_compiled_functions(bare: lab.Group, cells: in_cells.Cells, used: bool) -> None:
    cells(COMPILED)
    x = torch.ones(2)
    if used:
        cells.everything(x)
    for doubled, tripled, graphs in bare.run(cells.everything, x).results:
        assert (doubled.tolist(), tripled.tolist()) == ([2, 2], [3, 3])
        assert graphs >= 2  # they were compiled there
    assert bare[1].run(cells.double, x).results[0].tolist() == [2, 2]
    assert bare[0].run(lambda f: f(torch.ones(1)), cells.double).results[0].tolist() == [2]
    assert bare.run(cells.breaks, x).results == ["not one graph"] * 2


# What exists only in a rank


SETUP = """
import torch, torch.distributed as dist
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP

def mesh(): return init_device_mesh("cpu", (2,))
def sharded():
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=mesh())
    return model
def asked():
    work = dist.all_reduce(torch.ones(2), async_op=True)
    work.wait()
    return work
"""
CONFINED = {
    "DDP(nn.Linear(2, 2))": ("DistributedDataParallel", "Return model.module.state_dict()"),
    "{'loss': 1.0, 'model': [DDP(nn.Linear(2, 2))]}": ("['model'][0]", "Return model.module.state_dict()"),
    "dist.group.WORLD": ("ProcessGroup", "dist.get_process_group_ranks(group)"),
    "asked()": ("Work", "return the tensor"),
    "asked().get_future()": ("Future", "future.wait()"),
    "mesh()": ("DeviceMesh", "mesh.mesh"),
    "distribute_tensor(torch.ones(4, 4), mesh())": ("DTensor", "tensor.full_tensor()"),
    "sharded()": ("FSDPLinear", "get_model_state_dict(model"),
    "sharded().state_dict()": ("['weight'] cannot be sent: this DTensor", "tensor.full_tensor()"),
}


@pytest.mark.parametrize("value", CONFINED)
def test_objects_that_exist_only_in_a_rank(value: str, ranks: lab.Group, cells: in_cells.Cells) -> None:
    kind, remedy = CONFINED[value]
    cells(SETUP)(f"def train(): return {value}")
    with pytest.raises(lab.RankError, match=r"the result of train\(\)") as caught:
        ranks.run(cells.train)
    assert kind in caught.value.failures[0].headline
    assert remedy in caught.value.failures[0].headline


def test_the_suggested_replacement_comes_back(ranks: lab.Group, cells: in_cells.Cells) -> None:
    cells(SETUP)("""
        def train():
            model = DDP(nn.Linear(2, 2))
            return model.module, model.module.state_dict(), sharded().weight.full_tensor().detach(), mesh().mesh
    """)
    for module, state, whole, ranks_of_mesh in ranks.run(cells.train).results:
        assert torch.equal(module.weight, state["weight"])
        assert whole.shape == (4, 4)
        assert ranks_of_mesh.tolist() == [0, 1]


def test_references_and_futures_of_rpc(cells: in_cells.Cells) -> None:
    cells(SETUP)("""
        def reference(): return rpc.RRef(1)
        def asked(): return rpc.rpc_async(rpc.get_worker_info().name, int)
    """)
    with lab.Group(1, runtime="rpc", timeout_s=200) as group:
        with pytest.raises(lab.RankError, match=r"this RRef exists only inside its rank. Return its value: rref.to_here\(\)"):
            group.run(cells.reference)
        with pytest.raises(lab.RankError, match=r"this Future exists only inside its rank. Return its value: future.wait\(\)"):
            group.run(cells.asked)


@pytest.mark.usefixtures("patient")
def test_a_result_that_cannot_be_unpickled(ranks: lab.Group, cells: in_cells.Cells) -> None:
    cells("""
        import sys, types
        class Odd:
            def __getstate__(self): return {"a": 1}
            def __setstate__(self, state): raise FileNotFoundError("not here")
        def unknown():
            module = sys.modules["only_here"] = types.ModuleType("only_here")
            exec("class Thing: ...", module.__dict__)
            return module.Thing()
        def odd(): return Odd()
        def kept(): return "only_here" in sys.modules
    """)
    for function, says in ((cells.unknown, "No module named 'only_here'"), (cells.odd, "FileNotFoundError: not here")):
        with pytest.raises(lab.RankError, match=says) as caught:
            ranks.run(function)
        assert str(caught.value.failures[0]).startswith("rank 0 returned what the notebook cannot read: ")
        assert [f.rank for f in caught.value.failures] == [0, 1]
    assert ranks.run(cells.kept).results == [True, True], "the ranks go on"
