"""The matplotlib backend of ranks: it opens no windows, and `plt.show()` displays figures below the cell.

matplotlib imports it by name; no other module does, because a rank without figures must not load matplotlib.
"""

from __future__ import annotations

import builtins
import sys
from typing import Any

from matplotlib.backend_bases import FigureManagerBase
from matplotlib.backends.backend_agg import FigureCanvasAgg


class FigureManager(FigureManagerBase):
    """Manages one figure for pyplot."""

    @classmethod
    def pyplot_show(cls, *, block: bool | None = None) -> None:  # noqa: ARG003  # matplotlib's signature
        """Display all open figures, and close them."""
        pyplot: Any = sys.modules["matplotlib.pyplot"]
        show = getattr(builtins, "display", print)  # `print` in a program that a rank has started
        for number in pyplot.get_fignums():
            figure = pyplot.figure(number)
            pyplot.close(figure)
            show(figure)

    def show(self) -> None:
        """Display this figure; called by `figure.show()`."""
        getattr(builtins, "display", print)(self.canvas.figure)


class FigureCanvas(FigureCanvasAgg):
    """Draws into memory."""

    manager_class = FigureManager
