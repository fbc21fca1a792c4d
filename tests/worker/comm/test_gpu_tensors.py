"""How communication of GPU tensors is timed, with a simulated GPU: the tensors really are in main memory."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, cast

import comm_cases as cases
import pytest
import torch
import torch.distributed as dist

from labkit.errors.exceptions import LabError, RankError
from labkit.group.group import Group
from labkit.recording.record import Recorder, here
from labkit.recording.ring_buffer import RING_BYTES, RingWriter
from labkit.worker.comm import install
from labkit.worker.comm.cuda_timing import DeviceClock, DeviceOperation
from labkit.worker.comm.futures import Futures
from labkit.worker.comm.operation import Operation
from labkit.worker.comm.work import RecordedMessage


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

    def capturing(self) -> bool:
        return False

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
    group: Any = dist.new_group()
    group.gpu_backend = moved_by
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
    assert [s.through_host for s in spans] == [moved_by == "gloo"] * 2 + [False]


class Behind(Prompt):
    """The source of events in a rank whose GPU comes to everything `late_s` after the host."""

    late_s = 0.8

    class Event(Prompt.Event):
        def query(self) -> bool:
            return time.perf_counter_ns() > self.ns + Behind.late_s * 1e9


def reduced_behind_kernels() -> int:
    """An all-reduce that begins on the GPU long after the function has returned."""

    group: Any = dist.new_group()
    group.gpu_backend = "nccl"
    recorder = recorder_of_this_rank()
    recorder.device_clock = DeviceClock(recorder.ring, Behind())
    dist.all_reduce(torch.ones(2).as_subclass(OnGpu), group=group)
    return os.getpid()


@pytest.mark.processes
def test_an_operation_behind_kernels_when_the_function_returns(capsys: pytest.CaptureFixture[str]) -> None:
    with Group(2) as group:
        run = group.run(reduced_behind_kernels)
        assert group.run(os.getpid).results == run.results  # ranks that leave something behind are replaced
    assert [(s.name, s.device, s.done) for s in run.trace.filter(rank=0, kind="communication")] == [("all_reduce", "cuda", True)]
    assert capsys.readouterr().out == ""


def waited_for_in_vain(how: str) -> None:
    """Rank 0's GPU waits for an all-reduce; rank 1 does not enter it, or enters another one."""

    class Never(Behind):
        class Event(Prompt.Event):
            def query(self) -> bool:
                return False

    class BeforeIt(Prompt):
        launched: bool

        def on_side_stream(self, device: int, wait: Callable[[], object] | None = None) -> Any:
            return super().on_side_stream(device) if wait is None else Never.Event()

        def here(self, device: int) -> Any:
            return Never.Event() if self.launched else super().here(device)

    rank = dist.get_rank()
    if rank == 0 or how == "other shapes":
        world: Any = dist.group.WORLD
        events = BeforeIt()
        events.launched = False
        clock = recorder_of_this_rank().device_clock = DeviceClock(recorder_of_this_rank().ring, events)
        given = time.perf_counter_ns(), 8, -1, world.label, 1, "", None, f"float32 [{rank + 2}]"
        operation = DeviceOperation(clock, 0, recorder_of_this_rank().ring, "all_reduce", *given)
        events.launched = True
        operation.launched(None if how == "at once" else lambda: None, [])
        if how == "later":
            operation.wait_begins()
        elif how != "at once":
            operation.wait_begins(in_torch=True)


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ("at once", RankError, r"rank 1.*returned"),
        ("later", RankError, r"rank 1.*returned"),
        ("at the end of backward", RankError, r"rank 1.*returned"),
        ("other shapes", LabError, r"float32 \[2\]"),
    ],
)
@pytest.mark.processes
def test_a_gpu_that_waits_for_ever_after_the_function_has_returned(how: str, error: type[LabError], words: str) -> None:
    with Group(2) as group, pytest.raises(error, match=words):
        group.run(waited_for_in_vain, how)


class Host:
    """In place of `torch.cuda`'s streams: kernels run when a stream that is behind them is used, and not before."""

    device = torch.device("cuda", 0)

    def __init__(self) -> None:
        self.kernels: list[Callable[[], object]] = []

    def Stream(self, device: Any) -> Any:  # noqa: N802  # torch's name
        assert device == torch.device("cuda", 0)
        return self

    def current_stream(self, _: Any) -> Any:
        return self

    def wait_stream(self, other: Any) -> None:
        assert other is self
        self.behind = [*self.kernels]

    @contextlib.contextmanager
    def stream(self, of: Any) -> Iterator[None]:
        assert of is self
        for kernel in self.behind:
            kernel()
            self.kernels.remove(kernel)
        yield


def messages_through_the_host(how: str) -> tuple[list[float], list[float], str]:
    """Rank 0 sends what a kernel computes; rank 1 receives where an earlier kernel still reads.

    Returns:
        the values sent or received, what that kernel read, and the error for memory that is not contiguous.
    """
    recorder, host, group = recorder_of_this_rank(), Host(), cast("Any", dist.new_group())
    group.gpu_backend = "gloo"
    recorder.device_clock = DeviceClock(recorder.ring, Prompt())
    empty = torch.empty_strided
    torch.empty_strided = lambda *layout, dtype, **_: empty(*layout, dtype=dtype)
    torch.cuda.Stream, torch.cuda.current_stream, torch.cuda.stream = host.Stream, host.current_stream, host.stream
    torch.cuda.device = contextlib.nullcontext
    memory, seen = torch.zeros(2, 3), torch.zeros(2, 3)
    x = memory.as_subclass(OnGpu).requires_grad_()
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    host.kernels = [lambda: memory.fill_(7) if rank == 0 else seen.copy_(memory)]
    try:
        if how == "at once":
            (dist.send if rank == 0 else dist.recv)(x, peer, group)
        elif how == "from any" and rank == 1:
            dist.recv(x, group=group)
        elif how == "in a batch":
            for work in dist.batch_isend_irecv([dist.P2POp(dist.isend if rank == 0 else dist.irecv, x, peer, group)]):
                work.wait()
        else:
            works = [(dist.isend if rank == 0 else dist.irecv)(x, peer, group)]
            assert rank == 1 or memory.sum() == 42
            works[0].wait()
        error = ""
        try:
            dist.isend(torch.zeros(4).as_subclass(OnGpu)[::2], peer, group)
        except (RuntimeError, ValueError) as failed:
            error = str(failed)
        return memory.flatten().tolist(), seen.flatten().tolist(), error
    finally:
        recorder.device_clock = None


@pytest.mark.parametrize("how", ["at once", "later", "in a batch", "from any"])
@pytest.mark.processes
def test_messages_of_gpu_tensors_go_through_the_host(how: str) -> None:
    with Group(2) as group:  # whose ranks have other streams from now on
        run = group.run(messages_through_the_host, how)
    for sent, seen, error in run.results:
        assert sent == [7.0] * 6
        assert seen == [0.0] * 6
        assert "contiguous" in error
    for rank, name in enumerate(("send", "recv")):
        (span,) = run.trace.filter(rank=rank, kind="communication")
        assert (span.name, span.device, span.through_host, span.nbytes, span.peer) == (name, "cuda", True, 24, 1 - rank)


def barrier_of_nccl() -> list[list[str]]:
    """What is pending after a barrier like NCCL's has completed, before and after the wait: its future never
    completes."""
    group: Any = dist.new_group()
    group.gpu_backend = "nccl"
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
    group: Any = dist.new_group()
    group.gpu_backend = ""
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


def test_a_wait_with_a_time_limit_returns_when_the_gpu_has_the_data() -> None:
    """gloo has received the message, and the thread that waited for it still copies it when the limit expires."""

    class Arrived:
        def wait(self, _: timedelta) -> bool:
            return True

    copying, copied = threading.Event(), threading.Event()

    def copy(*_: Any) -> None:
        copying.set()
        assert copied.wait(60)

    operation = Operation(RingWriter(bytearray(RING_BYTES)), "recv", 1)
    message = RecordedMessage(Arrived(), operation, Futures(), copy)
    assert message.claim()
    attendant = threading.Thread(target=message.attend)
    attendant.start()
    assert copying.wait(60)
    late = threading.Timer(0.3, copied.set)
    late.start()
    assert message.wait(timedelta(milliseconds=10))
    assert copied.is_set()
    attendant.join()
    late.join()


def test_what_a_rank_computes_on() -> None:
    recorder = Recorder(RingWriter(bytearray(RING_BYTES)))
    install.watch_device(recorder, torch.device("cpu"))
    assert recorder.device_clock is None
    install.watch_device(recorder, torch.device("cuda", 0))
    assert isinstance(recorder.device_clock, DeviceClock)
