"""The figures that labkit draws: in a notebook, each shows itself with its alternative text."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from matplotlib.figure import Figure

from labkit.plots.image import show

__all__ = ["LabFigure"]


class LabFigure(Figure):
    """A figure that fills the width of the page, on a transparent page, with alternative text.

    Everywhere else, as with `savefig`, it is an ordinary figure.
    """

    alt_text = ""
    numbers: Mapping[str, Any] = MappingProxyType({})  # by MIME type

    def _ipython_display_(self) -> None:
        """Matplotlib's inline backend displays the figures of a cell when the cell has ended."""
        show(self, self.alt_text or "figure", self.numbers)
