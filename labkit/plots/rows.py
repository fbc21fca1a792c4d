"""The rows of a timeline: one per rank, or several for a rank that is active on several devices."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from labkit.plots.bars import Bars, lanes
from labkit.plots.endpoints import devices_of
from labkit.recording.events import device_number
from labkit.recording.schema import CALL, COMMUNICATION, COMPUTE, CUDA
from labkit.tracing.trace import Trace

_NUMBERED: Final = re.compile(r"(?i)(?:forward|backward)(?:\D*[\W_])?(\d+)")  # not "backward of NetShard2.forward"


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a timeline.

    Args:
        name: the rank's name, with the device if the rank has two rows.
        rank: the rank's number.
        device: "GPU" or "CPU" if the rank has two rows, otherwise "".
        number: the TensorFlow device if the rank has a row for each: 1 for "CPU:0", 0 for spans without a device;
            otherwise -1.
    """

    name: str
    rank: int
    device: str = ""
    number: int = -1

    def lanes(self, trace: Trace) -> tuple[Bars, Bars]:
        """Return the bars of the row's lanes, compute and communication; `span` is an index into `trace.columns`."""
        if self.number >= 0:
            data = trace.columns.data
            kept = np.flatnonzero((data["rank"] == self.rank) & (device_number(data) == self.number))
            part = Trace(trace.columns.where(kept), ranks=trace.ranks, start_ns=trace.start_ns, end_ns=trace.end_ns)
            compute, communication = lanes(part, self.rank)
            return replace(compute, span=kept[compute.span]), replace(communication, span=kept[communication.span])
        compute, communication = lanes(trace, self.rank)
        if not self.device:
            return compute, communication
        # Compute on either device hides communication; nesting and overlap are resolved separately for each device.
        mine = (trace.columns.data["device"] == CUDA) == (self.device == "GPU")
        kept = np.flatnonzero(mine)
        part = Trace(trace.columns.where(mine), ranks=trace.ranks, start_ns=trace.start_ns, end_ns=trace.end_ns)
        own = lanes(part, self.rank)[0]
        return replace(own, span=kept[own.span]), communication[mine[communication.span]]

    def shows(self, rank: int, on_cuda: bool) -> bool:
        """Whether spans of this rank and device are in this row."""
        return rank == self.rank and (not self.device or on_cuda == (self.device == "GPU"))


def rows_of(trace: Trace) -> list[Row]:
    """Return the rows of all ranks, from top to bottom."""
    data, found = trace.columns.data, []
    active = (data["kind"] == COMPUTE) | (data["kind"] == COMMUNICATION)
    on_cuda = data["device"] == CUDA
    both = {int(rank) for rank in np.intersect1d(data["rank"][active & on_cuda], data["rank"][active & ~on_cuda])}
    for rank, name in enumerate(trace.ranks):
        if devices := devices_of(trace, rank):
            found.append(Row(name, rank, number=0))
            found += [Row(f"CPU:{number - 1}", rank, number=number) for number in devices]
        elif rank in both:
            found += [Row(f"{name} GPU", rank, "GPU"), Row("CPU", rank, "CPU")]
        else:
            found.append(Row(name, rank))
    return found


def is_pipeline(trace: Trace) -> bool:
    """Whether several ranks compute numbered micro-batches (spans such as "forward 3") and pass them on to one another.

    A pipeline's ranks send messages. The trace of an ideal pipeline may have none: then a micro-batch is never on two
    ranks at once. A run that only has collectives accumulates gradients over micro-batches, and is not a pipeline.
    """
    data, names = trace.columns.data, trace.columns.names
    travels = data["kind"] == COMMUNICATION
    messages = bool((data["peer"][travels] >= 0).any())
    if not messages and (travels.any() or (data["kind"] == CALL).any()):  # an ideal pipeline has no calls
        return False
    rows = data[data["kind"] == COMPUTE]
    numbers = {i: int(match[1]) for i in np.unique(rows["name"]).tolist() if (match := _NUMBERED.match(names[i]))}
    rows = rows[np.isin(rows["name"], list(numbers))]
    if len(np.unique(rows["rank"])) < 2:
        return False
    number = np.array([numbers[i] for i in rows["name"].tolist()])
    if messages and len(np.unique(number)) > 1:
        return True
    order = np.lexsort((rows["end_ns"], rows["start_ns"], number))
    rows, number = rows[order], number[order]
    elsewhere = (number[1:] == number[:-1]) & (rows["rank"][1:] != rows["rank"][:-1])
    return bool(elsewhere.any() and (rows["start_ns"][1:] >= rows["end_ns"][:-1])[elsewhere].all())
