"""Which operations could run beside the compute of their step, and which cannot, since what follows needs them."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from labkit.recording.operations import type_of
from labkit.recording.schema import COMMUNICATION, COMPUTE, OPTIMIZER
from labkit.tracing.intervals import Intervals
from labkit.tracing.trace import Trace

FORWARD: Final = "forward"
BACKWARD: Final = "backward"


def after_backward(trace: Trace) -> NDArray[np.int64]:
    """Return the reductions of gradients that begin when the backward pass of their step has ended, as rows of a trace.

    A layer's gradients are known when the backward pass has come to it. Therefore those of all layers but the first
    can be averaged while it goes on, as DistributedDataParallel does.
    """
    data, found = trace.columns.data, []
    reduces = _reduces(trace) & ~np.isin(data["group"], _groups_in_forward(trace))
    for rank in range(len(trace.ranks)):
        rows = np.flatnonzero(reduces & (data["rank"] == rank) & (data["wait_end_ns"] > 0))
        at_ns, forward, backward = data["start_ns"][rows], *(passes(trace, rank, which) for which in (FORWARD, BACKWARD))
        steps = trace.step_bounds(rank)
        updates = passes(trace, rank, OPTIMIZER)  # what is reduced after one are parameters
        since = np.max([_last_start(own, at_ns) for own in (forward, steps, updates)], axis=0)
        after = (_last_start(backward, at_ns) >= since) & (len(backward) > 0)
        found.append(rows[after & ~_inside(forward, at_ns) & ~_inside(backward, at_ns)])
    return np.sort(np.concatenate(found))


def in_backward(trace: Trace) -> NDArray[np.int64]:
    """Return the operations that begin within a backward pass, as rows of a trace."""
    data, found = trace.columns.data, []
    for rank in range(len(trace.ranks)):
        rows = np.flatnonzero(_travels(trace) & (data["rank"] == rank))
        found.append(rows[_inside(passes(trace, rank, BACKWARD), data["start_ns"][rows])])
    return np.concatenate(found)


def needed_at_once(trace: Trace) -> NDArray[np.int64]:
    """Return the operations of tensor parallelism, as rows of a trace: the next layer waits for their results.

    They are those of the process groups that reduce something within a forward pass: activations.
    """
    data, found = trace.columns.data, []
    of_groups = _travels(trace) & np.isin(data["group"], _groups_in_forward(trace))
    for rank in range(len(trace.ranks)):
        rows = np.flatnonzero(of_groups & (data["rank"] == rank))
        forward, backward = (_inside(passes(trace, rank, which), data["start_ns"][rows]) for which in (FORWARD, BACKWARD))
        found.append(rows[forward | backward])
    return np.sort(np.concatenate(found))


def _groups_in_forward(trace: Trace) -> NDArray[Any]:
    """Return the numbers of the names of the process groups that reduce something within a forward pass."""
    data, found = trace.columns.data, [np.empty(0, trace.columns.data["group"].dtype)]
    reduces = _reduces(trace)
    for rank in range(len(trace.ranks)):
        rows = data[reduces & (data["rank"] == rank)]
        found.append(rows["group"][_inside(passes(trace, rank, FORWARD), rows["start_ns"])])
    return np.unique(np.concatenate(found))


def _travels(trace: Trace) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = (trace.columns.data["kind"] == COMMUNICATION) & ~trace.columns.around
    return found


def _reduces(trace: Trace) -> NDArray[np.bool_]:
    types = [type_of(name) for name in trace.columns.names]
    named = np.array([kind.collective and kind.reduces for kind in types], bool)
    found: NDArray[np.bool_] = _travels(trace) & named[trace.columns.data["name"]]
    return found


def passes(trace: Trace, rank: int, which: str) -> Intervals:
    """Return the bounds of a rank's passes of this name, such as "backward", in order of their start, in ns."""
    data = trace.columns.data
    # "backward", or with the number of a micro-batch, "backward 3"
    named = np.array([name == which or name.startswith(f"{which} ") for name in trace.columns.names], bool)[data["name"]]
    rows = data[named & (data["kind"] == COMPUTE) & (data["rank"] == rank)]
    return np.stack([rows["start_ns"], rows["end_ns"]], axis=1)


def _last_start(intervals: Intervals, at_ns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return when the last interval before each time started; the least number if none did."""
    starts = np.append(np.iinfo(np.int64).min, intervals[:, 0])
    found: NDArray[np.int64] = starts[np.searchsorted(intervals[:, 0], at_ns, side="right")]
    return found


def _inside(intervals: Intervals, at_ns: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return for each time whether it lies in one of some intervals, which are in order of their start."""
    latest = np.append(np.iinfo(np.int64).min, np.maximum.accumulate(intervals[:, 1]))
    found: NDArray[np.bool_] = at_ns < latest[np.searchsorted(intervals[:, 0], at_ns, side="right")]
    return found
