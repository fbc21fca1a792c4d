"""`lab.simulate`: programs as one of a thousand ranks, for the figures, and compared with real groups."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import simulated_programs
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import labkit as lab
from labkit.group.simulation.program import Elapsed, Wait
from labkit.group.simulation.simulate import programs_of
from labkit.recording.schema import MEMORY_KINDS

pytestmark = pytest.mark.processes
NETWORK = lab.Network(nodes=128, inside=lab.Link.nvlink4, between=lab.Link.infiniband_ndr)
MANY = 1024
FLOPS = 2 * 512**3


def multiply_and_average(steps: int) -> None:
    weight = torch.ones(512, 512)
    for _ in lab.steps(range(steps)):
        product = weight @ weight
        dist.all_reduce(product)


def test_a_step_takes_the_time_of_its_kernels_and_its_communication() -> None:
    device, link = lab.Device(tflop_per_s=1, gbyte_per_s=1e9), lab.Link(gbit_per_s=100, latency_us=5)
    sim = lab.simulate(multiply_and_average, 3, ranks=MANY, link=link, device=device)
    ring_ms = 1e3 * link.seconds("all_reduce", 4 * 512**2, MANY)
    halving_ms = 1e3 * (2 * 10 * 5e-6 + 2 * (1 - 1 / MANY) * 4 * 512**2 / link.bytes_per_s)
    assert sim.step_ms == pytest.approx(FLOPS / 1e12 * 1e3 + min(ring_ms, halving_ms), rel=0.001)
    assert lab.sent_mb(sim) == pytest.approx(2 * (MANY - 1) / MANY * 4 * 512**2 / 1e6)
    assert (sim.size, min(sim.programs), max(sim.programs)) == (MANY, 0, MANY - 1)
    assert str(len(sim.programs)) in sim.trace.notes[0]


def train(kind: str, *, tracks: bool = True) -> None:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    if kind == "shards":
        fully_shard(model[0])  # type: ignore[index]
        fully_shard(model)
    elif kind == "bfloat16":
        model = DistributedDataParallel(model.to(lab.device()).to(torch.bfloat16))
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters())
    with lab.track_memory(model, optimizer) if tracks else nullcontext():
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 64, dtype=next(model.parameters()).dtype)).sum().backward()
            optimizer.step()


@pytest.mark.parametrize("kind", ["copies", "bfloat16", "shards"])
def test_memory_and_sent_bytes_equal_those_of_a_real_group(kind: str) -> None:
    with lab.Group(4, devices="cpu") as group:
        real = group.run(train, kind)
    sim = lab.simulate(train, kind, ranks=4, link=lab.Link.nvlink4)
    for memory in (memory for memory in MEMORY_KINDS if memory != "other"):
        assert lab.memory_mb(sim, memory) == lab.memory_mb(real, memory)
    untracked = lab.simulate(train, kind, tracks=False, ranks=4, link=lab.Link.nvlink4)
    assert lab.memory_mb(sim) == lab.memory_mb(untracked) > lab.memory_mb(real)  # all tensors, temporaries included
    assert lab.sent_mb(sim) == pytest.approx(lab.sent_mb(real), rel=1e-4)
    assert len(sim.trace.step_bounds()) == len(real.trace.step_bounds())


def test_fsdp_gathers_the_next_layer_on_a_gpu_while_the_first_computes() -> None:
    rates = {"tflop_per_s": 1e-6, "gbyte_per_s": 1e9}
    link = lab.Link(gbit_per_s=100, latency_us=100)
    gpu, cpu = (
        lab.simulate(train, "shards", ranks=4, link=link, device=lab.Device(**rates, runs_ahead=ahead)) for ahead in (True, False)
    )
    assert lab.sent_mb(gpu) == lab.sent_mb(cpu)
    hidden = [sum(share.overlap_ns for share in sim.trace.shares()) for sim in (gpu, cpu)]
    assert hidden[0] > hidden[1] == 0
    assert gpu.step_ms < cpu.step_ms


def test_figures_accept_it_and_say_that_it_was_simulated(tmp_path: Path) -> None:
    sim = lab.simulate(train, "shards", ranks=MANY, link=NETWORK, show=[0, 8])
    assert sim.trace.ranks == ("rank 0", "rank 8")
    assert sim.trace.nodes == (0, 1)
    for draw in (lab.timeline, lab.breakdown, lab.memory, lab.traffic):
        assert f"simulated: 2 of {MANY:,} ranks" in draw(sim).get_title(loc="left").replace("\n", " ")
    loaded = lab.load_trace(sim.trace.save(tmp_path / "simulated.json"))
    assert (loaded.simulated, loaded.ranks, len(loaded)) == (MANY, sim.trace.ranks, len(sim.trace))


def encode() -> None:
    encoder = torch.nn.TransformerEncoderLayer(64, 4, 64, dropout=0.1, batch_first=True)
    encoder(torch.empty(1, 1024, 64)).sum().backward()


def test_attention_with_dropout_keeps_a_matrix_of_all_pairs_on_a_cpu_only() -> None:
    cpu = lab.Device(tflop_per_s=0.1, gbyte_per_s=10, runs_ahead=False)
    of_gpu, of_cpu = (
        lab.memory_mb(lab.simulate(encode, ranks=2, link=lab.Link.nvlink4, device=device)) for device in (lab.Device.h100, cpu)
    )
    assert of_cpu - of_gpu > 4 * 4 * 1024**2 / 1e6, "four heads"


def sleep_and_average(steps: int) -> None:
    numbers = torch.ones(1000)
    for _ in lab.steps(range(steps)):
        time.sleep(0.005)
        dist.all_reduce(numbers)


def test_a_measured_rank_takes_the_time_that_it_took_here_and_that_of_the_simulated_communication() -> None:
    """Nothing sleeps or communicates for a shorter time, however busy the machine is; some of it may overlap."""
    link = lab.Link(gbit_per_s=0.001, latency_us=10)
    sim = lab.simulate(sleep_and_average, 3, ranks=64, link=link, measured=True)
    assert sim.step_ms > 5 + 1e3 * link.seconds("all_reduce", 4000, 64)
    assert min(share.communication_ns for share in sim.trace.shares()) >= 3e9 * link.seconds("all_reduce", 4000, 64)


@pytest.mark.parametrize("function", [
    simulated_programs.ddp, simulated_programs.fsdp, simulated_programs.tensor_parallel, simulated_programs.one_f_one_b,
])  # fmt: skip
def test_with_data_a_rank_communicates_as_without(function: Callable[[], None]) -> None:
    without, with_data = (programs_of(function, (), {}, ranks=2, measured=measured) for measured in (False, True))
    for rank, program in with_data.items():
        assert program.communications == without[rank].communications
        assert not program.kernels
        waits = [event.communication for event in program.events if isinstance(event, Wait)]
        assert sorted(waits) == [c.number for c in program.communications]
        assert sum(event.ns for event in program.events if isinstance(event, Elapsed)) > 0


def test_kinds_of_memory_are_unknown_unless_the_function_tracks_them() -> None:
    sim = lab.simulate(multiply_and_average, 1, ranks=4, link=lab.Link.nvlink4)
    assert lab.memory_mb(sim) == lab.memory_mb(sim, "other") > 0
    with pytest.raises(lab.LabError, match="track_memory"):
        lab.memory_mb(sim, "parameters")


def gather_into_what_is_freed() -> None:
    part, whole = torch.ones(1000), torch.empty(4000)
    dist.all_gather(list(whole.chunk(4)), part)
    del whole
    part.sum()


def receive() -> None:
    dist.all_reduce(torch.empty(10))
    buffers = torch.empty(200), torch.zeros(100, dtype=torch.int64), torch.empty(100, 2).mT, torch.ones(3).new_empty(197)
    dist.all_reduce(torch.empty_like(buffers[0]))


def reduce_its_argument(given: torch.Tensor) -> None:
    with lab.span("reduce"):
        dist.all_reduce(given)


@pytest.mark.parametrize(("function", "args", "nbytes"), [
    (gather_into_what_is_freed, (), 20_000),
    (receive, (), 4 * (200 + 200 + 200 + 197 + 200)),  # ones(3) has been freed
    (reduce_its_argument, (torch.ones(1000),), 4000),
])  # fmt: skip
def test_tensors_count_that_no_kernel_touches(function: Callable[..., None], args: tuple[Any, ...], nbytes: int) -> None:
    assert lab.memory_mb(lab.simulate(function, *args, ranks=4, link=lab.Link.nvlink4)) == nbytes / 1e6


def track() -> None:
    model = nn.Linear(4, 4)
    with lab.track_memory(model):
        dist.all_reduce(model(torch.ones(2, 4)).detach())


def test_the_memory_of_a_measured_rank_is_known_if_the_function_tracks_it() -> None:
    measured = {"ranks": 2, "link": lab.Link.nvlink4, "measured": True}
    with pytest.raises(lab.LabError, match="track_memory"):
        lab.memory_mb(lab.simulate(gather_into_what_is_freed, **{**measured, "ranks": 4}))
    assert lab.memory_mb(lab.simulate(track, **measured), "parameters") == 80 / 1e6


def test_a_rank_that_is_shown_twice_is_one_rank() -> None:
    assert lab.simulate(multiply_and_average, 1, ranks=4, link=lab.Link.nvlink4, show=iter([3, 3])).trace.ranks == ("rank 3",)


def test_errors_name_the_students_function() -> None:
    with pytest.raises(lab.LabError, match=r"argument 1 of multiply_and_average\(\)"):
        lab.simulate(multiply_and_average, (i for i in range(3)), ranks=4, link=lab.Link.nvlink4)


def steps_one_by_one() -> Iterator[int]:
    yield 1


def test_a_generator_does_nothing_when_it_is_called() -> None:
    with pytest.raises(TypeError, match="steps_one_by_one"):
        lab.simulate(steps_one_by_one, ranks=4, link=lab.Link.nvlink4)


@pytest.mark.parametrize(("arguments", "error", "words"), [
    ({"ranks": 0}, ValueError, "ranks=0"), ({"ranks": 10**9}, ValueError, "from 1 to 262,144"),
    ({"ranks": 2, "show": 1}, TypeError, "show=1"), ({"ranks": 2, "show": [2]}, ValueError, "ranks from 0 to 1"),
    ({"ranks": 2, "link": None}, TypeError, "lab.Link or a lab.Network"),
    ({"ranks": 2, "device": lab.Device.h100, "measured": True}, ValueError, "expected one of both"),
    ({"ranks": 2, "device": "h100"}, TypeError, "device=lab.Device.h100"),
])  # fmt: skip
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        lab.simulate(train, "copies", **{"link": lab.Link.nvlink4, **arguments})
