"""Records and figures on real GPUs: spans timed by CUDA events, kernels, the allocator's memory, NVML's utilisation."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from gpu_device import DEVICES, REHEARSAL, gpu, needs_cuda, needs_two_gpus

import labkit as lab
from labkit.launch.resource_usage import Load
from labkit.recording.schema import MEMORY
from labkit.tracing.trace import Trace

pytestmark = gpu

MS = 1_000_000  # ns
AGREE_NS = 1 * MS  # two ways to put the GPU's time on the host's clock; the kernels below take tens of milliseconds


@pytest.fixture(scope="module")
def alone() -> Iterator[lab.Group]:
    with lab.Group(1, devices=DEVICES) as group:
        yield group


@pytest.fixture(scope="module")
def pair() -> Iterator[lab.Group]:
    with lab.Group(2, devices=DEVICES) as group:
        yield group


def many_products(count: int, size: int) -> None:
    x = torch.ones(size, size, device=lab.device())
    for _ in range(count):
        x = x @ x / size


def spans_of_kernels() -> tuple[int, int]:
    """Kernels inside a span, and when the host had left it."""
    import time

    many_products(2, 1024)  # the first product loads cuBLAS
    torch.cuda.synchronize()
    start_ns = time.perf_counter_ns()
    with lab.span("products"):
        many_products(400, 4096)
    left_ns = time.perf_counter_ns()
    torch.cuda.synchronize()
    return start_ns, left_ns


@needs_cuda
def test_a_span_lasts_as_long_as_the_gpu_works_not_the_host(alone: lab.Group) -> None:
    run = alone.run(spans_of_kernels)
    ((start_ns, left_ns),) = run.results
    (span,) = run.trace.filter(name="products")
    assert span.device == "cuda"
    assert span.start_ns >= start_ns - AGREE_NS
    assert span.end_ns > left_ns  # the host only enqueued the work


@needs_cuda
def test_events_and_the_profiler_agree_on_when_the_gpu_worked(alone: lab.Group) -> None:
    with lab.profile(alone):
        run = alone.run(spans_of_kernels)
    (span,) = run.trace.filter(name="products")
    kernels = [e for e in run.trace.profile if e.category == "kernel" and e.end_ns > span.start_ns + AGREE_NS]
    assert len(kernels) >= 400
    assert min(e.start_ns for e in kernels) >= span.start_ns - AGREE_NS
    assert max(e.end_ns for e in kernels) <= span.end_ns + AGREE_NS
    busy_ns = sum(e.end_ns - e.start_ns for e in kernels)  # one stream: they follow one another
    assert 0.8 * busy_ns <= span.end_ns - span.start_ns + AGREE_NS


@needs_cuda
def test_work_of_the_cpu_is_the_cpus() -> None:
    def mixed() -> None:
        x = torch.ones(512, 512)
        with lab.span("before the GPU is used"):
            x @ x
        many_products(400, 4096)  # the GPU is behind
        with lab.span("while the GPU is behind"):
            x @ x
        with lab.span("on the GPU"):
            many_products(1, 1024)

    with lab.Group(1) as group:
        run = group.run(mixed)
    devices = {s.name: s.device for s in run.trace.filter(kind="compute")}
    assert devices == {"before the GPU is used": "cpu", "while the GPU is behind": "cpu", "on the GPU": "cuda"}


@needs_cuda
def test_an_operation_behind_kernels_is_recorded_after_the_function_has_returned(
    alone: lab.Group, capsys: pytest.CaptureFixture[str]
) -> None:
    def reduce_late() -> None:
        import torch.distributed as dist

        many_products(400, 4096)
        dist.all_reduce(torch.ones(4, device=lab.device()))

    run = alone.run(reduce_late)
    assert [(s.name, s.device, s.done) for s in run.trace.filter(kind="communication")] == [("all_reduce", "cuda", True)]
    assert "unfinished" not in capsys.readouterr().out


def train(steps: int) -> None:
    device = lab.device()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 10)).to(device)
    replica = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
    for _ in lab.steps(range(steps)):
        x, y = torch.randn(512, 256, device=device), torch.randint(10, (512,), device=device)
        with lab.span("forward"):
            loss = torch.nn.functional.cross_entropy(replica(x), y)
        with lab.span("backward"):
            optimizer.zero_grad()
            loss.backward()
        with lab.span("optimizer"):
            optimizer.step()
        lab.record(loss=loss.item())


def test_a_training_step_is_on_the_timeline(pair: lab.Group, plain: None) -> None:
    run = pair.run(train, 5)
    for rank in (0, 1):
        of_rank = run.trace.filter(rank=rank)
        for name in ("forward", "backward", "optimizer"):
            spans = list(of_rank.filter(name=name))
            assert len(spans) == 5
            assert {s.device for s in spans} == {DEVICES}
            assert all(a.end_ns <= b.start_ns for a, b in itertools.pairwise(spans))
        for forward, backward in zip(of_rank.filter(name="forward"), of_rank.filter(name="backward"), strict=True):
            assert forward.end_ns <= backward.start_ns + AGREE_NS / 10
        assert sum(s.name == "all_reduce" for s in of_rank.filter(kind="communication")) >= 5
    for draw in (lab.timeline, lab.breakdown, lab.traffic):
        draw(run).figure.canvas.draw()


@needs_two_gpus
def test_a_collective_of_nccl_lasts_as_long_as_it_is_under_way(pair: lab.Group) -> None:
    """While one rank is late for an all-reduce, it is under way and waited for on the other."""

    def late() -> None:
        import torch.distributed as dist

        x = torch.ones(1 << 20, device=lab.device())
        dist.all_reduce(x)
        torch.cuda.synchronize()
        dist.barrier()
        if dist.get_rank() == 1:
            with lab.span("late"):
                many_products(400, 4096)
        dist.all_reduce(x)
        torch.cuda.synchronize()

    run = pair.run(late)
    (late_span,) = run.trace.filter(name="late")
    last = [list(run.trace.filter(rank=r, name="all_reduce"))[-1] for r in (0, 1)]
    assert last[0].start_ns < late_span.end_ns <= last[0].end_ns + AGREE_NS
    assert last[1].start_ns >= late_span.end_ns - AGREE_NS


class Loads:
    """A live view that keeps each rank's usage."""

    interval_s = 0.05

    def __init__(self) -> None:
        self.seen: list[Sequence[Load]] = []

    def begin(self, *_: Any) -> None:
        pass

    def update(self, _now_ns: int, _new: Trace, _pending: Any, loads: Sequence[Load], _silent: Any) -> None:
        self.seen.append(loads)

    def end(self, *_: Any) -> None:
        pass


@needs_cuda
def test_the_live_picture_shows_the_utilisation_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pynvml")
    loads = Loads()
    monkeypatch.setattr(lab.Group, "picture", staticmethod(lambda: loads))

    def work_until_seen() -> None:
        import time

        until = time.monotonic() + 3
        while time.monotonic() < until:
            many_products(20, 4096)
            torch.cuda.synchronize()

    with lab.Group(1) as group:
        group.watch(work_until_seen)
    seen = [of_ranks[0] for of_ranks in loads.seen if of_ranks]
    assert seen
    assert all(load.busy is not None and 0 <= load.busy <= 100 and load.nbytes > 0 for load in seen)
    assert max(load.busy or 0 for load in seen) > 0


@needs_cuda
def test_nvml_sees_the_memory_of_a_rank(alone: lab.Group) -> None:
    pytest.importorskip("pynvml")

    def held() -> tuple[int, int]:
        from labkit.launch.resource_usage import Gpus

        gpus = Gpus()
        torch.cuda.synchronize()
        before = gpus.read(0)
        x = torch.ones(1 << 30, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        after = gpus.read(0)
        assert before is not None
        assert after is not None
        del x
        return before[1], after[1]

    ((before, after),) = alone.run(held).results
    assert after - before >= 1 << 30


def tracked() -> dict[str, int]:
    """A few steps of Adam, with the numbers of torch's own allocator."""
    device = lab.device()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 1024)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    x = torch.randn(256, 1024, device=device)
    with lab.track_memory(model, optimizer):
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        at_end = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    most = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return {"parameters": sum(p.numel() * 4 for p in model.parameters()), "at end": at_end, "most": most}


def test_memory_equals_the_cuda_allocators(plain: None) -> None:
    with lab.Group(1, devices=DEVICES) as group:
        run = group.run(tracked)
    (truth,) = run.results
    last = {s.name.removeprefix(MEMORY): s.value for s in run.trace.scalars if s.name.startswith(MEMORY)}
    assert last["parameters"] == last["gradients"] == truth["parameters"]
    assert 2 * truth["parameters"] <= last["optimizer state"] <= 2 * truth["parameters"] + 64 * 1024
    if not REHEARSAL:
        assert sum(last.values()) == pytest.approx(truth["at end"], abs=64 * 1024)  # the allocator rounds to 512 bytes
        assert sum(last.values()) <= truth["most"]
    lab.memory(run).figure.canvas.draw()
