"""What all figures share: the style sheet, and what they accept."""

from __future__ import annotations

import reprlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from labkit.errors.exceptions import LabError, missing
from labkit.tracing.trace import Trace

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

__all__ = [
    "GREY",
    "INKS",
    "WIDTH_IN",
    "HasTrace",
    "labkit_style",
    "pyplot",
    "ranks_in_words",
    "shortened",
    "trace_of",
]

WIDTH_IN: Final = 9.0  # of a notebook's cell
INKS: Final = {"light": "white", "dark": "#16191F", "page": "#16191F"}  # text on bars; a figure's page is white
GREY: Final = "#5A6270"
_STYLE_SHEET: Final = Path(__file__).with_name("labkit.mplstyle")


class HasTrace(Protocol):
    """A `Run`, or whatever else has a trace."""

    @property
    def trace(self) -> Trace:
        """The spans of all ranks."""


def pyplot() -> Any:
    """matplotlib.pyplot, which only those who draw pay for."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise missing("matplotlib", "plot") from None
    # Wakes the backend. Jupyter's turns interactive mode on as it wakes; if that happened inside `sheet`, leaving it would turn
    # the mode off again, and the notebook would show its first figure and no other.
    plt.draw_if_interactive()
    return plt


def labkit_style() -> AbstractContextManager[None]:
    """Inside this context, figures have labkit's look."""
    import matplotlib.style

    return matplotlib.style.context(_STYLE_SHEET)


def trace_of(run: HasTrace | Trace, figure: str) -> Trace:
    """The trace of a run, if there is something in it to draw.

    Args:
        run: a run or a trace.
        figure: the name of the function that asks, for the messages.

    Raises:
        LabError: the trace is empty.
        TypeError: `run` is neither.
    """
    trace = run if isinstance(run, Trace) else getattr(run, "trace", None)
    if not isinstance(trace, Trace):
        if isinstance(run, list | tuple):
            hint = f"; several are given one by one, {figure}(a, b)" if figure == "timeline" else "; give one"
        else:
            hint = "; group.last_run is a group's last one" if hasattr(run, "last_run") else ""
        raise TypeError(
            f"{figure}({reprlib.repr(run)}): expected a run, as group.run and group.watch return it, or a trace{hint}"
        )
    if not len(trace) or trace.duration_ns <= 0:
        raise LabError(
            f"{figure}: there is nothing to draw, since the ranks wrote nothing down (run.trace holds {len(trace)} spans)"
        )
    return trace


def shortened(text: str, most: int) -> str:
    """A text of at most so many characters: both ends of a longer one, since names of methods differ in their last words."""
    if len(text) <= most:
        return text
    end = (most - 1) // 2
    return f"{text[: most - 1 - end]}…{text[-end:]}"


def ranks_in_words(trace: Trace) -> str:
    """How many ranks: "4 ranks", or the name of the only one."""
    return f"{len(trace.ranks)} ranks" if len(trace.ranks) > 1 else trace.ranks[0]
