"""Finds when a rank waits: for other ranks, in a communication operation, or for its next batch of data.

It does so only while no other thread computes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from labkit.recording.schema import CALL, CUDA, MEASURED, SERVED
from labkit.tracing.intervals import Intervals, difference, union


def blocked(operations: Any, spans: Any) -> Intervals:
    """Return when a rank was blocked in communication and computed nothing, given the rows of both.

    A thread that serves a remote call is only blocked by its own operations, and does not block the rank's function.
    Otherwise the thread of a record is unknown. But a blocked thread starts nothing: a span that starts while an
    operation blocks the rank belongs to another thread, which computes except while a later operation blocks it. Spans
    measured by TensorFlow's profiler always count as compute.
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
    if served.any():  # the function may compute while a serving thread is blocked
        calls, own = spans[spans["kind"] == CALL], operations[~served]
        of_function = union(calls["start_ns"], calls["end_ns"])
        waits = difference(waits, difference(of_function, union(own["wait_start_ns"], own["wait_end_ns"])))
    others = spans[~for_others]
    # the last operation that blocked before the span started
    before = np.searchsorted(operations["wait_start_ns"], others["start_ns"]) - 1
    reach = np.maximum.accumulate(operations["wait_end_ns"])
    beside = (before >= 0) & (reach[before] > others["start_ns"])
    return difference(waits, _computing(others[beside], operations))


def waits_for_data(spans: Any, name: int) -> Intervals:
    """Return when a rank only waited for data, in compute spans with this number of a name.

    Operations that TensorFlow's profiler measured, served calls and a GPU's work run beside it.
    """
    is_wait = spans["name"] == name
    beside = ~is_wait & ((spans["flags"] & (MEASURED | SERVED) != 0) | (spans["device"] == CUDA))
    waits, others = (union(spans["start_ns"][which], spans["end_ns"][which]) for which in (is_wait, beside))
    return difference(waits, others)


def _computing(spans: Any, operations: Any) -> Intervals:
    """Return the intervals of spans, minus the operations that start to block within them."""
    since, until = operations["wait_start_ns"], operations["wait_end_ns"]
    first, beyond = np.searchsorted(since, spans["start_ns"]), np.searchsorted(since, spans["end_ns"])
    whole = first == beyond
    parts = [np.stack([spans["start_ns"][whole], spans["end_ns"][whole]], axis=1)]
    for span, begin, end in zip(spans[~whole], first[~whole].tolist(), beyond[~whole].tolist(), strict=True):
        around = np.array([[span["start_ns"], span["end_ns"]]], np.int64)
        parts.append(difference(around, union(since[begin:end], until[begin:end])))
    return union(*np.concatenate(parts).T)
