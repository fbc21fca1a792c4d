"""A figure of the commonest mistakes of a class: the hints that its answers were given, and how many got each."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from labkit.plots.image import WIDTH_IN
from labkit.plots.style import INK, describe, labkit_style, new_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOUR: Final = "#d55e00"  # of a wrong answer, as in its verdict
MOST_SHOWN: Final = 12
CHARACTERS: Final = 58  # of a hint in one line
MOST_LINES: Final = 3


def draw_mistakes(mistakes: Sequence[tuple[str, str, int]], students: int) -> Axes:
    """Draw the commonest mistakes as bars.

    Args:
        mistakes: exercise, hint and number of students, most frequent first.
        students: how many students there are.
    """
    shown = mistakes[:MOST_SHOWN]
    labels = [_wrapped(f"{exercise}: {hint}") for exercise, hint, _ in shown]
    lines = [label.count("\n") + 1.6 for label in labels]  # with the space below
    with labkit_style():
        from matplotlib.ticker import MaxNLocator

        ax = new_axes(figsize=(WIDTH_IN, 0.8 + 0.155 * sum(lines)), layout="constrained")
        places = [sum(lines[:i]) + n / 2 for i, n in enumerate(lines)]
        counts = [count for *_, count in shown]
        ax.barh(places, counts, height=1.0, color=COLOUR)
        for place, count in zip(places, counts, strict=True):
            ax.annotate(str(count), (count, place), (4, 0), textcoords="offset points", va="center")
        ax.set_yticks(places, labels, fontsize=8)
        ax.tick_params(axis="y", length=0)
        ax.set_ylim(sum(lines) or 1, 0)
        ax.set_xlim(0, max([*counts, 1]) * 1.12)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.set_xlabel("students", color=INK)
        ax.set_title(f"The commonest mistakes of {students} students")
    each = "; ".join(f"{exercise}, {count}: {hint}" for exercise, hint, count in shown)
    return describe(ax, f"Mistakes by the number of students that made them. {each}.")


def _wrapped(hint: str) -> str:
    return "\n".join(textwrap.wrap(hint, CHARACTERS, max_lines=MOST_LINES, placeholder=" …"))
