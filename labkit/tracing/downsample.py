"""What the moving picture is told of a rank that writes faster than anyone can look: so many records a look, and no more.

The run keeps every record; this bounds what is worked out while the ranks compute. The latest records stay as they are. Of the
ones before, some stand for all: their length is that of as many as they stand for, so that sums over time come out right.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from labkit.recording.schema import COMMUNICATION, COMPUTE, SCALAR, STEP, SUM

__all__ = ["FEW", "MOST", "thin"]

MOST: Final = 1000  # spans of one rank in one look, of which there are twenty a second; half of them stand for many
FEW: Final = 200  # rows of any kind that are passed on as they are
STEPS: Final = 100  # the rate is that of the last ones
VALUES: Final = 20  # of each curve


def thin(rows: Any, loop_name: int) -> Any:
    """Some records that stand for all.

    Args:
        rows: of one rank, as they were read.
        loop_name: the number of the name of the scalar that begins a loop; -1 where there is none.

    Returns:
        the same rows where they are `FEW`; else at most `MOST` spans, of the steps the last with up to two rows for the others
        (flag `SUM`, `nbytes` says how many they are), of each curve some values with the last.
    """
    if len(rows) <= FEW:
        return rows
    kind = rows["kind"]
    work, steps, values = (np.flatnonzero(np.isin(kind, which)) for which in ((COMPUTE, COMMUNICATION), STEP, SCALAR))
    kept = [np.flatnonzero(~np.isin(kind, (COMPUTE, COMMUNICATION, STEP, SCALAR)))]
    sums = []
    if len(work) > MOST:
        sums.append(_standing_for(rows, work[: -MOST // 2]))
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


def _standing_for(rows: Any, which: Any) -> Any:
    """Some of many spans, each as long as those that it stands for."""
    stride = -(-len(which) // (MOST // 2))
    # Not every so-and-so-manieth: where forward and backward take turns, that would be one of them only.
    first = np.arange(0, len(which) - stride + 1, stride)
    some = rows[which[first + np.random.default_rng(len(which)).integers(stride, size=len(first))]]
    some["end_ns"] = some["start_ns"] + stride * (some["end_ns"] - some["start_ns"])
    some["flags"] |= SUM
    return some


def _counted(steps: Any, began_ns: int) -> Any:
    """One row for the steps before the loop under way began, one for those of this loop."""
    ends = np.maximum.accumulate(steps["end_ns"])
    steps = steps[np.append(True, steps["start_ns"][1:] >= ends[:-1])]  # else it is the step of a loop around another
    sums = []
    for part in (steps[steps["start_ns"] < began_ns], steps[steps["start_ns"] >= began_ns]):
        if len(part):
            row = part[:1].copy()
            row["end_ns"], row["nbytes"] = part["end_ns"][-1], len(part)
            row["flags"] |= SUM
            sums.append(row)
    return np.concatenate(sums)
