"""What all figures share: the style sheet, what they accept, and how they say times and sizes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from labkit.errors import LabError, missing
from labkit.trace import Trace

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

__all__ = [
    "GREY",
    "INKS",
    "WIDTH_IN",
    "HasTrace",
    "bytes_in_words",
    "pyplot",
    "ranks_in_words",
    "sheet",
    "shortened",
    "three_digits",
    "time_in_words",
    "trace_of",
    "unit_of",
]

WIDTH_IN: Final = 9.0  # of a notebook's cell
INKS: Final = {"light": "white", "dark": "#16191F", "page": "#16191F"}  # text on bars; a figure's page is white
GREY: Final = "#5A6270"
_STYLE_SHEET: Final = Path(__file__).parent.with_name("labkit.mplstyle")


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


def sheet() -> AbstractContextManager[None]:
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
        raise TypeError(f"{figure}({run!r}): expected a run, as group.run and group.watch return it, or a trace")
    if not len(trace) or trace.duration_ns <= 0:
        raise LabError(
            f"{figure}: there is nothing to draw, since the ranks wrote nothing down (run.trace holds {len(trace)} spans)"
        )
    return trace


def unit_of(duration_ns: float) -> tuple[str, float]:
    """The unit in which a time reads well, and its length in ns."""
    for unit, length_ns in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if duration_ns >= 1.5 * length_ns:
            return unit, length_ns
    return "ns", 1.0


def time_in_words(duration_ns: float) -> str:
    """A time with three digits and its unit: "67.7 ms"."""
    unit, length_ns = unit_of(duration_ns)
    return f"{three_digits(duration_ns / length_ns)} {unit}"


def bytes_in_words(nbytes: float) -> str:
    """A size in powers of ten: "4.19 MB"."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{three_digits(nbytes / size)} {unit}"
    return f"{nbytes:.0f} B"


def shortened(text: str, most: int) -> str:
    """A text of at most so many characters: both ends of a longer one, since names of methods differ in their last words."""
    if len(text) <= most:
        return text
    end = (most - 1) // 2
    return f"{text[: most - 1 - end]}…{text[-end:]}"


def ranks_in_words(trace: Trace) -> str:
    """How many ranks: "4 ranks", or the name of the only one."""
    return f"{len(trace.ranks)} ranks" if len(trace.ranks) > 1 else trace.ranks[0]


def three_digits(value: float) -> str:
    """A number of three digits, or more where they stand before the point."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
