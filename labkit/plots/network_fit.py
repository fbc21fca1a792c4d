"""A measured network: the fits of each level, beside the links that the group emulates, and its figure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from labkit.costs.fit import Fit
from labkit.costs.link import Link
from labkit.costs.network import Network
from labkit.errors.exceptions import LabError
from labkit.errors.units import in_words
from labkit.plots.link_fit import MeasuredLink, table, table_in_markdown
from labkit.plots.style import INK, WIDTH_IN, describe, labkit_style, new_figure, pyplot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["MeasuredNetwork"]

LEVELS: Final = ("inside", "between")


@dataclass(frozen=True)
class MeasuredNetwork:
    """The result of `labkit.measure_link` for a group with a `labkit.Network`: a `MeasuredLink` for each level.

    `.inside` and `.between` are the levels, `.link` is the network for predictions, `.plot()` draws the figure.

    Args:
        network: the network that the group emulates.
        inside: what was measured among the ranks of the first node.
        between: what was measured among the first ranks of all nodes.
    """

    network: Network
    inside: MeasuredLink
    between: MeasuredLink

    def __getitem__(self, level: str) -> MeasuredLink:
        if level not in LEVELS:
            raise LabError(f"{level!r} is not a level; expected 'inside' or 'between', as in measured['inside']['send']")
        found: MeasuredLink = getattr(self, level)
        return found

    def __iter__(self) -> Iterator[Fit]:
        return iter((*self.inside, *self.between))

    @property
    def link(self) -> Network:
        """The network with the fitted latency and bandwidth of each level."""
        return Network(nodes=self.network.nodes, inside=self.inside.link, between=self.between.link, ranks=self.network.ranks)

    def plot(self) -> Axes:
        """Draw both levels: measured times as points, fits as lines, and the times over the emulated links dashed.

        Returns:
            the upper Axes, of the level inside; the other Axes of its figure is that between.

        Raises:
            LabError: matplotlib is not installed.
        """
        pyplot()
        with labkit_style():
            figure = new_figure(figsize=(WIDTH_IN, 8.2), layout="constrained")
            axes = figure.subplots(2, sharex=True)
            for ax, level in zip(axes, LEVELS, strict=True):
                _draw_level(ax, self[level], level, getattr(self.network, level))
            axes[0].set_xlabel("")
        each = "; ".join(f"{level}, {fit.operation}: {', '.join(fit.in_short)}" for level in LEVELS for fit in self[level])
        upper: Axes = axes[0]
        return describe(upper, f"Time by size, measured and fitted, inside the nodes and between them. {each}.")

    def _rows(self) -> list[list[str]]:
        rows = [["level", "operation", "ranks", "latency α", "emulated", "bandwidth B", "emulated", "off by (median)", "at most"]]
        for level in LEVELS:
            link: Link = getattr(self.network, level)
            given = in_words(link.latency_s, "s"), in_words(link.gbit_per_s * 1e9, "bit/s")
            for fit in self[level]:
                found = [value for pair in zip(fit.in_short, given, strict=True) for value in pair]
                rows.append([level, fit.operation, str(fit.ranks), *found, f"{fit.error:.0%}", f"{fit.worst:.0%}"])
        return rows

    def __repr__(self) -> str:
        return table(self._rows())

    def _repr_markdown_(self) -> str:
        return table_in_markdown(self._rows())


def _draw_level(ax: Axes, measured: MeasuredLink, level: str, link: Link) -> None:
    measured.plot(ax)
    for number, fit in enumerate(measured):
        sizes = np.geomspace(min(fit.nbytes), max(fit.nbytes), 100).tolist()
        times = [link.seconds(fit.operation, n, fit.ranks) for n in sizes]
        ax.plot(sizes, times, color=INK, linewidth=1, linestyle="dashed", label=f"over {link}" if not number else "_")
        ax.set_ylim(bottom=min(ax.get_ylim()[0], min(times) / 2))
    where = "inside a node" if level == "inside" else "between nodes"
    ranks = max(fit.ranks for fit in measured)
    ax.set_title(f"{where}, {ranks} ranks: measured (points), fitted (lines), over the emulated link (dashed)")
    ax.legend(loc="upper left", ncols=1 if len(measured.fits) < 3 else 2)
