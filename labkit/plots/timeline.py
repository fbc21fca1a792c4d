"""`timeline`: what each rank did over time; `explore`: the same as an interactive picture."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from labkit.errors.exceptions import missing
from labkit.errors.lists import listed
from labkit.errors.units import unit_of
from labkit.errors.wrong_calls import public_api
from labkit.plots.bars import (
    IMPORTANCE,
    LANES,
    STYLES,
    Bars,
    blend,
    caption,
    captioned,
    coverage,
    crowded,
    hairlines,
    ink,
    legend_of,
    waiting_in_words,
)
from labkit.plots.flows import COLOUR, OUTLINE, draw_messages
from labkit.plots.image import WIDTH_IN
from labkit.plots.style import CHIP, INK, INKS, describe, labkit_style, new_figure, pyplot
from labkit.plots.view import RESTARTED, Row, View, bubble_in_words, numbered_steps, sharing_in_words, view_of
from labkit.recording.schema import ENDED
from labkit.tracing.replaying.critical_path import Piece, path_between
from labkit.tracing.step_times import HasTrace, trace_of
from labkit.tracing.trace import Trace

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from labkit.plots.explorer import Explorer
    from labkit.plots.figure import LabFigure

TEXT_PT: Final = 8.8  # inside bars: 11 pixels in a window of 1,000 without a sidebar
NOTE_PT: Final = 9.0  # below the legend
VISIBLE_PX: Final = 0.3  # a kind whose widest bar is narrower is not in the legend
GAP_PX: Final = 0.7  # after a wide bar
STEP_LINE: Final[dict[str, Any]] = {"color": INK, "linewidth": 0.6}
RESTART_LINE: Final[dict[str, Any]] = {"color": INK, "linewidth": 1.6, "linestyle": (0, (3, 1.5))}
END_MARK: Final[dict[str, Any]] = {"color": INK, "marker": "X", "markersize": 7, "linestyle": "none"}
HEADING: Final = 0.95  # height of the title and step numbers above each of several runs, in rows
HEADING_IN: Final = 0.3  # the minimum of the same in inches, for low rows

# As a fraction of the row, at the lower edge of each lane: in its middle, the line would cross out the captions.
HEIGHTS: Final = {"communication": 0.88}
OTHER_HEIGHT: Final = 0.58


@public_api
def timeline(
    *runs: HasTrace | Trace | Mapping[str, HasTrace | Trace],
    step: int | range | str | None = None,
    labels: Sequence[str] = (),
    critical_path: bool = False,
    ax: Axes | None = None,
) -> Axes:
    """Draw what each rank did over time: a row per rank, compute above communication, so that overlap is visible.

    Bars narrower than a pixel are drawn as hairlines where they cover nothing more important. A rank with activity on
    both GPU and CPU has a row for each; a rank with several TensorFlow devices has a row for each of them. Operations
    of a device mesh are named with their axis: "all_reduce tp". Messages are drawn as arrows from sender to receiver if
    there are few enough. For a pipeline, whose ranks compute numbered micro-batches ("forward 3") and pass them on, the
    title shows the bubble: the share of all ranks' time without compute.

    Args:
        runs: one or more runs or traces, or runs by title, as in `timeline({"naive": a, "overlapped": b})`. Several are
            drawn below one another on one time scale, each from its own start.
        step: the steps to show: a step number (negative: from the end), a range, "all", "median" (the step of median
            length without those in which labkit reads TensorFlow's profiler) or "end" (the last step that all ranks
            completed, and what followed). They stand below a strip that shows the whole run. Default: "all" in a run
            of up to 12 steps; in a longer one "median", or "end" if the run was stopped.
        labels: a title for each run, if `runs` has none.
        critical_path: whether to draw the critical path of what is shown, as `lab.critical_path` finds it: one line
            that leads from the rank that ended last to those for which it waited.
        ax: the axes to draw into; default: a new figure.

    Returns:
        the Axes.

    Raises:
        LabError: a trace is empty, has no such step, has no critical path since it cannot be replayed, or matplotlib is
            not installed.
        TypeError: a value is neither a run nor a trace, or `step` has a wrong type.
        ValueError: `labels` does not have one title for each run.
    """
    pyplot()
    given: list[Any] = list(runs)
    if len(given) == 1 and isinstance(given[0], Mapping):
        labels, given = [str(name) for name in given[0]], list(given[0].values())
    if not given:
        raise TypeError("timeline(): expected at least one run, as in timeline(run)")
    if labels and len(labels) != len(given):
        raise ValueError(f"labels={labels!r}: expected one for each of the {len(given)} runs")
    traces = [trace_of(run, "timeline", whole=True) for run in given]
    names = list(labels) or ([""] if len(given) == 1 else [f"run {i + 1}" for i in range(len(given))])
    views = [view_of(trace, step, name) for trace, name in zip(traces, names, strict=True)]
    with labkit_style(ax):
        return _Timeline(views, ax, new_figure, critical_path).draw()


def figure_of(trace: Trace, title: str, step: int | range | str | None = None) -> LabFigure:
    """Draw the timeline of one trace as a figure unknown to pyplot, so that a notebook does not show it by itself."""
    try:
        from labkit.plots.figure import LabFigure
    except ImportError:
        raise missing("matplotlib", "plot") from None
    with labkit_style():
        axes = _Timeline([view_of(trace_of(trace, "timeline", whole=True), step, title)], None, LabFigure).draw()
    figure = axes.get_figure(root=True)
    assert isinstance(figure, LabFigure)
    return figure


class _Timeline:
    """Draws one timeline: the runs from top to bottom, into given axes or a new figure."""

    def __init__(
        self, views: list[View], ax: Axes | None, new_figure: Callable[..., Figure], critical_path: bool = False
    ) -> None:
        self.views, self.several = views, len(views) > 1
        self.paths: list[list[Piece]] = [[] for _ in views]
        if critical_path:  # of the last attempt, if there were several
            lasts = [view.whole.last_attempt() for view in views]
            starts = [max(view.shown.start_ns, last.start_ns) for view, last in zip(views, lasts, strict=True)]
            self.paths = [path_between(last, start, v.shown.end_ns) for v, last, start in zip(views, lasts, starts, strict=True)]
        self.longest_ns = max(view.shown.duration_ns for view in views)
        self.unit, self.unit_ns = unit_of(self.longest_ns)
        self.sharing = sharing_in_words(views)
        self.rows = sum(len(view.rows) for view in views)
        self.heading = HEADING if self.several else 0.0
        self.strip_in = 0.0 if self.several or not views[0].zoomed else min(0.12 + 0.05 * self.rows, 0.5)
        self.ax = ax if ax is not None else self._axes(new_figure)
        box = self.ax.get_window_extent()
        self.width_px, self.dpi = box.width, self.ax.figure.dpi
        self.height_in = box.height / self.dpi
        row_in = (self.height_in - HEADING_IN * len(views)) / self.rows
        if self.several and row_in > 0.08:  # otherwise the given axes are too low for headings and rows
            self.heading = max(HEADING, HEADING_IN / row_in)
        self.polygons: dict[str, list[Any]] = {}  # per style: corners, shape (bars, 4, 2), in units of the axes
        self.drawn: set[str] = set()  # what the legend has to explain: styles, "step" and "message"
        self.mixed = False  # whether there are so many bars that a pixel shows several

    @property
    def height(self) -> float:
        """Height of all rows and headings, in rows."""
        return self.rows + self.heading * len(self.views)

    def draw(self) -> Axes:
        y, ticks, names = 0.0, [], []
        for view, path in zip(self.views, self.paths, strict=True):
            if self.several:
                heading = f"{view.label}:  {view.in_words()}{bubble_in_words(view.shown)}"
                self.ax.text(0, y + 0.47 * self.heading, heading, weight="bold", va="center", fontsize=8.5)
                y += self.heading
            top = y
            for row in view.rows:
                self._row(view.shown, row, y)
                ticks.append(y + 0.5)
                names.append(row.name)
                y += 1
            self._restarts(view.shown, top, y)
            self._step_numbers(view, top)
            self._arrows(view, top)
            if path:
                draw_path(self.ax, path, view.rows, top, view.shown.start_ns, self.unit_ns)
                self.drawn.add("critical path")
        self._add_polygons()
        ax = self.ax
        ax.set(xlim=(0, self.longest_ns / self.unit_ns), ylim=(self.height, 0), yticks=ticks, yticklabels=names)
        mixed = "   (where bars are narrower than a pixel, their colours mix)" if self.mixed else ""
        lost = sum(sum(view.whole.dropped) for view in self.views)
        drops = f"   ({lost} records were lost: written faster than read)" if lost else ""
        ax.set_xlabel(f"time since the start of the {'step' if self.views[0].zoomed else 'run'} [{self.unit}]{mixed}{drops}")
        ax.tick_params(axis="y", length=0)
        ax.spines["left"].set_visible(False)
        if not self.several:
            view = self.views[0]
            title = f"{view.label}  ·  {view.steps_in_words()}" if view.label else view.in_words()
            ax.set_title(title + bubble_in_words(view.shown), pad=72 * (self.strip_in + 0.2) if self.strip_in else 12)
        if self.strip_in:
            self._strip(self.views[0])
        self._legend()
        titles = [", ".join(filter(None, (v.label, v.in_words() + bubble_in_words(v.shown)))) for v in self.views]
        bars = listed(legend_of(style, "waiting") for style in STYLES if style in self.drawn)
        of_path = " A line shows the critical path." if "critical path" in self.drawn else ""
        shared = self.sharing and f" {self.sharing}."
        shown = f"One row for each of {listed(names)}. The bars show: {bars}.{of_path}{shared}"
        describe(ax, f"Timeline: {'; '.join(titles)}. {shown}")
        return ax

    def _axes(self, new_figure: Callable[..., Figure]) -> Axes:
        """Create axes with margins in inches, so that bars' widths in pixels are known when their texts are chosen."""
        row_in = min(max((2.4 + 0.8 * len(self.views)) / self.height, 0.16), 0.56)
        if self.several:
            self.heading = max(HEADING, HEADING_IN / row_in)
        left = 0.25 + 0.075 * max(len(row.name) for view in self.views for row in view.rows)
        top, bottom = (
            0.1 if self.several else 0.42 + (self.strip_in + 0.14 if self.strip_in else 0),
            1.1 if self.sharing else 0.9,
        )
        height = top + bottom + row_in * self.height
        return new_figure(figsize=(WIDTH_IN, height)).add_axes(
            (left / WIDTH_IN, bottom / height, 1 - (left + 0.2) / WIDTH_IN, row_in * self.height / height)
        )

    def _row(self, trace: Trace, row: Row, y: float) -> None:
        for bars, (top, height) in zip(row.lanes(trace), LANES, strict=True):
            if len(bars) > 1.5 * self.width_px:
                self._mixed_bars(bars, trace, y + top, height)
                continue
            crowd = crowded(bars, self._px_per_unit() / self.unit_ns)
            if crowd.any():
                self._mixed_bars(bars[crowd], trace, y + top, height)
                bars = bars[~crowd]
            drawn_ns = hairlines(bars, self._px_per_unit() / self.unit_ns)
            left, right = ((times_ns - trace.start_ns) / self.unit_ns for times_ns in drawn_ns)
            for number, style in enumerate(STYLES):
                of_style = bars.style == number
                if of_style.any():
                    a, b = left[of_style], right[of_style]
                    if (b - a).max() * self._px_per_unit() > VISIBLE_PX:
                        self.drawn.add(style)
                    corners = np.stack(
                        [np.stack([a, b, b, a], 1), np.broadcast_to([y + top] * 2 + [y + top + height] * 2, (len(a), 4))], 2
                    )
                    self.polygons.setdefault(style, []).append(corners)
            self._captions(bars, trace, left, right, y + top, height)
        self._step_lines(trace, row.rank, y)
        ended = [(s.time_ns - trace.start_ns) / self.unit_ns for s in trace.scalars if (s.name, s.rank) == (ENDED, row.rank)]
        if ended:
            self.ax.plot(ended, [y + 0.5] * len(ended), zorder=4, label=ENDED, clip_on=False, **END_MARK)
            self.drawn.add(ENDED)

    def _arrows(self, view: View, top: float) -> None:
        if self.height_in / self.height < 0.2:
            return  # the rows are too low for an arrow's direction to be visible
        width_px = self.width_px * view.shown.duration_ns / self.longest_ns
        if draw_messages(self.ax, view.shown, view.rows, top, self.unit_ns, width_px):
            self.drawn.add("message")

    def _add_polygons(self) -> None:
        from matplotlib.collections import PolyCollection

        for style, parts in self.polygons.items():
            look, corners = STYLES[style], np.concatenate(parts)
            wide = (corners[:, 1, 0] - corners[:, 0, 0]) * self._px_per_unit() > 5
            corners[:, 1:3, 0] -= (wide * GAP_PX / self._px_per_unit())[:, None]  # so that neighbours can be counted
            bars = PolyCollection(
                list(corners), facecolors=[look.rgba], label=style, zorder=2 + IMPORTANCE.get(style, 3) / 100, antialiased=True,
                edgecolors=look.colour if look.hatch else "none", hatch=look.hatch or None, linewidths=0,
            )  # fmt: skip
            self.ax.add_collection(bars, autolim=False)

    def _mixed_bars(self, bars: Bars, trace: Trace, top: float, height: float) -> None:
        """Draw more bars than pixels as an image that mixes their colours in each pixel."""
        self.drawn.update(np.array(list(STYLES))[np.unique(bars.style)])
        count = max(int(2 * self.width_px * trace.duration_ns / self.longest_ns), 1)
        edges = np.linspace(trace.start_ns, trace.end_ns, count + 1).astype(np.int64)
        pixels = blend(coverage(bars, edges), trace.duration_ns / count)
        extent = (0, trace.duration_ns / self.unit_ns, top + height, top)
        self.ax.imshow(pixels[None], extent=extent, aspect="auto", interpolation="antialiased", zorder=2)
        self.mixed = True

    def _captions(self, bars: Bars, trace: Trace, left: Any, right: Any, top: float, height: float) -> None:
        if height * self.height_in / self.height * 72 < 1.15 * TEXT_PT:
            return
        character_px = 0.61 * TEXT_PT * self.dpi / 72
        width_px = (right - left) * self._px_per_unit()
        wide = np.flatnonzero(width_px > 1.6 * character_px)
        for i in wide[captioned(bars[wide], self._px_per_unit() / self.unit_ns)]:
            style = list(STYLES)[bars.style[i]]
            text = caption(trace, int(i), bars, (width_px[i] - 3) / character_px)
            if text:
                x = (left[i] + right[i]) / 2
                chip = CHIP if STYLES[style].hatch else None
                color = INKS["dark" if chip else ink(style)]
                self.ax.text(
                    x, top + height / 2, text, color=color, fontsize=TEXT_PT, ha="center", va="center", clip_on=True, bbox=chip,
                    zorder=5,  # over the arrows of messages
                )  # fmt: skip

    def _restarts(self, trace: Trace, top: float, bottom: float) -> None:
        """Draw a line through all rows where all ranks were replaced and the function was called again."""
        at = [(ns - trace.start_ns) / self.unit_ns for ns in trace.restarts_ns if trace.start_ns < ns < trace.end_ns]
        if at:
            self.ax.vlines(at, top, bottom, zorder=4, label=RESTARTED, clip_on=False, **RESTART_LINE)
            self.drawn.add(RESTARTED)

    def _step_lines(self, trace: Trace, rank: int, y: float) -> None:
        from matplotlib.transforms import Bbox, TransformedBbox

        edges = trace.filter(rank=rank, kind="step").columns.data
        times_ns = np.unique([edges["start_ns"], edges["end_ns"]])
        # A step at the edge of the window may start before it or end after it, where the row of another run continues.
        at = (times_ns[(times_ns >= trace.start_ns) & (times_ns <= trace.end_ns)] - trace.start_ns) / self.unit_ns
        if 0 < len(at) < self.width_px / 6:
            lines = self.ax.vlines(at, y + 0.02, y + 0.98, zorder=3, label="step", **STEP_LINE)
            # Lines at the ends of the axis are drawn in their whole width.
            lines.set_clip_box(TransformedBbox(Bbox.from_extents(-0.002, 0, 1.002, 1), self.ax.transAxes))
            self.drawn.add("step")

    def _step_numbers(self, view: View, y: float) -> None:
        """Draw the number of each step above the first row, over that rank's own step, since ranks differ."""
        bounds, found = numbered_steps(view.whole, 0), []
        for number in view.chosen or range(min(len(bounds), 100)):
            # Clipped to the window: the label is centred over the visible part of a step.
            start, end = (int(t) - view.shown.start_ns for t in np.clip(bounds[number], view.shown.start_ns, view.shown.end_ns))
            if (end - start) / self.unit_ns * self._px_per_unit() > 45:
                found.append((f"step {number}", (start + end) / 2 / self.unit_ns))
        for text, x in found if len(found) > 1 else []:  # a single step is named in the title
            self.ax.text(x, y + 0.01, text, fontsize=TEXT_PT, color=INK, ha="center", va="bottom")

    def _strip(self, view: View) -> None:
        """Draw a strip of the whole run above the rows, with the shown part marked."""
        trace = view.whole
        gap, tall = 0.14 / self.height_in, self.strip_in / self.height_in
        strip = self.ax.inset_axes((0, 1 + gap, 1, tall))
        edges = np.linspace(trace.start_ns, trace.end_ns, int(self.width_px) + 1).astype(np.int64)
        for number, row in enumerate(view.rows):
            for bars, (top, height) in zip(row.lanes(trace), LANES, strict=True):
                pixels = blend(coverage(bars, edges), trace.duration_ns / (len(edges) - 1))
                extent = (0, 1, number + top + height, number + top)
                strip.imshow(pixels[None], extent=extent, aspect="auto", interpolation="antialiased")
        strip.set(xlim=(0, 1), ylim=(len(view.rows), 0), xticks=[], yticks=[])
        for spine in strip.spines.values():
            spine.set(visible=True, color=INK, alpha=0.5, linewidth=0.6)
        left, right = ((t - trace.start_ns) / trace.duration_ns for t in (view.shown.start_ns, view.shown.end_ns))
        strip.axvspan(left, right, facecolor="none", edgecolor=INK, linewidth=1.4, zorder=5, clip_on=False)
        strip.set_ylabel("whole run", rotation=0, ha="right", va="center", fontsize=TEXT_PT + 0.5, color=INK)

    def _legend(self) -> None:
        """Draw two lines below the axis: the styles of the upper lane, and the styles of the lower lane."""
        from matplotlib.legend import Legend
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch
        from matplotlib.patheffects import withStroke
        from matplotlib.transforms import ScaledTranslation

        waiting = waiting_in_words(view.whole for view in self.views)
        upper: list[Any] = []
        lower: list[Any] = []
        for number, (style, look) in enumerate(STYLES.items()):
            if style in self.drawn:
                stripes: dict[str, Any] = {"edgecolor": look.colour, "hatch": look.hatch} if look.hatch else {}
                patch = Patch(facecolor=look.rgba, label=legend_of(style, waiting), linewidth=0.0, **stripes)
                (upper if number < list(STYLES).index("exposed") else lower).append(patch)
        if "step" in self.drawn:
            upper.append(Line2D([], [], label="step boundary", **STEP_LINE))
        if "critical path" in self.drawn:
            upper.append(Line2D([], [], **path_line()))
        if ENDED in self.drawn:
            upper.append(Line2D([], [], label=ENDED, **END_MARK))
        if RESTARTED in self.drawn:
            upper.append(Line2D([], [], label=RESTARTED, **RESTART_LINE))
        if "message" in self.drawn:
            outline = [withStroke(linewidth=1.8, foreground=OUTLINE)]
            arrow: dict[str, Any] = {"color": COLOUR, "linewidth": 0.8, "marker": ">", "markersize": 3, "path_effects": outline}
            lower.append(Line2D([], [], label="message", **arrow))
        lines = {
            down_in: Legend(
                self.ax, handles, [handle.get_label() for handle in handles], loc="upper left", ncols=len(handles),
                borderaxespad=0, borderpad=0, columnspacing=1.0, handletextpad=0.5,
            )
            for down_in, handles in ((0.46, upper), (0.67, lower)) if handles
        }  # fmt: skip
        figure = self.ax.get_figure(root=True)
        assert figure is not None
        wide_in = max((line.get_window_extent().width for line in lines.values()), default=0) / self.dpi
        left_in = self.ax.get_window_extent().x0 / self.dpi
        # The lines are moved to the left if they would extend beyond the figure.
        shift_in = min(max(left_in + wide_in + 0.05 - figure.get_figwidth(), 0), max(left_in - 0.05, 0))
        for down_in, line in lines.items():
            place = ScaledTranslation(-shift_in, -down_in, self.ax.figure.dpi_scale_trans)
            line.set_bbox_to_anchor((0, 0), self.ax.transAxes + place)
            self.ax.add_artist(line).set_clip_on(False)  # otherwise a notebook, which trims figures, would cut it off
        if self.sharing:
            below = self.ax.transAxes + ScaledTranslation(-left_in + 0.05, -0.9, self.ax.figure.dpi_scale_trans)
            self.ax.text(0, 0, self.sharing, transform=below, va="top", fontsize=NOTE_PT)

    def _px_per_unit(self) -> float:
        return float(self.width_px * self.unit_ns / self.longest_ns)


def draw_path(ax: Axes, pieces: Sequence[Piece], rows: Sequence[Row], top: float, start_ns: int, unit_ns: float) -> None:
    """Draw the path over the rows, the first of which begins at `top`."""
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


@public_api
def explore(run: HasTrace | Trace, *, step: int | range | str | None = None) -> Explorer | LabFigure:
    """Draw an interactive timeline of a run: hover over a bar to read its details, zoom, and isolate a rank.

    The cell's output is the image that `timeline` draws. While the kernel is alive, the page covers the image with the
    interactive timeline and requests data from the kernel as you zoom. The notebook file stores the image,
    and the run for `make site`, whose pages have no kernel.

    Above it are sliders for what `replay` can change in this run, such as its link; each move draws the run that replay
    predicts in front of the recorded one. For a trace of `schedule`, they change its arguments.

    Args:
        run: a run or a trace.
        step: the steps to show first: a step number (negative: from the end), a range, "median", "end" or "all".
            Default: as in `timeline`.

    Returns:
        a widget, shown when it is a cell's last expression. It keeps the trace in memory until its `close()`; the image
        remains after that. Without anywidget: the figure of `timeline`.

    Raises:
        LabError: the trace is empty, has no such step, or matplotlib is not installed.
        TypeError: `run` is neither a run nor a trace.
    """
    view = view_of(trace_of(run, "explore", whole=True), step, "")
    figure = figure_of(view.whole, "", step)
    try:
        from labkit.plots.explorer import Explorer
    except ModuleNotFoundError as error:
        if error.name not in ("anywidget", "ipywidgets", "traitlets"):
            raise

        print(f"{error.name} is not installed, so this is a picture only: %pip install anywidget", file=sys.stderr)
        return figure
    return Explorer(view, figure)
