"""Which ranks are executed, and what a program of one of many ranks contains."""

from __future__ import annotations

from typing import Any

import pytest
import simulated_programs
import torch
import torch.distributed as dist

from labkit.simulate.program import Communication, Kernel, Wait
from labkit.simulate.representatives import programs_of

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
    assert multiplied == Kernel("mm", 2 * 64 * 128 * 32, sizes[0] + sizes[1], sizes[2], sum(sizes))
    rest = events[events.index(multiplied) + 1 :]
    kinds = [event.name if isinstance(event, Kernel | Communication) else event for event in rest]
    assert kinds == ["all_reduce", "zeros", Wait(0, True), "all_reduce", Wait(1, False), "add_"]
    zeros = rest[1]
    assert isinstance(zeros, Kernel)
    assert zeros.live_bytes == sizes[2] + 40  # the factors have been freed


def scaled(factor: float, model: torch.nn.Module) -> None:
    model(torch.ones(2, 3) * factor).sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)


def test_arguments_reach_the_rank() -> None:
    program = simulate(scaled, 2.0, torch.nn.Linear(3, 4))[0]
    assert [c.nbytes for c in program.communications] == [4 * 12, 4 * 4]
