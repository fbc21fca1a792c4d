"""The cost of one `span`, beside two readings of the clock: inside a group and outside."""

from __future__ import annotations

import importlib
import mmap
import statistics
import time
from collections.abc import Callable
from typing import Any, Final

__all__ = ["measure"]

LOOPS: Final = 50_000
ROUNDS: Final = 15


def measure() -> dict[str, float]:
    """Medians in ns, of loops that alternate: "clock" (two readings), "outside", "recording"."""
    import labkit as lab
    from labkit.recording.ring_buffer import RING_BYTES, RingWriter

    recording: Any = importlib.import_module("labkit.recording.record")  # `labkit.record` is the function
    span, clock = lab.span, time.perf_counter_ns

    def nothing(count: int) -> None:
        for _ in range(count):
            pass

    def two_clocks(count: int) -> None:
        for _ in range(count):
            clock()
            clock()

    def spans(count: int) -> None:
        for _ in range(count):
            with span("forward"):
                pass

    def per_loop(loop: Callable[[int], None]) -> float:
        start = clock()
        loop(LOOPS)
        return (clock() - start) / LOOPS

    samples: dict[str, list[float]] = {name: [] for name in ("empty", "clock", "outside", "recording")}
    recorder = recording.Recorder(RingWriter(mmap.mmap(-1, RING_BYTES)))
    for _ in range(ROUNDS):
        samples["empty"].append(per_loop(nothing))
        samples["clock"].append(per_loop(two_clocks))
        samples["outside"].append(per_loop(spans))
        recording.here.start(recorder)
        samples["recording"].append(per_loop(spans))
        recording.here.start(None)
    empty = statistics.median(samples.pop("empty"))  # the loop itself
    return {name: statistics.median(values) - empty for name, values in samples.items()}
