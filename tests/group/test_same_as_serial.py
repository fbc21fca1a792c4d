"""`same_as_serial`: trainings with one mistake each, what is said about it, and trainings that cannot be compared."""

from __future__ import annotations

from typing import Any

import pytest

import labkit as lab
from labkit.tracing.silent_faults import FaultKind

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402  # after the check that it is there
from torch import nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

pytestmark = pytest.mark.processes

BATCH = 24


def train(mistake: str = "", steps: int = 3) -> None:
    """Divide a batch of fixed size by hand, with one mistake."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank if mistake == "other seeds" else 0)
    model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5 if mistake == "dropout" else 0.0), nn.Linear(8, 2))
    averaged = mistake not in ("DDP", "FSDP2", "never averages")
    model = DistributedDataParallel(model) if mistake == "DDP" else fully_shard(model) if mistake == "FSDP2" else model
    optimizer = torch.optim.Adam(model.parameters())
    torch.manual_seed(100 + (rank if mistake == "other data" else 0))
    for _ in range(steps):
        batch = torch.randn(BATCH * (ranks if mistake == "grows" else 1), 4)
        part = batch[PARTS.get(mistake, lambda rank, ranks: slice(rank, None, ranks))(rank, ranks)]
        loss = model(part).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters() if averaged else ():
            if mistake == "forgets a layer" and len(parameter) == 2:
                continue
            if mistake == "weights":
                parameter.grad *= len(part) / BATCH
            dist.all_reduce(parameter.grad)
            parameter.grad /= 1 if mistake in ("sums", "weights") else ranks ** (1 + (mistake == "divides twice"))
        optimizer.step()


PARTS: dict[str, Any] = {
    "all data": lambda *_: slice(None),
    "drops samples": lambda rank, ranks: slice(rank * (BATCH // ranks), (rank + 1) * (BATCH // ranks) - (ranks > 1)),
    "repeats samples": lambda rank, ranks: slice(rank, rank + BATCH // ranks),
    "unequal": lambda rank, ranks: slice(0, 6 if ranks == 2 else None) if rank == 0 else slice(6, None),
    "weights": lambda rank, ranks: slice(0, 6 if ranks == 2 else None) if rank == 0 else slice(6, None),
}


@pytest.mark.parametrize("program", ["", "DDP", "weights"])
def test_the_same(program: str) -> None:
    found = lab.same_as_serial(train, program, ranks=(1, 2))
    assert found.faults == ()
    assert "2 ranks: the same as one rank: the 24 samples and the gradients of the first step. After 3 steps, par" in repr(found)


@pytest.mark.parametrize(
    ("mistake", "kind", "words"),
    [
        ("sums", FaultKind.SUM_FOR_MEAN, "all gradients of the first step are 2 times those on one rank."),
        ("divides twice", FaultKind.SCALED, "all gradients of the first step are 0.5 times those on one rank."),
        ("never averages", FaultKind.NOT_AVERAGED, "all gradients of the first step differ from rank to rank, and their mean is"),
        ("forgets a layer", FaultKind.NOT_AVERAGED, "the gradients of 2.weight and 2.bias of the first step differ from rank"),
        ("all data", FaultKind.NOT_DIVIDED, "Each of 2 ranks had all 24 samples of the first step."),
        ("drops samples", FaultKind.OTHER_SAMPLES, "2 of 24 samples of the first step never came."),
        ("repeats samples", FaultKind.OTHER_SAMPLES, "11 of 24 samples of the first step never came, and 11 came again."),
        ("unequal", FaultKind.UNEQUAL_PARTS, "not a multiple of those on one rank; the ranks had 6 and 18 samples."),
        ("dropout", FaultKind.OTHER_GRADIENTS, "all gradients of the first step"),
    ],
)
def test_a_mistake(mistake: str, kind: FaultKind, words: str) -> None:
    found = lab.same_as_serial(train, mistake, ranks=(1, 2))
    assert [fault.kind for fault in found.faults] == [kind]
    assert words in repr(found)
    assert "2 ranks: not the same as one rank." in repr(found)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("grows", "because the batch grows with the ranks (24 samples on one rank, and 48 on 2)"),
        ("other seeds", "because training begins with other parameters on rank 1"),
        ("other data", "because the samples are others than on one rank"),
        ("FSDP2", "because no optimizer of torch began a step with gradients of 32 bits that are not sharded"),
    ],
)
def test_trainings_that_cannot_be_compared(program: str, reason: str) -> None:
    found = lab.same_as_serial(train, program, ranks=(1, 2))
    assert found.faults == ()
    assert f"2 ranks: not comparable, {reason}" in repr(found)


class Shifted(nn.Linear):
    """A classifier with a shift of all logits, whose gradient is 0 but for rounding."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x: Any) -> Any:
        return super().forward(x) + self.shift


def classify() -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(Shifted())
    optimizer = torch.optim.SGD(model.parameters())
    x, y = torch.randn(BATCH, 4), torch.arange(BATCH) % 3
    part = slice(dist.get_rank(), None, dist.get_world_size())
    nn.functional.cross_entropy(model(x[part]), y[part]).backward()
    optimizer.step()


def test_a_gradient_that_is_rounding_only() -> None:
    assert lab.same_as_serial(classify, ranks=(1, 2)).faults == ()


def accumulate(parts: int) -> None:
    """Four micro-batches in all."""
    torch.manual_seed(0)
    model, ranks = DistributedDataParallel(nn.Linear(4, 1)), dist.get_world_size()
    optimizer = torch.optim.SGD(model.parameters())
    for micro in range(dist.get_rank(), 4, ranks):
        batch = torch.randn(6, 4, generator=torch.Generator().manual_seed(micro))
        (model(batch).square().mean() * ranks / parts).backward()
    optimizer.step()


def test_accumulated_gradients() -> None:
    assert lab.same_as_serial(accumulate, 4, ranks=(1, 2)).faults == ()


def test_later_steps_that_differ() -> None:
    found = lab.same_as_serial(train_from_step_2_alone, ranks=(1, 2))
    assert "the gradients of the first step are the same as on one rank. After 5 steps, parameters differ by " in repr(found)


def train_from_step_2_alone() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(5):
        optimizer.zero_grad()
        model(torch.randn(8, 4)[dist.get_rank() :: dist.get_world_size()]).square().mean().backward()
        for parameter in model.parameters() if step == 0 else ():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()


def test_wrong_numbers_of_ranks() -> None:
    for ranks in ((2, 4), (1,), ()):
        with pytest.raises(ValueError, match="expected 1 and other numbers of ranks"):
            lab.same_as_serial(train, ranks=ranks)
