"""The steps of one rank: those of the innermost loop."""

from __future__ import annotations

from typing import Any

import numpy as np

from labkit.tracing.intervals import Intervals


def steps_of_rank(steps: Any, start_ns: int, end_ns: int) -> Intervals:
    """Return the bounds of a rank's steps that contain no other step, shape (steps, 2), in ns.

    Args:
        steps: the rank's spans of steps, as rows of a trace.
        start_ns: the start of a window; a step counts if its middle lies in the window.
        end_ns: the end of the window.
    """
    steps = steps[np.lexsort((-steps["end_ns"], steps["start_ns"]))]
    steps = steps[np.append(steps["start_ns"][1:] >= steps["end_ns"][:-1], np.ones(len(steps[:1]), bool))]
    middle = steps["start_ns"] + (steps["end_ns"] - steps["start_ns"]) // 2
    steps = steps[(middle >= start_ns) & (middle <= end_ns)]
    return np.stack([steps["start_ns"], steps["end_ns"]], axis=1)
