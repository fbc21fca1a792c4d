"""The critical path as one line over the rows of a timeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from labkit.plots.message_arrows import COLOUR, OUTLINE
from labkit.plots.rows import Row
from labkit.replaying.critical_path import Piece

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# As a fraction of the row, at the lower edge of each lane: in its middle, the line would cross out the captions.
HEIGHTS: Final = {"communication": 0.88}
OTHER_HEIGHT: Final = 0.58


def draw_path(ax: Axes, pieces: Sequence[Piece], rows: Sequence[Row], top: float, start_ns: int, unit_ns: float) -> None:
    """Draw the path.

    Args:
        ax: the timeline.
        pieces: the path.
        rows: the rows of the run.
        top: where the first of them begins.
        start_ns: the start of the axis.
        unit_ns: the length of its unit.
    """
    first = {row.rank: number for number, row in reversed([*enumerate(rows)])}
    x, y = [], []
    for piece in pieces:
        x += [(time - start_ns) / unit_ns for time in (piece.start_ns, piece.end_ns)]
        y += [top + first[piece.rank] + HEIGHTS.get(piece.kind, OTHER_HEIGHT)] * 2
    ax.plot(x, y, **path_line(), zorder=6)


def path_line() -> dict[str, Any]:
    """The look of the line: light in a dark outline, so that it is visible on bars, and on light and dark pages."""
    from matplotlib.patheffects import withStroke

    outline = [withStroke(linewidth=3.4, foreground=OUTLINE)]
    return {"color": COLOUR, "linewidth": 1.6, "solid_joinstyle": "round", "path_effects": outline, "label": "critical path"}
