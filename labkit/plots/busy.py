"""`busy_shares`: for what share of the steps each row of the timeline computes."""

from __future__ import annotations

import numpy as np

from labkit.errors.wrong_calls import public_api
from labkit.plots.view import ends_of
from labkit.recording.events import device_number
from labkit.tracing.intervals import intersection, length, union
from labkit.tracing.step_times import HasTrace, trace_of, undisturbed_steps
from labkit.tracing.trace import Trace


@public_api
def busy_shares(run: HasTrace | Trace) -> dict[str, float]:
    """Return the share of the steps, from 0 to 1, in which each rank computes; of a rank with devices, each device.

    Of at least three steps, the first is left out, because it includes what is done only once, and so are steps in
    which labkit reads TensorFlow's profiler. A run without `lab.steps` counts as one step.

    Args:
        run: a run or a trace.

    Returns:
        the shares by the names of the timeline's rows, such as "rank 1" or "CPU:0".

    Raises:
        LabError: the ranks recorded nothing.
        TypeError: `run` is neither a run nor a trace.
    """
    trace = trace_of(run, "busy_shares")
    bounds = trace.step_bounds()
    if not len(bounds):
        bounds = np.array([[trace.start_ns, trace.end_ns]], np.int64)
    else:
        chosen = undisturbed_steps(trace)
        bounds = bounds[chosen[chosen > 0] if len(chosen) > 2 else chosen]
    steps = union(bounds[:, 0], bounds[:, 1])
    whole_ns = max(length(steps), 1)
    ends, data = ends_of(trace), trace.columns.data
    with_devices = set(ends.rank[np.bincount(ends.rank, minlength=len(trace.ranks))[ends.rank] > 1].tolist())
    found = {}
    for rank, name in enumerate(trace.ranks):
        if rank not in with_devices:
            found[name] = length(intersection(trace.activity(rank)["compute"], steps)) / whole_ns
            continue
        for number in np.flatnonzero(ends.place[rank] != ends.place[rank, 0]).tolist():
            own = trace.columns.where((data["rank"] == rank) & (device_number(data) == number))
            part = Trace(own, ranks=trace.ranks, start_ns=trace.start_ns, end_ns=trace.end_ns)
            busy = length(intersection(part.activity(rank)["compute"], steps))
            found[ends.names[int(ends.place[rank, number])]] = busy / whole_ns
    return found
