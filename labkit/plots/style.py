"""Shared by all figures: the style sheet, and the check of the run or trace that they are given."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from labkit.errors.exceptions import missing
from labkit.tracing.trace import Trace

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

__all__ = [
    "GREY",
    "INKS",
    "WIDTH_IN",
    "labkit_style",
    "pyplot",
    "ranks_in_words",
    "shortened",
]

WIDTH_IN: Final = 9.0  # of a notebook's cell
INKS: Final = {"light": "white", "dark": "#16191F", "page": "#16191F"}  # text on bars; a figure's page is white
GREY: Final = "#5A6270"
_STYLE_SHEET: Final = Path(__file__).with_name("labkit.mplstyle")


def pyplot() -> Any:
    """Import matplotlib.pyplot, which is only needed to draw.

    Raises:
        LabError: matplotlib is not installed.
    """
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise missing("matplotlib", "plot") from None
    # Initializes the backend. Jupyter's turns interactive mode on at that moment; inside `labkit_style`, leaving the
    # context would turn it off again, and the notebook would show only its first figure.
    plt.draw_if_interactive()
    return plt


def labkit_style() -> AbstractContextManager[None]:
    """A context in which figures have labkit's style."""
    import matplotlib.style

    return matplotlib.style.context(_STYLE_SHEET)


def shortened(text: str, most: int) -> str:
    """Shorten a text in its middle to at most `most` characters: names of methods often differ in their last words."""
    if len(text) <= most:
        return text
    end = (most - 1) // 2
    return f"{text[: most - 1 - end]}…{text[-end:]}"


def ranks_in_words(trace: Trace) -> str:
    """The number of ranks, as in "4 ranks"; of a single rank, its name."""
    return f"{len(trace.ranks)} ranks" if len(trace.ranks) > 1 else trace.ranks[0]
