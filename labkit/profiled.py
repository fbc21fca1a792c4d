"""torch's profiler inside a rank, with its times on the clock of the spans."""

from __future__ import annotations

import heapq
import json
import os
import tempfile
from contextlib import suppress
from typing import Any, Final

from labkit.clocks import Reading, bounds, on_reference
from labkit.record import clock

__all__ = ["Row", "TorchProfiler", "rows"]

MOST_EVENTS: Final = 100_000  # of a rank and a run: some 10 MB in a trace file. Those that last longest are kept
MARKS: Final = 5  # the first one finds caches cold
MARK: Final = "labkit looks at the clock"
LEFT_OUT: Final = ("Trace", "overhead")  # categories that tell of the profiler itself
ON_GPU: Final = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")

Row = tuple[str, str, str, int, int]  # track, name, category, start_ns, end_ns


class TorchProfiler:
    """Records what torch does in this process from `start` to `stop`."""

    def __init__(self) -> None:
        self._profiler: Any = None
        self._marks: list[tuple[int, int, int]] = []  # around the begin and the end of a mark

    def start(self) -> None:
        """Begin. The first time in a process this takes a second, or several where there is a GPU."""
        import torch
        from torch.profiler import ProfilerActivity, profile

        self._profiler, self._marks = None, []
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        self._profiler = profile(activities=activities, experimental_config=_all_threads())
        self._profiler.start()
        self._mark()

    def stop(self) -> list[Row]:
        """End, and give what was seen, in no order; [] where it was not started."""
        if self._profiler is None:
            return []
        self._mark()
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        fd, path = tempfile.mkstemp(suffix=".json")
        os.close(fd)
        try:
            profiler.export_chrome_trace(path)
            with open(path, encoding="utf-8", errors="replace") as file:
                content = json.load(file)
        finally:
            os.unlink(path)
        return rows(content, self._marks)

    def _mark(self) -> None:
        """Let the profiler see something whose begin and end we know as well."""
        from torch.profiler import record_function

        for _ in range(MARKS):
            before_ns = clock()
            with record_function(MARK):
                inside_ns = clock()
            self._marks.append((before_ns, inside_ns, clock()))


def _all_threads() -> Any:
    """The profiler sees the thread that started it and those of the backward pass; RPC serves on others. Since torch 2.8."""
    from torch._C._profiler import _ExperimentalConfig

    with suppress(TypeError):
        return _ExperimentalConfig(profile_all_threads=True)
    return None


def rows(content: dict[str, Any], marks: list[tuple[int, int, int]]) -> list[Row]:
    """The events of one of the profiler's files, on our clock.

    The profiler tells the time of the day, from counters of the processor. How that compares with our clock is known from the
    marks at the start and at the end, each within some microseconds; in between, it is taken to change evenly.

    Args:
        content: of the file.
        marks: for each mark, our clock before its begin, inside it, and after its end, in the order in which they were made.
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
