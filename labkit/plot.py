"""Figures from runs: what each rank did (`timeline`), where the time went (`breakdown`), what more ranks brought (`scaling`).

Each takes runs, or traces, and returns the matplotlib Axes. In a notebook, end the line with a semicolon.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from labkit.errors import LabError
from labkit.pictures.bars import STYLES
from labkit.pictures.gantt import HATCH, timeline, view_of
from labkit.pictures.sheet import GREY, INKS, WIDTH_IN, HasTrace, pyplot, sheet, trace_of
from labkit.trace import Share, Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["breakdown", "scaling", "timeline"]

# The parts of a bar of `breakdown`, and what fills them: styles with the top and the height of their share of the bar. What
# overlaps shows both its colours, one above the other as in the timeline.
_PARTS: Final = {
    "compute": [("compute", 0.0, 1.0)],
    "compute that hides communication": [("compute", 0.0, 0.6), ("hidden", 0.6, 0.4)],
    "exposed communication": [("exposed", 0.0, 1.0)],
    "waiting for another rank": [("waiting", 0.0, 1.0)],
    "idle": [],
}


def breakdown(run: HasTrace | Trace, *, step: int | range | str = "all", ax: Axes | None = None) -> Axes:
    """Draw where the time went, per rank and in all; the parts of each bar add up to 100 %.

    Compute, with the part of it that hides communication; exposed communication, which nothing hides; waiting for another rank to
    come; and idle, the rest. `Trace.shares` says how they are told apart.

    Args:
        run: a run or a trace.
        step: a step's number, a range of them, or "all" for the whole run.
        ax: where to draw; default: a figure of its own.

    Raises:
        LabError: there is nothing to draw, or no such step.
        TypeError: something else than a run or a trace was given.
    """
    plt = pyplot()
    view = view_of(trace_of(run, "breakdown"), step, "")
    trace = view.shown
    parts = np.array([_percent(share) for share in trace.shares()])
    parts = np.vstack([parts, parts.mean(axis=0)])  # the window is the same for all ranks, so the mean is the share of them all
    y = np.append(np.arange(len(trace.ranks)), len(trace.ranks) + 0.3)
    with sheet():
        if ax is None:
            ax = plt.subplots(figsize=(WIDTH_IN, 1.2 + 0.36 * len(y)), layout="constrained")[1]
        left = np.zeros(len(y))
        for part, width in zip(_PARTS, parts.T, strict=True):
            _lay(ax, part, y, left, width)
            left += width
        ax.set(xlim=(0, 100), ylim=(y[-1] + 0.5, -0.5), yticks=y, yticklabels=[*trace.ranks, "all ranks"])
        ax.set_xlabel("share of the time [%]")
        ax.set_title(f"Where the time went  ·  {view.in_words()}")
        ax.tick_params(axis="y", length=0)
        ax.spines["left"].set_visible(False)
        _legend_of_parts(ax, [part for part, width in zip(_PARTS, parts.T, strict=True) if width.any()])
    return ax


def _percent(share: Share) -> NDArray[np.float64]:
    """The five parts in the order of `_PARTS`, in % of the time looked at."""
    computing = share.compute_ns - share.overlap_ns
    rest = share.idle_ns - share.waiting_ns
    parts = np.array([computing, share.overlap_ns, share.exposed_ns, share.waiting_ns, rest], np.float64)
    return 100 * parts / share.window_ns


def _lay(ax: Axes, part: str, y: NDArray[np.float64], left: NDArray[np.float64], width: NDArray[np.float64]) -> None:
    """Add one part to all bars, with its per cent where there is room."""
    tall = 0.72
    for style, top, height in _PARTS[part]:
        ax.barh(
            y - tall / 2 + (top + height / 2) * tall, width, height * tall, left, label=part if not top else None, **_look(style)
        )
    ax.barh(y, width, tall, left, facecolor="none", edgecolor="#C6CBD3" if part == "idle" else "white", linewidth=0.6)
    for row in np.flatnonzero(width >= 3.5):
        paper = {"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 0.8} if part.startswith("waiting") else None
        ax.text(
            left[row] + width[row] / 2, y[row], f"{width[row]:.0f} %", ha="center", va="center", fontsize=8, bbox=paper,
            color=GREY if part == "idle" else INKS["dark"],
        )  # fmt: skip


def _look(style: str) -> dict[str, Any]:
    look = STYLES[style]
    hatch = {"edgecolor": look.colour, "hatch": HATCH} if look.hatch else {}
    return {"facecolor": look.rgba, "linewidth": 0} | hatch


def _legend_of_parts(ax: Axes, parts: list[str]) -> None:
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    handles: list[Any] = []
    for part in parts:
        patches = [Patch(**_look(style)) for style, _, _ in _PARTS[part]] or [Patch(facecolor="none", edgecolor="#C6CBD3")]
        handles.append(tuple(patches))
    ax.figure.legend(
        handles, parts, loc="outside lower left", ncols=len(parts), handler_map={tuple: HandlerTuple(ndivide=None, pad=0)}
    )


def scaling(
    runs: Mapping[int, HasTrace | Trace],
    *,
    work: float | Mapping[int, float] | None = None,
    unit: str = "items",
    weak: bool = False,
    ax: Axes | None = None,
) -> Axes:
    """Draw what more ranks brought: the measured speed-up, or throughput, beside the ideal, with the efficiency at each point.

    With T(n) the time that the run on n ranks took from its start to its end, and W(n) the work that it did, all ranks together:

        throughput(n) = W(n) / T(n)      speed-up(n) = throughput(n) / throughput(n₀)      efficiency(n) = speed-up(n) · n₀ / n

    where n₀ is the smallest number of ranks given. Strong scaling, the default, divides the same work among the ranks: W is the
    same for all n, and the speed-up is T(n₀) / T(n). Weak scaling gives every rank the same work: W is proportional to n.

    Args:
        runs: runs or traces by their number of ranks (or of devices).
        work: how many items a run processed in all: one number for all runs, or one per number of ranks. Then the throughput is
            drawn; without it the speed-up, for which only the proportions count.
        unit: what an item is, in the plural: "samples".
        weak: True where `work` is not given and each rank had the same work to do.
        ax: where to draw; default: a figure of its own.

    Raises:
        LabError: fewer than two runs, or one with nothing in it.
        ValueError: a number of ranks below 1, work that is not positive or not given for each run, or both `work` and `weak`.

    Source: G. M. Amdahl, "Validity of the single processor approach …", 1967, for the same work on more processors;
    J. L. Gustafson, "Reevaluating Amdahl's law", 1988, for work that grows with them.
    """
    plt = pyplot()
    counts, time_s, done = _measured(runs, work, weak)
    throughput = done / time_s
    relative = throughput / throughput[0]
    efficiency = relative * counts[0] / counts
    drawn = relative if work is None else throughput
    ideal = drawn[0] * counts / counts[0]
    with sheet():
        if ax is None:
            ax = plt.subplots(figsize=(WIDTH_IN * 0.62, 3.6), layout="constrained")[1]
        ax.plot(counts, ideal, linestyle=(0, (4, 3)), color=GREY, linewidth=1.2, label="ideal: proportional to the ranks")
        ax.plot(counts, drawn, marker="o", color=STYLES["backward"].colour, label="measured, with its efficiency")
        for x, y, share in zip(counts, drawn, efficiency, strict=True):
            ax.annotate(f"{100 * share:.0f} %", (x, y), (0, -14), textcoords="offset points", ha="center", fontsize=8.5)
        if counts[-1] > 8 * counts[0]:
            ax.set_xscale("log", base=2)
            ax.set_yscale("log", base=2)
            ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            ax.set_ylim(drawn.min() / 1.4, max(ideal.max(), drawn.max()) * 1.2)
        else:
            ax.set_xlim(counts[0] - 0.06 * np.ptp(counts), counts[-1] + 0.08 * np.ptp(counts))
            ax.set_ylim(0, max(ideal.max(), drawn.max()) * 1.08)
        ax.set_xticks(counts, [str(n) for n in counts.tolist()])
        ax.minorticks_off()
        ax.grid(axis="y")
        ax.set_xlabel("ranks")
        base = "1 rank" if counts[0] == 1 else f"{counts[0]} ranks"
        ax.set_ylabel(f"speed-up over {base}" if work is None else f"throughput [{unit}/s]")
        ax.set_title(f"{'Speed-up' if work is None else 'Throughput'}, {_kind(counts, done)}")
        ax.legend(loc="upper left")
    return ax


def _kind(counts: NDArray[np.int64], done: NDArray[np.float64]) -> str:
    """What the work has to do with the number of ranks."""
    if np.allclose(done, done[0]):
        return "all runs do the same work (strong scaling)"
    if np.allclose(done / counts, done[0] / counts[0]):
        return "every rank does the same work (weak scaling)"
    return "the runs differ in their work"


def _measured(
    runs: Mapping[int, HasTrace | Trace], work: float | Mapping[int, float] | None, weak: bool
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    """Numbers of ranks, ascending; seconds; and the work done, in items or in units of one rank's work."""
    if not isinstance(runs, Mapping):
        raise TypeError(f"scaling({runs!r}): expected runs by their number of ranks, as in scaling({{1: run1, 2: run2}})")
    if len(runs) < 2:
        raise LabError(f"scaling: {len(runs)} run given, at least two are needed: scaling({{1: run1, 2: run2}})")
    if any(not isinstance(n, int) or n < 1 for n in runs):
        raise ValueError(f"scaling: the runs are given for {list(runs)} ranks; expected whole numbers from 1")
    counts = np.array(sorted(runs), np.int64)
    time_s = np.array([trace_of(runs[n], "scaling").duration_ns for n in counts.tolist()]) / 1e9
    if work is None:
        return counts, time_s, counts.astype(np.float64) if weak else np.ones(len(counts))
    if weak:
        raise ValueError(
            "scaling: weak=True says that the work grows with the ranks, and work=... how much it is: give one of them"
        )
    if isinstance(work, Mapping):
        if absent := [n for n in counts.tolist() if n not in work]:
            raise ValueError(f"scaling: work={dict(work)} says nothing of {', '.join(map(str, absent))} ranks")
        done = np.array([work[n] for n in counts.tolist()], np.float64)
    else:
        done = np.full(len(counts), work, np.float64)
    if not (done > 0).all():
        raise ValueError(f"scaling: work={work!r}: expected positive numbers, the items that the ranks processed together")
    return counts, time_s, done
