"""The figure of a measured link: times by size as points, and the fit of each operation as a line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from labkit.pictures.operations import colour_of
from labkit.pictures.sheet import WIDTH_IN, pyplot, sheet
from labkit.units import in_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from labkit.fit import Fit

__all__ = ["draw"]

MARKERS: Final = "osD^vP*X"  # colours alone do not tell six apart in print


def draw(fits: Sequence[Fit], ax: Axes | None = None) -> Axes:
    """Draw them, both axes logarithmic.

    Args:
        fits: at least one.
        ax: where to draw; default: a figure of its own.
    """
    plt = pyplot()
    with sheet():
        if ax is None:
            ax = plt.subplots(figsize=(WIDTH_IN, 4.2), layout="constrained")[1]
        for number, fit in enumerate(fits):
            colour, marker = colour_of(fit.operation), MARKERS[number % len(MARKERS)]
            sizes = np.geomspace(min(fit.nbytes), max(fit.nbytes), 100)
            ax.plot(sizes, [fit.predicted_s(n) for n in sizes.tolist()], color=colour, linewidth=1.4)
            label = f"{fit.operation}: {', '.join(fit.in_short)}, off by {fit.error:.0%}"
            ax.plot(fit.nbytes, fit.seconds, marker, color=colour, markersize=5, label=label)
        ax.set_xscale("log")
        ax.set_yscale("log")
        times = [s for fit in fits for s in fit.seconds]
        # Room for the lowest points, and for the legend above the highest.
        ax.set_ylim(10 ** math.floor(math.log10(min(times) / 1.2)), max(times) * 12)
        measured = sorted({n for fit in fits for n in fit.nbytes})
        if measured[-1] < 100 * measured[0]:  # there may be no power of ten among them
            ax.set_xticks(measured)
        ax.xaxis.set_major_formatter(lambda nbytes, _: in_words(nbytes, "B"))
        ax.yaxis.set_major_formatter(lambda s, _: in_words(s, "s").replace(".00", ""))
        ax.minorticks_off()
        ax.grid()
        ax.set_xlabel("size n")
        ax.set_ylabel("time, median")
        ranks = max(fit.ranks for fit in fits)
        ax.set_title(f"{ranks} ranks: measured (points), and fitted by latency and bandwidth (lines)")
        ax.legend(loc="upper left", ncols=1 if len(fits) < 3 else 2)
    return ax
