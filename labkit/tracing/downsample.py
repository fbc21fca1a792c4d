"""Downsampling for the live picture: a bounded number of records per update, however fast a rank records.

The run keeps all records; this bounds the work while the ranks compute. The latest records are kept as they are.
Earlier ones are represented by samples whose length is multiplied by the number of records they represent, so that sums
over time are right on average.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from labkit.recording.schema import COMMUNICATION, COMPUTE, SCALAR, STEP, WAIT

MOST: Final = 1000  # spans of one rank per read, with twenty reads a second; half of them represent many
FEW: Final = 200  # up to this many rows are kept as they are
STEPS: Final = 100  # the last steps, which determine the rate
VALUES: Final = 20  # of each curve


def downsample(rows: Any, loop_name: int) -> Any:
    """Reduce one rank's records to a bounded number, if there are more than `FEW`.

    Kept are at most `MOST` spans; the last steps, and up to two rows for the others, each with their `count`; and some
    values of each curve, including the last. `loop_name` is the number of the scalar's name that starts a loop, or -1.
    """
    if len(rows) <= FEW:
        return rows
    kind = rows["kind"]
    work, steps, values = (np.flatnonzero(np.isin(kind, which)) for which in ((COMPUTE, COMMUNICATION), STEP, SCALAR))
    kept = [np.flatnonzero(~np.isin(kind, (COMPUTE, COMMUNICATION, STEP, SCALAR, WAIT)))]
    sums = []
    if len(work) > MOST:
        sums.append(_samples(rows, work[: -MOST // 2]))
        work = work[-MOST // 2 :]
    began_ns = 0
    if len(values):
        names = rows["name"][values]
        loops = values[names == loop_name]
        began_ns = int(rows["start_ns"][loops[-1]]) if len(loops) else 0
        for name in np.unique(names).tolist():
            own = values[names == name]
            kept.append(own[np.unique(np.linspace(0, len(own) - 1, VALUES).astype(np.int64))])
    if len(steps) > STEPS:
        sums.append(_counted(rows[steps[:-STEPS]], began_ns))
        steps = steps[-STEPS:]
    return np.concatenate([*sums, rows[np.sort(np.concatenate([*kept, work, steps]))]])


def _samples(rows: Any, which: Any) -> Any:
    """A sample of many spans, each as long as the spans that it represents together."""
    stride = -(-len(which) // (MOST // 2))
    # At random: with a fixed stride, only one of forward and backward might be sampled, since they alternate.
    first = np.arange(0, len(which) - stride + 1, stride)
    some = rows[which[first + np.random.default_rng(len(which)).integers(stride, size=len(first))]]
    some["end_ns"] = some["start_ns"] + stride * (some["end_ns"] - some["start_ns"])
    some["count"] = stride
    return some


def _counted(steps: Any, began_ns: int) -> Any:
    """One row for the steps before the current loop, and one for the steps of the current loop."""
    ends = np.maximum.accumulate(steps["end_ns"])
    steps = steps[np.append(True, steps["start_ns"][1:] >= ends[:-1])]  # without steps of outer loops
    sums = []
    for part in (steps[steps["start_ns"] < began_ns], steps[steps["start_ns"] >= began_ns]):
        if len(part):
            row = part[:1].copy()
            row["end_ns"], row["count"] = part["end_ns"][-1], len(part)
            sums.append(row)
    return np.concatenate(sums)
