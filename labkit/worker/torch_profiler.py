"""Runs torch's profiler inside a rank, and converts its times to the clock of the spans."""

from __future__ import annotations

import heapq
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from labkit.errors.exceptions import LabError
from labkit.recording.clock import Reading, bounds, on_reference
from labkit.recording.record import clock
from labkit.recording.torch_internals import PROFILER

MOST_EVENTS: Final = 100_000  # of a rank in a run: about 10 MB in a trace file. The longest are kept
MARKS: Final = 5  # at each end of a profile; several, because the first one runs with cold caches
MARK: Final = "labkit reads the clock"
LEFT_OUT: Final = ("Trace", "overhead")  # categories of events about the profiler itself
STARTS: Final = ("_prepare_profiler", "_enable_profiler")
ON_GPU: Final = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")

ProfilerEvent = tuple[str, str, str, int, int]  # track, name, category, start_ns, end_ns


class TorchProfiler:
    """Records torch's operators in this process from `start` to `stop`.

    torch supports one profiler per process, and crashes if a second one starts. So the program cannot start its own
    meanwhile.
    """

    def __init__(self) -> None:
        self._profiler: Any = None
        self._marks: list[tuple[int, int, int]] = []  # see `events_of`
        self._originals: dict[str, Any] = {}  # the functions of torch that start profilers, by name

    def start(self) -> None:
        """Start recording. The first start in a process takes a second, or several seconds with a GPU."""
        if not PROFILER.found:
            raise LabError("lab.profile: this version of torch is not known to labkit (lab.doctor() says more)")
        if PROFILER["_profiler_enabled"]():
            raise LabError("lab.profile: a torch.profiler that an earlier run started is still running; stop it in that run")
        import torch
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        of_rpc = PROFILER["_ExperimentalConfig"](profile_all_threads=True)  # by default, only this thread and the backward pass's
        self._profiler, self._marks = profile(activities=activities, experimental_config=of_rpc), []
        self._profiler.start()
        self._mark()
        for name in STARTS:
            self._originals[name] = PROFILER[name]
            PROFILER.set(name, _refuse)

    def stop(self) -> list[ProfilerEvent]:
        """Stop recording; return the events in no particular order, or [] if it was not started."""
        if self._profiler is None:
            return []
        for name, function in self._originals.items():
            PROFILER.set(name, function)
        self._mark()
        self._profiler.stop()
        profiler, self._profiler = self._profiler, None
        return _exported(profiler, self._marks)

    def _mark(self) -> None:
        """Let the profiler record short events whose times are also read on labkit's clock."""
        from torch.profiler import record_function

        for _ in range(MARKS):
            before_ns = clock()
            with record_function(MARK):
                inside_ns = clock()
            self._marks.append((before_ns, inside_ns, clock()))


def _refuse(*_: object, **__: object) -> None:
    raise LabError(
        "lab.profile runs torch's profiler, and torch can run only one: call your function with group.run, or leave its own "
        "profiler out"
    )


def _exported(profiler: Any, marks: list[tuple[int, int, int]]) -> list[ProfilerEvent]:
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        content = json.loads(Path(file.name).read_text(encoding="utf-8", errors="replace"))
    return events_of(content, marks)


def events_of(content: dict[str, Any], marks: list[tuple[int, int, int]]) -> list[ProfilerEvent]:
    """Return the events in a profiler's file, on labkit's clock in ns; [] if the profiler has lost marks.

    The profiler's times are wall-clock times, derived from the processor's time-stamp counter. The marks are as for
    `on_our_clock`.
    """
    base_ns = int(content.get("baseTimeNanoseconds", 0))
    seen = [e for e in content["traceEvents"] if e.get("ph") == "X" and e.get("cat") not in LEFT_OUT and "dur" in e]
    times = []
    for event in seen:
        start_ns = base_ns + round(float(event["ts"]) * 1e3)
        times.append((start_ns, start_ns + round(float(event["dur"]) * 1e3)))
    of_marks = sorted(t for t, e in zip(times, seen, strict=True) if e["name"] == MARK and e["cat"] == "user_annotation")
    kept = [i for i, e in enumerate(seen) if e["name"] != MARK]
    if len(kept) > MOST_EVENTS:
        kept = heapq.nlargest(MOST_EVENTS, kept, key=lambda i: times[i][1] - times[i][0])
    converted = on_our_clock([times[i] for i in kept], of_marks, marks)
    return [
        (_track(seen[i]), str(seen[i]["name"]), str(seen[i]["cat"]), start_ns, end_ns)
        for i, (start_ns, end_ns) in zip(kept, converted, strict=False)
    ]


def on_our_clock(
    times: Sequence[tuple[int, int]], seen: Sequence[tuple[int, int]], marks: Sequence[tuple[int, int, int]]
) -> list[tuple[int, int]]:
    """Convert starts and ends on a profiler's clock; [] if it has lost marks, and so perhaps other events.

    The marks at the start and at the end give the offset to labkit's clock within some microseconds; in between it is
    interpolated linearly. `seen` is when the profiler saw each mark start and end; `marks` is labkit's clock in ns
    before its start, inside it, and after its end.
    """
    import numpy as np

    if len(seen) != len(marks) or not times:
        return []
    readings = []
    for part in (slice(None, len(marks) // 2), slice(len(marks) // 2, None)):
        exchanges = []
        for (before_ns, inside_ns, after_ns), (start_ns, end_ns) in zip(marks[part], seen[part], strict=True):
            exchanges += [(before_ns, start_ns, inside_ns), (inside_ns, end_ns, after_ns)]
        ours = bounds(exchanges)
        readings.append(Reading(ours.at_ns + ours.offset_ns, -ours.offset_ns, ours.within_ns))
    both = np.array(times, np.int64)
    starts, ends = on_reference(both[:, 0], readings).tolist(), on_reference(both[:, 1], readings).tolist()
    return [(start_ns, max(start_ns, end_ns)) for start_ns, end_ns in zip(starts, ends, strict=True)]


def _track(event: dict[str, Any]) -> str:
    if event["cat"] in ON_GPU:
        return f"GPU {event['pid']}, stream {event['tid']}"
    return "main thread" if event["tid"] == os.getpid() else f"thread {event['tid']}"
