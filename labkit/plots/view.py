"""The part of a run that a figure shows: the whole run, or some of its steps."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from labkit.errors.exceptions import LabError
from labkit.errors.lists import counted, listed
from labkit.errors.units import percent, time_in_words
from labkit.plots.rows import Row, is_pipeline, rows_of
from labkit.plots.style import ranks_in_words
from labkit.recording.schema import THROUGH_HOST
from labkit.tracing.intervals import Intervals
from labkit.tracing.step_times import lacking_cores, median_step
from labkit.tracing.trace import Trace

SUBSTANTIAL: Final = 0.15  # of the ranks' time: with less, `own_cores` hardly changes a step
ZOOM_BEYOND: Final = 12  # steps: with more, their parts are too narrow to distinguish at notebook width


@dataclass(frozen=True, slots=True)
class View:
    """The part of one run that a timeline shows."""

    label: str  # the run's title; "" if it has none
    whole: Trace  # the trace of the whole run
    shown: Trace  # the trace clipped to the chosen steps; the whole trace if none were chosen
    chosen: range  # the numbers of the chosen steps; empty for the whole run
    steps: int  # how many steps the run has

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
        return f"{ranks_in_words(self.shown.ranks)}, {self.steps_in_words()}"

    def bounds_of_ranks(self) -> Intervals | None:
        """Return when each rank was in the chosen steps, shape (ranks, 2), in ns; None if no steps were chosen.

        For a rank without steps, this is the window.
        """
        if not self.zoomed:
            return None
        window = (self.shown.start_ns, self.shown.end_ns)
        own = [self.whole.step_bounds(rank) for rank in range(len(self.whole.ranks))]
        return np.array([(s[self.chosen[0], 0], s[self.chosen[-1], 1]) if len(s) else window for s in own], np.int64)

    def steps_in_words(self) -> str:
        """Return the steps shown, and their duration: as long as on the rank that took longest for them.

        Of a replayed or simulated run, which did not happen, it says so.
        """
        return ", ".join(filter(None, (self._steps_in_words(), self.whole.origin)))

    def _steps_in_words(self) -> str:
        if not self.zoomed:
            length = time_in_words(self.shown.duration_ns)
            return f"{self.steps} steps, {length}" if self.steps > 1 else length
        length = time_in_words(self._steps_ns())
        first, last = self.chosen[0], self.chosen[-1]
        some = f"step {first}" if first == last else f"steps {first} to {last}"
        return f"{some} ({length}) of the steps 0 to {self.steps - 1}"

    def _steps_ns(self) -> int:
        """The picture is longer than that, since the ranks do not start a step at the same time."""
        own = [self.whole.step_bounds(rank) for rank in range(len(self.whole.ranks))]
        lasted = [int(steps[self.chosen[-1], 1] - steps[self.chosen[0], 0]) for steps in own if len(steps) >= self.steps]
        return max(lasted, default=self.shown.duration_ns)


def view_of(trace: Trace, step: int | range | str | None, label: str) -> View:
    """Select the part of a trace that `step` names, as for `timeline`; `label` is the run's title, "" for none."""
    bounds = trace.step_bounds()
    count = len(bounds)
    if step == "all" or (step is None and count <= ZOOM_BEYOND):
        return View(label, trace, trace, range(0), count)
    if not count and (step == "median" or isinstance(step, numbers.Integral | range)):
        raise LabError(f"step={step!r}: this run has no steps; wrap its loop: `for batch in lab.steps(batches):`")
    if step in (None, "median"):
        step = median_step(trace)
    if isinstance(step, numbers.Integral):
        number = int(step) if step >= 0 else count + int(step)
        chosen = range(number, number + 1)
    elif isinstance(step, range) and step.step == 1 and step:
        chosen = step
    else:
        raise TypeError(f"step={step!r}: expected a step number, a range such as range(3, 6), 'median' or 'all'")
    if chosen[0] < 0 or chosen[-1] >= count:
        raise LabError(f"step={step!r}: this run has the steps 0 to {count - 1}")
    shown = trace.between(int(bounds[chosen[0], 0]), int(bounds[chosen[-1], 1]))
    return View(label, trace, shown, chosen, count)


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
