"""Which of many steps stands for all of them."""

from __future__ import annotations

import numpy as np

from labkit.recording.schema import READING
from labkit.tracing.trace import Trace

__all__ = ["median_step"]


def median_step(trace: Trace) -> int:
    """The number of the step of median length, if possible without a reading of TensorFlow's profiler."""
    bounds, data = trace.step_bounds(), trace.columns.data
    reads = data[np.array([name == READING for name in trace.columns.names], bool)[data["name"]]]
    disturbed = (reads["start_ns"] < bounds[:, 1:]) & (reads["end_ns"] > bounds[:, :1])
    own = np.flatnonzero(~disturbed.any(axis=1))
    own = own if len(own) else np.arange(len(bounds))
    return int(own[np.argsort((bounds[:, 1] - bounds[:, 0])[own], kind="stable")[len(own) // 2]])
