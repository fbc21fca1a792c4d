"""Which operations could run beside compute: of traces made by hand, and of real programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import labkit as lab
from labkit.tracing.patterns import after_backward, needed_at_once
from labkit.tracing.trace import Trace

from replayed import beside, blocking, sent_afterwards, tensor_parallel  # isort: skip
from synthetic import made, model_parallel  # isort: skip

STEPS = 3


def starts_ms(trace: Trace, rows: Any) -> list[int]:
    return [trace.spans[row].start_ns // 1_000_000 for row in rows]


def test_reductions_after_the_backward_pass_carry_gradients() -> None:
    trace = sent_afterwards()
    names = [trace.columns.names[number] for number in trace.columns.data["name"][after_backward(trace)]]
    assert names == ["all_reduce"] * 2 * 2 * 4
    assert not len(needed_at_once(trace))


def test_reductions_within_passes_are_needed_at_once() -> None:
    assert len(needed_at_once(tensor_parallel())) == 2 * 2 * 4
    assert not len(after_backward(tensor_parallel()))


@pytest.mark.parametrize("trace", [beside(), blocking(), model_parallel()], ids=["beside backward", "no backward", "messages"])
def test_of_others_neither_is_known(trace: Trace) -> None:
    assert not len(after_backward(trace))
    assert not len(needed_at_once(trace))


def blocked(at: float, name: str = "all_reduce", **key: Any) -> tuple[Any, ...]:
    """An operation of 1 ms in which the rank waits."""
    return name, at, at + 1, (at, at + 1), key


def test_gradients_of_another_step_s_backward_pass_do_not_count() -> None:
    reduced = [blocked(10 * step + 5) for step in (0, 1)] + [blocked(10 * step + 7, "broadcast") for step in (0, 1)]
    trace = made([("backward 1", 0, 4), *reduced, ("step", 0, 10), ("step", 10, 20)])
    assert starts_ms(trace, after_backward(trace)) == [5]


def test_the_groups_of_data_and_tensor_parallelism_are_told_apart() -> None:
    """The last reduction is one of something else, such as the gradients' norm."""
    within = [blocked(1, group="tp"), blocked(5, group="tp")]
    trace = made([("forward", 0, 4), ("backward", 4, 8), *within, blocked(8, group="dp"), blocked(9, group="tp")])
    assert starts_ms(trace, after_backward(trace)) == [8]
    assert starts_ms(trace, needed_at_once(trace)) == [1, 5]


def test_what_is_reduced_after_an_optimizer_step_are_parameters() -> None:
    trace = made([("forward", 0, 1), ("backward", 1, 2), ("optimizer", 4, 5), blocked(3), blocked(6)])
    assert starts_ms(trace, after_backward(trace)) == [3]


def averaged_afterwards() -> None:
    model = nn.Linear(8, 8)
    for _ in lab.steps(range(STEPS)):
        model(torch.ones(4, 8)).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)


def in_buckets() -> None:
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    for _ in lab.steps(range(STEPS)):
        model(torch.ones(4, 8)).sum().backward()


def split_layers() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for _ in lab.steps(range(STEPS)):
        model(torch.ones(4, 16)).sum().backward()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("program", "afterwards", "at_once"),
    [(averaged_afterwards, True, False), (in_buckets, False, False), (split_layers, False, True)],
)
def test_real_programs(program: Callable[[], None], afterwards: bool, at_once: bool) -> None:
    with lab.Group(2) as group:
        trace = group.run(program).trace
    assert len(after_backward(trace)) == (2 * 2 * STEPS if afterwards else 0)
    assert (len(needed_at_once(trace)) >= 2 * STEPS) == at_once
    assert bool(len(needed_at_once(trace))) == at_once
