"""One frame of the live picture as plain data: what `drawing` draws."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from labkit.errors.units import clock_time
from labkit.launch.resource_usage import Load
from labkit.tracing.trace import Trace

Cells = tuple[NDArray[np.float64], NDArray[np.float64]]  # covered time in ns of each lane, shape (styles, bins)


@dataclass(slots=True)
class LiveRow:
    """A rank in a frame.

    Args:
        name: the rank's name.
        status: what it is doing, in a few words.
        blocked: whether it waits.
        load: its resource usage.
        ended_ns: when its process ended, in ns since the run's start; None while it lives.
    """

    name: str
    status: str
    blocked: bool
    load: Load = field(default_factory=Load)
    ended_ns: int | None = None


@dataclass(slots=True)
class Curve:
    """A recorded value over the time that the strip shows.

    Args:
        name: the name given to `lab.record`.
        means: the mean of each bin, per rank and then over all ranks, shape (ranks + 1, bins); NaN for empty bins.
    """

    name: str
    means: NDArray[np.float64]


@dataclass(slots=True)
class Past:
    """The run so far, in bins.

    Args:
        cells: per rank, the covered time of its lanes' bins.
        shown_ns: the time that the bins cover.
        drawn: "strip" and "rows" as SVG once drawn: a cache, since bins are filled less often than frames are drawn.
    """

    cells: list[Cells]
    shown_ns: int
    drawn: dict[str, str] = field(default_factory=dict)

    def styles(self) -> set[int]:
        """Return the numbers of the styles that occur in it."""
        return {int(number) for lanes in self.cells for lane in lanes for number in np.flatnonzero(lane.any(axis=1))}


@dataclass(slots=True)
class Detail:
    """A part of the run that is drawn bar by bar.

    Args:
        trace: the part.
        extent_ns: length of the rows' time axis.
        label: label of that axis.
        marked: start and end of the part in ns since the run's start; None if it is the whole run.
        drawn: the rows as SVG once drawn: a cache, since a part may be shown for several frames.
        styles: the numbers of the styles drawn in it.
    """

    trace: Trace
    extent_ns: int
    label: str
    marked: tuple[int, int] | None = None
    drawn: str = ""
    styles: set[int] = field(default_factory=set)


@dataclass(slots=True)
class LiveFrame:
    """The content of one frame.

    Args:
        title: the function and the ranks: "train on 4 ranks".
        elapsed_ns: time since the run's start.
        fraction: completed fraction of the loop, from 0 to 1; None if unknown.
        progress: texts for steps, rate, time left, and values; "" if unknown.
        rows: the ranks.
        past: the content of the strip.
        detail: the content of the rows; None: the same as the strip.
        curve: the first recorded value with several points; None if there is none yet.
        held: whether it stays for as long as the student thinks at a debugger's prompt.
    """

    title: str
    elapsed_ns: int
    fraction: float | None
    progress: tuple[str, ...]
    rows: list[LiveRow]
    past: Past
    detail: Detail | None
    curve: Curve | None = None
    held: bool = False

    @property
    def in_words(self) -> str:
        """The progress in one line."""
        return "  ·  ".join(part for part in self.progress if part) or clock_time(self.elapsed_ns / 1e9, tenths=True)
