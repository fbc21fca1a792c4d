"""What a program does with values that a simulated rank does not have: printed as "?", or refused at its line."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cells import Cells

import labkit as lab
from labkit.group.simulation.simulate import execute_ranks
from labkit.group.simulation.unknown_values import UnknownNumber

pytestmark = pytest.mark.processes
KNOWN = torch.tensor([1.5, 2.5])


# What a program does before the statement that is refused, and that statement.
REFUSED = {
    "a condition": ("", "if torch.randn(3).sum() > 0: raise AssertionError"),
    "a comparison": ("loss = torch.randn(3).sum().item()", "while loss < 1: loss += 1"),
    "a size from data": ("", "torch.randn(3).nonzero()"),
    "values": ("", "range(*torch.randn(3).tolist())"),
    "data as an array": ("", "torch.randn(3).numpy()"),
    "a received number": ("number = torch.zeros(1, dtype=torch.int64); dist.recv(number, 1)", "range(number)"),
    "a counted number": ("count = torch.tensor(0); count += (torch.randn(3) > 0).sum()", "int(count)"),
    "compiled": ("", "torch.compile(torch.nn.Linear(2, 2))"),
    "saved in parts": ("", "checkpoint.save({'weight': torch.ones(3)}, checkpoint_id='/dev/null')"),
    "remote calls": ("", "rpc.init_rpc('one')"),
    "a received object": ("", "dist.recv_object_list([None], src=1)"),
    "an object of rank 0": ("", "dist.broadcast_object_list([1], src=0)"),
    "uneven batches": ("", "DistributedDataParallel(torch.nn.Linear(2, 2)).join()"),
    "a stage without shapes": (
        "", "PipelineStage(torch.nn.Linear(2, 2), 0, 2, torch.device('cpu'), input_args=torch.empty(3, 2))",
    ),
    "offloaded": ("from torch.distributed.fsdp import CPUOffloadPolicy", "CPUOffloadPolicy(pin_memory=False)"),
    "a selected GPU": ("", "torch.cuda.set_device(0)"),
    "moved to a GPU": ("", "torch.nn.Linear(2, 2).to('cuda:1')"),
    "moved to a GPU by its number": ("", "torch.ones(2).to(0)"),
    "a model moved to a GPU": ("", "torch.nn.Linear(2, 2).cuda()"),
    "created on a GPU": ("", "torch.ones(2, device='cuda')"),
    "from any rank": ("", "dist.recv(torch.ones(3))"),
    "another framework": ("", "import tensorflow"),
}  # fmt: skip
PROGRAM = """
import torch
import torch.distributed as dist
from torch.distributed import checkpoint, rpc
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel

def program():
    {before}
    {refused}
"""


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_simulated_is_refused_at_the_students_line(case: str, cells: Cells) -> None:
    if case == "another framework":
        pytest.importorskip("tensorflow")
    before, refused = REFUSED[case]
    cells(PROGRAM.format(before=before or "pass", refused=refused))
    with pytest.raises(lab.RankError) as raised:
        execute_ranks(cells.program, (), {}, [0], 2)
    (failure,) = raised.value.failures
    assert failure.headline.startswith("LabError")
    assert '", line 10, in program' in failure.traceback


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
