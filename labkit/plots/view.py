"""What a figure shows of a run: all of it or some of its steps, and its rows: one per rank, or one per device."""

from __future__ import annotations

import numbers
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from labkit.errors.exceptions import LabError
from labkit.errors.lists import counted, listed, these
from labkit.errors.units import percent, time_in_words
from labkit.plots.bars import Bars, lanes
from labkit.recording.events import device_number
from labkit.recording.schema import CALL, COMMUNICATION, COMPUTE, CUDA, OPEN, THROUGH_HOST
from labkit.tracing.intervals import Intervals
from labkit.tracing.step_times import lacking_cores, median_step, steps_in_turn
from labkit.tracing.trace import Trace

_NUMBERED: Final = re.compile(r"(?i)(?:forward|backward)(?:\D*[\W_])?(\d+)")  # not "backward of NetShard2.forward"

OTHERS: Final = "others"
RESTARTED: Final = "all ranks replaced"


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a timeline."""

    name: str  # the rank's name, with the device if the rank has two rows
    rank: int
    device: str = ""  # "GPU" or "CPU" if the rank has two rows, otherwise ""
    # the TensorFlow device if the rank has a row for each: 1 for "CPU:0", 0 for spans without a device; otherwise -1
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


@dataclass(frozen=True, slots=True)
class Ends:
    """The endpoints of a trace's communication."""

    names: tuple[str, ...]
    rank: NDArray[np.int64]  # rank number of each endpoint, shape (endpoints,)
    # index into `names` by rank and by `device_number`, shape (ranks, devices + 1). Device 0 is the rank as a whole.
    place: NDArray[np.int64]

    @property
    def devices(self) -> bool:
        """Whether any endpoint is a device."""
        return bool(self.place.shape[1] > 1)

    def of(self, rows: Any) -> NDArray[np.int64]:
        """Return the endpoint that recorded each of these rows."""
        return np.asarray(self.place[rows["rank"], device_number(rows)])

    def root(self, ranks: NDArray[Any]) -> NDArray[np.int64]:
        """Return the endpoint of a collective's root, given the root's rank: in TensorFlow, the rank's first device."""
        return np.asarray(self.place[ranks, min(1, self.place.shape[1] - 1)])

    def opposite(self, sent: Any, received: Any) -> NDArray[np.int64]:
        """Return the peer endpoint of each message: the device that recorded the matching row; the rank if none did."""
        found = np.array(self.place[sent["peer"], 0])
        if self.devices:
            at = defaultdict(list)
            for key, end in zip(_keys(received, "rank"), self.of(received).tolist(), strict=True):
                at[key].append(end)
            for i, key in enumerate(_keys(sent, "peer")):
                if at.get(key):
                    found[i] = at[key].pop(0)
        return found

    def matter(self, ends: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return a mask of the endpoints to show.

        These are all endpoints, except for ranks that have devices and do not occur in `ends` themselves.
        """
        shown = np.ones(len(self.names), bool)
        with_devices = (self.place != self.place[:, :1]).any(axis=1)
        shown[self.place[with_devices, 0]] = False
        shown[ends] = True
        return shown


def devices_of(trace: Trace, rank: int) -> list[int]:
    """Return the active devices of a rank, by `device_number`; [] if there is at most one."""
    data = trace.columns.data
    active = (data["rank"] == rank) & ((data["kind"] == COMPUTE) | (data["kind"] == COMMUNICATION))
    numbers = np.unique(device_number(data[active]))
    found: list[int] = numbers[numbers > 0].tolist()
    return found if len(found) > 1 else []


def ends_of(trace: Trace) -> Ends:
    """Return the endpoints of a trace; those ranks of a simulation that it lacks are one endpoint, "others"."""
    devices = [devices_of(trace, rank) for rank in range(len(trace.ranks))]
    place = np.zeros((len(devices), 1 + max((d[-1] for d in devices if d), default=0)), np.int64)
    names: list[str] = []
    ranks: list[int] = []
    for rank, (name, of_rank) in enumerate(zip(trace.ranks, devices, strict=True)):
        place[rank] = len(names)
        names.append(name)
        for number in of_rank:
            place[rank, number] = len(names)
            names.append(f"CPU:{number - 1}" if len(devices) == 1 else f"{name} CPU:{number - 1}")
        ranks += [rank] * (1 + len(of_rank))
    if trace.simulated > len(devices):
        place = np.append(place, np.full((1, place.shape[1]), len(names)), axis=0)
        names.append(OTHERS)
        ranks.append(len(devices))
    return Ends(tuple(names), np.array(ranks, np.int64), place)


def _keys(rows: Any, other: str) -> list[tuple[int, int, int]]:
    return list(zip(rows["group"].tolist(), rows["match"].tolist(), rows[other].tolist(), strict=True))


SUBSTANTIAL: Final = 0.15  # of the ranks' time: with less, `own_cores` changes a step by at most 4 %; above 0.2, by 10 to 45 %
ZOOM_BEYOND: Final = 12  # steps: with more, their parts are too narrow to distinguish at notebook width


@dataclass(frozen=True, slots=True)
class View:
    """The part of one run that a timeline shows."""

    label: str  # the run's title; "" if it has none
    whole: Trace  # the trace of the whole run
    shown: Trace  # the trace clipped to the chosen steps; the whole trace if none were chosen
    chosen: range  # the numbers of the chosen steps; empty for the whole run
    steps: int  # how many steps the run has
    to_end: bool = False  # whether what follows the chosen steps is shown, too

    @property
    def rows(self) -> list[Row]:
        """The rows from top to bottom, independent of the chosen steps."""
        return rows_of(self.whole)

    @property
    def zoomed(self) -> bool:
        """Whether only some steps are shown."""
        return bool(self.chosen)

    def in_words(self) -> str:
        """Return the number of ranks, the steps shown, and their duration."""
        return f"{these(self.shown.ranks)}, {self.steps_in_words()}"

    def bounds_of_ranks(self) -> Intervals | None:
        """Return when each rank was in the chosen steps, shape (ranks, 2), in ns; None if no steps were chosen.

        For a rank without steps, this is the window.
        """
        if not self.zoomed:
            return None
        window = (self.shown.start_ns, self.shown.end_ns)
        own = [self.whole.step_bounds(rank) for rank in range(len(self.whole.ranks))]
        found = np.array([(s[self.chosen[0], 0], s[self.chosen[-1], 1]) if len(s) else window for s in own], np.int64)
        if self.to_end:
            found[:, 1] = self.shown.end_ns
        return found

    def steps_in_words(self) -> str:
        """Return the steps shown, and their duration, as `labkit.step_ms` measures it.

        Of a replayed or simulated run, which did not happen, it says so.
        """
        return ", ".join(filter(None, (self._steps_in_words(), self.whole.origin)))

    def _steps_in_words(self) -> str:
        if not self.zoomed:
            length, again = time_in_words(self.shown.duration_ns), len(self.whole.restarts_ns)
            after = f"after the last of {again} restarts" if again > 1 else "after 1 restart" if again else ""
            steps = f"{self.steps} steps" if self.steps > 1 else ""
            return ", ".join(filter(None, (f"{steps} {after}".strip(), length)))
        if self.to_end:
            return f"{self.chosen_in_words()} ({time_in_words(self.shown.duration_ns)})"
        # The picture is longer than that, since the ranks do not start a step at the same time.
        bounds = steps_in_turn(self.whole)
        length = time_in_words(int(bounds[self.chosen[-1], 1] - bounds[self.chosen[0], 0]))
        return f"{self.chosen_in_words()} ({length}) of the steps 0 to {self.steps - 1}"

    def chosen_in_words(self) -> str:
        """Return the chosen steps: "step 3", or "steps 3 to 5"; also "the end, from step 12 on"."""
        first, last = self.chosen[0], self.chosen[-1]
        if self.to_end:
            return f"the end, from step {first} on"
        return f"step {first}" if first == last else f"steps {first} to {last}"


def view_of(trace: Trace, step: int | range | str | None, label: str) -> View:
    """Select the part of a trace that `step` names, as for `timeline`; `label` is the run's title, "" for none."""
    bounds = trace.step_bounds()
    count = len(bounds)
    if step is None:
        step = "all" if count <= ZOOM_BEYOND or trace.restarts_ns else "end" if _ended_early(trace) else "median"
    if step == "all":
        return View(label, trace, trace, range(0), count)
    if not count and (step in ("median", "end") or isinstance(step, numbers.Integral | range)):
        raise LabError(f"step={step!r}: this run has no steps; wrap its loop: `for batch in lab.steps(batches):`")
    if step == "end":
        shown = trace.between(int(bounds[-1, 0]), trace.end_ns)
        return View(label, trace, shown, range(count - 1, count), count, to_end=True)
    if step == "median":
        step = median_step(trace)
    if isinstance(step, numbers.Integral):
        number = int(step) if step >= 0 else count + int(step)
        chosen = range(number, number + 1)
    elif isinstance(step, range) and step.step == 1 and step:
        chosen = step
    else:
        raise TypeError(f"step={step!r}: expected a step number, a range such as range(3, 6), 'median', 'end' or 'all'")
    if chosen[0] < 0 or chosen[-1] >= count:
        raise LabError(f"step={step!r}: this run has the steps 0 to {count - 1}")
    shown = trace.between(int(bounds[chosen[0], 0]), int(bounds[chosen[-1], 1]))
    return View(label, trace, shown, chosen, count)


def _ended_early(trace: Trace) -> bool:
    """Whether ranks were still in their function when the run was stopped."""
    data = trace.columns.data
    return bool(((data["kind"] == CALL) & (data["flags"] & OPEN != 0)).any())


def numbered_steps(trace: Trace, rank: int) -> Intervals:
    """Return start and end in ns of the steps that are numbered above a rank's row, shape (steps, 2).

    They are the rank's own, as far as all ranks have completed them; of a rank without steps, those of all ranks.
    """
    common = trace.step_bounds()
    own = trace.filter(rank=rank).step_bounds()
    return own[: len(common)] if len(own) >= len(common) else common


def bubble_in_words(trace: Trace) -> str:
    """Return the bubble for a title, as in ", bubble 27 %"; "" if the trace is not of a pipeline."""
    return f", bubble {percent(trace.bubble)}" if is_pipeline(trace) else ""


def sharing_in_words(views: Sequence[View]) -> str:
    """Return a line about the runs with distorted times, because ranks shared cores or GPUs; "" if there are none."""
    if any((view.whole.columns.data["flags"] & THROUGH_HOST != 0).any() for view in views):
        return "gloo moved GPU tensors through the host's memory: communication includes these copies"
    distorted = [view for view in views if lacking_cores(view.whole) > SUBSTANTIAL]
    if not distorted:
        return ""
    trace = max((view.whole for view in distorted), key=lambda trace: len(trace.ranks))
    cores = counted(trace.cores, "core") if trace.cores else "cores"
    whose = f"{listed(view.label for view in distorted)}: " if len(distorted) < len(views) else ""
    cure = "" if any(view.whole.replayed for view in views) else "; lab.replay(run, own_cores=True) shows it"
    return f"{whose}{len(trace.ranks)} ranks shared {cores}: what overlaps here may not overlap on cores of their own{cure}"
