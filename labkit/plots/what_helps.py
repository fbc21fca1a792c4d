"""The figure of what would help: what each of several changes would save per step, by replay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from labkit.errors.exceptions import LabError
from labkit.errors.units import time_in_words, unit_of
from labkit.errors.wrong_calls import public_api
from labkit.plots.bars import STYLES
from labkit.plots.style import INK, axes_for, describe, shortened
from labkit.tracing.replaying.gains import Gains, gain_in_words, gains_of
from labkit.tracing.step_times import HasTrace, trace_of
from labkit.tracing.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SAVES: Final = STYLES["optimizer"].colour
COSTS: Final = STYLES["exposed"].colour
LONGEST: Final = 48  # characters of a change
TEXT_PT: Final = 10  # on a page of 800 pixels, 12 of them
APART: Final = 1.0  # the room above the ideals, in rows


@public_api
def what_helps(run: HasTrace | Trace, ax: Axes | None = None) -> Axes:
    """Draw what each of a dozen changes would save per step, the largest first, as `lab.replay` predicts it.

    Only changes that make sense for the run are drawn, such as a phase twice as fast, a slow rank as fast as the
    others, twice the bandwidth, half the latency, or consecutive collectives of one line as one message. A gain that is
    smaller than the recorded steps differ from one another is pale: one cannot count on it. Gains do not add up: after
    one change, something else may limit the run.

    Ideals, such as communication that takes no time, stand apart below the changes, as empty bars: nobody can make
    them, and they show what no change exceeds. Do not compare them with changes.

    Args:
        run: a run or a trace.
        ax: the axes to draw into; default: a new figure.

    Returns:
        the Axes.

    Raises:
        LabError: the trace is empty, has no such times, or cannot be replayed (the message says why), or matplotlib is
            not installed.
        TypeError: neither a run nor a trace.
    """
    trace = trace_of(run, "what_helps")
    found = gains_of(trace, "what_helps")
    if not found.gains:
        raise LabError("what_helps: this run has no spans of noticeable length and no communication, whose time could change")
    lasts = ", ".join(filter(None, (_lasts(found), trace.origin)))
    texts = [gain_in_words(gain, found) for gain in found.gains]
    changes = sum(not gain.ideal for gain in found.gains)
    rows = [row + APART * gain.ideal for row, gain in enumerate(found.gains)]
    with axes_for(ax, 1.0 + 0.31 * max(rows[-1] + 1, 2)) as ax:
        unit, unit_ns = unit_of(found.step_ns)
        saved = [gain.saved_ns / unit_ns for gain in found.gains]
        colours = [SAVES if value >= 0 else COSTS for value in saved]
        bars = ax.barh(rows, saved, height=0.7, color=colours, edgecolor=colours)
        for bar, gain in zip(bars, found.gains, strict=True):
            bar.set(alpha=0.35 if gain.in_spread else 1.0, fill=not gain.ideal, linestyle="--" if gain.ideal else "-")
            x, y = max(bar.get_x() + bar.get_width(), 0.0), bar.get_y() + bar.get_height() / 2
            text = gain_in_words(gain, found, whole=False)
            ax.annotate(text, (x, y), (4, 0), textcoords="offset points", va="center", fontsize=TEXT_PT, color=INK)
        if changes < len(rows):
            ax.annotate(
                "Ideals, which no change reaches:", (0, rows[changes] - 0.95), (4, 0), textcoords="offset points",
                va="center", fontsize=TEXT_PT, color=INK, style="italic",
            )  # fmt: skip
        ax.axvline(0, color=INK, linewidth=0.6)
        ax.set_yticks(rows, [shortened(gain.change, LONGEST) for gain in found.gains])
        ax.set_ylim(max(rows[-1] + 1, 1) - 0.4, -0.6)
        low, high = min([0.0, *saved]), max([0.0, *saved])
        ax.set_xlim(1.05 * low, max(high + 0.45 * (high - low), 1e-9))  # room for the texts
        ax.tick_params(axis="y", length=0, labelsize=TEXT_PT)
        ax.spines["left"].set_visible(False)
        ax.set_xlabel(f"saved per {'step' if found.steps else 'run'}, predicted by replay [{unit}]")
        ax.set_title(f"What would help: {lasts}")
    each = [f"{gain.change}: {text}" for gain, text in zip(found.gains, texts, strict=True)]
    ideals = f" Ideals, which no change reaches: {'; '.join(each[changes:])}." if changes < len(each) else ""
    said = f" {'; '.join(each[:changes])}." if changes else ""
    return describe(ax, f"What would help, predicted by replay, for {lasts}.{said}{ideals}")


def _lasts(gains: Gains) -> str:
    if not gains.steps:
        return f"a run of {time_in_words(gains.step_ns)}"
    between = f"{time_in_words(gains.low_ns)} to {time_in_words(gains.high_ns)}"
    return f"a step of {time_in_words(gains.step_ns)} (half of the steps: {between})"
