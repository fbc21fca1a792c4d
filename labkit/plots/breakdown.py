"""Where the time went: one run rank by rank (`breakdown`), or several runs side by side (`compare`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from labkit.errors.exceptions import LabError
from labkit.errors.units import percent, time_in_words, unit_of
from labkit.errors.wrong_calls import public_api
from labkit.plots.bars import STYLES, waiting_in_words
from labkit.plots.image import WIDTH_IN
from labkit.plots.style import CHIP, INK, INKS, axes_for, describe, shortened
from labkit.plots.view import View, sharing_in_words, view_of
from labkit.tracing.step_times import HasTrace, busy_machine, spread_ns, trace_of
from labkit.tracing.trace import Share, Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINE: Final = 28  # characters per line of a run's name
LONGEST: Final = 80  # characters of a run's name in all
CHARACTER_IN: Final = 0.075

WAITING: Final = "waiting"
# The parts of a bar, and their fill: styles, each with its top and height as fractions of the bar. Overlap shows both
# colours, compute above communication as in the timeline.
_PARTS: Final = {
    "compute": [("compute", 0.0, 1.0)],
    "waiting for data": [("data", 0.0, 1.0)],
    "compute that hides communication": [("compute", 0.0, 0.6), ("hidden", 0.6, 0.4)],
    "exposed communication": [("exposed", 0.0, 1.0)],
    WAITING: [("waiting", 0.0, 1.0)],
    "unknown": [("unknown", 0.0, 1.0)],
    "idle": [],
}


@public_api
def breakdown(run: HasTrace | Trace, *, step: int | range | str = "all", ax: Axes | None = None) -> Axes:
    """Draw where the time went, per rank and for all ranks; the parts of each bar add up to 100 %.

    The parts are compute, waiting for data, compute that hides communication, exposed communication, waiting for
    another rank (or for another device of the same rank), idle time, and what is unknown since a machine does not
    answer. `Trace.shares` defines them.

    Args:
        run: a run or a trace.
        step: a step number, a range of steps, "median" for the step of median length, or "all" for the whole run.
        ax: the axes to draw into; default: a new figure.

    Returns:
        the Axes.

    Raises:
        LabError: the trace is empty, has no such step, or matplotlib is not installed.
        TypeError: `run` is neither a run nor a trace.
    """
    view = view_of(trace_of(run, "breakdown"), step, "")
    trace = view.shown
    parts = np.array([_percent(share) for share in trace.shares()])
    parts = np.vstack([parts, parts.mean(axis=0)])  # all ranks have the same window, so the mean is the share of all ranks
    y = np.append(np.arange(len(trace.ranks)), len(trace.ranks) + 0.3)
    shared = sharing_in_words([view])
    wide_in = _wide_in(ax, trace.ranks)
    with axes_for(ax, 1.2 + 0.36 * len(y) + (0.2 if shared else 0)) as ax:
        left = np.zeros(len(y))
        for part, width in zip(_PARTS, parts.T, strict=True):
            _draw_part(ax, part, y, left, width, _fitting([percent(part / 100) for part in width], width * wide_in / 100))
            left += width
        ax.set(xlim=(0, 100), ylim=(y[-1] + 0.5, -0.5), yticks=y, yticklabels=[*trace.ranks, "all ranks"])
        ax.set_xlabel("\n".join(filter(None, ["share of the time [%]", shared])))
        ax.set_title(f"Where the time went  ·  {view.in_words()}")
        ax.tick_params(axis="y", length=0)
        ax.spines["left"].set_visible(False)
        _legend_of_parts(ax, [part for part, width in zip(_PARTS, parts.T, strict=True) if width.any()], [view])
    shares = ", ".join(f"{part} {percent(share / 100)}" for part, share in zip(_PARTS, parts[-1], strict=True) if share)
    return describe(ax, f"Where the time went: {view.in_words()}. All ranks: {shares}.{shared and f' {shared}.'}")


@public_api
def compare(
    runs: Mapping[str, HasTrace | Trace | Sequence[HasTrace | Trace]] | None = None,
    /,
    *,
    step: int | range | str = "all",
    ax: Axes | None = None,
    **named: HasTrace | Trace | Sequence[HasTrace | Trace],
) -> Axes:
    """Draw several runs side by side: how long each took compared with the first, and which parts grew or shrank.

        lab.compare(naive=a, overlapped=b)

    The length of a bar is the run's duration. Its parts are those of `breakdown`, averaged over the ranks, so the
    difference between two runs is the sum of the differences of their parts. It is too close to call where the steps of
    the runs differ by more than the runs do: the quartiles of each run's steps show by how much. Several runs of the
    same program, given as a list, show it better: the middle one is drawn.

    Args:
        runs: runs or traces by name, or a list of them for each name; for names that are not Python identifiers:
            `compare({"2 ranks": a, "4 ranks": b})`.
        step: a step number, a range of steps, "median" for each run's step of median length, or "all" for whole
            runs; the same for every run.
        ax: the axes to draw into; default: a new figure.
        named: runs or traces by name.

    Returns:
        the Axes.

    Raises:
        LabError: fewer than two runs, an empty trace, no such step, or matplotlib is not installed.
        TypeError: a value is neither a run nor a trace.
    """
    if runs is not None and not isinstance(runs, Mapping):
        raise TypeError(f"compare({runs!r}): expected runs by name, as in compare(naive=a, overlapped=b)")
    given: dict[Any, Any] = {**(runs or {}), **named}
    if len(given) < 2:
        raise LabError(f"compare: {len(given)} run given, at least two are needed: compare(naive=a, overlapped=b)")
    several: list[list[Any]] = [list(runs) if runs and isinstance(runs, list | tuple) else [runs] for runs in given.values()]
    all_views = [
        [view_of(trace_of(run, "compare"), step, str(name)) for run in runs] for name, runs in zip(given, several, strict=True)
    ]
    views = [sorted(own, key=lambda view: view.shown.duration_ns)[len(own) // 2] for own in all_views]
    lengths = np.array([view.shown.duration_ns for view in views], np.float64)
    unit, unit_ns = unit_of(lengths.max())
    parts = np.array([np.mean([_percent(share) for share in view.shown.shares()], axis=0) for view in views])
    parts *= lengths[:, None] / unit_ns / 100
    y, left, longest = np.arange(len(views), dtype=np.float64), np.zeros(len(views)), lengths / unit_ns
    names = [f"{fill(shortened(view.label, LONGEST), LINE)}\n{_ranks_and_steps(view)}" for view in views]
    lines, ratios = [name.split("\n") for name in names], _ratios(lengths, [_spread(own) for own in all_views])
    busy = next(filter(None, (busy_machine(run) for runs in several for run in runs)), "")
    shared = "\n".join(filter(None, [sharing_in_words(views), busy]))
    wide_in = _wide_in(ax, [line for of_name in lines for line in of_name])
    row_in = max(0.5, 0.1 + 0.15 * max(map(len, lines)))
    with axes_for(ax, 1.2 + row_in * len(y) + (0.2 if shared else 0)) as ax:
        # Leave room for the text to the right of each bar.
        room_in = wide_in - 0.1 - 1.15 * CHARACTER_IN * np.array([len(words) for words in ratios])
        right = max(1.3 * longest.max(), (longest * wide_in / np.maximum(room_in, 0.2 * wide_in)).max())
        for part, width in zip(_PARTS, parts.T, strict=True):
            texts = [f"{time:#.3g}".rstrip(".") if time < 1000 else f"{time:.0f}" for time in width]
            _draw_part(ax, part, y, left, width, _fitting(texts, width * wide_in / right))
            left += width
        for row, words in enumerate(ratios):
            ax.text(left[row] + 0.006 * right, y[row], words, va="center", fontsize=9, weight="bold")
        ax.set(xlim=(0, right), ylim=(y[-1] + 0.5, -0.5), yticks=y, yticklabels=names)
        ax.set_xlabel("\n".join(filter(None, [f"time, mean of the ranks [{unit}]", shared])))
        ax.set_title(f"Where the time of each run went  ·  against {shortened(views[0].label, LONGEST // 2)}")
        ax.tick_params(axis="y", length=0)
        ax.spines["left"].set_visible(False)
        _legend_of_parts(ax, [part for part, width in zip(_PARTS, parts.T, strict=True) if width.any()], views)
    each = "; ".join(f"{view.label} {words}" for view, words in zip(views, ratios, strict=True))
    return describe(ax, f"Where the time of each run went: {each}.{shared and f' {shared}.'}")


def _wide_in(ax: Axes | None, names: Sequence[str]) -> float:
    """Return the width of the axes; in a new figure, beside the row names, about."""
    if ax is not None:
        return float(ax.get_window_extent().width / ax.figure.dpi)
    return WIDTH_IN - 0.2 - CHARACTER_IN * max(map(len, names))


def _fitting(texts: Sequence[str], room_in: NDArray[np.float64]) -> list[str]:
    """Return the texts that fit into their part of a bar; "" for the others."""
    return [text if room > 0.05 + 0.85 * CHARACTER_IN * len(text) else "" for text, room in zip(texts, room_in, strict=True)]


def _spread(views: Sequence[View]) -> tuple[float, float]:
    """Return the shortest and the longest run, divided by the middle one; of one run, the quartiles of its steps."""
    low, middle, high = spread_ns(views[0].whole)
    if len(views) > 1:
        lengths = sorted(view.shown.duration_ns for view in views)
        low, middle, high = lengths[0], lengths[len(lengths) // 2], lengths[-1]
    return (low / middle, high / middle) if middle else (1.0, 1.0)


def _ratios(lengths_ns: NDArray[np.float64], spreads: Sequence[tuple[float, float]]) -> list[str]:
    """Return each run's duration, and how it compares with the first run's."""
    words = [time_in_words(lengths_ns[0])]
    first_low, first_high = float(lengths_ns[0]) * np.array(spreads[0])
    for length_ns, (low, high) in zip(lengths_ns[1:].tolist(), spreads[1:], strict=True):
        known = low < high or first_low < first_high
        if known and length_ns * low <= first_high and first_low <= length_ns * high:
            words.append(f"{time_in_words(length_ns)}, too close to call")
            continue
        faster = float(lengths_ns[0]) / length_ns
        longer = 1 / faster
        ratio = f"{_times(faster)} as fast" if faster >= 1.005 else f"{_times(longer)} as long" if faster <= 0.995 else "as long"
        words.append(f"{time_in_words(length_ns)}, {ratio}")
    return words


def _times(factor: float) -> str:
    return f"{factor:.2f} ×" if factor < 100 else f"{factor:.3g} ×"


def _ranks_and_steps(view: View) -> str:
    count = len(view.shown.ranks)
    ranks = f"{count} ranks" if count > 1 else "1 rank"
    if view.whole.origin:
        ranks += f", {view.whole.origin}"
    if view.zoomed:
        return f"{ranks}, {view.chosen_in_words()}"
    return f"{ranks}, {view.steps} steps" if view.steps > 1 else ranks


def _percent(share: Share) -> NDArray[np.float64]:
    """Return the parts in the order of `_PARTS`, in % of the trace's window."""
    computing = share.compute_ns - share.overlap_ns
    rest = share.idle_ns - share.waiting_ns - share.unknown_ns
    parts = [computing, share.data_ns, share.overlap_ns, share.exposed_ns, share.waiting_ns, share.unknown_ns, rest]
    return 100 * np.array(parts, np.float64) / share.window_ns


def _draw_part(
    ax: Axes, part: str, y: NDArray[np.float64], left: NDArray[np.float64], width: NDArray[np.float64], texts: list[str]
) -> None:
    """Add one part to all bars, with its texts."""
    tall = 0.72
    for style, top, height in _PARTS[part]:
        ax.barh(
            y - tall / 2 + (top + height / 2) * tall, width, height * tall, left, label=part if not top else None, **_look(style)
        )
    ax.barh(y, width, tall, left, facecolor="none", edgecolor=INK if part == "idle" else "none", linewidth=0.6)
    for row in (i for i, text in enumerate(texts) if text):
        ax.text(
            left[row] + width[row] / 2, y[row], texts[row], ha="center", va="center", fontsize=8.8,
            color=INK if part == "idle" else INKS["dark"], bbox=CHIP if part in (WAITING, "unknown") else None,
        )  # fmt: skip


def _look(style: str) -> dict[str, Any]:
    look = STYLES[style]
    hatch = {"edgecolor": look.colour, "hatch": look.hatch} if look.hatch else {}
    return {"facecolor": look.rgba, "linewidth": 0} | hatch


def _legend_of_parts(ax: Axes, parts: list[str], views: Sequence[View]) -> None:
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    waiting = waiting_in_words(view.whole for view in views)
    handles: list[Any] = []
    for part in parts:
        patches = [Patch(**_look(style)) for style, _, _ in _PARTS[part]] or [Patch(facecolor="none", edgecolor=INK)]
        handles.append(tuple(patches))
    names = [waiting if part == WAITING else part for part in parts]
    columns = len(parts) if len(parts) < 6 else (len(parts) + 1) // 2  # more are wider than the figure
    handler_map = {tuple: HandlerTuple(ndivide=None, pad=0)}
    ax.figure.legend(handles, names, loc="outside lower left", ncols=columns, handler_map=handler_map)
