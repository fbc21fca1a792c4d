"""What a program does with values that a simulated rank does not have: printed as "?", or refused at its line."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import rpc

import labkit as lab
from labkit.simulation.representatives import execute_ranks
from labkit.simulation.unknown_values import UnknownNumber

pytestmark = pytest.mark.processes
KNOWN = torch.tensor([1.5, 2.5])


def condition() -> None:
    if torch.randn(3).sum() > 0:  # refused
        raise AssertionError


def comparison() -> None:
    loss = torch.randn(3).sum().item()
    while loss < 1:  # refused
        loss += 1


def size_from_data() -> None:
    torch.randn(3).nonzero()  # refused


def values() -> None:
    torch.randn(3).tolist()  # refused


def received_number() -> None:
    number = torch.zeros(1, dtype=torch.int64)
    dist.recv(number, 1)
    range(number)  # refused


def counted_number() -> None:
    count = torch.tensor(0)
    count += (torch.randn(3) > 0).sum()
    int(count)  # refused


def compiled() -> None:
    torch.compile(torch.nn.Linear(2, 2))  # refused


def saved() -> None:
    torch.save({"weight": torch.ones(3)}, "/dev/null")  # refused


def remote_calls() -> None:
    rpc.init_rpc("one")  # refused


def received_object() -> None:
    dist.recv_object_list([None], src=1)  # refused


def from_any_rank() -> None:
    dist.recv(torch.ones(3))  # refused


def other_framework() -> None:
    import tensorflow  # noqa: F401  # refused


REFUSED = (
    condition, comparison, size_from_data, values, received_number, counted_number, compiled, saved, remote_calls,
    received_object, from_any_rank, other_framework,
)  # fmt: skip


@pytest.mark.parametrize("function", REFUSED)
def test_what_cannot_be_simulated_is_refused_at_the_students_line(function: Callable[[], None]) -> None:
    if function is other_framework:
        pytest.importorskip("tensorflow")
    lines, first = inspect.getsourcelines(function)
    refused = next(first + i for i, line in enumerate(lines) if "# refused" in line)
    with pytest.raises(lab.RankError) as raised:
        execute_ranks(function, (), {}, [0], 2)
    (failure,) = raised.value.failures
    assert failure.headline.startswith("LabError")
    assert f'test_unknown_values.py", line {refused}, in {function.__name__}' in failure.traceback


def printed() -> None:
    loss = torch.randn(3).mean()
    number = loss.item()
    print(f"{loss:.2f} {number:.2f} {number * 2 + 1} {float(loss)}")
    total = torch.tensor(3)
    dist.all_reduce(total)
    print(total.item(), KNOWN.sum().item(), KNOWN[1].item(), torch.arange(4).tolist())


def test_unknown_values_are_printed_and_known_ones_are_right(capsys: pytest.CaptureFixture[str]) -> None:
    execute_ranks(printed, (), {}, [5], 8)
    assert capsys.readouterr().out == "[rank 5] ? ? ? nan\n[rank 5] 24 ? ? [0, 1, 2, 3]\n"


@pytest.mark.parametrize("use", [bool, round, int, lambda n: n > 1, lambda n: n == 1])
def test_an_unknown_number_decides_nothing(use: Callable[[Any], Any]) -> None:
    with pytest.raises(lab.LabError):
        use(UnknownNumber())


def test_an_unknown_number_can_be_computed_with() -> None:
    number = UnknownNumber()
    total = sum([number, 2 * number, number / 3, abs(-number) ** 2])
    assert isinstance(total, UnknownNumber)
    assert f"{total:.3f} {total}" == "? ?"
