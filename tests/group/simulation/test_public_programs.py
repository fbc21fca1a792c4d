"""What programs from tutorials and courses do, in a simulation as in a real group: the real group is the oracle."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from communications import real_communications, simulated_communications
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import labkit as lab
from labkit.group.simulation.program import Memory
from labkit.recording.schema import MEMORY_KINDS

pytestmark = pytest.mark.processes
RANKS = 2
SLOW = lab.Device(tflop_per_s=1e-3, gbyte_per_s=1, runs_ahead=False)  # no kernel takes less than a nanosecond


@pytest.fixture(scope="module")
def group() -> Iterator[lab.Group]:
    with lab.Group(RANKS, devices="cpu") as group:
        group.run(int)
        yield group


def small_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def scaled_losses() -> None:
    """Mixed precision: the optimizer steps, as long as no gradient is infinite."""
    model = DistributedDataParallel(small_model())
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cpu")
    with lab.track_memory(model, optimizer):
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = cross_entropy(model(torch.randn(8, 16)), torch.randint(0, 4, (8,)))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
            scaler.step(optimizer)
            scaler.update()


def truncated_weights() -> None:
    model = small_model()
    nn.init.trunc_normal_(model[0].weight, std=0.02)
    model(torch.randn(4, 16)).sum().backward()
    dist.all_reduce(model[0].weight.grad)


def made_without_memory() -> None:
    with torch.device("meta"):
        model = nn.Sequential(small_model(), nn.BatchNorm1d(4))
    model.to_empty(device="cpu")
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lab.track_memory(model, optimizer):
        model(torch.randn(4, 16)).sum().backward()
        optimizer.step()


def loaded_by_workers() -> None:
    model = DistributedDataParallel(small_model())
    data = TensorDataset(torch.randn(16, 16), torch.randint(0, 4, (16,)))
    for images, labels in DataLoader(data, batch_size=8, num_workers=1, timeout=60):
        cross_entropy(model(images), labels).backward()


def other_optimizers() -> None:
    for kind in (torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax):
        model = small_model()
        optimizer = kind(model.parameters())
        for _ in range(2):
            model(torch.randn(4, 16)).sum().backward()
            optimizer.step()
        dist.all_reduce(model[0].weight.grad)


def gathered_on_one_rank() -> None:
    found = [None] * RANKS
    dist.gather_object("same", found if dist.get_rank() == 0 else None)
    assert dist.get_rank() > 0 or found == ["same"] * RANKS
    parts = [torch.empty(3) for _ in range(RANKS)]
    dist.gather(torch.ones(3), parts if dist.get_rank() == 0 else None)


def masked_by_known_labels() -> None:
    labels = torch.tensor([1, -100, 2])
    scores, kept = torch.randn(3, 4, requires_grad=True), labels != -100
    cross_entropy(scores[kept], labels[kept]).backward()
    chosen = torch.zeros(3, 4)
    chosen[kept, 0] = 1.0
    dist.all_reduce(scores[kept])
    dist.all_reduce(scores.grad)


def ends_itself() -> None:
    dist.all_reduce(torch.ones(3))
    sys.exit()


@pytest.mark.parametrize("function", [
    scaled_losses, truncated_weights, made_without_memory, loaded_by_workers, other_optimizers, gathered_on_one_rank,
    masked_by_known_labels, ends_itself,
])  # fmt: skip
def test_it_communicates_and_fills_memory_as_in_a_real_group(group: lab.Group, function: Callable[[], None]) -> None:
    real = group.run(function)
    sim = lab.simulate(function, ranks=RANKS, link=lab.Link.nvlink4, device=SLOW)
    for rank, program in sim.programs.items():
        assert simulated_communications(program) == real_communications(real.trace, rank) != []
    if "track_memory" in function.__code__.co_names:
        kinds = [kind for kind in MEMORY_KINDS if kind != "other"]
        assert [lab.memory_mb(sim, kind) for kind in kinds] == [lab.memory_mb(real, kind) for kind in kinds]


def large_without_memory() -> None:
    with torch.device("meta"):
        nn.Linear(1000, 1000)
    dist.all_reduce(torch.ones(3))


def test_tensors_on_the_meta_device_take_neither_memory_nor_time() -> None:
    sim = lab.simulate(large_without_memory, ranks=RANKS, link=lab.Link.nvlink4)
    assert [kernel.name for kernel in sim.programs[0].kernels] == ["ones"]
    assert max(event.live_bytes for event in sim.programs[0].events if isinstance(event, Memory)) == 12


def save(file: str) -> None:
    model = DistributedDataParallel(small_model())
    if dist.get_rank() == 0:
        for _ in range(2):
            torch.save(model.state_dict(), file)
    dist.barrier()


@pytest.mark.parametrize("measured", [False, True])
def test_a_checkpoint_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str], measured: bool) -> None:
    file = tmp_path / "checkpoint.pt"
    file.write_text("trained for a week")
    sim = lab.simulate(save, str(file), ranks=RANKS, link=lab.Link.nvlink4, measured=measured)
    assert sim.programs[0].communications[-1].name == "barrier"
    assert file.read_text() == "trained for a week"
    assert capsys.readouterr().out.count("torch.save") == 1


def load(file: str) -> None:
    model = small_model()
    model.load_state_dict(torch.load(file))
    model(torch.randn(4, 16)).sum().backward()
    dist.all_reduce(model[0].weight.grad)


def test_a_checkpoint_can_be_loaded(tmp_path: Path) -> None:
    torch.save(small_model().state_dict(), tmp_path / "checkpoint.pt")
    sim = lab.simulate(load, str(tmp_path / "checkpoint.pt"), ranks=RANKS, link=lab.Link.nvlink4)
    assert [c.nbytes for c in sim.programs[0].communications] == [4 * 16 * 32]


def wrong_shapes() -> None:
    nn.Linear(4, 4)(torch.randn(2, 5))


def test_a_mistake_in_shapes_prints_nothing_but_its_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(lab.RankError):
        lab.simulate(wrong_shapes, ranks=RANKS, link=lab.Link.nvlink4)
    assert capsys.readouterr() == ("", "")


def different_collectives() -> None:
    if int(os.environ["RANK"]) == 0:
        dist.all_reduce(torch.ones(3))
    else:
        dist.broadcast(torch.ones(3), src=0)


def different_sizes() -> None:
    dist.all_reduce(torch.ones(3 + dist.get_rank()))


@pytest.mark.parametrize(("function", "words"), [
    (different_collectives, "rank 0 calls all_reduce .* rank 1 calls broadcast"),
    (different_sizes, "rank 0 calls all_reduce .* with 12 B, and rank 1 .* with 16 B"),
])  # fmt: skip
def test_collectives_that_do_not_match_are_reported(function: Callable[[], None], words: str) -> None:
    with pytest.raises(lab.LabError, match=words):
        lab.simulate(function, ranks=RANKS, link=lab.Link.nvlink4)
