"""A frame of the live picture as an SVG string with the colours and the geometry of the timeline.

The SVG is built without matplotlib: this takes about 2 ms, a matplotlib figure 100 ms. Its size is bounded, its height
is the same in all frames of a run, and everything except the bars has the theme's colours, light or dark.

A frame that is not replaced fades, and says that it was saved while the ranks were running. A reloaded page gets no
further frames, since a front end ignores updates of cells that it did not run itself. Only the frame that is shown at
a debugger's prompt stays, however long the student thinks.

JupyterLab removes styles, scripts and drawings from the outputs of a notebook that is not trusted, and keeps the texts
of the drawings. So the drawing is hidden unless the style is there, and instead a sentence says what happened.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from html import escape
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from labkit.errors.units import bytes_in_words, clock_time, round_stride, unit_of
from labkit.launch.resource_usage import Load
from labkit.plots.bars import ALONE, LANES, STYLES, Bars, blend, caption, captioned, coverage, ink, lanes
from labkit.plots.image import STAYS
from labkit.plots.live.curves import COLOUR, EACH_RANK, attempts
from labkit.plots.style import shortened
from labkit.plots.view import RESTARTED
from labkit.tracing.trace import Trace

Cells = tuple[NDArray[np.float64], NDArray[np.float64]]  # covered time in ns of each lane, shape (styles, bins)


@dataclass(slots=True)
class LiveRow:
    """A rank in a frame."""

    name: str
    status: str
    blocked: bool
    load: Load = field(default_factory=Load)
    ended_ns: int | None = None  # when its process ended, in ns since the run's start; None while it lives


@dataclass(slots=True)
class Curve:
    """A recorded value over the time that the strip shows."""

    name: str  # the name given to `lab.record`
    # the mean of each bin, per rank and then over all ranks, shape (ranks + 1, bins); NaN for empty bins
    means: NDArray[np.float64]


@dataclass(slots=True)
class Past:
    """The run so far, in bins."""

    cells: list[Cells]  # per rank, the covered time of its lanes' bins
    shown_ns: int  # the time that the bins cover

    def styles(self) -> set[int]:
        """Return the numbers of the styles that occur in it."""
        return {int(number) for lanes in self.cells for lane in lanes for number in np.flatnonzero(lane.any(axis=1))}


@dataclass(slots=True)
class Detail:
    """A part of the run that is drawn bar by bar."""

    trace: Trace
    extent_ns: int
    label: str
    # start and end of the part in ns since the run's start; None if it is the whole run
    marked: tuple[int, int] | None = None
    styles: set[int] = field(default_factory=set)  # the numbers of the styles drawn in it


@dataclass(slots=True)
class LiveFrame:
    """The content of one frame."""

    title: str  # the function and the ranks: "train on 4 ranks"
    elapsed_ns: int
    fraction: float | None  # completed fraction of the loop, from 0 to 1; None if unknown
    progress: tuple[str, ...]  # texts for steps, rate, time left, and values; "" if unknown
    rows: list[LiveRow]
    past: Past  # the content of the strip
    detail: Detail | None  # the content of the rows; None: the same as the strip
    curve: Curve | None = None  # the first recorded value with several points; None if there is none yet
    restarts_ns: list[int] = field(default_factory=list)  # when all ranks had been replaced, in ns since the run's start
    held: bool = False  # whether it stays for as long as the student thinks at a debugger's prompt

    @property
    def in_words(self) -> str:
        """The progress in one line."""
        return "  ·  ".join(part for part in self.progress if part) or clock_time(self.elapsed_ns / 1e9, tenths=True)


WIDTH: Final = 1000.0  # of the drawing, in SVG units: pixels if the page has that width
RIGHT: Final = 165.0  # to the right of the rows, for the ranks' statuses and memory, if a row has two lines of text
SLOTS: Final = (0.0, 150.0, 245.0, 395.0, 505.0)  # x of steps, rate, time left, and values: fixed, so texts do not move
FOOT: Final = 66.0  # height of axis and legend
LOWEST: Final = 0.85  # of its height on a page of `WIDTH`: on narrower pages letters become narrower, but not lower
CURVE: Final = 60.0  # how far the curve reaches into the width of the rows, above them
CHARACTER: Final = 6.1  # mean width of a character at 11 units
BARS_IN_ALL: Final = 1600  # more bars are drawn as cells, so that a frame stays below 100 kB
CELLS_IN_ALL: Final = 2048
TEXTS_PER_LANE: Final = 12
COARSE: Final = 15  # mixed colours are rounded to this many steps from 0 to 1, so that similar neighbours are merged
HEAD: Final = 58.0  # height of title and progress
STILL_S: Final = 10  # longer than any live frame stays, even on a busy machine
STILL: Final = (
    "This picture is no longer live: it was saved while the ranks were running.",
    "When the run is over, lab.timeline(run) draws it, and run.output has the prints.",
)
TWO_LINES: Final = 30.0  # a row of this height has room for status and memory below each other
ONE_LINE: Final = 215.0  # width to the right of lower rows
GAP: Final = 8.0  # minimum between a rank's status and its resource usage
# Widths relative to the font size, those of DejaVu Sans Bold: the widest font that systems use for their interfaces.
NARROW: Final = frozenset("ijlIft.,:;'|![]() -")
WIDEST: Final = frozenset("mwMW@%…")
SINCE: Final = " · "  # between a rank's operation and how long it has lasted
_SOFT: Final = ' opacity=".65"'
_PAPER: Final = "var(--jp-layout-color0,var(--vscode-editor-background,white))"
_HALO: Final = f' paint-order="stroke" stroke-width="3" stroke="{_PAPER}"'
_LINE: Final = 'fill="currentColor" fill-opacity=".5"'
_RESTART: Final = 'stroke="currentColor" stroke-width="1.6" stroke-dasharray="4 2"'
_NAMES: Final = tuple(STYLES)
_COMMUNICATION: Final = _NAMES.index("exposed")  # from this style on, styles belong to the lower lane

_STYLE: Final = (
    f"{STAYS}<style>.labkit-live{{display:block!important;"
    # The theme's text colour in JupyterLab and in VS Code, otherwise the page's.
    "color:var(--jp-ui-font-color1,var(--vscode-editor-foreground,inherit));"
    "font-family:var(--jp-ui-font-family,system-ui,sans-serif);font-size:11px}"
    ".labkit-live~.labkit-not-live{display:none}</style>"
)
# Shift+Enter may leave the picture below the window; a picture far away from the window does not call the reader back.
_COME: Final = (
    "<script>{const shown=document.currentScript.parentElement,{top,bottom}=shown.getBoundingClientRect();"
    "if(top<2*innerHeight&&bottom>-innerHeight)shown.scrollIntoView({block:'nearest'})}</script>"
)


def page(frame: LiveFrame, name: str, *, first: bool = False) -> str:
    """Return a frame as HTML; `name` makes its ids unique in the page, and the `first` one comes into the window."""
    return (
        f'{_STYLE}<div class="labkit-live" hidden="hidden">{svg(frame, name)}</div>'
        f'<p class="labkit-not-live">{" ".join(STILL)}</p>{_COME if first else ""}'
    )


def svg(frame: LiveFrame, name: str) -> str:
    """Draw a frame; `name` is a prefix that makes the SVG's ids unique in the page."""
    return _Drawing(frame, name).svg()


@dataclass(slots=True)
class _Pen:
    """Collects shapes by fill, so that a drawing has few elements; texts are drawn above them."""

    paths: dict[str, list[str]] = field(default_factory=dict)
    above: list[str] = field(default_factory=list)

    def box(self, fill: str, x: float, y: float, width: float, height: float) -> None:
        """Add a rectangle with this fill attribute."""
        self.paths.setdefault(fill, []).append(f"M{x:.1f} {y:.1f}h{width:.1f}v{height:.1f}h-{width:.1f}z")

    def text(self, x: float, y: float, text: str, more: str = "") -> None:
        """Add a text with more attributes."""
        if text:
            self.above.append(f'<text x="{x:.1f}" y="{y:.1f}"{more}>{escape(text)}</text>')

    def drawn(self) -> str:
        """Return all shapes and texts as SVG."""
        return "".join(f'<path {fill} d="{"".join(parts)}"/>' for fill, parts in self.paths.items()) + "".join(self.above)


class _Drawing:
    """Draws one frame."""

    def __init__(self, frame: LiveFrame, name: str) -> None:
        self.frame = frame
        self.name = name
        self.count = len(frame.rows)
        self.left = max(14 + CHARACTER * max(min(len(row.name), 16) for row in frame.rows), 64)
        self.row_high = float(min(max(round(170 / self.count), 10), 40))
        self.two_lines = self.row_high >= TWO_LINES
        self.wide = WIDTH - self.left - (RIGHT if self.two_lines else ONE_LINE)
        self.head = self.wide - CURVE  # of progress and strip
        self.strip_high = min(max(5.0 * self.count, 12), 40)
        self.top = HEAD + self.strip_high + 12
        self.bottom = self.top + self.count * self.row_high
        self.pen = _Pen()

    def svg(self) -> str:
        frame = self.frame
        self._head()
        drawn = self._strip() + self._rows()
        for number, row in enumerate(frame.rows):
            middle = self.top + (number + 0.5) * self.row_high + 4
            font = min(11.0, self.row_high)
            size = f' font-size="{font:g}"'
            self.pen.text(self.left - 8, middle, shortened(row.name, 16), ' text-anchor="end"' + size)
            at = self.left + self.wide + 8
            used = self._load(row, middle + 7.5 * self.two_lines, size)
            if row.ended_ns is not None:
                self._ended(row.ended_ns, self.top + (number + 0.5) * self.row_high)
            text = fitting_status((WIDTH - (4 if self.two_lines else used) - at - GAP) / font, row.status)
            self.pen.text(at, middle - 6.5 * self.two_lines, text, size + (' font-weight="600"' if row.blocked else _SOFT))
        if any(row.load.nbytes for row in frame.rows):
            label = "own memory" if all(row.load.busy is None for row in frame.rows) else "GPU busy, its memory"
            at, anchor = (self.left + self.wide + 8, "start") if self.two_lines else (WIDTH - 4, "end")
            self.pen.text(
                at, self.bottom + (27 if self.two_lines else 14), label, f' text-anchor="{anchor}" font-size="9.5"' + _SOFT
            )
        if frame.curve is not None:
            self._curve(frame.curve)
        self._axis()
        label = escape(f"{frame.title}: {frame.in_words}", quote=True)
        fades = f'<animate attributeName="opacity" to=".2" begin="{STILL_S}s" dur=".5s" fill="freeze"/>'
        high = self.bottom + FOOT
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {high:g}" preserveAspectRatio="none" role="img" '
            f'aria-label="{label}" fill="currentColor" style="display:block;width:100%;min-height:{LOWEST * high:.0f}px">'
            f"{_hatch(self.name)}<g>{drawn}{self.pen.drawn()}{self._legend()}"
            f"{'</g>' if frame.held else f'{fades}</g>{self._still()}'}</svg>"
        )

    def _legend(self) -> str:
        """Draw the legend: the visible styles of the upper lane, and those of the lower lane."""
        styles = self.frame.past.styles() | (self.frame.detail.styles if self.frame.detail else set())
        pen, x, y, lower = _Pen(), self.left, self.bottom + 43, False
        if self.frame.restarts_ns:
            pen.above.append(f'<path d="M{x + 7:.1f} {y + 2:g}v-10" {_RESTART}/>')
            pen.text(x + 18, y, RESTARTED, ' font-size="10"')
            x += 34 + 5.5 * len(RESTARTED)
        for number, (style, look) in enumerate(STYLES.items()):
            if number not in styles:
                continue
            words = ALONE if self.count == 1 and style == "waiting" else look.legend
            wide, travels = 34 + 5.5 * len(words), number >= _COMMUNICATION
            if (not lower and travels and x > self.left) or x + wide - 16 > WIDTH:
                x, y = self.left, y + 16
            lower = travels
            pen.box(_fill(self.name, style), x, y - 7.5, 14, 9)
            pen.text(x + 18, y, words, ' font-size="10"')
            x += wide
        return pen.drawn()

    def _load(self, row: LiveRow, y: float, size: str) -> float:
        """Draw the rank's resource usage, below its status or at the right margin, and return its width there."""
        reaches, font = 4.0, min(11.0, self.row_high)
        if self.two_lines:
            x = self.left + self.wide + 8
            if row.load.busy is not None:
                self.pen.text(x, y, f"{row.load.busy} %", size + _SOFT)
                x += 42
            self.pen.text(x, y, bytes_in_words(row.load.nbytes) if row.load.nbytes else "", size + _SOFT)
            return reaches
        if row.load.nbytes:
            text = bytes_in_words(row.load.nbytes)
            self.pen.text(WIDTH - 4, y, text, ' text-anchor="end"' + size)
            reaches += text_width(text) * font
        if row.load.busy is not None:
            self.pen.text(WIDTH - 58, y, f"{row.load.busy} %", ' text-anchor="end"' + size)
            reaches = 58 + text_width(f"{row.load.busy} %") * font
        return reaches

    def _still(self) -> str:
        """Return the text that appears in a frame that was not replaced."""
        pen, x, y = _Pen(), WIDTH / 2, (self.top + self.bottom) / 2
        for line, text in enumerate(STILL):
            pen.text(x, y + 18 * line, text, ' text-anchor="middle" font-size="13" font-weight="600"')
        return f'<g visibility="hidden"><set attributeName="visibility" to="visible" begin="{STILL_S}s"/>{pen.drawn()}</g>'

    def _head(self) -> None:
        """Draw the title, the time and the progress."""
        frame, pen = self.frame, self.pen
        pen.text(0, 14, shortened(frame.title, 80), ' font-size="13" font-weight="600"')
        pen.text(self.left + self.head, 14, clock_time(frame.elapsed_ns / 1e9, tenths=True), ' text-anchor="end"')
        if frame.fraction is not None:
            pen.text(self.left - 8, 35, "steps", ' text-anchor="end" font-size="9.5"' + _SOFT)
            pen.box('fill="currentColor" fill-opacity=".14"', self.left, 28, self.head, 7)
            pen.box(f'fill="{STYLES["forward"].colour}"', self.left, 28, self.head * frame.fraction, 7)
        for x, part in zip(SLOTS, frame.progress, strict=False):
            pen.text(self.left + x, 49, part)

    def _curve(self, curve: Curve) -> None:
        """Draw a small panel in the upper right corner: thin lines for the ranks, a thick line for their mean."""
        left, top, bottom = self.left + self.head + 48, 22.0, HEAD + self.strip_high
        wide = WIDTH - 4 - left
        self.pen.text(left, 14, shortened(curve.name, 22), ' font-size="10" font-weight="600"')
        self.pen.above.append(
            f'<rect x="{left:.1f}" y="{top:g}" width="{wide:.1f}" height="{bottom - top:g}" fill="none" '
            'stroke="currentColor" stroke-opacity=".25"/>'
        )
        if np.isnan(curve.means).all():
            return
        low, high = float(np.nanmin(curve.means)), float(np.nanmax(curve.means))
        digits = next((n for n in range(2, 6) if f"{low:.{n}g}" != f"{high:.{n}g}"), 2)  # enough to distinguish both
        middle, half = (low + high) / 2, max((high - low) / 2, abs(high) * 1e-6, 1e-12) * 1.12
        for value, y in ((high, top + 8), (low, bottom - 1)) if high > low else ((high, (top + bottom) / 2 + 3),):
            self.pen.text(left - 4, y, f"{value:.{digits}g}", ' text-anchor="end" font-size="9"' + _SOFT)
        each = (np.arange(curve.means.shape[1]) + 0.5) * wide / curve.means.shape[1] + left
        ranks = curve.means[:-1]
        lines = [(row, ' stroke-width=".8" stroke-opacity=".5"') for row in ranks] if 1 < len(ranks) <= EACH_RANK else []
        parts = attempts(curve.means.shape[1], self.frame.restarts_ns, self.frame.past.shown_ns)
        for row, look in (*lines, (curve.means[-1], ' stroke-width="1.8" stroke-linecap="round"')):
            for part in parts:
                there = part[~np.isnan(row[part])]
                y = (top + bottom) / 2 - (row[there] - middle) / half * (bottom - top) / 2
                points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(each[there].tolist(), y.tolist(), strict=True))
                if points.count(" ") == 0 and points:
                    points = f"{points} {points}"  # a line needs two points; two equal ones draw a dot
                if points:
                    self.pen.above.append(f'<polyline points="{points}" fill="none" stroke="{COLOUR}"{look}/>')

    def _strip(self) -> str:
        frame, columns = self.frame, min(128, max(CELLS_IN_ALL // (4 * self.count), 16))
        strip = self._past(columns, HEAD, self.strip_high / self.count, self.head)
        self.pen.text(self.left - 8, HEAD + self.strip_high / 2 + 3.5, "whole run", ' text-anchor="end" font-size="9.5"' + _SOFT)
        self._outline(self.left, self.head, 1, ' stroke-opacity=".25"')
        if frame.detail is not None and frame.detail.marked is not None:
            begin, end = (self.head * t / frame.past.shown_ns for t in frame.detail.marked)
            self._outline(self.left + begin, max(end - begin, 2), 2, ' stroke-width="1.4"')
        self._restarts(self.head, HEAD, HEAD + self.strip_high)
        if frame.detail is None:
            self._restarts(self.wide, self.top, self.bottom)
        return strip

    def _outline(self, x: float, width: float, beyond: float, more: str) -> None:
        size = f'y="{HEAD - beyond:g}" width="{width:.1f}" height="{self.strip_high + 2 * beyond:g}"'
        self.pen.above.append(f'<rect x="{x:.1f}" {size} fill="none" stroke="currentColor"{more}/>')

    def _restarts(self, wide: float, top: float, bottom: float) -> None:
        """Draw a dashed line where all ranks were replaced, in a part that shows the whole run in this width."""
        at = {f"{self.left + wide * ns / self.frame.past.shown_ns:.0f}" for ns in self.frame.restarts_ns}
        if at:
            lines = "".join(f"M{x} {top - 2:g}V{bottom + 2:g}" for x in sorted(at))
            self.pen.above.append(f'<path d="{lines}" {_RESTART}/>')

    def _rows(self) -> str:
        detail = self.frame.detail
        if detail is None:
            return self._past(min(256, CELLS_IN_ALL // (2 * self.count)), self.top, self.row_high, self.wide)
        pen = _Pen()
        for number in range(self.count):
            self._bars(pen, detail, number, self.top + number * self.row_high)
        return pen.drawn()

    def _ended(self, ended_ns: int, y: float) -> None:
        """Draw a cross where a rank's process ended, if the rows show that time."""
        detail = self.frame.detail
        begin_ns = detail.marked[0] if detail is not None and detail.marked is not None else 0
        x = (ended_ns - begin_ns) / (detail.extent_ns if detail is not None else self.frame.past.shown_ns)
        if not 0 <= x <= 1:
            return
        size = min(10.0, self.row_high / 1.5)
        strokes = f"l{size:.1f} {size:.1f}m0 -{size:.1f}l-{size:.1f} {size:.1f}"
        cross = f'd="M{self.left + x * self.wide - size / 2:.1f} {y - size / 2:.1f}{strokes}" fill="none"'
        self.pen.above.append(f'<path {cross} stroke="{_PAPER}" stroke-width="5"/>')  # sets it off from the bars
        self.pen.above.append(f'<path {cross} stroke="currentColor" stroke-width="2.4"/>')

    def _past(self, columns: int, y: float, high: float, wide: float) -> str:
        past, pen = self.frame.past, _Pen()
        for number, cells in enumerate(past.cells):
            self._cells(pen, cells, columns, past.shown_ns, (y + number * high, high, wide))
        return pen.drawn()

    def _cells(self, pen: _Pen, cells: Cells, columns: int, shown_ns: int, place: tuple[float, float, float]) -> None:
        """Draw a rank's bins as at most so many cells; neighbours of one colour are merged.

        `place` is top, height and width.
        """
        y, high, wide = place
        columns = 1 << (columns.bit_length() - 1)  # a power of two, as the number of bins is: it divides that
        pixel = wide / columns
        for covered, (top, height) in zip(cells, LANES, strict=True):
            fold = covered.shape[1] // columns
            sums = covered.reshape(len(covered), columns, fold).sum(axis=2)
            mixed = np.round(blend(sums, shown_ns / columns) * COARSE).astype(np.int64)  # red, green, blue, opacity
            first = np.append(0, np.flatnonzero((mixed[1:] != mixed[:-1]).any(axis=1)) + 1)
            for colour, a, b in zip(mixed[first].tolist(), first.tolist(), [*first[1:].tolist(), columns], strict=True):
                *rgb, alpha = colour
                if alpha:
                    fill = 'fill="#{:x}{:x}{:x}"'.format(*rgb) + (
                        f' fill-opacity="{alpha / COARSE:.2f}"' if alpha < COARSE else ""
                    )
                    pen.box(fill, self.left + a * pixel, y + top * high, (b - a) * pixel + 0.1, height * high)

    def _bars(self, pen: _Pen, detail: Detail, rank: int, y: float) -> None:
        """Draw a rank's row bar by bar, or as cells if there are too many bars."""
        limit, start_ns = BARS_IN_ALL // (2 * self.count), detail.trace.start_ns
        both = lanes(detail.trace, rank)
        detail.styles.update(int(number) for bars in both for number in np.unique(bars.style))
        if max(len(bars) for bars in both) > limit:
            edges = np.linspace(start_ns, start_ns + detail.extent_ns, 257).astype(np.int64)
            compute, communication = (coverage(bars, edges).astype(np.float64) for bars in both)
            columns = min(256, CELLS_IN_ALL // (2 * self.count))
            self._cells(pen, (compute, communication), columns, detail.extent_ns, (y, self.row_high, self.wide))
            return
        scale, fills = self.wide / detail.extent_ns, [_fill(self.name, style) for style in STYLES]
        for bars, (top, height) in zip(both, LANES, strict=True):
            at, tall = y + top * self.row_high, height * self.row_high
            x = (self.left + (bars.start_ns - start_ns) * scale).tolist()
            width = np.maximum((bars.end_ns - bars.start_ns) * scale, 0.3)
            gap = np.where(width > 4, 0.7, 0)  # between neighbours, so that buckets can be counted
            for style, a, w in zip(bars.style.tolist(), x, (width - gap).tolist(), strict=True):
                pen.box(fills[style], a, at, w, tall)
            if tall >= 9:
                self._captions(pen, detail.trace, bars, scale, x, width, at + tall / 2 + 3.5)

    def _captions(self, pen: _Pen, trace: Trace, bars: Bars, scale: float, x: list[float], width: Any, y: float) -> None:
        wide = np.flatnonzero(width > 12)
        wide = np.sort(wide[np.argsort(-width[wide])[:TEXTS_PER_LANE]])
        for i in wide[captioned(bars[wide], scale)].tolist():
            text = caption(trace, i, bars, (width[i] - 5) / 5.6)
            if text:
                colour = {"light": "white", "dark": "#16191F", "page": "currentColor"}[ink(_NAMES[bars.style[i]])]
                halo = _HALO if STYLES[_NAMES[bars.style[i]]].hatch else ""  # keeps stripes from crossing the text
                pen.text(x[i] + width[i] / 2, y, text, f' text-anchor="middle" font-size="10" fill="{colour}"{halo}')

    def _axis(self) -> None:
        detail, pen, y = self.frame.detail, self.pen, self.bottom
        extent_ns = detail.extent_ns if detail else self.frame.past.shown_ns
        unit, unit_ns = unit_of(extent_ns)
        extent = extent_ns / unit_ns
        pen.box(_LINE, self.left, y, self.wide, 0.8)
        for tick in _ticks(extent):
            x = self.left + self.wide * tick / extent
            pen.box(_LINE, x, y, 0.8, 4)
            pen.text(x, y + 14, f"{tick:g}", ' text-anchor="middle" font-size="9.5"')
        label = f"{detail.label if detail else 'time since the start of the run'} [{unit}]"
        pen.text(self.left + self.wide / 2, y + 27, label, ' text-anchor="middle" font-size="10"' + _SOFT)


def _fill(name: str, style: str) -> str:
    look = STYLES[style]
    if look.hatch:
        return f'fill="url(#{name}-{style})"'
    return f'fill="{look.colour}"' + (f' fill-opacity="{look.alpha:g}"' if look.alpha < 1 else "")


# By the first character of a hatch.
_SHAPES: Final = {
    ".": 'circle cx="2.5" cy="2.5" r="1.1"',
    "/": 'rect width="1.4" height="5"',
    "x": 'path d="M0 0h5v1.4h-3.6v3.6h-1.4z"',
}


@functools.lru_cache(maxsize=8)
def _hatch(name: str) -> str:
    """Return the SVG patterns of striped styles."""
    found = ""
    for style, look in STYLES.items():
        if look.hatch:
            size = 'width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"'
            paper = f'<rect width="5" height="5" fill="{look.colour}" fill-opacity="{look.alpha:g}"/>'
            shape = _SHAPES[look.hatch[0]]
            found += f'<defs><pattern id="{name}-{style}" {size}>{paper}<{shape} fill="{look.colour}"/></pattern></defs>'
    return found


def _ticks(extent: float) -> list[float]:
    """Return about six round numbers from 0 to `extent`."""
    stride = round_stride(extent, 6)
    return [round(i * stride, 9) for i in range(int(extent / stride + 1e-9) + 1)]


def text_width(text: str) -> float:
    """The maximum width of a text, in units of its font size."""
    return sum(0.46 if c in NARROW else 1.13 if c in WIDEST else 0.86 if c.isupper() else 0.72 for c in text)


def fitting_status(room: float, status: str) -> str:
    """A rank's status, shortened to `room` units of its font size: the operation's name is cut, never the duration."""
    name, dot, since = status.rpartition(SINCE)
    if not dot:
        name, since = since, ""
    cut = ""
    while name and text_width(name + cut + dot + since) > room:
        name, cut = name[:-1], "…"
    return name.rstrip() + cut + dot + since
