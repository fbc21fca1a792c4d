"""When a rank can do nothing but wait: what blocks one of its threads while no other of them computes."""

from __future__ import annotations

from typing import Any

import numpy as np

from labkit.recording.schema import CALL, MEASURED, SERVED
from labkit.tracing.intervals import Intervals, difference, union

__all__ = ["blocked"]


def blocked(operations: Any, spans: Any) -> Intervals:
    """When a rank was blocked in a communication and computed nothing, shape (n, 2) in ns.

    A thread that does what another rank has called is blocked by what it waits for itself, by nothing that others wait for, and
    does not block the function. Beyond that nobody knows which thread it was. But a blocked thread begins nothing: a span that
    begins while an operation blocks the rank is of another thread, and computes but for what blocks it later. Operations that
    TensorFlow's profiler measured compute in any case.

    Args:
        operations: the rank's communications, as `recording.events.COLUMNS`.
        spans: those inside which it computes, likewise.
    """
    operations = operations[np.argsort(operations["wait_start_ns"], kind="stable")]
    waits = union(operations["wait_start_ns"], operations["wait_end_ns"])
    measured = (spans["flags"] & MEASURED) != 0
    waits = difference(waits, union(spans["start_ns"][measured], spans["end_ns"][measured]))
    spans = spans[~measured]
    if not len(waits) or not len(spans):
        return waits
    for_others, served = (spans["flags"] & SERVED) != 0, (operations["flags"] & SERVED) != 0
    waits = difference(waits, _computing(spans[for_others], operations[served]))
    if served.any():  # then the function may compute while such a thread is blocked
        calls, own = spans[spans["kind"] == CALL], operations[~served]
        of_function = union(calls["start_ns"], calls["end_ns"])
        waits = difference(waits, difference(of_function, union(own["wait_start_ns"], own["wait_end_ns"])))
    others = spans[~for_others]
    before = np.searchsorted(operations["wait_start_ns"], others["start_ns"]) - 1  # what blocked last before the span began
    reach = np.maximum.accumulate(operations["wait_end_ns"])
    beside = (before >= 0) & (reach[before] > others["start_ns"])
    return difference(waits, _computing(others[beside], operations))


def _computing(spans: Any, operations: Any) -> Intervals:
    """What of each span is left beside the operations that begin to block within it."""
    since, until = operations["wait_start_ns"], operations["wait_end_ns"]
    first, beyond = np.searchsorted(since, spans["start_ns"]), np.searchsorted(since, spans["end_ns"])
    whole = first == beyond
    parts = [np.stack([spans["start_ns"][whole], spans["end_ns"][whole]], axis=1)]
    for span, begin, end in zip(spans[~whole], first[~whole].tolist(), beyond[~whole].tolist(), strict=True):
        around = np.array([[span["start_ns"], span["end_ns"]]], np.int64)
        parts.append(difference(around, union(since[begin:end], until[begin:end])))
    return union(*np.concatenate(parts).T)
