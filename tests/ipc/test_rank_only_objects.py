"""Objects that exist only in a rank: the error says what to return instead. A result that cannot be unpickled is an
error too."""

from __future__ import annotations

from collections.abc import Iterator

import cells as in_cells
import pytest

import labkit as lab

pytestmark = pytest.mark.processes

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def ranks() -> Iterator[lab.Group]:
    with lab.Group(2, timeout_s=200) as group:
        yield group


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
