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
from synthetic import Book, model_parallel  # isort: skip

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


def blocked(book: Book, name: str, at: float, group: str = "world", match: int = 0) -> None:
    """An operation of 1 ms in which rank 0 waits."""
    book.travel(0, name, at, at + 1, wait=(at, at + 1), group=group, match=match)


def test_gradients_of_another_step_s_backward_pass_do_not_count() -> None:
    book = Book()
    book.compute(0, "backward 1", 0, 4)
    for step in range(2):
        blocked(book, "all_reduce", 10 * step + 5, match=step)
        blocked(book, "broadcast", 10 * step + 7, match=step + 2)
        book.whole(0, "step", 10 * step, 10 * step + 10)
    trace = book.trace(1)
    assert starts_ms(trace, after_backward(trace)) == [5]


def test_the_groups_of_data_and_tensor_parallelism_are_told_apart() -> None:
    book = Book()
    for name, at, match in (("forward", 0, 1), ("backward", 4, 2)):
        book.compute(0, name, at, at + 4)
        blocked(book, "all_reduce", at + 1, "tp", match)
    for group, at in (("dp", 8), ("tp", 9)):  # the second one of something else, such as the gradients' norm
        blocked(book, "all_reduce", at, group, 3)
    trace = book.trace(1)
    assert starts_ms(trace, after_backward(trace)) == [8]
    assert starts_ms(trace, needed_at_once(trace)) == [1, 5]


def test_what_is_reduced_after_an_optimizer_step_are_parameters() -> None:
    book = Book()
    for name, at in (("forward", 0), ("backward", 1), ("optimizer", 4)):
        book.compute(0, name, at, at + 1)
    for at in (3, 6):
        blocked(book, "all_reduce", at)
    trace = book.trace(1)
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
