"""What a TensorFlow rank does, in its ring: TensorFlow's profiler looks at every run, and what it saw becomes spans.

A session begins with the run, and ends with it. In a long run it is read and begun again now and then, between two calls of
tf.functions of the main thread, when nothing is under way: so events take bounded memory, and `watch` has something to show.
A rank that only serves calls nothing, so a thread reads its session; what is under way at that moment is not seen.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections import Counter
from typing import Any, Final

from labkit.recording.record import Recorder, clock
from labkit.recording.ring_layout import CAPACITY, TAIL_FIELDS
from labkit.recording.schema import COMPUTE, Span, device_code, flags_of
from labkit.worker.runtimes.tensorflow.events import Place, spans_of
from labkit.worker.runtimes.tensorflow.profiler_defect import SafeStop, safe_stop
from labkit.worker.runtimes.tensorflow.session import Session
from labkit.worker.runtimes.tensorflow.sizes import Sizes
from labkit.worker.runtimes.tensorflow.spans import GraphSpans

__all__ = ["OFF", "Timeline", "next_reading"]

OFF: Final = "LABKIT_TENSORFLOW_TIMELINE"  # the variable that, as 0, keeps TensorFlow's profiler away
SLICE_NS: Final = 1_000_000_000  # a session is read when it is about so old,
SHARE: Final = 4  # or so many times as old as reading the last one took: what is to be read grows with it,
OLDEST_NS: Final = 2_000_000_000  # or so old: TensorFlow keeps up to 50 MB a second meanwhile
SETTLE_S: Final = 0.005  # what has just completed is seen when its thread has come to its end
FINISH_S: Final = 5.0  # so long what the function has left under way may take
LIMIT_S: Final = 60.0  # a session that nobody could read between two calls ends then: it may hold a million events
MOST: Final = CAPACITY // 4  # spans at once: the notebook, which reads twenty times a second, must have time to come
READING: Final = "reading TensorFlow's profiler"


class Timeline:
    """Records a rank's runs.

    Args:
        recorder: where to.
        place: who this is.
    """

    def __init__(self, recorder: Recorder, place: Place) -> None:
        self._recorder, self._place, self._sizes = recorder, place, Sizes()
        self._spans = GraphSpans()
        self._session: Session | None = None
        self._lock = threading.RLock()
        self._due_ns = 0
        self._over = threading.Event()  # of the session
        self._make: Any = None  # TensorFlow's class of sessions
        self._safe_stop: SafeStop | None = None
        self._theirs = 0  # sessions of the student's that are under way
        self._notes: list[str] = []
        self._times: Counter[tuple[int, int, int]] = Counter()  # of collectives in this run

    def install(self) -> list[str]:
        """Prepare this process; once, before anything runs. Returns what the student should be told."""
        from tensorflow.python.eager.polymorphic_function import polymorphic_function
        from tensorflow.python.profiler import profiler_v2

        if os.environ.get(OFF) == "0":
            return []
        self._safe_stop = safe_stop()
        if self._safe_stop is None:
            return ["This TensorFlow's profiler is not known to labkit: pictures show no operations of TensorFlow's."]
        self._make = profiler_v2._pywrap_profiler.ProfilerSession
        profiler_v2._pywrap_profiler = _Profilers(profiler_v2._pywrap_profiler, self, self._safe_stop)
        function = polymorphic_function.Function
        call, timeline, main = function.__call__, self, threading.main_thread().ident

        @functools.wraps(call)
        def call_between(this: Any, *args: Any, **kwargs: Any) -> Any:
            if timeline._due_ns and clock() > timeline._due_ns and threading.get_ident() == main:
                timeline.read()
            return call(this, *args, **kwargs)

        function.__call__ = call_between
        self._recorder.graph_spans = self._spans
        self._sizes.watch()
        return []

    def begin(self) -> None:
        """A run begins, in which this rank computes or serves."""
        with self._lock:
            if self._make is not None and self._session is None and not self._theirs:
                self._start()

    def read(self) -> None:
        """Write down what was seen so far, and go on."""
        with self._lock:
            if self._session is None:
                return
            start_ns = clock()
            if not self._place.serves:
                _finish_what_is_under_way()
            self._stop(go_on=not self._theirs)
            end_ns = clock()
            if not self._place.serves:  # where it does, the thread that computes goes on
                self._recorder.ring.write(READING, COMPUTE, start_ns, end_ns)
            self._due_ns = next_reading(end_ns, end_ns - start_ns) if self._session is not None else 0

    def end(self) -> list[str]:
        """The run is over. Returns what the student should know of it."""
        with self._lock:
            if self._session is not None:
                _finish_what_is_under_way()
                self._stop()
            self._times.clear()
            notes, self._notes = self._notes, []
            return notes

    def give_way(self) -> None:
        """The student has a session of their own, and TensorFlow allows one."""
        with self._lock:
            self._stop()
            self._theirs += 1
            self._notes.append(
                f"rank {self._place.rank} profiled with TensorFlow's profiler itself, which serves one at a time: "
                "meanwhile the pictures show none of its operations."
            )

    def resume(self) -> None:
        """The student's session is over."""
        with self._lock:
            self._theirs = 0
            self.begin()

    def _start(self) -> None:
        try:
            self._session = Session(self._make, self._safe_stop or contextlib.nullcontext())
        except Exception as error:  # noqa: BLE001  # whatever it is, the student's run is worth more than its picture
            self._fail(error)
            return
        self._due_ns = next_reading(clock(), 0)
        self._over = over = threading.Event()
        threading.Thread(target=self._look_after, args=(over,), daemon=True, name="labkit-profiler").start()

    def _stop(self, *, go_on: bool = False) -> None:
        """End the session and write down what it saw; another one begins before, if it goes on."""
        session, self._session, self._due_ns = self._session, None, 0
        if session is not None:
            time.sleep(SETTLE_S)
        self._over.set()
        if session is not None:
            try:
                session.stop()
                if go_on:
                    self._start()
                place = self._place._replace(devices=max(self._place.devices, _configured_devices()))
                self._write(spans_of(session.events(), place, self._spans.names, self._sizes.nbytes, self._times))
            except Exception as error:  # noqa: BLE001  # as above
                self._fail(error)
            self._sizes.forget()

    def _fail(self, error: Exception) -> None:
        what = f"{type(error).__name__}: {error}"
        self._notes.append(f"rank {self._place.rank}: TensorFlow's profiler gave nothing, so that pictures lack its work. {what}")

    def _look_after(self, over: threading.Event) -> None:
        """Read the session where nobody else does: of a rank that serves when it is due, of others when it is far too old."""
        while self._place.serves and not over.is_set():
            with self._lock:  # while the session before is still being read, it is not known when this one is due
                left_ns = self._due_ns - clock()
            if left_ns <= 0:
                self.read()
                return
            over.wait(left_ns / 1e9)
        if over.wait(LIMIT_S):
            return
        with self._lock:
            if over.is_set():
                return
            self._stop()
            self._notes.append(
                f"rank {self._place.rank} was in one call of TensorFlow's for {LIMIT_S:.0f} s: later operations are not shown."
            )

    def _write(self, spans: list[Span]) -> None:
        ring = self._recorder.ring
        if len(spans) > MOST:
            spans.sort(key=lambda s: (s.kind == "compute", s.start_ns - s.end_ns))
            self._notes.append(f"rank {self._place.rank}: of {len(spans)} spans at once, the pictures have the {MOST} longest.")
        for span in spans[:MOST]:
            seen = {"device": device_code(span.device), "flags": flags_of(span)}
            if span.kind == "compute":
                ring.write(span.name, COMPUTE, span.start_ns, span.end_ns, **seen)
            else:
                details = {f.name: getattr(span, f.name) for f in TAIL_FIELDS}
                ring.write_communication(span.name, span.start_ns, span.end_ns, **details, **seen)


def _configured_devices() -> int:
    """How many logical CPUs the program has asked for itself, as tutorials on DTensor do; 0: it has not."""
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    return len(tf.config.get_logical_device_configuration(cpu) or ())  # neither initialises TensorFlow


def next_reading(now_ns: int, reading_ns: int) -> int:
    """When a session is due to be read, if reading the last one took so long.

    The moments are the same in all ranks of a machine, whose clock is one: a rank that reads keeps the others waiting in their
    next collective, so they had better read at the same time.
    """
    period_ns = SLICE_NS
    while period_ns < min(SHARE * reading_ns, OLDEST_NS):
        period_ns *= 2
    return (now_ns + period_ns // 2) // period_ns * period_ns + period_ns


class _Profilers:
    """In place of TensorFlow's module of profilers: sessions of the student's take the place of ours."""

    def __init__(self, module: Any, timeline: Timeline, stopping: SafeStop) -> None:
        self._module, self._timeline, self._stopping = module, timeline, stopping

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def start_server(self, port: int) -> Any:
        """Of one that others may ask at any moment."""
        self._timeline.give_way()
        return self._module.start_server(port)

    def ProfilerSession(self) -> Any:  # noqa: N802  # TensorFlow's name
        """A session of the student's."""
        return _Session(self._module.ProfilerSession(), self._timeline, self._stopping)


class _Session:
    """A session of the student's: ours waits meanwhile."""

    def __init__(self, session: Any, timeline: Timeline, stopping: SafeStop) -> None:
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


def _finish_what_is_under_way() -> None:
    """Operations that TensorFlow runs behind the function's back, as DTensor's, belong to the run."""
    from tensorflow.python.eager import context

    def wait() -> None:
        with contextlib.suppress(Exception):  # an error that the student's program did not wait for
            context.async_wait()

    if context.context()._context_handle is not None:
        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        waiting.join(FINISH_S)
