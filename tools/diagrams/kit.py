"""Draws the course's diagrams as SVG: boxes, arrows and text in one style, readable on light and on dark pages.

The background is transparent. Text and lines outside of boxes have an ink whose contrast is 4.4 : 1 on white and on
JupyterLab's dark page, so one file serves both themes: a picture in a notebook cannot know the theme.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final
from xml.sax.saxutils import escape, quoteattr

from labkit.plots.bars import STYLES
from labkit.plots.style import CHIP

INK: Final = "#787878"
# What is done has the colour that it has in the timelines.
FORWARD, BACKWARD, OPTIMIZER, COMPUTE = (STYLES[name].colour for name in ("forward", "backward", "optimizer", "compute"))
COMMUNICATION: Final = STYLES["exposed"].colour
# Who does it, or has it, has one that nothing in the timelines has.
VIOLET: Final = "#8E63C7"
GOLD: Final = "#CCAA00"
OLIVE: Final = "#7F8B2E"
PINK: Final = "#CC79A7"
SUM: Final = "#C8CCD4"
PART_OF_SUM: Final = "#A4ABB8"
EMPTY: Final = "none"
STRIPES: Final = "url(#stripes)"  # as in the timelines: waiting for another rank
SHARES: Final = (VIOLET, GOLD, OLIVE, PINK)  # of ranks 0 to 3: what each of them has
_STRIPES: Final = (
    f'<pattern id="stripes" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    f'<path d="M1,0 V7" stroke="{COMMUNICATION}" stroke-width="2"/></pattern>'
)
# Fills on which black is easier to read than white.
_DARK_TEXT: Final = {GOLD, PINK, SUM, PART_OF_SUM, STRIPES, FORWARD, COMPUTE}
_FONT: Final = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"


class Diagram:
    """A drawing under way; lengths are in pixels, y grows downwards. Title and description are for screen readers."""

    def __init__(self, width: float, height: float, title: str, description: str) -> None:
        self.width, self.height, self.title, self.description = width, height, title, description
        self._parts: list[str] = []
        self._heads: set[str] = set()

    def box(
        self, x: float, y: float, width: float, height: float, text: str = "", *, fill: str = EMPTY, outline: str = "",
        dashed: bool = False, size: float = 14, bold: bool = False, radius: float = 5,
    ) -> None:  # fmt: skip
        """A rectangle with a text in its middle; lines of the text are separated by a newline."""
        edge = outline or (INK if fill == EMPTY else "none")
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" fill="{fill}" stroke="{edge}" '
            f'stroke-width="1.5"{dash}/>'
        )
        color = INK if fill == EMPTY else "#111111" if fill in _DARK_TEXT else "#ffffff"
        lines = text.split("\n") if text else []
        if fill == STRIPES and lines:
            wide, tall = max(map(len, lines)) * size * 0.54 + 6, len(lines) * size * 1.25
            self.box(x + (width - wide) / 2, y + (height - tall) / 2, wide, tall, fill=str(CHIP["facecolor"]), radius=2)
        for number, line in enumerate(lines):
            middle = y + height / 2 + (number - (len(lines) - 1) / 2) * size * 1.25
            self.text(x + width / 2, middle, line, size=size, bold=bold, color=color)

    def text(
        self, x: float, y: float, text: str, *, anchor: str = "middle", size: float = 14, bold: bool = False, color: str = INK
    ) -> None:  # fmt: skip
        """One line of text whose middle is at the height `y`; `anchor` is "start", "middle" or "end"."""
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" dominant-baseline="central" font-size="{size:g}"{weight} '
            f'fill="{color}">{escape(text)}</text>'
        )

    def line(self, *points: tuple[float, float], color: str = INK, width: float = 1.5, dashed: bool = False) -> None:
        """Straight lines through the points."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width:g}"{dash}/>')

    def arrow(
        self, start: tuple[float, float], end: tuple[float, float], text: str = "", *, color: str = INK, bend: float = 0,
        width: float = 2, dashed: bool = False, size: float = 13,
    ) -> None:  # fmt: skip
        """An arrow, with a text beside its middle: above one to the right or left, to the right of one up or down.

        `bend` is how far the middle lies beside the straight line, to the left of the arrow's direction.
        """
        (x1, y1), (x2, y2) = start, end
        length = math.hypot(x2 - x1, y2 - y1) or 1.0
        left = ((y2 - y1) / length, -(x2 - x1) / length)
        middle = ((x1 + x2) / 2 + left[0] * bend * 2, (y1 + y2) / 2 + left[1] * bend * 2)  # of a quadratic curve: twice as far
        self._heads.add(color)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<path d="M{x1:g},{y1:g} Q{middle[0]:g},{middle[1]:g} {x2:g},{y2:g}" fill="none" stroke="{color}" '
            f'stroke-width="{width:g}"{dash} marker-end="url(#head-{color[1:]})"/>'
        )
        if text:
            at = ((x1 + x2) / 2 + left[0] * bend, (y1 + y2) / 2 + left[1] * bend)
            if abs(x2 - x1) >= abs(y2 - y1):
                self.text(at[0], at[1] - 11, text, size=size, color=color)
            else:
                self.text(at[0] + 9, at[1], text, anchor="start", size=size, color=color)

    def both_ways(
        self, start: tuple[float, float], end: tuple[float, float], *, color: str = COMMUNICATION, width: float = 2
    ) -> None:  # fmt: skip
        """An arrow in each direction."""
        self.arrow(start, end, color=color, width=width)
        self.arrow(end, start, color=color, width=width)

    def svg(self) -> str:
        """The picture as the text of an SVG file."""
        stripes = _STRIPES if any(STRIPES in part for part in self._parts) else ""
        heads = "".join(
            f'<marker id="head-{color[1:]}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            f'markerUnits="userSpaceOnUse" orient="auto-start-reverse" overflow="visible">'
            f'<path d="M0,0 L10,5 L0,10 z" fill="{color}" transform="translate(-3,-2) scale(1.4)"/></marker>'
            for color in sorted(self._heads)
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width:g}" height="{self.height:g}" '
            f'viewBox="0 0 {self.width:g} {self.height:g}" role="img" aria-label={quoteattr(self.title)} '
            f'font-family="{_FONT}">\n<title>{escape(self.title)}</title>\n<desc>{escape(self.description)}</desc>\n'
            + (f"<defs>{stripes}{heads}</defs>\n" if stripes or heads else "")
            + "\n".join(self._parts)
            + "\n</svg>\n"
        )


DIAGRAMS: Final[dict[str, Diagram]] = {}  # by the name of the file, without ".svg": those of the imported lessons


def diagram(name: str, width: float, height: float, title: str) -> Callable[[Callable[[Diagram], None]], None]:
    """Decorate a function that draws on a diagram of that size; its docstring is the description."""

    def drawn(draw: Callable[[Diagram], None]) -> None:
        DIAGRAMS[name] = Diagram(width, height, title, " ".join((draw.__doc__ or "").split()))
        draw(DIAGRAMS[name])

    return drawn
