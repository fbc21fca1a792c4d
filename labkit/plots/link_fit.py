"""A measured link: the fit of each operation, and its figure with measured times as points and fits as lines."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np

from labkit.costs.fit import Fit
from labkit.costs.link import Link
from labkit.errors.exceptions import LabError
from labkit.errors.units import in_words, percent
from labkit.plots.style import WIDTH_IN, describe, labkit_style, new_axes, pyplot
from labkit.recording.operations import type_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes


__all__ = ["MeasuredLink", "table", "table_in_markdown"]

MARKERS: Final = "osD^vP*X"  # six colours alone are not distinguishable in print


def _draw(fits: Sequence[Fit], ax: Axes | None = None) -> Axes:
    """Draw at least one fit on logarithmic axes; without `ax`, in a new figure."""
    pyplot()
    with labkit_style(ax):
        if ax is None:
            ax = new_axes(figsize=(WIDTH_IN, 4.2), layout="constrained")
        for number, fit in enumerate(fits):
            colour, marker = type_of(fit.operation).colour, MARKERS[number % len(MARKERS)]
            sizes = np.geomspace(min(fit.nbytes), max(fit.nbytes), 100)
            ax.plot(sizes, [fit.predicted_s(n) for n in sizes.tolist()], color=colour, linewidth=1.4)
            label = f"{fit.operation}: {', '.join(fit.in_short)}, off by {percent(fit.error)}"
            ax.plot(fit.nbytes, fit.seconds, marker, color=colour, markersize=5, label=label)
        ax.set_xscale("log")
        ax.set_yscale("log")
        times = [s for fit in fits for s in fit.seconds]
        # Room below the lowest points, and for the legend above the highest.
        ax.set_ylim(10 ** math.floor(math.log10(min(times) / 1.2)), max(times) * 12)
        measured = sorted({n for fit in fits for n in fit.nbytes})
        if measured[-1] < 100 * measured[0]:  # the range may contain no power of ten
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
    each = "; ".join(f"{fit.operation}: {', '.join(fit.in_short)}" for fit in fits)
    return describe(ax, f"Time by size, measured and fitted: {ranks} ranks. {each}.")


@dataclass(frozen=True)
class MeasuredLink:
    """The result of `labkit.measure_link`: `.link` for predictions, `[operation]` for a fit, `.plot()` for the figure.

    Args:
        fits: one fit for each operation.
    """

    fits: tuple[Fit, ...]

    @cached_property
    def _by_name(self) -> dict[str, Fit]:
        return {fit.operation: fit for fit in self.fits}

    def __getitem__(self, operation: str) -> Fit:
        if operation not in self._by_name:
            raise LabError(f"{operation!r} was not measured; the measured operations are {', '.join(self._by_name)}")
        return self._by_name[operation]

    def __iter__(self) -> Iterator[Fit]:
        return iter(self.fits)

    @property
    def link(self) -> Link:
        """Latency and bandwidth of messages or calls between two ranks; of the first operation if there are none."""
        return self._by_name.get("send", self.fits[0]).link

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the measured times as points and the fits as lines, on logarithmic axes.

        Args:
            ax: the axes to draw into; default: a new figure.

        Returns:
            the Axes.

        Raises:
            LabError: matplotlib is not installed.
        """
        return _draw(self.fits, ax)

    def _rows(self) -> list[list[str]]:
        head = ["operation", "ranks", "latency α", "bandwidth B", "off by (median)", "at most"]
        return [
            head,
            *([f.operation, str(f.ranks), *f.in_short, percent(f.error), percent(f.worst)] for f in self.fits),
        ]

    def __repr__(self) -> str:
        return table(self._rows())

    def _repr_markdown_(self) -> str:
        return table_in_markdown(self._rows())


def table(rows: list[list[str]]) -> str:
    """A table as text: columns of equal width, two spaces apart."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def table_in_markdown(rows: list[list[str]]) -> str:
    """A table in Markdown; the first row is its head."""
    head, *rest = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *rest])
