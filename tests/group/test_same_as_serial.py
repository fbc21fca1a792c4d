"""`same_as_serial`: trainings with one mistake each, what is said about it, and trainings that cannot be compared."""

from __future__ import annotations

import math
from collections.abc import Callable
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
            parameter.grad /= (
                1 if mistake in ("sums", "weights", "sums, and drops some") else ranks ** (1 + (mistake == "divides twice"))
            )
        optimizer.step()


PARTS: dict[str, Any] = {
    "all data": lambda *_: slice(None),
    "drops samples": lambda rank, ranks: slice(rank * (BATCH // ranks), (rank + 1) * (BATCH // ranks) - (ranks > 1)),
    "repeats samples": lambda rank, ranks: slice(rank, rank + BATCH // ranks),
    "sums, and drops some": lambda rank, ranks: slice(rank, BATCH - 4 * (ranks == 4), ranks),
    "repeats one": lambda rank, ranks: [*range(rank, BATCH, ranks), *[0] * (ranks > 1)],
    "unequal": lambda rank, ranks: slice(0, 6 if ranks == 2 else None) if rank == 0 else slice(6, None),
    "weights": lambda rank, ranks: slice(0, 6 if ranks == 2 else None) if rank == 0 else slice(6, None),
}


def learn(program: str, mistake: str = "") -> None:
    """Train two models with an optimizer each, in a program that is no plain loop, and perhaps with a mistake."""
    torch.manual_seed(0)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    firsts: dict[str, Any] = {"lazy": nn.LazyLinear(8), "sequences": nn.RNN(1, 8), "one number": nn.Linear(1, 1, bias=False)}
    first = firsts.get(program, nn.Linear(4, 8))
    last = nn.Linear(1 if program == "one number" else 8, 1)
    batch = torch.randn({"many samples": 5000, "odd": 25, "one number": 25}.get(program, BATCH), 4)
    part = batch[rank::ranks, :1] if program == "one number" else batch[rank::ranks]
    if program == "lazy":
        first(torch.ones(1, 4))  # a forward pass that is no training
    kind = Averaging if program == "averages in the step" else torch.optim.SGD
    optimizers: list[Any] = [kind(first.parameters(), lr=0.1), kind(last.parameters(), lr=0.1)]
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=program == "autocast"):
            if program == "sequences":  # samples are the second axis
                hidden = first(part.t().unsqueeze(-1).contiguous())[0][-1]
            else:
                hidden = torch.cat([first(half) for half in part.chunk(2)]).tanh()
            weight = {"no gradients": 0, "weights a rank": 1 + rank}.get(mistake, 1)
            loss = (last(hidden) - 1).square().mean() * weight
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for parameter in () if mistake == "never averages" else (*first.parameters(), *last.parameters()):
            reduced = parameter.grad.clone() if mistake == "reduces a copy" else parameter.grad
            dist.all_reduce(reduced)
            sums = mistake == "sums" or (mistake == "sums the last" and len(parameter) == 1)
            parameter.grad /= 1 if sums else ranks
            if mistake == "nan" and ranks > 1:
                parameter.grad *= math.nan
            if mistake == "lacks a gradient" and rank == 1 and parameter is first.bias:
                parameter.grad = None
            if program == "sparse" and parameter.dim() == 2:
                parameter.grad = parameter.grad.to_sparse()
        for optimizer in optimizers:
            optimizer.step()


class Averaging(torch.optim.SGD):
    """An optimizer that averages gradients in its step."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        return super().step(closure)


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
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    x, y = torch.randn(BATCH, 4), torch.arange(BATCH) % 3
    part = slice(dist.get_rank(), None, dist.get_world_size())
    nn.functional.cross_entropy(model(x[part]), y[part]).backward()
    optimizer.step()


def accumulate(parts: int) -> None:
    """Four micro-batches in all."""
    torch.manual_seed(0)
    model, ranks = DistributedDataParallel(nn.Linear(4, 1)), dist.get_world_size()
    optimizer = torch.optim.SGD(model.parameters())
    for micro in range(dist.get_rank(), 4, ranks):
        batch = torch.randn(6, 4, generator=torch.Generator().manual_seed(micro))
        (model(batch).square().mean() * ranks / parts).backward()
    optimizer.step()


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


APART = "gradients of the first step differ from rank to rank"
UNCOMPARED = "some gradients are sharded, sparse, complex, or computed with fewer than 32 bits"
SERIAL = "2 ranks: the same as one rank:"
FIRST = "the 24 samples and the gradients of the first step."


@pytest.mark.parametrize(
    ("function", "arguments", "words"),
    [
        (train, [""], f"{SERIAL} {FIRST} After 3 steps, par"),
        (train, ["DDP"], f"{SERIAL} {FIRST} After 3 steps, par"),
        (train, ["weights"], f"{SERIAL} {FIRST} After 3 steps, par"),
        (learn, ["two models"], f"{SERIAL} the 24 samples and the first gradients of 2 of 2 optimizers. After 4 steps"),
        (learn, ["lazy"], f"{SERIAL} the first gradients of 2 of 2 optimizers. After 4 steps"),
        (learn, ["sequences"], f"{SERIAL} the first gradients of 2 of 2 optimizers. After 4 steps"),
        (learn, ["many samples"], f"{SERIAL} the first gradients of 2 of 2 optimizers. After 4 steps"),
        (classify, [], f"{SERIAL} the 24 samples"),
        (accumulate, [4], SERIAL),
        (train, ["grows"], "because the batch grows with the ranks (24 samples on one rank, and 48 on 2)"),
        (train, ["other seeds"], "because training begins with other parameters on rank 1"),
        (train, ["other data"], "because the samples are not those of one rank"),
        (train, ["FSDP2"], f"because {UNCOMPARED}: 0.weight, 0.bias, 2.w"),
        (learn, ["sparse"], f"because {UNCOMPARED}: weight."),
        (learn, ["autocast"], f"because {UNCOMPARED}: weight and bias."),
        (learn, ["two models", "no gradients"], "because the gradients on one rank are all 0, or not finite."),
        (
            learn, ["averages in the step", "never averages"],
            "because gradients differ from rank to rank, but parameters are equal after the last",
        ),
    ],
)  # fmt: skip
def test_trainings_that_are_the_same_or_cannot_be_compared(
    function: Callable[..., None], arguments: list[Any], words: str
) -> None:
    found = lab.same_as_serial(function, *arguments, ranks=(1, 2))
    assert found.faults == ()
    assert (f"2 ranks: not comparable, {words}" if words.startswith("because") else words) in repr(found)


@pytest.mark.parametrize(
    ("function", "arguments", "kinds", "words"),
    [
        (train, ["sums"], [FaultKind.SUM_FOR_MEAN], "all gradients of the first step are 2 times those on one rank."),
        (train, ["divides twice"], [FaultKind.SCALED], "all gradients of the first step are 0.5 times those on one rank."),
        (train, ["never averages"], [FaultKind.NOT_AVERAGED], f"all {APART}, and their mean is"),
        (train, ["forgets a layer"], [FaultKind.NOT_AVERAGED], "gradients of 2.weight and 2.bias of the first step differ from"),
        (train, ["drops samples"], [FaultKind.OTHER_SAMPLES], "2 of 24 samples of the first step never came."),
        (
            train, ["repeats samples"], [FaultKind.OTHER_SAMPLES],
            "11 of 24 samples of the first step never came, and 11 came again.",
        ),
        (
            train, ["unequal"], [FaultKind.UNEQUAL_PARTS],
            "equal on all ranks, but differ from those on one rank; the ranks had 6 and 18 samples.",
        ),
        (train, ["dropout"], [FaultKind.OTHER_GRADIENTS], "all gradients of the first step"),
        (
            train, ["repeats one"], [FaultKind.REPEATED_SAMPLES, FaultKind.OTHER_GRADIENTS],
            "Perhaps: On 2 ranks, 2 samples of the first step came again.",
        ),
        (learn, ["two models", "sums the last"], [FaultKind.SUM_FOR_MEAN], "gradients of optimizer 2's first step are 2 times"),
        (learn, ["lazy", "sums"], [FaultKind.SUM_FOR_MEAN], "all gradients of the first step are 2 times"),
        (learn, ["sequences", "sums"], [FaultKind.SUM_FOR_MEAN], "all gradients of the first step are 2 times"),
        (learn, ["many samples", "sums"], [FaultKind.SUM_FOR_MEAN], "all gradients of the first step are 2 times"),
        (
            learn, ["many samples", "weights a rank"], [FaultKind.OTHER_GRADIENTS],
            "are equal on all ranks, but differ from those on one rank.",
        ),
        (learn, ["odd", "never averages"], [FaultKind.NOT_AVERAGED], f"{APART}, and their mean is that on one rank."),
        (learn, ["two models", "reduces a copy"], [FaultKind.NOT_AVERAGED], f"all {APART}."),
        (learn, ["two models", "lacks a gradient"], [FaultKind.NOT_AVERAGED], "gradients of bias of the first step differ from"),
        (learn, ["two models", "nan"], [FaultKind.LOSS], "all gradients of the first step are not finite."),
        (
            learn, ["one number", ""], [FaultKind.UNEQUAL_PARTS],
            "all gradients of the first step are equal on all ranks, but differ from those on",
        ),
    ],
)  # fmt: skip
def test_a_mistake(function: Callable[..., None], arguments: list[str], kinds: list[FaultKind], words: str) -> None:
    found = lab.same_as_serial(function, *arguments, ranks=(1, 2))
    assert [fault.kind for fault in found.faults] == kinds
    assert words in repr(found)
    assert "2 ranks: not the same as one rank." in repr(found)


def test_all_samples_on_each_rank() -> None:
    found = lab.same_as_serial(train, "all data", ranks=(1, 2))
    assert [fault.kind for fault in found.faults] == [FaultKind.NOT_DIVIDED]
    assert "Perhaps: Each of 2 ranks had all 24 samples of the first step." in repr(found)
    assert "2 ranks: the same as one rank: the gradients of the first step." in repr(found)


def test_another_mistake_on_more_ranks() -> None:
    found = lab.same_as_serial(train, "sums, and drops some", ranks=(1, 2, 4))
    assert [fault.kind for fault in found.faults] == [FaultKind.SUM_FOR_MEAN, FaultKind.OTHER_SAMPLES]
    assert "On 4 ranks, 4 of 24 samples of the first step never came." in repr(found)


def test_later_steps_that_differ() -> None:
    found = lab.same_as_serial(train_from_step_2_alone, ranks=(1, 2))
    assert "the gradients of the first step are the same as on one rank. After 5 steps, parameters differ by " in repr(found)


def test_wrong_numbers_of_ranks() -> None:
    for ranks in ((2, 4), (1,), ()):
        with pytest.raises(ValueError, match="expected 1 and other numbers of ranks"):
            lab.same_as_serial(train, ranks=ranks)
