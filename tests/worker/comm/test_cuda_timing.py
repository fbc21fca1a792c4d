"""Times taken by a GPU, with a fake GPU that the test controls."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from labkit.recording.record import Recorder, here, span, steps
from labkit.recording.ring_buffer import RING_BYTES, RingReader, RingWriter
from labkit.recording.schema import Span
from labkit.tracing.trace import from_records
from labkit.worker.comm import cuda_timing as module
from labkit.worker.comm import operation
from labkit.worker.comm.cuda_timing import ANCHOR_LIFE_NS, ANCHOR_LIMIT_NS, ANCHOR_RETRY_NS, DeviceClock, DeviceOperation
from labkit.worker.comm.phases import BACKWARD, DATA, FORWARD, Phases

SKEW_NS = 5_000_000  # between the GPU's clock and the host's
READING_NS = 1_000  # one reading of the host's clock
WORK_NS = 10_000  # of the GPU before each event


class FakeEvent:
    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.ns: int | None = None  # on the GPU's clock, once it has happened

    def query(self) -> bool:
        if self.gpu.broken:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return self.ns is not None

    def elapsed_time(self, end_event: FakeEvent) -> float:
        assert self.ns is not None
        assert end_event.ns is not None
        return (end_event.ns - self.ns) / 1e6

    def synchronize(self) -> None:
        self.gpu.catch_up()
        self.gpu.idle_streams()


class FakeGpu:
    """A host clock that advances by itself, and a GPU whose streams run enqueued work when the test allows it."""

    def __init__(self) -> None:
        self.now_ns = 1_000
        self.enqueued: list[FakeEvent] = []
        self.own: list[FakeEvent] = []
        self.sleeps = self.captures = self.broken = False
        self.congested = False
        self.waited: list[object] = []

    def clock(self) -> int:
        self.now_ns += READING_NS
        if not self.congested:
            self.idle_streams()
        return self.now_ns

    def awake(self) -> bool:
        return not self.sleeps

    def capturing(self) -> bool:
        return self.captures

    def device(self) -> int:
        return 0

    def here(self, device: int) -> FakeEvent:
        assert device == 0
        if self.broken:
            raise RuntimeError("CUDA error: device-side assert triggered")
        self.enqueued.append(FakeEvent(self))
        return self.enqueued[-1]

    def on_side_stream(self, device: int, wait: Callable[[], object] | None = None) -> FakeEvent:
        assert device == 0
        event = FakeEvent(self)
        if wait is None:
            self.own.append(event)  # our own stream reaches it at once
        else:
            self.waited.append(wait())
            self.enqueued.append(event)
        return event

    def idle_streams(self) -> None:
        for event in self.own:
            event.ns = self.now_ns + SKEW_NS
        self.own = []

    def comes_to(self, at_ns: int, count: int = 1) -> None:
        """The GPU does the next enqueued item at a given time on the host's clock."""
        self.now_ns = max(self.now_ns, at_ns)
        for event in self.enqueued[:count]:
            event.ns = at_ns + SKEW_NS
        del self.enqueued[:count]

    def catch_up(self) -> None:
        while self.enqueued:
            self.comes_to(self.now_ns + WORK_NS)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    gpu = FakeGpu()
    monkeypatch.setattr(module, "clock", gpu.clock)
    monkeypatch.setattr(operation, "clock", gpu.clock)
    return gpu


class Rank:
    def __init__(self, gpu: FakeGpu) -> None:
        memory = bytearray(RING_BYTES)
        self.ring, self.reader = RingWriter(memory), RingReader(memory)
        self.clock = DeviceClock(self.ring, gpu)

    def written(self) -> list[Span]:
        return list(from_records([self.reader.read()], [self.reader.names()], ["rank 0"]))

    def settled(self) -> list[Span]:
        """What is recorded once the clock has looked at the events that have happened."""
        self.clock.settle()
        return self.written()

    def span(self, name: str) -> None:
        """The host comes to a span and leaves it."""
        with self.clock.span(name, "cell 2, line 3"):
            pass

    def launched(
        self, gpu: FakeGpu, name: str = "all_reduce", wait: Callable[[], object] | None = lambda: None, kept: Sequence[str] = ()
    ) -> DeviceOperation:
        """An operation that the host has launched."""
        operation = DeviceOperation(self.clock, 0, self.ring, name, gpu.now_ns, 64, -1, "world", 1)
        operation.launched(wait, list(kept))
        return operation


@pytest.fixture
def rank(gpu: FakeGpu) -> Rank:
    return Rank(gpu)


@pytest.fixture
def recorder(rank: Rank) -> Iterator[Recorder]:
    """Records this process's spans, timed by the GPU."""
    recorder = Recorder(rank.ring)
    recorder.device_clock = rank.clock
    here.start(recorder)
    yield recorder
    here.start(None)


def close(ns: int, expected_ns: int) -> bool:
    """As close as the anchor is: the two readings of the host's clock around its event."""
    return abs(ns - expected_ns) <= 3 * READING_NS


def took(span: Span, start_ns: int, end_ns: int) -> bool:
    return close(span.start_ns, start_ns) and close(span.end_ns, end_ns)


def test_a_span_is_timed_by_the_gpu(gpu: FakeGpu, rank: Rank) -> None:
    rank.span("forward")
    assert rank.written() == []  # the host has finished, the GPU has not begun
    gpu.comes_to(2_000_000)
    gpu.comes_to(9_000_000)
    (forward,) = rank.settled()
    assert (forward.name, forward.line, forward.kind, forward.device) == ("forward", "cell 2, line 3", "compute", "cuda")
    assert took(forward, 2_000_000, 9_000_000)


def test_nested_spans_on_a_gpu(gpu: FakeGpu, rank: Rank) -> None:
    span = rank.clock.span("layer", "cell 2, line 3")
    with span, span:
        pass
    for at_ns in (1_000_000, 2_000_000, 3_000_000, 4_000_000):
        gpu.comes_to(at_ns)
    inner, outer = sorted(rank.settled(), key=lambda s: s.duration_ns)
    assert close(inner.duration_ns, 1_000_000)
    assert close(outer.duration_ns, 3_000_000)


def test_before_cuda_starts_the_hosts_clock_is_used(gpu: FakeGpu, rank: Rank) -> None:
    span = rank.clock.span("load", "cell 2, line 3")
    gpu.sleeps = True
    gpu.now_ns = 1_000_000
    with span:
        gpu.sleeps = False
    gpu.comes_to(3_000_000)
    (load,) = rank.settled()
    assert took(load, 1_000_000, 3_000_000)


def test_the_clocks_are_compared_again_when_they_may_have_drifted(gpu: FakeGpu, rank: Rank) -> None:
    rank.clock.mark()
    first = rank.clock._anchors[0]
    rank.clock.mark()
    assert rank.clock._anchors[0] is first
    gpu.now_ns += ANCHOR_LIFE_NS
    mark = rank.clock.mark()
    assert rank.clock._anchors[0] is not first
    gpu.comes_to(gpu.now_ns, count=2)
    at_ns = gpu.now_ns
    gpu.comes_to(at_ns)
    assert close(mark.time_ns() or 0, at_ns)


def test_an_old_anchor_is_better_than_one_that_other_work_delays(gpu: FakeGpu, rank: Rank) -> None:
    rank.clock.mark()
    first = rank.clock._anchors[0]
    gpu.congested = True
    gpu.now_ns += ANCHOR_LIFE_NS
    before_ns = gpu.now_ns
    rank.clock.mark()
    assert rank.clock._anchors[0] is first
    assert gpu.now_ns - before_ns < 2 * ANCHOR_LIMIT_NS
    tried_ns = gpu.now_ns
    for _ in range(50):  # the program does not wait again at once
        rank.clock.mark()
    assert gpu.now_ns - tried_ns < ANCHOR_LIMIT_NS
    gpu.congested = False
    gpu.now_ns += ANCHOR_RETRY_NS
    rank.clock.mark()
    assert rank.clock._anchors[0] is not first


def test_the_first_anchor_is_waited_for(gpu: FakeGpu, rank: Rank) -> None:
    gpu.congested = True
    mark = rank.clock.mark()
    gpu.comes_to(gpu.now_ns + 1_000_000)
    assert close(mark.time_ns() or 0, gpu.now_ns)


def test_an_asynchronous_operation(gpu: FakeGpu, rank: Rank) -> None:
    reduced = rank.launched(gpu, wait=lambda: "side stream waits", kept=["tensors"])
    assert gpu.waited == ["side stream waits"]
    assert reduced._kept == ["tensors"]
    reduced.wait_begins()
    assert rank.reader.pending()[0].wait_start_ns
    reduced.wait_ends()
    assert reduced._kept is None  # the student's stream now waits for it: torch may reuse the memory
    gpu.comes_to(1_000_000)  # all that was enqueued before it
    end = gpu.enqueued.pop(0)  # it runs beside the student's stream ...
    gpu.comes_to(2_000_000)  # ... which reaches the wait,
    assert rank.settled() == []
    end.ns = 6_000_000 + SKEW_NS
    gpu.comes_to(6_000_000)  # and continues
    (span,) = rank.settled()
    assert (span.name, span.device, span.done, span.nbytes) == ("all_reduce", "cuda", True, 64)
    assert close(span.start_ns, 1_000_000)
    assert close(span.wait_start_ns, 2_000_000)
    assert close(span.wait_end_ns, 6_000_000)
    assert close(span.end_ns, 6_000_000)
    assert rank.reader.pending() == []


def test_an_operation_that_nobody_waits_for(gpu: FakeGpu, rank: Rank) -> None:
    sent = rank.launched(gpu, "send", kept=["tensors"])
    sent.completed()  # the host's clock does not matter
    sent.on_completion(None)
    gpu.comes_to(1_000_000)
    gpu.comes_to(3_000_000)
    (span,) = rank.settled()
    assert span.wait_start_ns == 0
    assert close(span.duration_ns, 2_000_000)
    assert sent._kept is None


def test_an_operation_on_the_students_own_stream(gpu: FakeGpu, rank: Rank) -> None:
    rank.launched(gpu, wait=None)
    gpu.comes_to(1_000_000)
    gpu.comes_to(3_000_000)
    (span,) = rank.settled()
    assert (span.start_ns, span.end_ns) == (span.wait_start_ns, span.wait_end_ns)


def test_the_wait_at_the_end_of_a_backward_pass(gpu: FakeGpu, rank: Rank) -> None:
    reduced = rank.launched(gpu)
    reduced.wait_begins(in_torch=True)
    start, end, wait = gpu.enqueued
    for event, at_ns in ((start, 1_000_000), (wait, 4_000_000), (end, 7_000_000)):
        event.ns = at_ns + SKEW_NS
    (span,) = rank.settled()
    assert close(span.wait_start_ns, 4_000_000)
    assert span.wait_end_ns == span.end_ns


@pytest.mark.parametrize("in_torch", [False, True])
def test_a_wait_for_what_the_gpu_has_completed(gpu: FakeGpu, rank: Rank, in_torch: bool) -> None:
    reduced = rank.launched(gpu)
    gpu.comes_to(1_000_000)
    gpu.comes_to(3_000_000)
    rank.clock.settle()
    gpu.now_ns = 5_000_000
    reduced.wait_begins(in_torch=in_torch)
    rank.clock.settle()
    trace = from_records([rank.reader.read()], [rank.reader.names()], ["rank 0"])
    (span,), (wait,) = trace, trace.waits
    assert span.wait_start_ns == 0
    assert close(wait["time_ns"], 5_000_000)


def test_a_stuck_operation_delays_no_other(gpu: FakeGpu, rank: Rank) -> None:
    stuck = rank.launched(gpu, "recv")
    rank.launched(gpu, "send")
    gpu.comes_to(1_000_000)
    gpu.enqueued.pop(0)  # the end of the first
    gpu.comes_to(1_000_000)
    gpu.comes_to(2_000_000)
    assert [s.name for s in rank.settled()] == ["send"]
    assert [p.name for p in rank.reader.pending()] == ["recv"]
    rank.clock.flush()  # returns although one never completes
    stuck.failed()
    rank.clock.settle()
    assert not rank.clock._operations
    assert [s.done for s in rank.written()] == [False]


def test_flush_waits_for_the_gpu(gpu: FakeGpu, rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    rank.span("forward")
    monkeypatch.setattr(module.time, "sleep", lambda _: gpu.catch_up())
    rank.clock.flush()
    assert [s.name for s in rank.written()] == ["forward"]


class Clock:
    """In place of `time`: the GPU does what the test says at the given seconds."""

    def __init__(self, gpu: FakeGpu, **at_s: Callable[[], None]) -> None:
        self.gpu, self.now_s = gpu, 0.0
        self.to_do = [(float(name.removeprefix("s").replace("_", ".")), action) for name, action in at_s.items()]

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        while self.to_do and self.to_do[0][0] <= self.now_s:
            self.to_do.pop(0)[1]()


@pytest.mark.parametrize("behind", ["this rank", "another rank"])
def test_flush_waits_for_an_operation_behind_long_kernels(
    gpu: FakeGpu, rank: Rank, monkeypatch: pytest.MonkeyPatch, behind: str
) -> None:
    """The student's stream waits for it: also for a rank that arrives later, with kernels of its own before it."""
    reduced = rank.launched(gpu)
    reduced.wait_begins()
    reduced.wait_ends()
    start = (lambda: gpu.comes_to(gpu.now_ns + WORK_NS)) if behind == "another rank" else (lambda: None)
    monkeypatch.setattr(module, "time", Clock(gpu, s0_01=start, s4_5=gpu.catch_up))
    assert rank.clock.flush() > 50
    assert [s.name for s in rank.written()] == ["all_reduce"]


def test_flush_waits_shortly_for_an_operation_that_nobody_waits_for(
    gpu: FakeGpu, rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank.launched(gpu, "send")
    time = Clock(gpu, s3_0=lambda: gpu.comes_to(gpu.now_ns + WORK_NS))  # only now the GPU begins it
    monkeypatch.setattr(module, "time", time)
    assert rank.clock.flush() == 0
    assert 3.9 < time.now_s < 4.1
    assert rank.written() == []
    time.now_s, time.to_do = 0.0, []
    rank.clock.flush(limit_s=0.2)
    assert time.now_s < 0.3


def test_the_host_times_what_gives_a_busy_gpu_nothing_to_do(gpu: FakeGpu, rank: Rank) -> None:
    rank.clock.mark()  # which compares the clocks
    gpu.comes_to(1_000_000)
    with rank.clock.span("load", "cell 2, line 3"):
        gpu.now_ns = 9_000_000
    rank.span("forward")
    gpu.comes_to(20_000_000, count=3)  # it comes to both ends of the first span at once, and to the second span
    gpu.comes_to(21_000_000)
    load, forward = sorted(rank.settled(), key=lambda s: s.start_ns)
    assert (load.name, load.device, forward.name, forward.device) == ("load", "cpu", "forward", "cuda")
    assert took(load, 1_000_000, 9_000_000)
    assert close(forward.duration_ns, 1_000_000)


@pytest.mark.parametrize("marked", [True, False])
def test_a_step_holds_the_work_that_the_gpu_does_in_it(gpu: FakeGpu, rank: Rank, recorder: Recorder, marked: bool) -> None:
    """The host is two steps ahead of the GPU: by its clock, the first step would be over before its work begins."""
    optimizer = FakeEvent(gpu)
    for _ in steps(range(2)) if marked else range(2):
        recorder.automatic_steps.working()
        with span("forward"):
            pass
        recorder.automatic_steps.optimizer_begins(optimizer)
        recorder.automatic_steps.optimizer_ends(optimizer)
    recorder.automatic_steps.end_step()
    gpu.comes_to(5_000_000)
    gpu.catch_up()
    found = sorted(rank.settled(), key=lambda s: (s.start_ns, -s.end_ns))
    assert [(s.name, s.kind, s.device) for s in found] == [("step", "step", "cuda"), ("forward", "compute", "cuda")] * 2
    for step, forward in zip(found[::2], found[1::2], strict=True):
        assert 5_000_000 - 3 * READING_NS <= step.start_ns <= forward.start_ns < forward.end_ns <= step.end_ns


def test_steps_stay_in_their_order_where_one_gives_a_busy_gpu_nothing_to_do(gpu: FakeGpu, rank: Rank, recorder: Recorder) -> None:
    for batch in steps(range(3)):
        if batch != 1:
            with span("forward"):
                pass
    gpu.comes_to(5_000_000)
    gpu.comes_to(9_000_000, count=4)  # the first step ends, and so does the second
    gpu.catch_up()
    bounds = [(s.start_ns, s.end_ns) for s in rank.settled() if s.kind == "step"]
    assert len(bounds) == 3
    assert bounds == sorted(bounds)
    assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))


def test_after_a_failed_kernel_nothing_raises_but_the_students_own_calls(gpu: FakeGpu, rank: Rank) -> None:
    rank.span("forward")
    rank.launched(gpu, wait=None)
    gpu.broken = True
    rank.span("backward")
    rank.clock.settle()
    assert rank.clock.flush() > 0
    assert not rank.clock._operations


def test_nothing_is_queried_while_a_graph_is_captured(gpu: FakeGpu, rank: Rank) -> None:
    rank.span("warm up")
    enqueued = len(gpu.enqueued)
    gpu.captures = gpu.broken = True  # an event or a query would end the capture
    rank.span("captured")
    rank.launched(gpu, wait=lambda: 1 / 0)
    assert len(gpu.enqueued) == enqueued
    gpu.captures = gpu.broken = False
    gpu.catch_up()
    assert {(s.name, s.device) for s in rank.settled() if s.kind == "compute"} == {("warm up", "cuda"), ("captured", "cpu")}


def test_what_a_failed_run_leaves_is_not_in_the_next(gpu: FakeGpu, rank: Rank) -> None:
    recorder = Recorder(rank.ring)
    recorder.device_clock = rank.clock
    rank.span("forward")
    assert rank.clock.flush(limit_s=0.01) == 0
    recorder.begin_run()
    gpu.catch_up()
    assert rank.settled() == []


def test_flush_does_not_wait_for_what_other_threads_begin_meanwhile(
    gpu: FakeGpu, rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve() -> None:
        gpu.catch_up()
        rank.span("served")

    rank.span("forward")
    time = Clock(gpu, **{f"s{n}": serve for n in range(100)})
    monkeypatch.setattr(module, "time", time)
    rank.clock.flush()
    assert time.now_s < 2


@pytest.mark.parametrize("on_gpu", [True, False])
def test_a_step_begins_before_the_phase_that_begins_it(gpu: FakeGpu, rank: Rank, recorder: Recorder, on_gpu: bool) -> None:
    phases, optimizer = Phases(), FakeEvent(gpu)
    recorder.device_clock = rank.clock if on_gpu else None
    phases.call(FORWARD, None, lambda: None)
    recorder.automatic_steps.optimizer_begins(optimizer)
    recorder.automatic_steps.optimizer_ends(optimizer)
    recorder.automatic_steps.end_step()
    gpu.catch_up()
    step, forward = sorted(rank.settled(), key=lambda s: s.kind, reverse=True)
    assert (step.kind, forward.name) == ("step", "forward")
    assert step.start_ns <= forward.start_ns < forward.end_ns <= step.end_ns


def test_a_step_that_began_before_cuda_was_initialised(gpu: FakeGpu, rank: Rank) -> None:
    recorder = Recorder(rank.ring)
    assert isinstance(recorder.now(), int)
    start = gpu.clock()
    recorder.device_clock = rank.clock
    recorder.step(start, recorder.now(), 0)
    gpu.catch_up()
    assert [(s.kind, s.start_ns, s.device) for s in rank.settled()] == [("step", start, "cuda")]


def test_the_host_times_what_a_rank_computes_without_memory_on_the_gpu(gpu: FakeGpu, rank: Rank) -> None:
    gpu.sleeps = True
    with rank.clock.span("forward", "cell 2, line 3"):
        gpu.now_ns += 5_000_000
    (forward,) = rank.settled()
    assert forward.device == "cpu"
    assert close(forward.duration_ns, 5_000_000)


def test_spans_of_a_rank_with_a_gpu(gpu: FakeGpu, rank: Rank, recorder: Recorder) -> None:
    with span("forward"):
        pass
    with span("a file", "communication"):
        pass
    gpu.catch_up()
    assert {(s.name, s.device) for s in rank.settled()} == {("forward", "cuda"), ("a file", "cpu")}


def test_a_span_of_another_thread(gpu: FakeGpu, rank: Rank) -> None:
    span = rank.clock.span("load", "cell 2, line 3")

    def load() -> None:
        with span:
            pass

    thread = threading.Thread(target=load)
    for begin in (load, thread.start, thread.join):
        begin()
    gpu.catch_up()
    assert [s.own_thread for s in rank.settled()] == [False, True]


def test_phases_of_training_are_timed_by_the_gpu_and_data_by_the_host(gpu: FakeGpu, rank: Rank, recorder: Recorder) -> None:
    phases = Phases()
    for phase in (DATA, FORWARD, BACKWARD):
        phases.call(phase, None, lambda: None)
    with span("mine"):
        phases.call(FORWARD, None, lambda: None)  # inside a span of the program's own
    phases.call(FORWARD, ("forward 3", "cell 2, line 3"), lambda: None)
    gpu.catch_up()
    written = [(s.name, s.device, s.automatic) for s in rank.settled()]
    assert sorted(written) == [
        ("backward", "cuda", True),
        ("data", "cpu", True),
        ("forward", "cuda", True),
        ("forward 3", "cuda", True),
        ("mine", "cuda", False),
    ]
