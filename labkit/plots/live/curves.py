"""Curves: values from `lab.record` over time, per rank and averaged, in the live picture and below the timeline.

The first name with several values is drawn. A name that was recorded only once, such as a size, has no curve.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from labkit.errors.units import unit_of
from labkit.plots.style import INK, labkit_style, shortened
from labkit.recording.events import Scalar
from labkit.recording.schema import ENDED, MEMORY, STEPS_IN_ALL
from labkit.tracing.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOUR: Final = "#CC79A7"  # of Okabe and Ito's palette, the colour that no bar of the timeline has
EACH_RANK: Final = 8  # up to this many ranks have their own lines besides their mean
BINS: Final = 128  # over the time shown
CURVES: Final = 16  # names that are kept: more than one, since the first ones may have a single value
POINTS: Final = 500  # the most points of a line below a timeline
NAME: Final = 80  # characters of a curve's name
SUPERSCRIPTS: Final = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
HEIGHT_IN: Final = 1.15  # of the panel below a timeline, with its axis


def recorded(scalars: Sequence[Scalar]) -> list[Scalar]:
    """Select the values recorded by the student's code, without labkit's own."""
    return [s for s in scalars if s.name not in (STEPS_IN_ALL, ENDED) and not s.name.startswith(MEMORY)]


def attempts(bins: int, restarts_ns: Sequence[int], shown_ns: int) -> list[NDArray[np.int64]]:
    """The numbers of the bins, of all that cover `shown_ns`, before, between and after the restarts of a run."""
    parts = np.split(np.arange(bins), sorted({ns * bins // shown_ns for ns in restarts_ns}))
    return [part for part in parts if len(part)]


class Curves:
    """The values recorded during a run of so many ranks, averaged in a fixed number of bins."""

    def __init__(self, ranks: int, start_ns: int) -> None:
        self._ranks, self._start_ns = ranks, start_ns
        self._shown_ns = 0
        self._sums: dict[str, NDArray[np.float64]] = {}  # by name: sums and numbers of values, shape (2, ranks, bins)

    def add(self, new: Sequence[Scalar], shown_ns: int) -> None:
        """Add recorded values; the bins now cover `shown_ns`, as before or doubled once or several times."""
        while self._shown_ns and self._shown_ns < shown_ns:
            for name, sums in self._sums.items():
                halves = sums[..., ::2] + sums[..., 1::2]
                self._sums[name] = np.concatenate([halves, np.zeros_like(halves)], axis=-1)
            self._shown_ns *= 2
        self._shown_ns = shown_ns
        for scalar in recorded(new):
            if scalar.name not in self._sums:
                if len(self._sums) == CURVES:
                    continue
                self._sums[scalar.name] = np.zeros((2, self._ranks, BINS))
            place = (scalar.time_ns - self._start_ns) * BINS // shown_ns
            if 0 <= place < BINS and np.isfinite(scalar.value):
                self._sums[scalar.name][:, scalar.rank, place] += (scalar.value, 1)

    @property
    def names(self) -> list[str]:
        """The names that any rank has recorded more than once, in the order in which they first appeared."""
        return [name for name, (_, numbers) in self._sums.items() if (numbers.sum(axis=1) > 1).any()]

    def means(self, name: str, restarts_ns: Sequence[int] = ()) -> NDArray[np.float64]:
        """Return the mean of each bin per rank, then over all ranks, shape (ranks + 1, bins); NaN for empty bins.

        Ranks reach the same step at different times, so the mean over all ranks uses the last value of each rank since
        all ranks were last replaced.
        """
        sums, numbers = self._sums[name]
        with np.errstate(invalid="ignore"):
            each = sums / numbers
        present = numbers > 0
        over_ranks = np.full(BINS, np.nan)
        for bins in attempts(BINS, [ns - self._start_ns for ns in restarts_ns], self._shown_ns):
            here = present[:, bins]
            last = np.maximum.accumulate(np.where(here, bins, bins[0]), axis=1)
            lasting = np.take_along_axis(each, last, axis=1)[here.any(axis=1)]
            if len(lasting):
                over_ranks[bins] = lasting.mean(axis=0)
        return np.vstack([each, np.where(present.any(axis=0), over_ranks, np.nan)])


def draw_below(figure: Figure, trace: Trace) -> None:
    """Make a timeline higher, and draw the first curve below it, over the time of the whole run, if there is one."""
    unit, unit_ns = unit_of(trace.duration_ns)
    by_name: dict[str, dict[tuple[int, int], list[tuple[float, float]]]] = {}  # then by attempt and rank
    for s in recorded(trace.scalars):
        at, attempt = (s.time_ns - trace.start_ns) / unit_ns, bisect.bisect(trace.restarts_ns, s.time_ns)
        by_name.setdefault(s.name, {}).setdefault((attempt, s.rank), []).append((at, s.value))
    curves = {name: {key: points for key, points in of.items() if len(points) > 1} for name, of in by_name.items()}
    name = next((name for name, lines in curves.items() if lines), None)
    if name is None or trace.duration_ns <= 0:
        return
    each = {key: _downsampled(np.array(points)) for key, points in curves[name].items()}
    ranks = len({rank for _, rank in each})
    timeline = figure.axes[0]
    width, before = figure.get_size_inches()
    height = before + HEIGHT_IN
    for axes in figure.axes:
        box = axes.get_position()
        axes.set_position((box.x0, (box.y0 * before + HEIGHT_IN) / height, box.width, box.height * before / height))
    figure.set_size_inches(width, height)
    box = timeline.get_position()
    with labkit_style():
        panel = figure.add_axes((box.x0, 0.42 / height, box.width, (HEIGHT_IN - 0.5) / height))
        for points in each.values() if 1 < ranks <= EACH_RANK else []:
            panel.plot(*points.T, color=COLOUR, alpha=0.45, linewidth=0.8)
        for attempt in sorted({attempt for attempt, _ in each}):
            own = [points for (of, _), points in each.items() if of == attempt]
            count = min(map(len, own))
            mean = np.mean([points[:count] for points in own], axis=0)  # over the ranks' first values, their second ones, …
            panel.plot(*mean.T, color=COLOUR, linewidth=1.6, marker="o" if count < 20 else "", markersize=3)
        panel.set(xlim=(0, trace.duration_ns / unit_ns), xlabel=f"time since the start of the run [{unit}]")
        # Above the panel, since a long name may not fit beside the numbers.
        panel.set_title(shortened(name, NAME) + _scaled(panel), fontsize=8.5, pad=2)
        panel.locator_params(axis="y", nbins=3)
        panel.grid(axis="y")
        if ranks > 1:
            thin = "thin: each rank;  " if ranks <= EACH_RANK else ""
            panel.set_title(f"{thin}thick: mean of the {ranks} ranks", loc="right", fontsize=7.5, color=INK, pad=2)
        around = panel.get_tightbbox()
        assert around is not None
        beyond = 2 - around.x0
        if beyond > 0:  # long numbers need more space than the ranks' names above
            inside, moved = panel.get_position(), beyond / figure.bbox.width
            panel.set_position((inside.x0 + moved, inside.y0, inside.width - moved, inside.height))


def _scaled(panel: Axes) -> str:
    """Scale long numbers of an axis by a power of ten, and return that factor as the suffix of the curve's name."""
    largest = max(map(abs, panel.get_ylim()))
    power = math.floor(math.log10(largest)) if largest else 0
    if -3 < power < 5:
        return ""
    panel.yaxis.set_major_formatter(lambda value, _: f"{value / 10.0**power:.4g}")
    return f"  [10{str(power).translate(SUPERSCRIPTS)}]"


def _downsampled(points: NDArray[np.float64]) -> NDArray[np.float64]:
    """Reduce points to at most `POINTS`: means over neighbours, in time and value; shape (points, 2)."""
    stride = -(-len(points) // POINTS)
    return np.array([points[i : i + stride].mean(axis=0) for i in range(0, len(points), stride)])
