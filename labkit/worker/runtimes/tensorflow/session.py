"""One session of TensorFlow's profiler in this process: started, stopped, and its events read, on the clock of the spans."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final, NamedTuple

from labkit.recording.clock_sync import Reading, bounds, on_reference
from labkit.recording.record import clock

__all__ = ["Event", "Session"]

OPTIONS: Final = {"host_tracer_level": 2, "python_tracer_level": 0, "device_tracer_level": 0}  # 2: with the operations
MARKS: Final = 5  # at each end; the first one finds caches cold
MARK: Final = "labkit looks at the clock"
HOST: Final = b"/host:CPU"
# How the names of events begin that tell nothing of what is drawn; more than half of all.
LEFT_OUT: Final = (
    b"ThreadpoolListener", b"TFE_", b"convert_to_tensor", b"EagerCopyToDevice", b"ValidateInput", b"EagerKernelExecute",
    b"KernelAndDevice", b"EagerLocalExecute", b"Iterator:", b"Prefetch", b"tf.constant", b"Loop", b"ParallelFor", b"MemCpyAsync",
)  # fmt: skip


class Event(NamedTuple):
    """Something that TensorFlow's profiler saw.

    Args:
        thread: the number of the thread.
        name: TensorFlow's: "sgd/split:SplitV".
        start_ns, end_ns: on `time.perf_counter_ns`.
        stats: what TensorFlow says of it.
    """

    thread: int
    name: str
    start_ns: int
    end_ns: int
    stats: dict[str, Any]


class Session:
    """The profiler from now until `stop`. There is one at a time in a process.

    Args:
        make: the class of TensorFlow's sessions.
        stopping: what to stop it in.
    """

    def __init__(self, make: Any, stopping: AbstractContextManager[None]) -> None:
        self._stopping = stopping
        # TensorFlow makes the folder when it writes its file, at the end: a rank that is killed before leaves none behind.
        self._folder = os.path.join(tempfile.gettempdir(), f"labkit-{secrets.token_hex(8)}")
        self._marks: list[tuple[int, int, int]] = []
        self._seen = b""
        self._session = make()
        self._session.start(self._folder, OPTIONS)
        self._mark()

    def stop(self) -> None:
        """End it. Another one may begin from now on."""
        self._mark()
        session, self._session = self._session, None
        try:
            with self._stopping:
                session.export_to_tb()
            files = sorted(Path(self._folder).rglob("*.xplane.pb"))
            self._seen = b"".join(file.read_bytes() for file in files)
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def events(self) -> list[Event]:
        """What it saw until `stop`, by thread and in no order within."""
        return _read(self._seen, self._marks)

    def _mark(self) -> None:
        """Let the profiler see something whose begin and end we know as well."""
        from tensorflow.python.profiler.internal import _pywrap_traceme

        for _ in range(MARKS):
            before_ns = clock()
            mark = _pywrap_traceme.TraceMe(MARK)
            inside_ns = clock()
            mark.Stop()
            self._marks.append((before_ns, inside_ns, clock()))


def _read(data: bytes, marks: Sequence[tuple[int, int, int]]) -> list[Event]:
    space = _space()
    space.ParseFromString(data)
    found: list[Event] = []
    seen: list[tuple[int, int]] = []  # the marks, in nanoseconds since the session began
    for plane in space.planes:
        if plane.name != HOST:
            continue
        stats = {number: about.name.decode(errors="replace") for number, about in plane.stat_metadata.items()}
        names = {
            n: about.name.decode(errors="replace")
            for n, about in plane.event_metadata.items()
            if not about.name.startswith(LEFT_OUT)
        }
        told = {n: _tells(name) for n, name in names.items()}
        for line in plane.lines:
            for event in line.events:
                name = names.get(event.metadata_id)
                if name is None:
                    continue
                start_ns = event.offset_ps // 1000
                end_ns = start_ns + event.duration_ps // 1000
                if name == MARK:
                    seen.append((start_ns, end_ns))
                    continue
                about = {stats[stat.metadata_id]: _value(stat, stats) for stat in event.stats} if told[event.metadata_id] else {}
                found.append(Event(line.id, name, start_ns, end_ns, about))
    return _on_our_clock(found, sorted(seen), marks)


def _tells(name: str) -> bool:
    """Whether somebody wants to know what TensorFlow says of an event: not of operations that neither send nor receive."""
    _, colon, kind = name.rpartition(":")
    return not colon or "::" in name or kind.startswith(("_", "Collective"))


def _on_our_clock(events: list[Event], seen: list[tuple[int, int]], marks: Sequence[tuple[int, int, int]]) -> list[Event]:
    import numpy as np

    if len(seen) != len(marks) or not events:
        return []  # it has lost some, and may have lost anything
    readings = []
    for part in (slice(None, len(marks) // 2), slice(len(marks) // 2, None)):
        exchanges = []
        for (before_ns, inside_ns, after_ns), (start_ns, end_ns) in zip(marks[part], seen[part], strict=True):
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
    """An empty message of TensorFlow's type XSpace, but with bytes for its texts: some of TensorFlow's are no UTF-8."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    file = descriptor_pb2.FileDescriptorProto()
    xplane_pb2.DESCRIPTOR.CopyToProto(file)
    waiting = list(file.message_type)
    while waiting:
        message = waiting.pop()
        waiting += message.nested_type
        for one in message.field:
            if one.type == one.TYPE_STRING:
                one.type = one.TYPE_BYTES
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{file.package}.XSpace"))()
