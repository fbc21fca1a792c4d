"""The matplotlib backend of ranks: no windows; `plt.show()` shows the figures under the cell, as in a notebook."""

from __future__ import annotations

import builtins
import sys
from typing import Any

from matplotlib.backend_bases import FigureManagerBase
from matplotlib.backends.backend_agg import FigureCanvasAgg

__all__ = ["FigureCanvas", "FigureManager"]


class FigureManager(FigureManagerBase):
    """Holds a figure until it is shown."""

    @classmethod
    def pyplot_show(cls, *, block: bool | None = None) -> None:  # noqa: ARG003  # there is nothing to wait for
        """Show all figures that are open, and close them."""
        pyplot: Any = sys.modules["matplotlib.pyplot"]
        show = getattr(builtins, "display", print)  # a program that a rank has started inherits this backend, but is no rank
        for number in pyplot.get_fignums():
            figure = pyplot.figure(number)
            pyplot.close(figure)
            show(figure)

    def show(self) -> None:
        """Show this one; `figure.show()`."""
        getattr(builtins, "display", print)(self.canvas.figure)


class FigureCanvas(FigureCanvasAgg):
    """Draws into memory."""

    manager_class = FigureManager
