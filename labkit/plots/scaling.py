"""The scaling figure: speed-up by the number of ranks, measured, ideal and predicted."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from labkit.errors.exceptions import LabError
from labkit.errors.units import percent
from labkit.errors.wrong_calls import public_api
from labkit.plots.bars import STYLES
from labkit.plots.style import INK, axes_for, describe
from labkit.tracing.step_times import HasTrace, trace_of
from labkit.tracing.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LABEL: Final = 0.075  # width of a text such as "100 %", as a fraction of the axis
PREDICTED: Final = "#CC79A7"  # Okabe and Ito's purple, which no kind of span uses


@public_api
def scaling(
    runs: Mapping[int, HasTrace | Trace],
    *,
    predicted: Mapping[int, float] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw how a run scales with its ranks: speed-up, measured, ideal and predicted, and the efficiency.

    All runs do the same work, which is divided among the ranks (strong scaling). With T(n) the duration of the run on n
    ranks, and n₀ the smallest number of ranks given:

        speed-up(n) = T(n₀) / T(n)
        efficiency(n) = speed-up(n) · n₀ / n

    Args:
        runs: runs or traces by their number of ranks (or of devices).
        predicted: predicted seconds by number of ranks, which may include numbers that were not run. Their speed-up is
            relative to the same measured run.
        ax: the axes to draw into; default: a new figure.

    Returns:
        the Axes.

    Raises:
        LabError: fewer than two runs, an empty trace, or matplotlib is not installed.
        TypeError: `runs` or `predicted` is not a mapping, or a value is neither a run nor a trace.
        ValueError: a number of ranks is below 1, or `predicted` is not positive.

    Source: G. M. Amdahl, "Validity of the single processor approach …", 1967.
    """
    counts = _checked(runs, "runs", "{1: run1, 2: run2}")
    if len(runs) < 2:
        raise LabError(f"scaling: {len(runs)} run given, at least two are needed: scaling({{1: run1, 2: run2}})")
    traces = [trace_of(runs[n], "scaling") for n in counts.tolist()]
    time_s = np.array([trace.duration_ns for trace in traces]) / 1e9
    origins = sorted({trace.origin.partition(":")[0] or "measured" for trace in traces})
    drawn = time_s[0] / time_s
    efficiency = drawn * counts[0] / counts
    predicted = predicted or {}
    ahead = _checked(predicted, "predictions", "..., predicted={1: 8.0, 2: 4.3}")
    if not all(seconds > 0 for seconds in predicted.values()):
        raise ValueError(f"scaling: predicted={dict(predicted)}: expected seconds, more than 0")
    expected = np.array([time_s[0] / predicted[n] for n in ahead.tolist()])
    every = np.union1d(counts, ahead)
    ideal = every / counts[0]
    top = max(ideal.max(), drawn.max(), *expected)
    with axes_for(ax, 3.6) as ax:
        ax.plot(every, ideal, linestyle=(0, (4, 3)), color=INK, linewidth=1.2, label="ideal: proportional to the ranks")
        if len(ahead):
            look: dict[str, Any] = {"marker": "D", "markersize": 5, "markerfacecolor": "none", "linestyle": (0, (1, 1.5))}
            ax.plot(ahead, expected, color=PREDICTED, label="predicted", **look)
        ax.plot(counts, drawn, marker="o", color=STYLES["backward"].colour, label=f"{' and '.join(origins)}, with its efficiency")
        logarithmic = bool(every[-1] > 8 * every[0])
        place = (np.log if logarithmic else np.asarray)(np.append(every, counts).astype(np.float64))
        place = (place - place.min()) / np.ptp(place)
        of_ticks, of_points = place[: len(every)], place[len(every) :]
        bound = dict(zip(ahead.tolist(), expected.tolist(), strict=True))  # a label below would cover the prediction
        for i in _labelled_points(of_points):
            there: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "fontsize": 8.5}
            above = bound.get(int(counts[i]), np.inf) < drawn[i]
            ax.annotate(percent(efficiency[i]), (counts[i], drawn[i]), (0, 8 if above else -14), **there)
        if logarithmic:
            ax.set_xscale("log", base=2)
            ax.set_yscale("log", base=2)
            ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}" if value < 1e5 else f"{value:.3g}")
            low = min(drawn.min(), *expected, drawn[0])
            ax.set_ylim(low / max(1.4, (top / low) ** 0.12), top * max(1.2, (top / low) ** 0.05))
        else:
            ax.set_xlim(every[0] - 0.06 * np.ptp(every), every[-1] + 0.08 * np.ptp(every))
            ax.set_ylim(0, top * 1.08)
        named = every[_labelled_points(of_ticks)]
        ax.set_xticks(named, [str(n) for n in named.tolist()])
        ax.minorticks_off()
        ax.grid(axis="y")
        ax.set_xlabel("ranks")
        base = "1 rank" if counts[0] == 1 else f"{counts[0]} ranks"
        ax.set_ylabel(f"speed-up over {base}")
        ax.set_title("Speed-up, all runs do the same work (strong scaling)")
        ax.figure.legend(*ax.get_legend_handles_labels(), loc="outside lower left", ncols=3)
    each = ", ".join(f"{n}: {value:.3g} ({percent(e)})" for n, value, e in zip(counts.tolist(), drawn, efficiency, strict=True))
    return describe(ax, f"Scaling: {ax.get_ylabel()} by the number of ranks, with the efficiency: {each}.")


def _labelled_points(places: NDArray[np.float64]) -> list[int]:
    """The indices of the points that get a text: the first, the last, and those between them with enough room."""
    kept = [0]
    for i, place in enumerate(places[:-1].tolist()):
        if min(place - places[kept[-1]], places[-1] - place) >= LABEL:
            kept.append(i)
    return [*kept, len(places) - 1]


def _checked(by_ranks: Mapping[int, Any], runs: str, example: str) -> NDArray[np.int64]:
    """Return the numbers of ranks, in ascending order, for which there are runs or predictions."""
    if not isinstance(by_ranks, Mapping):
        raise TypeError(f"scaling({by_ranks!r}): expected {runs} by number of ranks, as in scaling({example})")
    if any(not isinstance(n, numbers.Integral) or n < 1 for n in by_ranks):
        raise ValueError(f"scaling: {runs} for {list(by_ranks)} ranks; expected whole numbers from 1")
    return np.array(sorted(by_ranks), np.int64)
