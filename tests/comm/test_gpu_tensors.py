"""How communication of GPU tensors is timed, with a simulated GPU: the tensors really are in main memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import comm_cases as cases
import pytest
import torch

from labkit.comm import install
from labkit.comm.cuda_timing import DeviceClock
from labkit.group.group import Group
from labkit.recording.record import Recorder, here
from labkit.recording.ring_buffer import RingWriter
from labkit.recording.ring_layout import RING_BYTES


@pytest.fixture(scope="module")
def pair() -> Iterator[Group]:
    with Group(2) as group:
        yield group


def recorder_of_this_rank() -> Recorder:
    assert here.recorder is not None
    return here.recorder


class Prompt:
    """The source of events in a rank whose GPU does everything at once."""

    class Event:
        def __init__(self) -> None:
            import time

            self.ns = time.perf_counter_ns()

        def query(self) -> bool:
            return True

        def elapsed_time(self, end_event: Any) -> float:
            return float(end_event.ns - self.ns) / 1e6

        def synchronize(self) -> None:
            pass

    def __init__(self) -> None:
        self.waits = 0

    def awake(self) -> bool:
        return True

    def device(self) -> int:
        return 0

    def here(self, device: int) -> Event:
        assert device == 0
        return self.Event()

    def on_side_stream(self, device: int, wait: Callable[[], object] | None = None) -> Event:
        assert device == 0
        if wait is not None:
            wait()
            self.waits += 1
        return self.Event()


class OnGpu(torch.Tensor):
    """A tensor that claims to be on a GPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    is_cuda = True
    device = torch.device("cuda", 0)


def all_reduced(moved_by: str) -> tuple[list[float], int, list[str]]:
    """Two all-reduces, one of them asynchronous, of a tensor on the simulated GPU."""
    import torch.distributed as dist

    group: Any = dist.new_group()
    group._on_gpu = moved_by == "nccl"
    recorder, events = recorder_of_this_rank(), Prompt()
    recorder.device_clock = DeviceClock(recorder.ring, events)
    try:
        x = torch.ones(2).as_subclass(OnGpu)
        work = dist.all_reduce(x, group=group, async_op=True)
        assert work is not None
        work.wait()
        dist.all_reduce(x, group=group)
        dist.barrier(group=group)
        recorder.device_clock.flush()
        return x.as_subclass(torch.Tensor).tolist(), events.waits, cases.pending()
    finally:
        recorder.device_clock = None


@pytest.mark.parametrize("moved_by", ["nccl", "gloo"])
@pytest.mark.processes
def test_operations_of_a_gpu_are_timed_by_it(pair: Group, moved_by: str) -> None:
    run = pair.run(all_reduced, moved_by)
    for values, waits, pending in run.results:
        assert values == [4.0, 4.0]
        assert waits == (2 if moved_by == "nccl" else 0)  # gloo's work is over when the host says so
        assert pending == []
    spans = [s for s in run.trace if s.kind == "communication" and s.rank == 0]
    assert [(s.name, s.device) for s in spans] == [("all_reduce", "cuda"), ("all_reduce", "cuda"), ("barrier", "cpu")]
    assert all(s.start_ns <= s.end_ns and s.nbytes in (8, 0) and s.done for s in spans)


def barrier_of_nccl() -> list[list[str]]:
    """What is pending after a barrier like NCCL's has completed, before and after the wait: its future never
    completes."""
    import torch.distributed as dist

    group: Any = dist.new_group()
    group._on_gpu = True
    work: Any = dist.barrier(group=group, async_op=True)
    while not work._work.is_completed():
        pass
    before = cases.pending()
    work.wait()
    return [before, cases.pending()]


@pytest.mark.processes
def test_a_barrier_of_nccl_is_over_when_the_wait_for_it_is(pair: Group) -> None:
    run = pair.run(barrier_of_nccl)
    assert run.results == [[["barrier"], []]] * 2


class Coalescing:
    """A backend that launches messages together, as NCCL does."""

    def __init__(self, real: Any) -> None:
        self._real, self._works = real, None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def _get_backend(self, _: torch.device) -> Any:
        class Backend:
            supports_coalescing = True

            def name(self) -> str:
                return "nccl"

        return Backend()

    def _start_coalescing(self, _: torch.device) -> None:
        self._works: list[Any] | None = []

    def send(self, *args: Any) -> None:
        assert self._works is not None
        self._works.append(self._real.send(*args))

    def recv(self, *args: Any) -> None:
        assert self._works is not None
        self._works.append(self._real.recv(*args))

    def _end_coalescing(self, _: torch.device) -> Any:
        works, self._works = self._works or [], None

        class Together:
            def wait(self, *timeout: Any) -> bool:
                return all(work.wait(*timeout) for work in works)

        return Together()


def batched() -> tuple[list[float], int, list[str], list[str]]:
    """A batch of messages through such a backend: what arrived, in how many works, and what was pending before and
    after."""
    import torch.distributed as dist

    group: Any = dist.new_group()
    group._on_gpu = False
    group._real = Coalescing(group._real)
    other = 1 - dist.get_rank()
    x, y = torch.full((2,), float(dist.get_rank())), torch.zeros(2)
    operations = [dist.P2POp(dist.isend, x, other, group=group), dist.P2POp(dist.irecv, y, other, group=group)]
    works = dist.batch_isend_irecv(operations)
    before = cases.pending()
    for work in works:
        work.wait()
    return y.tolist(), len(works), before, cases.pending()


@pytest.mark.processes
def test_a_batch_that_is_launched_as_one(pair: Group) -> None:
    run = pair.run(batched)
    for rank in (0, 1):
        assert run.results[rank] == ([1.0 - rank] * 2, 1, ["send", "recv"], [])
        spans = [s for s in run.trace if s.kind == "communication" and s.rank == rank]
        assert [s.name for s in spans] == ["send", "recv"]
        assert spans[0].end_ns <= spans[1].end_ns
        assert all(s.wait_start_ns and s.peer == 1 - rank for s in spans)


def test_what_a_rank_computes_on() -> None:
    recorder = Recorder(RingWriter(bytearray(RING_BYTES)))
    install.watch_device(recorder, torch.device("cpu"))
    assert recorder.device_clock is None
    install.watch_device(recorder, torch.device("cuda", 0))
    assert isinstance(recorder.device_clock, DeviceClock)
