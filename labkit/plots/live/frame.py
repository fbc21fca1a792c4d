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
    """A rank in a frame."""

    name: str
    status: str
    blocked: bool
    load: Load = field(default_factory=Load)
    ended_ns: int | None = None  # when its process ended, in ns since the run's start; None while it lives


@dataclass(slots=True)
class Curve:
    """A recorded value over the time that the strip shows."""

    name: str  # the name given to `lab.record`
    # the mean of each bin, per rank and then over all ranks, shape (ranks + 1, bins); NaN for empty bins
    means: NDArray[np.float64]


@dataclass(slots=True)
class Past:
    """The run so far, in bins."""

    cells: list[Cells]  # per rank, the covered time of its lanes' bins
    shown_ns: int  # the time that the bins cover
    # "strip" and "rows" as SVG once drawn: a cache, since bins are filled less often than frames are drawn
    drawn: dict[str, str] = field(default_factory=dict)

    def styles(self) -> set[int]:
        """Return the numbers of the styles that occur in it."""
        return {int(number) for lanes in self.cells for lane in lanes for number in np.flatnonzero(lane.any(axis=1))}


@dataclass(slots=True)
class Detail:
    """A part of the run that is drawn bar by bar."""

    trace: Trace
    extent_ns: int
    label: str
    # start and end of the part in ns since the run's start; None if it is the whole run
    marked: tuple[int, int] | None = None
    drawn: str = ""  # the rows as SVG once drawn: a cache, since a part may be shown for several frames
    styles: set[int] = field(default_factory=set)  # the numbers of the styles drawn in it


@dataclass(slots=True)
class LiveFrame:
    """The content of one frame."""

    title: str  # the function and the ranks: "train on 4 ranks"
    elapsed_ns: int
    fraction: float | None  # completed fraction of the loop, from 0 to 1; None if unknown
    progress: tuple[str, ...]  # texts for steps, rate, time left, and values; "" if unknown
    rows: list[LiveRow]
    past: Past  # the content of the strip
    detail: Detail | None  # the content of the rows; None: the same as the strip
    curve: Curve | None = None  # the first recorded value with several points; None if there is none yet
    held: bool = False  # whether it stays for as long as the student thinks at a debugger's prompt

    @property
    def in_words(self) -> str:
        """The progress in one line."""
        return "  ·  ".join(part for part in self.progress if part) or clock_time(self.elapsed_ns / 1e9, tenths=True)
