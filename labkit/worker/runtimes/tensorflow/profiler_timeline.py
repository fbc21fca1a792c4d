"""Records the operations of a TensorFlow rank: TensorFlow's profiler observes every run, and its events become spans.

A session begins and ends with the run. In a long run it is read and restarted regularly, between two calls of
tf.functions on the main thread, when no operation is running: so events take limited memory, and `watch` can show them.
A rank that only serves calls no functions, so a thread reads its session; operations that are running at that moment
are lost, and the timeline shows the reading instead.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

from labkit.recording.record import Recorder, TimedSpan, clock
from labkit.recording.ring_buffer import CAPACITY
from labkit.recording.schema import COMPUTE, READING, Span, device_code, flags_of
from labkit.worker.runtimes.tensorflow.profiler_defect import SafeStop, safe_stop
from labkit.worker.runtimes.tensorflow.profiler_events import Event, Role, scope_of, spans_of
from labkit.worker.runtimes.tensorflow.sizes import Sizes
from labkit.worker.runtimes.tensorflow.tensorflow_internals import CALLS, PENDING, PROFILER
from labkit.worker.torch_profiler import MARK, MARKS, on_our_clock

OFF: Final = "LABKIT_TENSORFLOW_TIMELINE"  # the variable that disables TensorFlow's profiler if it is 0
SLICE_NS: Final = 1_000_000_000  # the usual age at which a session is read
SHARE: Final = 4  # a session is read later if reading takes long: at this many times the last reading's duration,
OLDEST_NS: Final = 2_000_000_000  # but at this age at the latest, because TensorFlow stores up to 50 MB per second
SETTLE_S: Final = 0.005  # the profiler sees an operation only some time after it has completed
FINISH_S: Final = 5.0  # longest wait for operations that the function has left running
SESSION_LIMIT_S: Final = 60.0  # a session that cannot be read between two calls ends at this age: it may have a million events
MOST: Final = CAPACITY // 4  # spans written at once, so that the notebook, which reads 20 times a second, can keep up
HOST: Final = b"/host:CPU"
# Prefixes of the names of events that are not needed; these are more than half of all events.
LEFT_OUT: Final = (
    b"ThreadpoolListener", b"TFE_", b"convert_to_tensor", b"EagerCopyToDevice", b"ValidateInput", b"EagerKernelExecute",
    b"KernelAndDevice", b"EagerLocalExecute", b"Iterator:", b"Prefetch", b"tf.constant", b"Loop", b"ParallelFor", b"MemCpyAsync",
)  # fmt: skip


class ProfilerTimeline:
    """Records the TensorFlow operations of a rank's runs."""

    def __init__(self, recorder: Recorder, role: Role) -> None:
        self._recorder, self._role, self._sizes = recorder, role, Sizes()
        self._spans = GraphSpans()
        self._session: Session | None = None
        self._lock = threading.RLock()
        self._due_ns = 0
        self._over = threading.Event()  # whether the session has ended
        self._safe_stop: SafeStop | None = None
        self._students_sessions = 0  # running sessions of the student's own
        self._notes: list[str] = []
        self._times: Counter[tuple[int, int, int]] = Counter()  # how often each collective has run in this run

    def install(self) -> list[str]:
        """Prepare this process. Call it once, before the student's code runs; returns remarks for the student."""
        if os.environ.get(OFF) == "0":
            return []
        stopping = safe_stop() if PROFILER.found else None
        if stopping is None:
            return ["labkit does not support the profiler of this TensorFlow: pictures show no operations of TensorFlow."]
        self._safe_stop = stopping
        PROFILER.set("_pywrap_profiler", _Profilers(PROFILER["_pywrap_profiler"], self, stopping))
        main = threading.main_thread().ident

        def call_between(call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            if self._due_ns and clock() > self._due_ns and threading.get_ident() == main:
                self.read()
            return call(*args, **kwargs)

        CALLS.apply(__call__=call_between)
        self._recorder.graph_spans = self._spans
        self._sizes.install()
        return []

    def begin(self) -> None:
        """Start a session at the beginning of a run in which this rank computes or serves."""
        with self._lock:
            if self._safe_stop is not None and self._session is None and not self._students_sessions:
                self._start()

    def read(self) -> None:
        """Write the events so far to the ring, and start a new session."""
        with self._lock:
            if self._session is None:
                return
            start_ns = clock()
            if not self._role.serves:
                _finish_running_operations()
            blind_ns = self._stop(go_on=not self._students_sessions)
            end_ns = clock()
            # In a rank that serves, other threads compute meanwhile; their operations are missing only between the two.
            self._recorder.ring.write(READING, COMPUTE, *(blind_ns if self._role.serves else (start_ns, end_ns)))
            self._due_ns = next_reading(end_ns, end_ns - start_ns) if self._session is not None else 0

    def end(self) -> list[str]:
        """Stop the session at the end of a run; return remarks for the student."""
        with self._lock:
            if self._session is not None:
                _finish_running_operations()
                self._stop()
            self._sizes.forget()  # also what was noted while the student's own session ran
            self._times.clear()
            notes, self._notes = self._notes, []
            return notes

    def give_way(self) -> None:
        """Stop the session, because the student starts one, and TensorFlow allows only one at a time."""
        with self._lock:
            self._stop()
            self._students_sessions += 1
            self._notes.append(
                f"rank {self._role.rank} used TensorFlow's profiler itself, which allows one session at a time: meanwhile the "
                "pictures show none of its operations."
            )

    def resume(self) -> None:
        """Start a session again after the student's has ended."""
        with self._lock:
            self._students_sessions = 0
            self.begin()

    def _start(self) -> None:
        try:
            self._session = Session(self._safe_stop or contextlib.nullcontext())
        except Exception as error:  # noqa: BLE001  # recording must not end the student's run
            self._fail(error)
            return
        self._due_ns = next_reading(clock(), 0)
        self._over = over = threading.Event()
        threading.Thread(target=self._read_when_due, args=(over,), daemon=True, name="labkit-profiler").start()

    def _stop(self, *, go_on: bool = False) -> tuple[int, int]:
        """Stop the session and write its events to the ring; if `go_on`, start another one in between.

        Returns when operations are not recorded: from the end of the session to the start of the next one.
        """
        session, self._session, self._due_ns = self._session, None, 0
        if session is not None:
            time.sleep(SETTLE_S)
        self._over.set()
        start_ns = end_ns = clock()
        if session is not None:
            try:
                session.stop()
                if go_on:
                    self._start()
                end_ns = clock()
                role = self._role._replace(devices=max(self._role.devices, _configured_devices()))
                self._write(spans_of(session.events(), role, self._spans.names, self._sizes.nbytes, self._times))
            except Exception as error:  # noqa: BLE001  # as above
                self._fail(error)
            self._sizes.forget()
        return start_ns, end_ns

    def _fail(self, error: Exception) -> None:
        self._notes.append(
            f"rank {self._role.rank}: TensorFlow's profiler failed, so pictures lack its operations. "
            f"{type(error).__name__}: {error}"
        )

    def _read_when_due(self, over: threading.Event) -> None:
        """Read the session on a thread: in a rank that serves when it is due, in others only at `SESSION_LIMIT_S`."""
        while self._role.serves and not over.is_set():
            with self._lock:  # until the previous session has been read, `_due_ns` is not set
                left_ns = self._due_ns - clock()
            if left_ns <= 0:
                self.read()
                return
            over.wait(left_ns / 1e9)
        if over.wait(SESSION_LIMIT_S):
            return
        with self._lock:
            if over.is_set():
                return
            self._stop()
            self._notes.append(
                f"rank {self._role.rank} was in one call of TensorFlow for {SESSION_LIMIT_S:.0f} s: "
                "later operations are not shown."
            )

    def _write(self, spans: list[Span]) -> None:
        ring = self._recorder.ring
        if len(spans) > MOST:
            spans.sort(key=lambda s: (s.kind == "compute", s.start_ns - s.end_ns))
            self._notes.append(f"rank {self._role.rank}: of {len(spans)} spans at once, pictures show the {MOST} longest.")
        for span in spans[:MOST]:
            device, flags = device_code(span.device), flags_of(span)
            if span.kind == "compute":
                ring.write(span.name, COMPUTE, span.start_ns, span.end_ns, device=device, flags=flags)
            else:
                ring.write_communication(
                    span.name, span.start_ns, span.end_ns, wait_start_ns=span.wait_start_ns, wait_end_ns=span.wait_end_ns,
                    nbytes=span.nbytes, peer=span.peer, root=span.root, group=span.group, match=span.match, line=span.line,
                    signature=span.signature, device=device, flags=flags,
                )  # fmt: skip


class GraphSpans:
    """The spans in the tf.functions of this process: name scopes, which the names of operations contain."""

    def __init__(self) -> None:
        self.names: list[str] = []  # by their numbers
        self._lock = threading.Lock()

    def around(self, timed: TimedSpan) -> TimedSpan:
        """Return a span that is a name scope while a graph is built, and `timed` otherwise."""
        return _GraphSpan(self, timed)

    def scope(self, name: str) -> Any:
        """Return the name scope of a span."""
        import tensorflow as tf

        with self._lock:
            if name not in self.names:
                self.names.append(name)
            return tf.name_scope(scope_of(self.names.index(name)))


class _GraphSpan(TimedSpan):
    """A span of a TensorFlow rank."""

    __slots__ = ("_eagerly", "_graph_spans", "_timed")

    def __init__(self, graph_spans: GraphSpans, timed: TimedSpan) -> None:
        import tensorflow as tf

        super().__init__(timed.name, timed.kind)
        self._graph_spans, self._timed, self._eagerly = graph_spans, timed, tf.executing_eagerly

    def begin(self) -> Any:
        """Enter a name scope and return it; None after beginning the timed span instead."""
        if self._eagerly():
            self._timed.__enter__()
            return None
        scope = self._graph_spans.scope(self.name)
        scope.__enter__()
        return scope

    def end(self, begun: Any) -> None:
        """Leave the name scope, or end the timed span."""
        (self._timed if begun is None else begun).__exit__(None, None, None)


def _configured_devices() -> int:
    """Return the number of logical CPUs that the program has configured itself, as for DTensor; 0 if it has not."""
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    return len(tf.config.get_logical_device_configuration(cpu) or ())  # neither initialises TensorFlow


def next_reading(now_ns: int, reading_ns: int) -> int:
    """Return the time at which a session is due to be read.

    The times are the same in all ranks of a machine, which share a clock: while a rank reads, the others wait for it in
    their next collective, so they should read at the same time.
    """
    period_ns = SLICE_NS
    while period_ns < min(SHARE * reading_ns, OLDEST_NS):
        period_ns *= 2
    return (now_ns + period_ns // 2) // period_ns * period_ns + period_ns


class _Profilers:
    """Replaces TensorFlow's module of profilers, so that labkit's session gives way to the student's."""

    def __init__(self, module: Any, timeline: ProfilerTimeline, stopping: SafeStop) -> None:
        self._module, self._timeline, self._stopping = module, timeline, stopping

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def start_server(self, port: int) -> Any:
        """Start a profiler server, which may start a session at any time."""
        self._timeline.give_way()
        return self._module.start_server(port)

    def ProfilerSession(self) -> Any:  # noqa: N802  # TensorFlow's name
        """Create a session of the student's."""
        return _ProfilerSession(self._module.ProfilerSession(), self._timeline, self._stopping)


class _ProfilerSession:
    """A session of the student's, during which labkit's does not run."""

    def __init__(self, session: Any, timeline: ProfilerTimeline, stopping: SafeStop) -> None:
        self._session, self._timeline, self._stopping, self._started = session, timeline, stopping, False

    def start(self, *args: Any) -> None:
        self._timeline.give_way()
        self._started = True
        self._session.start(*args)

    def stop(self) -> Any:
        with self._stopping:
            return self._session.stop()

    def export_to_tb(self) -> None:
        with self._stopping:
            self._session.export_to_tb()

    def __del__(self) -> None:
        if self._started:
            with self._stopping:
                del self._session
            self._timeline.resume()


def _finish_running_operations() -> None:
    """Wait for asynchronous operations, such as DTensor's, which belong to the run."""

    def wait() -> None:
        with contextlib.suppress(Exception):  # an error of an operation that the student's program did not wait for
            PENDING["async_wait"]()

    if PENDING.found:
        waiter = threading.Thread(target=wait, daemon=True)
        waiter.start()
        waiter.join(FINISH_S)


class Session:
    """A session of the profiler, from its creation until `stop`. A process can have one session at a time."""

    def __init__(self, stopping: AbstractContextManager[None]) -> None:
        self._stopping = stopping
        # TensorFlow creates the folder when it writes its file, at the end; a rank that is killed before leaves none.
        self._folder = os.path.join(tempfile.gettempdir(), f"labkit-{secrets.token_hex(8)}")
        self._marks: list[tuple[int, int, int]] = []
        self._data = b""
        self._session = PROFILER["ProfilerSession"]()
        self._session.start(self._folder, {})  # TensorFlow 2.21 ignores all options
        self._mark()

    def stop(self) -> None:
        """Stop the session; afterwards another one may start."""
        self._mark()
        session, self._session = self._session, None
        try:
            with self._stopping:
                session.export_to_tb()
            files = sorted(Path(self._folder).rglob("*.xplane.pb"))
            self._data = b"".join(file.read_bytes() for file in files)
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def events(self) -> list[Event]:
        """Return the events, grouped by thread, in no particular order within one; [] if the profiler has lost some."""
        return _read(self._data, self._marks)

    def _mark(self) -> None:
        """Let the profiler record short events whose times are also read on labkit's clock."""
        trace_me = PROFILER["TraceMe"]
        for _ in range(MARKS):
            before_ns = clock()
            mark = trace_me(MARK)
            inside_ns = clock()
            mark.Stop()
            self._marks.append((before_ns, inside_ns, clock()))


def _read(data: bytes, marks: Sequence[tuple[int, int, int]]) -> list[Event]:
    space = _space()
    space.ParseFromString(data)
    found: list[Event] = []
    recorded_marks: list[tuple[int, int]] = []  # in nanoseconds since the session began
    for plane in space.planes:
        if plane.name != HOST:
            continue
        stats = {number: about.name.decode(errors="replace") for number, about in plane.stat_metadata.items()}
        names = {
            n: about.name.decode(errors="replace")
            for n, about in plane.event_metadata.items()
            if not about.name.startswith(LEFT_OUT)
        }
        has_details = {n: _needs_details(name) for n, name in names.items()}
        for line in plane.lines:
            for event in line.events:
                name = names.get(event.metadata_id)
                if name is None:
                    continue
                start_ns = event.offset_ps // 1000
                end_ns = start_ns + event.duration_ps // 1000
                if name == MARK:
                    recorded_marks.append((start_ns, end_ns))
                    continue
                details = event.stats if has_details[event.metadata_id] else ()
                about = {stats[stat.metadata_id]: _value(stat, stats) for stat in details}
                found.append(Event(line.id, name, start_ns, end_ns, about))
    times = on_our_clock([(e.start_ns, e.end_ns) for e in found], sorted(recorded_marks), marks)
    return [e._replace(start_ns=start_ns, end_ns=end_ns) for e, (start_ns, end_ns) in zip(found, times, strict=False)]


def _needs_details(name: str) -> bool:
    """Whether an event's details are needed; those of operations that neither send nor receive are not."""
    _, colon, kind = name.rpartition(":")
    return not colon or "::" in name or kind.startswith(("_", "Collective"))


def _value(stat: Any, names: dict[int, str]) -> Any:
    kind = stat.WhichOneof("value")
    if kind == "ref_value":
        return names[stat.ref_value]
    value = getattr(stat, kind)
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _space() -> Any:
    """Return an empty message of TensorFlow's type XSpace with bytes instead of strings, some of which are no UTF-8."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto()
    PROFILER["DESCRIPTOR"].CopyToProto(file)
    pending = list(file.message_type)
    while pending:
        message = pending.pop()
        pending += message.nested_type
        for one in message.field:
            if one.type == one.TYPE_STRING:
                one.type = one.TYPE_BYTES
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{file.package}.XSpace"))()
