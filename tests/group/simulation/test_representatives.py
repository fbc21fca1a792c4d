"""Which ranks are executed, and what a program of one of many ranks contains."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import simulated_programs
import torch
import torch.distributed as dist
from cells import Cells
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import labkit as lab
from labkit.costs.device import Kernel
from labkit.group.simulation.program import Communication, Mark, Memory, Program, Wait
from labkit.group.simulation.simulate import PATIENCE_S, programs_of

pytestmark = pytest.mark.processes
MANY = 1024


def simulate(function: Any, *args: Any, ranks: int = 2) -> dict[int, Any]:
    return programs_of(function, args, {}, ranks=ranks)


def to_the_next() -> None:
    rank = dist.get_rank()
    tensor = torch.ones(3)
    if rank % 4 < 3:
        dist.send(tensor, rank + 1)
    if rank % 4 > 0:
        dist.recv(tensor, rank - 1)


def test_ranks_that_exchange_messages_are_executed_together() -> None:
    executed = simulate(to_the_next, ranks=MANY)
    chains = {rank // 4 for rank in executed}
    assert sorted(executed) == sorted(4 * chain + i for chain in chains for i in range(4))
    assert {0, MANY // 4 - 1} <= chains
    assert len(chains) <= 3


@pytest.mark.parametrize("function", [simulated_programs.ddp, simulated_programs.fsdp, simulated_programs.mesh])
def test_one_of_a_thousand_ranks(function: Any) -> None:
    executed = simulate(function, ranks=MANY)
    assert len(executed) <= 3
    for rank, program in executed.items():
        assert (program.rank, program.size) == (rank, MANY)
        assert {len(c.group) for c in program.communications} <= {2, MANY // 2, MANY}
        assert all(rank in c.group for c in program.communications)
    names = [[c.name for c in program.communications] for program in executed.values()]
    assert names == names[:1] * len(names)


def multiply_and_reduce() -> None:
    left, right = torch.ones(64, 128), torch.ones(128, 32)
    product = left @ right
    del left, right
    pending = dist.all_reduce(product, async_op=True)
    other = torch.zeros(10)
    assert pending is not None
    pending.wait()
    dist.all_reduce(other, async_op=True)
    other.add_(1)


def test_a_program_has_sizes_memory_and_waits() -> None:
    events = simulate(multiply_and_reduce)[0].events
    multiplied = next(event for event in events if isinstance(event, Kernel) and event.name == "mm")
    mebi = 4
    sizes = mebi * 64 * 128, mebi * 128 * 32, mebi * 64 * 32
    assert multiplied == Kernel("mm", 2 * 64 * 128 * 32, sizes[0] + sizes[1], sizes[2], wide=True)
    at = events.index(multiplied)
    assert events[at - 1] == Memory(sum(sizes))
    assert Memory(sizes[2] + 40) in events[at:], "the factors have been freed"
    rest = [event for event in events[at + 1 :] if not isinstance(event, Memory)]
    kinds = [event.name if isinstance(event, Kernel | Communication) else event for event in rest]
    assert kinds == ["all_reduce", "zeros", Wait(0), "all_reduce", Wait(1), "add_"]


def train_shards() -> None:
    model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(8)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    batch = torch.randn(1, 256)
    for _ in lab.steps(range(2)):
        model(batch).sum().backward()
        model.zero_grad()


def test_gathered_parameters_are_freed() -> None:
    """The whole model exists only before it is sharded; later, a rank has its part and a few layers at a time."""
    program = simulate(train_shards, ranks=8)[0]
    layer = 4 * 256 * 256
    begin = program.events.index(next(event for event in program.events if isinstance(event, Mark) and event.name == "step"))
    peak, in_training = (max(e.live_bytes for e in program.events[at:] if isinstance(e, Memory)) for at in (0, begin))
    assert peak >= 8 * layer
    assert 8 * layer / 8 + 2 * layer < in_training < 8 * layer / 8 + 6 * layer


def split_layers() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(nn.Linear(64, 1024, bias=False), nn.Linear(1024, 64, bias=False))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    model(torch.randn(8, 64)).sum().backward()


def test_kernels_have_the_size_of_the_ranks_part() -> None:
    kernels = [kernel for kernel in simulate(split_layers, ranks=8)[0].kernels if kernel.flops]
    assert [(kernel.name, kernel.flops) for kernel in kernels] == [("mm", 2 * 8 * 64 * 1024 // 8)] * 5


def attend() -> None:
    query, key, value = (torch.randn(2, 4, 16, 8) for _ in range(3))
    nn.functional.scaled_dot_product_attention(query, key, value)


def test_attention_on_the_cpu_counts_its_operations() -> None:
    scores_and_values = 2 * (2 * (2 * 4) * 16 * 8 * 16)
    assert [kernel.flops for kernel in simulate(attend)[0].kernels if kernel.flops] == [scores_and_values]


def test_functions_of_cells_are_executed(cells: Cells) -> None:
    cells("""
        import torch
        import torch.distributed as dist

        SIZE = 5

        def make():
            return torch.ones(SIZE)

        def reduce():
            dist.all_reduce(make())
    """)
    (communication,) = simulate(cells.reduce, ranks=MANY)[0].communications
    assert communication.nbytes == 20
    assert communication.line.endswith("line 11")


def scaled(factor: float, model: nn.Module) -> None:
    model(torch.ones(2, 3) * factor).sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)


def test_arguments_reach_the_rank() -> None:
    program = simulate(scaled, 2.0, nn.Linear(3, 4))[0]
    assert [c.nbytes for c in program.communications] == [4 * 12, 4 * 4]


def test_a_long_simulation_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Here, ranks exchange messages with their neighbours in a ring."""

    def executed(*arguments: Any, **_: Any) -> dict[int, Program]:
        clock[0] += PATIENCE_S
        return {rank: Program(rank, 100, tuple(to(rank, (rank + i) % 100) for i in (1, -1))) for rank in arguments[3]}

    def to(rank: int, peer: int) -> Communication:
        return Communication(0, "send", 8, (rank, peer), "0", peer=peer)

    clock = [0.0]
    module = sys.modules[programs_of.__module__]
    monkeypatch.setattr(module, "execute_ranks", executed)
    monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: clock[0]))
    assert len(programs_of(print, (), {}, ranks=100, measured=True)) == 100
    first, *_, last = capsys.readouterr().err.strip("\r").split("\r")
    assert first.rstrip() == "simulate: 2 ranks executed, of 100 at most"
    assert last.rstrip() == "simulate: 100 ranks executed"
