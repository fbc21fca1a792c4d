"""Which operations could run beside the compute of their step, and which cannot, since what follows needs them."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from labkit.recording.operations import type_of
from labkit.recording.schema import COMPUTE, OPTIMIZER
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
    return _within(trace, trace.columns.travels, BACKWARD)


def needed_at_once(trace: Trace) -> NDArray[np.int64]:
    """Return the operations of tensor parallelism, as rows of a trace: the next layer waits for their results.

    They are those of the process groups that reduce something within a forward pass: activations.
    """
    of_groups = np.isin(trace.columns.data["group"], _groups_in_forward(trace))
    return _within(trace, trace.columns.travels & of_groups, FORWARD, BACKWARD)


def _groups_in_forward(trace: Trace) -> NDArray[Any]:
    """Return the numbers of the names of the process groups that reduce something within a forward pass."""
    return np.unique(trace.columns.data["group"][_within(trace, _reduces(trace), FORWARD)])


def _reduces(trace: Trace) -> NDArray[np.bool_]:
    return trace.columns.travels & trace.columns.named(lambda name: type_of(name).collective and type_of(name).reduces)


def _within(trace: Trace, chosen: NDArray[np.bool_], *names: str) -> NDArray[np.int64]:
    """Return those of the chosen spans that begin within a pass with one of these names of their rank, as rows."""
    data, found = trace.columns.data, [np.empty(0, np.int64)]
    for rank in range(len(trace.ranks)):
        rows = np.flatnonzero(chosen & (data["rank"] == rank))
        inside = [_inside(passes(trace, rank, name), data["start_ns"][rows]) for name in names]
        found.append(rows[np.any(inside, axis=0)])
    return np.sort(np.concatenate(found))


def passes(trace: Trace, rank: int, which: str) -> Intervals:
    """Return the bounds of a rank's passes of this name, such as "backward", in order of their start, in ns."""
    data = trace.columns.data
    # "backward", or with the number of a micro-batch, "backward 3"
    named = trace.columns.named(lambda name: name == which or name.startswith(f"{which} "))
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
