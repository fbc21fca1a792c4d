"""What a program does with values that a simulated rank does not have: printed as "?", or refused at its line."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint, rpc
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel

import labkit as lab
from labkit.group.simulation.simulate import execute_ranks
from labkit.group.simulation.unknown_values import UnknownNumber

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
    range(*torch.randn(3).tolist())  # refused


def data_as_an_array() -> None:
    torch.randn(3).numpy()  # refused


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


def saved_in_parts() -> None:
    checkpoint.save({"weight": torch.ones(3)}, checkpoint_id="/dev/null")  # refused


def remote_calls() -> None:
    rpc.init_rpc("one")  # refused


def received_object() -> None:
    dist.recv_object_list([None], src=1)  # refused


def object_of_rank_0() -> None:
    dist.broadcast_object_list([1], src=0)  # refused


def uneven_batches() -> None:
    DistributedDataParallel(torch.nn.Linear(2, 2)).join()  # refused


def stage_without_shapes() -> None:
    PipelineStage(torch.nn.Linear(2, 2), 0, 2, torch.device("cpu"), input_args=torch.empty(3, 2))  # refused


def selected_gpu() -> None:
    torch.cuda.set_device(0)  # refused


def moved_to_gpu() -> None:
    torch.nn.Linear(2, 2).to("cuda:1")  # refused


def moved_to_gpu_by_its_number() -> None:
    torch.ones(2).to(0)  # refused


def model_moved_to_gpu() -> None:
    torch.nn.Linear(2, 2).cuda()  # refused


def created_on_gpu() -> None:
    torch.ones(2, device="cuda")  # refused


def from_any_rank() -> None:
    dist.recv(torch.ones(3))  # refused


def other_framework() -> None:
    import tensorflow  # noqa: F401  # refused


REFUSED = (
    condition, comparison, size_from_data, values, data_as_an_array, received_number, counted_number, compiled, saved_in_parts,
    remote_calls, received_object, object_of_rank_0, uneven_batches, stage_without_shapes, selected_gpu, moved_to_gpu,
    moved_to_gpu_by_its_number, model_moved_to_gpu, created_on_gpu, from_any_rank, other_framework,
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
    dist.recv(total, 1)
    print(loss, torch.randn(2, 3), total, torch.arange(2), torch.randn(2, 1).tolist(), math.isfinite(number), math.isnan(1.0))


def test_unknown_values_are_printed_and_known_ones_are_right(capsys: pytest.CaptureFixture[str]) -> None:
    execute_ranks(printed, (), {}, [5], 8)
    assert capsys.readouterr().out.splitlines() == [
        "[rank 5] ? ? ? nan", "[rank 5] 24 ? ? [0, 1, 2, 3]",
        "[rank 5] tensor(?) tensor(?, size=(2, 3)) tensor(?) tensor([0, 1]) [[?], [?]] True False",
    ]  # fmt: skip


@pytest.mark.parametrize("use", [bool, round, int, lambda n: n > 1, lambda n: n == 1])
def test_an_unknown_number_decides_nothing(use: Callable[[Any], Any]) -> None:
    with pytest.raises(lab.LabError):
        use(UnknownNumber())


def test_an_unknown_number_can_be_computed_with() -> None:
    number = UnknownNumber()
    total = sum([number, 2 * number, number / 3, abs(-number) ** 2])
    assert isinstance(total, UnknownNumber)
    assert f"{total:.3f} {total}" == "? ?"
