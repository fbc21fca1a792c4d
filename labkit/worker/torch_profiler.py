"""torch's profiler inside a rank, with its times on the clock of the spans."""

from __future__ import annotations

import heapq
import json
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

from labkit.errors.exceptions import LabError
from labkit.recording.clock_sync import Reading, bounds, on_reference
from labkit.recording.record import clock
from labkit.worker.runtimes.base import quiet_stderr

__all__ = ["Row", "TorchProfiler", "rows"]

MOST_EVENTS: Final = 100_000  # of a rank and a run: some 10 MB in a trace file. Those that last longest are kept
MARKS: Final = 5  # the first one finds caches cold
MARK: Final = "labkit looks at the clock"
LEFT_OUT: Final = ("Trace", "overhead")  # categories that tell of the profiler itself
ON_GPU: Final = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")

Row = tuple[str, str, str, int, int]  # track, name, category, start_ns, end_ns


class TorchProfiler:
    """Records what torch does in this process from `start` to `stop`.

    torch has one profiler per process, and crashes where a second begins beside it. So this one pauses while the
    program's own runs, which then stands in its rows as one event.
    """

    def __init__(self) -> None:
        self._profiler: Any = None  # the part that is being recorded
        self._marks: list[tuple[int, int, int]] = []  # around the begin and the end of a mark
        self._parts: list[tuple[Any, list[tuple[int, int, int]]]] = []  # those that are over, with their marks
        self._pauses: list[Row] = []
        self._paused_ns = 0  # since when the student's own profiler runs; 0: it does not
        self._busy = False  # torch is called by this object
        self._torchs_own: dict[str, Any] = {}  # functions of torch that say when a profiler begins and ends

    def start(self) -> None:
        """Begin. The first time in a process this takes a second, or several where there is a GPU.

        Raises:
            LabError: a profiler of the student's own is still running.
        """
        import torch
        from torch.autograd import profiler

        if torch.autograd._profiler_enabled():
            raise LabError(
                "lab.profile: a torch.profiler that an earlier run started is still running here; let that run stop it"
            )
        self._parts, self._pauses, self._paused_ns = [], [], 0
        self._begin()
        begins, ends = partial(self._students, self._pause, None), partial(self._students, None, self._resume)
        for name, watched in (("_prepare_profiler", begins), ("_enable_profiler", begins), ("_disable_profiler", ends)):
            self._torchs_own[name] = getattr(profiler, name)
            setattr(profiler, name, partial(watched, self._torchs_own[name]))

    def stop(self) -> list[Row]:
        """End, and give what was seen, in no order; [] where it was not started."""
        if not self._torchs_own:
            return []
        from torch.autograd import profiler

        for name, function in self._torchs_own.items():
            setattr(profiler, name, function)
        self._torchs_own = {}
        self._end()
        seen = self._pauses + [row for part, marks in self._parts for row in _exported(part, marks)]
        self._parts = []
        return heapq.nlargest(MOST_EVENTS, seen, key=lambda row: row[4] - row[3]) if len(seen) > MOST_EVENTS else seen

    def _begin(self) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        self._profiler, self._marks = profile(activities=activities, experimental_config=_all_threads()), []
        self._profiler.start()
        self._mark()

    def _end(self) -> None:
        if self._profiler is not None:
            self._mark()
            self._profiler.stop()
            self._parts.append((self._profiler, self._marks))
            self._profiler = None

    def _students(
        self, before: Callable[[], None] | None, after: Callable[[], None] | None, torchs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """A function of torch's was called: by this object, or because a profiler of the student's begins or ends."""
        if self._busy:
            return torchs(*args, **kwargs)
        self._call(before)
        try:
            return torchs(*args, **kwargs)
        finally:
            self._call(after)

    def _call(self, action: Callable[[], None] | None) -> None:
        if action is not None:
            self._busy = True
            try:
                with quiet_stderr():  # torch says when a profiler starts and stops
                    action()
            finally:
                self._busy = False

    def _pause(self) -> None:
        if not self._paused_ns:
            self._end()
            self._paused_ns = clock()

    def _resume(self) -> None:
        if self._paused_ns:
            self._pauses.append(("main thread", "torch.profiler of the program's own", "labkit", self._paused_ns, clock()))
            self._paused_ns = 0
            self._begin()

    def _mark(self) -> None:
        """Let the profiler see something whose begin and end we know as well."""
        from torch.profiler import record_function

        for _ in range(MARKS):
            before_ns = clock()
            with record_function(MARK):
                inside_ns = clock()
            self._marks.append((before_ns, inside_ns, clock()))


def _exported(profiler: Any, marks: list[tuple[int, int, int]]) -> list[Row]:
    """What a profiler has seen that was stopped."""
    fd, path = tempfile.mkstemp(suffix=".json")
    os.close(fd)
    try:
        profiler.export_chrome_trace(path)
        with open(path, encoding="utf-8", errors="replace") as file:
            content = json.load(file)
    finally:
        os.unlink(path)
    return rows(content, marks)


def _all_threads() -> Any:
    """The profiler sees the thread that started it and those of the backward pass; RPC serves on others. Since torch 2.8."""
    from torch._C._profiler import _ExperimentalConfig

    with suppress(TypeError):
        return _ExperimentalConfig(profile_all_threads=True)
    return None


def rows(content: dict[str, Any], marks: list[tuple[int, int, int]]) -> list[Row]:
    """The events of one of the profiler's files, on our clock.

    The profiler tells the time of the day, from counters of the processor. How that compares with our clock is known
    from the marks at the start and at the end, each within some microseconds; in between, it is taken to change evenly.

    Args:
        content: of the file.
        marks: for each mark, our clock before its begin, inside it, and after its end, in the order in which they were
            made.
    """
    import numpy as np

    base_ns = int(content.get("baseTimeNanoseconds", 0))
    seen = [e for e in content["traceEvents"] if e.get("ph") == "X" and e.get("cat") not in LEFT_OUT and "dur" in e]
    spans = [(base_ns + round(float(e["ts"]) * 1e3), round(float(e["dur"]) * 1e3)) for e in seen]
    of_marks = sorted(s for s, e in zip(spans, seen, strict=True) if e["name"] == MARK and e["cat"] == "user_annotation")
    if len(of_marks) != len(marks):
        return []  # it has lost some, and may have lost anything
    readings = []
    for part in (slice(None, len(marks) // 2), slice(len(marks) // 2, None)):
        exchanges = []
        for (before_ns, inside_ns, after_ns), (start_ns, length_ns) in zip(marks[part], of_marks[part], strict=True):
            exchanges += [(before_ns, start_ns, inside_ns), (inside_ns, start_ns + length_ns, after_ns)]
        ours = bounds(exchanges)
        readings.append(Reading(ours.at_ns + ours.offset_ns, -ours.offset_ns, ours.within_ns))
    kept = [i for i, e in enumerate(seen) if e["name"] != MARK]
    if len(kept) > MOST_EVENTS:
        kept = heapq.nlargest(MOST_EVENTS, kept, key=lambda i: spans[i][1])
    times = np.array([(spans[i][0], sum(spans[i])) for i in kept], np.int64).reshape(-1, 2)
    starts, ends = on_reference(times[:, 0], readings).tolist(), on_reference(times[:, 1], readings).tolist()
    return [
        (_track(seen[i]), str(seen[i]["name"]), str(seen[i]["cat"]), start_ns, max(start_ns, end_ns))
        for i, start_ns, end_ns in zip(kept, starts, ends, strict=True)
    ]


def _track(event: dict[str, Any]) -> str:
    if event["cat"] in ON_GPU:
        return f"GPU {event['pid']}, stream {event['tid']}"
    return "main thread" if event["tid"] == os.getpid() else f"thread {event['tid']}"
