"""The figures that labkit draws: in a notebook, each shows itself with its alternative text."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from matplotlib.backend_bases import RendererBase
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from labkit.plots.image import show


@contextlib.contextmanager
def _missing_characters_allowed() -> Iterator[None]:
    """No warnings about characters of the student's names, who cannot change labkit's fonts."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        yield


class LabFigure(Figure):
    """A figure that fills the width of the page, on a transparent page, with alternative text.

    Everywhere else, as with `savefig`, it is an ordinary figure.
    """

    alt_text = ""
    numbers: Mapping[str, Any] = MappingProxyType({})  # by MIME type

    def draw(self, renderer: RendererBase) -> None:
        """Draw; characters that no installed font has become boxes."""
        with _missing_characters_allowed():
            super().draw(renderer)

    def get_tightbbox(self, *args: Any, **options: Any) -> Bbox:
        """See `Figure`; this, too, looks for the characters."""
        with _missing_characters_allowed():
            return super().get_tightbbox(*args, **options)

    def _ipython_display_(self) -> None:
        """Matplotlib's inline backend displays the figures of a cell when the cell has ended."""
        show(self, self.alt_text or "figure", self.numbers)
