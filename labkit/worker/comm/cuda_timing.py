"""Times GPU work with CUDA events, on the clock of all ranks, without synchronizing the GPU or the student's code.

The host only enqueues work, so its clock around a call does not measure it. Events enqueued before and after do. They
are read later, when the GPU has reached them, and converted to the host's clock by an anchor: an event and a host time
that belong together.

Which spans are the GPU's? No call tells whether a program has given the GPU work. The host times a span if the process
holds no memory of the GPU at either end, or if the GPU passes from the start to the end in no time: it was behind, and
had nothing to do in between. All others are the GPU's. If it idles while the host computes, both clocks agree.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, cast

import torch

from labkit.recording.record import TimedSpan, clock
from labkit.recording.ring_buffer import RingWriter
from labkit.recording.schema import COMPUTE, CPU, CUDA, STREAM
from labkit.worker.comm.operation import Operation

ANCHOR_LIFE_NS: Final = 1_000_000_000  # clocks drift by about 10 ppm: as much in a second as an anchor's own error
ANCHOR_TRIES: Final = 5  # the fastest of these tries is the most accurate
ANCHOR_LIMIT_NS: Final = 1_000_000  # for one try; if other work delays the event longer, the old anchor is more accurate
ANCHOR_RETRY_NS: Final = 100_000_000  # after such a delay: each try may cost the program `ANCHOR_LIMIT_NS`
NOTHING_NS: Final = 4_000  # between two events without work in between; a kernel takes longer
FLUSH_LIMIT_S: Final = 60.0  # for work that the student's function enqueued before it returned
# For operations that no stream waits for, once the GPU has begun them: another rank may be behind, or never arrive.
UNWAITED_LIMIT_S: Final = 1.0

Anchor = tuple[torch.cuda.Event, int]  # an event and a host time that belong together


class CudaEvents:
    """The source of events of `torch.cuda`; tests have a fake one."""

    def __init__(self) -> None:
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._in_use = False

    def awake(self) -> bool:
        """Whether CUDA has given this process memory of the current device, so that there may be something to time."""
        if not self._in_use and torch.cuda.is_initialized():  # once in use, it remains so: products keep a workspace
            try:
                allocated = torch.cuda.memory_stats_as_nested_dict().get("allocated_bytes")
                self._in_use = bool(allocated and allocated["all"]["current"])
            except RuntimeError:  # an allocator of the program's own, which does not count
                self._in_use = True
        return self._in_use

    def capturing(self) -> bool:
        """Whether the current stream records a CUDA graph, which events and queries would break."""
        return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()

    def device(self) -> int:
        """The current device."""
        return torch.cuda.current_device()

    def here(self, device: int) -> torch.cuda.Event:
        """Record an event behind all work on the device's current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    def on_side_stream(self, device: int, wait: Callable[[], object] | None = None) -> torch.cuda.Event:
        """Record an event on a separate stream, behind the work that `wait` makes that stream wait for."""
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)
        event = torch.cuda.Event(enable_timing=True)
        with torch.cuda.device(device), torch.cuda.stream(stream):
            if wait is not None:
                wait()
            event.record(stream)
        return event


class GpuMark:
    """A point in the GPU's work, set at `host_ns`: an event, or this time, if events cannot be recorded."""

    __slots__ = ("_anchor", "_event", "_ns", "host_ns", "of_gpu")

    def __init__(self, event: torch.cuda.Event | None = None, anchor: Anchor | None = None, host_ns: int | None = None) -> None:
        self.host_ns, self.of_gpu = clock() if host_ns is None else host_ns, event is not None
        self._event, self._anchor, self._ns = event, anchor, None if event is not None else self.host_ns

    def time_ns(self) -> int | None:
        """Return when the GPU reached it, on `time.perf_counter_ns`'s clock; None if it has not."""
        event, anchor = self._event, self._anchor
        if event is None or anchor is None:  # also if another thread has just read it
            return self._ns
        if not event.query():
            return None
        self._ns = anchor[1] + round(anchor[0].elapsed_time(event) * 1e6)
        self._event = self._anchor = None
        return self._ns


class DeviceClock:
    """Times spans and operations by the GPU's work; the rank calls `flush` when the student's function has returned."""

    def __init__(self, ring: RingWriter, events: CudaEvents | None = None) -> None:
        self._ring = ring
        self._events = events or CudaEvents()
        self.thread_flags = ring.thread_flags
        self._anchors: dict[int, Anchor] = {}
        self._anchor_due_ns: dict[int, int] = {}
        self._spans: deque[tuple[Any, ...]] = deque()  # kind, name, line, flags, start, end
        self._operations: deque[DeviceOperation] = deque()
        self._settling = threading.Lock()

    def mark(self, device: int | None = None) -> GpuMark:
        """Mark the end of all work enqueued so far on a GPU, by default the current one if the program uses it."""
        events = self._events
        if events.capturing() or (device is None and not events.awake()):
            return GpuMark()
        device = events.device() if device is None else device
        try:
            anchor = self._anchor(device)
            return GpuMark(events.here(device), anchor)
        except RuntimeError:  # a kernel has failed: CUDA works no more, as the student's next call says
            return GpuMark()

    def mark_after(self, device: int, wait: Callable[[], object]) -> GpuMark:
        """Mark the end of the work that `wait` makes the current stream wait for."""
        if self._events.capturing():
            return GpuMark()
        anchor = self._anchor(device)
        return GpuMark(self._events.on_side_stream(device, wait), anchor)

    def span(self, name: str, line: str) -> TimedSpan:
        """Return a span of the program's own, first used at `line`."""
        return _DeviceSpan(self, name, line)

    def ended(
        self, name: str, line: str, start: GpuMark | int, flags: int = 0, *, kind: int = COMPUTE, end: GpuMark | int | None = None
    ) -> None:
        """Record a span or a step, which by default ends with all work that is enqueued so far.

        Its start is a time of the host if that was before CUDA was initialized.
        """
        marks = [GpuMark(host_ns=at) if isinstance(at, int) else at for at in (start, end or self.mark())]
        self._spans.append((kind, name, line, flags, *marks))
        self.settle()

    def follow(self, operation: DeviceOperation) -> None:
        """Record an operation when the GPU has completed it."""
        self._operations.append(operation)
        self.settle()

    def begin_run(self) -> None:
        """Drop what an earlier run has left, which the GPU had not completed when its ranks returned or failed."""
        with self._settling:
            self._spans.clear()

    def settle(self) -> None:
        """Record what the GPU has completed so far, without waiting."""
        if self._events.capturing() or not self._settling.acquire(blocking=False):
            return  # or another thread is doing it
        try:
            spans = self._spans
            while spans:
                kind, name, line, flags, start, end = spans[0]
                end_ns, start_ns = end.time_ns(), start.time_ns()
                if end_ns is None or start_ns is None:
                    break  # later spans cannot be complete either
                device = CUDA
                nothing = end_ns - start_ns < NOTHING_NS and kind == COMPUTE  # steps stay in their order
                if nothing or not (start.of_gpu or end.of_gpu):
                    start_ns, end_ns, device = start.host_ns, end.host_ns, CPU
                self._ring.write(name, kind, start_ns, end_ns, line=line, device=device, flags=flags)
                spans.popleft()
            for _ in range(len(self._operations)):  # operations may complete in any order
                operation = self._operations.popleft()
                if not operation.settled():
                    self._operations.append(operation)
        except RuntimeError:  # a kernel has failed: CUDA works no more, as `_wait_for_gpu` or the student's next call says
            self._spans.clear()
            self._operations.clear()
        finally:
            self._settling.release()

    def flush(self, limit_s: float = FLUSH_LIMIT_S) -> float:
        """Wait until the GPU has completed all open spans and operations, and record them.

        The GPU may be far behind the host, and other ranks' GPUs behind this one. So this rank counts as blocked in the
        operations for which a stream waits: if they never complete, the notebook finds the deadlock meanwhile.

        Returns the seconds left of the time limit, for other work of the GPU.
        """
        begun = time.monotonic()
        until, unwaited_until = begun + limit_s, begun + UNWAITED_LIMIT_S
        self.settle()
        # Without those of other threads that are added from now on. Copies of a deque are made in one step.
        last_span, operations = tuple(self._spans)[-1:], {*tuple(self._operations)}
        for operation in operations:
            operation.blocks()
        while True:
            left = [operation for operation in tuple(self._operations) if operation in operations]
            of_spans = any(span is last_span[0] for span in tuple(self._spans)) if last_span else False
            if not left and not of_spans:
                return max(0.0, until - time.monotonic())
            now = time.monotonic()
            if of_spans or not all(operation.unwaited() for operation in left):
                unwaited_until = now + UNWAITED_LIMIT_S
            if now > min(until, unwaited_until):
                return 0.0
            time.sleep(0.0005)
            self.settle()

    def _anchor(self, device: int) -> Anchor:
        """Return an event and the host time at that event, at most `ANCHOR_LIFE_NS` old if the GPU is responsive."""
        old = self._anchors.get(device)
        if old is not None and clock() < self._anchor_due_ns[device]:
            return old
        quickest, best = ANCHOR_LIMIT_NS, old
        for _ in range(ANCHOR_TRIES):
            asked_ns = clock()
            event = self._events.on_side_stream(device)
            while not event.query() and clock() - asked_ns < ANCHOR_LIMIT_NS:
                pass
            took_ns = clock() - asked_ns
            if took_ns >= ANCHOR_LIMIT_NS:
                break  # another process has the GPU
            if took_ns < quickest:
                quickest, best = took_ns, (event, asked_ns + took_ns)
        if best is None:
            event = self._events.on_side_stream(device)
            event.synchronize()
            best = event, clock()
        self._anchor_due_ns[device] = clock() + (ANCHOR_LIFE_NS if best is not old else ANCHOR_RETRY_NS)
        self._anchors[device] = best
        return best


class _DeviceSpan(TimedSpan):
    """A compute span of the program's own that the GPU times."""

    __slots__ = ("_clock", "_line")

    def __init__(self, device_clock: DeviceClock, name: str, line: str) -> None:
        super().__init__(name, "compute")
        self._clock, self._line = device_clock, line

    def begin(self) -> GpuMark:
        """Mark the GPU's work so far."""
        return self._clock.mark()

    def end(self, start: GpuMark) -> None:
        """Record the span once the GPU has completed the work enqueued since `start`."""
        self._clock.ended(self.name, self._line, start, self._clock.thread_flags())


class DeviceOperation(Operation):
    """A communication operation between GPUs: the host only enqueues it, and the wait for it."""

    __slots__ = ("_clock", "_device", "_end", "_kept", "_start", "_wait_end", "_wait_start")

    def __init__(self, device_clock: DeviceClock, device: int, ring: RingWriter, name: str, *details: Any) -> None:
        super().__init__(ring, name, *details)
        self._clock, self._device = device_clock, device
        self._start = device_clock.mark(device)
        self._end = self._wait_start = self._wait_end = cast("GpuMark | None", None)
        self._kept: object = None

    def launched(self, wait: Callable[[], object] | None, kept: object) -> None:
        """Note that it is enqueued; `wait` makes the current stream wait for it, None if the student's already does.

        `kept`, its tensors, are kept until the student's stream has waited. Otherwise the wait on the side stream could
        make torch release them too early.
        """
        if wait is None:
            self._end = self._wait_end = self._clock.mark(self._device)
            self._wait_start = self._start
            super().wait_begins(STREAM)
        else:
            self._end, self._kept = self._clock.mark_after(self._device, wait), kept
        self._clock.follow(self)

    def wait_begins(self, _thread: int = STREAM, *, in_torch: bool = False) -> None:
        """Note that the student's stream waits from here; `in_torch`, until the operation is complete."""
        if self._wait_start is None and not self.done:
            self._wait_start = self._clock.mark(self._device)
            if in_torch:
                self._wait_end = self._end
        super().wait_begins(STREAM)

    def wait_ends(self) -> None:
        """Note that the student's stream continues from here."""
        self._wait_end = self._clock.mark(self._device)
        self._kept = None
        self._clock.settle()

    def blocks(self) -> None:
        """Note that this thread does nothing more until it completes, if the student's stream waits for it."""
        if self._wait_start is not None:
            self._ring.waiting(self._slot, clock())

    def unwaited(self) -> bool:
        """Whether the GPU has begun it, and no stream waits for it."""
        return self._wait_start is None and self._start.time_ns() is not None

    def completed(self, _: object = None) -> None:
        """Does nothing: the host does not know when it completes."""

    def on_completion(self, _: Any) -> None:
        """Does nothing: the host does not know when it completes."""

    def settled(self) -> bool:
        """Whether it has failed, or the GPU has completed it; in the latter case, record it."""
        end_ns = self._end.time_ns() if self._end is not None else None
        start_ns = self._start.time_ns()
        if end_ns is None or start_ns is None:
            return self.done  # it failed
        if self._wait_start is not None:
            wait_start_ns = self._wait_start.time_ns()
            wait_end_ns = self._wait_end.time_ns() if self._wait_end is not None else None
            if wait_start_ns is None or wait_end_ns is None:
                return False
            self.wait_start_ns, self.wait_end_ns = wait_start_ns, wait_end_ns
        self.start_ns, self.end_ns = start_ns, max(start_ns, end_ns)
        self._kept = None
        self._write(device=CUDA)
        return True
