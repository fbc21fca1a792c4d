"""Starts and stops a session of TensorFlow's profiler, and reads its events, with times on the clock of the spans."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final, NamedTuple

from labkit.recording.clock import Reading, bounds, on_reference
from labkit.recording.record import clock
from labkit.worker.runtimes.tensorflow.tensorflow_internals import PROFILER

OPTIONS: Final = {"host_tracer_level": 2, "python_tracer_level": 0, "device_tracer_level": 0}  # 2: with operations
MARKS: Final = 5  # at each end; several, because the first one runs with cold caches
MARK: Final = "labkit reads the clock"
HOST: Final = b"/host:CPU"
# Prefixes of the names of events that are not needed; these are more than half of all events.
LEFT_OUT: Final = (
    b"ThreadpoolListener", b"TFE_", b"convert_to_tensor", b"EagerCopyToDevice", b"ValidateInput", b"EagerKernelExecute",
    b"KernelAndDevice", b"EagerLocalExecute", b"Iterator:", b"Prefetch", b"tf.constant", b"Loop", b"ParallelFor", b"MemCpyAsync",
)  # fmt: skip


class Event(NamedTuple):
    """An event of TensorFlow's profiler."""

    thread: int  # the number of its thread
    name: str  # TensorFlow's name for it, such as "sgd/split:SplitV"
    start_ns: int  # on the clock of `time.perf_counter_ns`
    end_ns: int
    stats: dict[str, Any]  # TensorFlow's details, by name


class Session:
    """A session of the profiler, from its creation until `stop`. A process can have one session at a time."""

    def __init__(self, stopping: AbstractContextManager[None]) -> None:
        self._stopping = stopping
        # TensorFlow creates the folder when it writes its file, at the end; a rank that is killed before leaves none.
        self._folder = os.path.join(tempfile.gettempdir(), f"labkit-{secrets.token_hex(8)}")
        self._marks: list[tuple[int, int, int]] = []
        self._data = b""
        self._session = PROFILER["ProfilerSession"]()
        self._session.start(self._folder, OPTIONS)
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
    return _on_our_clock(found, sorted(recorded_marks), marks)


def _needs_details(name: str) -> bool:
    """Whether an event's details are needed; those of operations that neither send nor receive are not."""
    _, colon, kind = name.rpartition(":")
    return not colon or "::" in name or kind.startswith(("_", "Collective"))


def _on_our_clock(
    events: list[Event], recorded_marks: list[tuple[int, int]], marks: Sequence[tuple[int, int, int]]
) -> list[Event]:
    import numpy as np

    if len(recorded_marks) != len(marks) or not events:
        return []  # the profiler has lost marks, and may have lost other events
    readings = []
    for part in (slice(None, len(marks) // 2), slice(len(marks) // 2, None)):
        exchanges = []
        for (before_ns, inside_ns, after_ns), (start_ns, end_ns) in zip(marks[part], recorded_marks[part], strict=True):
            exchanges += [(before_ns, start_ns, inside_ns), (inside_ns, end_ns, after_ns)]
        ours = bounds(exchanges)
        readings.append(Reading(ours.at_ns + ours.offset_ns, -ours.offset_ns, ours.within_ns))
    starts = on_reference(np.array([e.start_ns for e in events], np.int64), readings).tolist()
    ends = on_reference(np.array([e.end_ns for e in events], np.int64), readings).tolist()
    return [e._replace(start_ns=s, end_ns=max(s, t)) for e, s, t in zip(events, starts, ends, strict=True)]


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
