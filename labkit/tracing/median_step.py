"""Which of many steps stands for all of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from labkit.recording.schema import READING
from labkit.tracing.trace import Trace


def undisturbed_steps(trace: Trace) -> NDArray[np.int64]:
    """The numbers of the steps in which no rank reads TensorFlow's profiler; all numbers if there are no such steps."""
    bounds, data = trace.step_bounds(), trace.columns.data
    reads = data[np.array([name == READING for name in trace.columns.names], bool)[data["name"]]]
    disturbed = (reads["start_ns"] < bounds[:, 1:]) & (reads["end_ns"] > bounds[:, :1])
    own = np.flatnonzero(~disturbed.any(axis=1))
    return own if len(own) else np.arange(len(bounds))


def median_step(trace: Trace) -> int:
    """The number of the step of median length, if possible without a reading of TensorFlow's profiler."""
    bounds, own = trace.step_bounds(), undisturbed_steps(trace)
    return int(own[np.argsort((bounds[:, 1] - bounds[:, 0])[own], kind="stable")[len(own) // 2]])
