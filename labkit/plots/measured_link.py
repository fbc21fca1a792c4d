"""What `lab.measure_link` returns: the fits of a link or of each level of a network, as a table and as a figure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from labkit.costs.fit import Fit
from labkit.costs.link import Link
from labkit.costs.network import Network
from labkit.errors.exceptions import LabError
from labkit.errors.lists import Table
from labkit.errors.units import in_words, percent
from labkit.errors.wrong_calls import public_api
from labkit.plots.image import WIDTH_IN
from labkit.plots.style import INK, axes_for, describe, labkit_style, new_figure, pyplot
from labkit.recording.operations import type_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes


LEVELS: Final = ("inside", "between")
MARKERS: Final = "osD^vP*X"  # six colours alone are not distinguishable in print


def _draw(fits: Sequence[Fit], ax: Axes | None = None) -> Axes:
    """Draw at least one fit on logarithmic axes; without `ax`, in a new figure."""
    with axes_for(ax, 4.2) as ax:
        for number, fit in enumerate(fits):
            colour, marker = type_of(fit.operation).colour, MARKERS[number % len(MARKERS)]
            sizes = np.geomspace(min(fit.nbytes), max(fit.nbytes), 100)
            ax.plot(sizes, [fit.predicted_s(n) for n in sizes.tolist()], color=colour, linewidth=1.4)
            label = f"{fit.operation}: {', '.join(fit.in_short)}, off by {percent(fit.error)}"
            ax.plot(fit.nbytes, fit.seconds, marker, color=colour, markeredgecolor=INK, markersize=5.5, label=label)
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


class _Shown:
    """Something that a notebook shows as a table; `print` shows the same as text."""

    def _table(self) -> Table:
        raise NotImplementedError

    def __repr__(self) -> str:
        return "\n".join(line.rstrip() for line in self._table().lines())

    def _repr_html_(self) -> str:
        return self._table().html("text-align:{};padding:2px 12px")


@dataclass(frozen=True, repr=False)
class MeasuredLink(_Shown):
    """What `labkit.measure_link` returns: `.link` for predictions, `[operation]` for a fit, `.plot()` to draw."""

    fits: tuple[Fit, ...]  # one fit for each operation

    def __getitem__(self, operation: str) -> Fit:
        by_name = {fit.operation: fit for fit in self.fits}
        if operation not in by_name:
            raise LabError(f"{operation!r} was not measured; the measured operations are {', '.join(by_name)}")
        return by_name[operation]

    def __iter__(self) -> Iterator[Fit]:
        return iter(self.fits)

    @property
    def link(self) -> Link:
        """Latency and bandwidth of messages or calls between two ranks; of the first operation if there are none."""
        return next((fit for fit in self.fits if fit.operation == "send"), self.fits[0]).link

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the measured times as points and the fits as lines, on logarithmic axes."""
        return _draw(self.fits, ax)

    def _table(self) -> Table:
        head = ["operation", "ranks", "latency α", "bandwidth B", "off by (median)", "at most"]
        rows = [[f.operation, str(f.ranks), *f.in_short, percent(f.error), percent(f.worst)] for f in self.fits]
        return Table(head, rows, range(len(head)))


@dataclass(frozen=True, repr=False)
class MeasuredNetwork(_Shown):
    """The result of `labkit.measure_link` for a group on several nodes: a `MeasuredLink` for each level.

    `.inside` and `.between` are the levels, `.link` is the network for predictions, `.plot()` draws the figure.
    """

    network: Network | None  # the `labkit.Network` that the group emulates; None for real machines
    inside: MeasuredLink  # what was measured among the ranks of the first node
    between: MeasuredLink  # what was measured among the first ranks of all nodes
    nodes: int  # the numbers of nodes and of ranks
    ranks: int

    def __getitem__(self, level: str) -> MeasuredLink:
        if level not in LEVELS:
            raise LabError(f"{level!r} is not a level; expected 'inside' or 'between', as in measured['inside']['send']")
        found: MeasuredLink = getattr(self, level)
        return found

    def __iter__(self) -> Iterator[Fit]:
        return iter((*self.inside, *self.between))

    @property
    def link(self) -> Network:
        """The network with the fitted latency and bandwidth of each level.

        Its nodes have equally many ranks, or almost, even if the measured machines do not.
        """
        return Network(nodes=self.nodes, inside=self.inside.link, between=self.between.link, ranks=self.ranks)

    @public_api
    def plot(self, expected: Network | None = None) -> Axes:
        """Draw both levels: measured times as points, fits as lines, and the times over the expected links dashed.

        Args:
            expected: the network to compare with; default: the emulated one, if there is one.

        Returns:
            the upper Axes, of the level inside; the other Axes of its figure is that between.

        Raises:
            TypeError: `expected` is no network.
            LabError: matplotlib is not installed.
        """
        pyplot()
        with labkit_style():
            figure = new_figure(figsize=(WIDTH_IN, 8.2), layout="constrained")
            axes = figure.subplots(2, sharex=True)
            model = expected or self.network
            for ax, level in zip(axes, LEVELS, strict=True):
                _draw_level(ax, self[level], level, None if model is None else getattr(model, level))
            axes[0].set_xlabel("")
        each = "; ".join(f"{level}, {fit.operation}: {', '.join(fit.in_short)}" for level in LEVELS for fit in self[level])
        upper: Axes = axes[0]
        return describe(upper, f"Time by size, measured and fitted, inside the nodes and between them. {each}.")

    def _table(self) -> Table:
        emulated = ["emulated"] if self.network is not None else []
        head = ["level", "operation", "ranks", "latency α", *emulated, "bandwidth B", *emulated, "off by (median)", "at most"]
        rows = []
        for level in LEVELS:
            given: list[list[str]] = [[], []]
            if self.network is not None:
                link: Link = getattr(self.network, level)
                given = [[in_words(link.latency_s, "s")], [in_words(link.gbit_per_s * 1e9, "bit/s")]]
            for fit in self[level]:
                found = [value for fitted, others in zip(fit.in_short, given, strict=True) for value in (fitted, *others)]
                rows.append([level, fit.operation, str(fit.ranks), *found, f"{fit.error:.0%}", f"{fit.worst:.0%}"])
        return Table(head, rows, range(len(head)))


def _draw_level(ax: Axes, measured: MeasuredLink, level: str, link: Link | None) -> None:
    measured.plot(ax)
    for number, fit in enumerate(measured if link is not None else ()):
        assert link is not None
        sizes = np.geomspace(min(fit.nbytes), max(fit.nbytes), 100).tolist()
        times = [link.seconds(fit.operation, n, fit.ranks) for n in sizes]
        ax.plot(sizes, times, color=INK, linewidth=1, linestyle="dashed", label=f"over {link}" if not number else "_")
        ax.set_ylim(bottom=min(ax.get_ylim()[0], min(times) / 2))
    where = "inside a node" if level == "inside" else "between nodes"
    dashed = "" if link is None else ", over the expected link (dashed)"
    ax.set_title(f"{where}, {max(fit.ranks for fit in measured)} ranks: measured (points), fitted (lines){dashed}")
    ax.legend(loc="upper left", ncols=1 if len(measured.fits) < 3 else 2)
