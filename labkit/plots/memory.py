"""`memory`: what filled each rank's memory over time, as recorded by `track_memory`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from labkit.errors.exceptions import LabError
from labkit.errors.lists import these
from labkit.errors.units import bytes_in_words, round_stride, three_digits, unit_of, unit_of_bytes
from labkit.errors.wrong_calls import public_api
from labkit.plots.image import WIDTH_IN
from labkit.plots.style import INK, axes_for, describe
from labkit.plots.view import view_of
from labkit.recording.schema import MEMORY, MEMORY_KINDS
from labkit.tracing.step_times import HasTrace, trace_of
from labkit.tracing.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The timeline's colours of what produces them: activations come from the forward pass, gradients from the backward
# pass; buckets are for communication.
COLOURS: Final = dict(
    zip(MEMORY_KINDS, ("#7C93C9", "#009E73", "#0072B2", "#EBAF80", "#C9D3EA", "#56B4E9", "#C6CBD3"), strict=True)
)
COLUMNS: Final = 1500  # more than the figure has pixels
CHARACTER_PT_IN: Final = 0.0082  # width of a character, in inches per point of font size
UNCOUNTED: Final = "tracked kinds, without temporaries"
_HEADROOM_IN: Final = 0.26  # above each rank's areas, for the text and the marker of the peak


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What filled one rank's memory; each value holds until the next."""

    rank: int
    time_ns: NDArray[np.int64]  # times in ns, ascending, shape (points,)
    nbytes: NDArray[np.float64]  # bytes by kind, shape (kinds, points), in the order of `MEMORY_KINDS`

    @property
    def peak(self) -> int:
        """Index of the point with the most bytes, all kinds together."""
        return int(self.nbytes.sum(axis=0).argmax())


def memory_uses(trace: Trace) -> list[MemoryUse]:
    """What `track_memory` recorded, in rank order, for each rank that used it."""
    of_rank: dict[int, list[tuple[int, int, float]]] = {}
    for scalar in trace.scalars:
        if scalar.name.startswith(MEMORY) and (kind := scalar.name.removeprefix(MEMORY)) in MEMORY_KINDS:
            of_rank.setdefault(scalar.rank, []).append((scalar.time_ns, MEMORY_KINDS.index(kind), scalar.value))
    found = []
    for rank, points in sorted(of_rank.items()):
        times = sorted({time_ns for time_ns, _, _ in points})
        place = {time_ns: i for i, time_ns in enumerate(times)}
        nbytes = np.full((len(MEMORY_KINDS), len(times)), np.nan)
        for time_ns, kind_number, value in points:
            nbytes[kind_number, place[time_ns]] = value
        nbytes[np.isnan(nbytes[:, 0]), 0] = 0
        known = np.maximum.accumulate(np.where(np.isnan(nbytes), 0, np.arange(len(times))), axis=1)
        found.append(MemoryUse(rank, np.array(times, np.int64), np.take_along_axis(nbytes, known, axis=1)))
    return found


@public_api
def memory(run: HasTrace | Trace, *, step: int | range | str = "all", ax: Axes | None = None) -> Axes:
    """Draw what filled each rank's memory over time: parameters, optimizer state, gradients, activations; and the peak.

    Only ranks that put `with lab.track_memory(model, optimizer):` around their training loop are shown; `track_memory`
    documents what is counted. On a CPU, temporaries are not, as the title says: the real peak is higher.

    Args:
        run: a run or a trace.
        step: a step number, a range of steps, "median" for the step of median length, or "all" for the whole run.
        ax: the axes to draw into; default: a new figure.

    Returns:
        the Axes.

    Raises:
        LabError: no rank tracked its memory, the trace is empty, has no such step, or matplotlib is not installed.
        TypeError: `run` is neither a run nor a trace.
    """
    view = view_of(trace_of(run, "memory"), step, "")
    trace = view.shown
    found = memory_uses(trace)
    if not found:
        raise LabError(
            "memory: no rank of this run tracked its memory; "
            "put `with lab.track_memory(model, optimizer):` around the training loop"
        )
    counted = "" if all(usage.nbytes[-1].any() for usage in found) else UNCOUNTED  # "other" includes temporaries
    shown = f"{these([trace.ranks[usage.rank] for usage in found])}, {view.steps_in_words()}"
    highest = max(usage.nbytes.sum(axis=0).max() for usage in found) or 1.0
    unit, size = unit_of_bytes(highest)
    time_unit, unit_ns = unit_of(trace.duration_ns)
    top = highest / size
    row_in = min(max(4.6 / len(found), 0.66), 1.9)
    pitch = top * row_in / (row_in - _HEADROOM_IN)
    wide_in = WIDTH_IN - 0.75 if ax is None else ax.get_window_extent().width / ax.figure.dpi
    with axes_for(ax, 1.15 + row_in * len(found)) as ax:
        peaks = [_words(usage, trace, unit, size) for usage in found]
        small = min(8.0, wide_in / max(map(len, peaks)) / CHARACTER_PT_IN)  # so that each fits into one line
        ticks, labels = [], []
        stride = round_stride(top, 2 if len(found) > 4 else 4)
        for row, usage in enumerate(found):
            base = pitch * (len(found) - 1 - row)
            _draw(ax, usage, trace, base, size, unit_ns)
            ax.text(
                0.004, base + top + 0.62 * (pitch - top), peaks[row], fontsize=small, va="center", in_layout=False,
                transform=ax.get_yaxis_transform(),
            )  # fmt: skip
            for i in range(int(top / stride + 1e-9) + 1):
                ticks.append(base + i * stride)
                labels.append(f"{i * stride:g}")
                ax.axhline(ticks[-1], color=INK, alpha=0.3 if i else 1, linewidth=0.6 if i else 0.8, zorder=1)
        ax.set(xlim=(0, trace.duration_ns / unit_ns), ylim=(0, pitch * len(found)), yticks=ticks, yticklabels=labels)
        ax.set_xlabel(f"time since the start of the {'step' if view.zoomed else 'run'} [{time_unit}]")
        ax.set_ylabel(f"memory of a rank [{unit}]")
        ax.tick_params(axis="y", length=0)
        ax.set_title(f"What fills the memory{counted and f': {counted}'}  ·  {shown}")
        _legend(ax, [kind for i, kind in enumerate(MEMORY_KINDS) if any(usage.nbytes[i].any() for usage in found)])
    return describe(ax, f"What fills the memory: {counted and f'{counted}; '}{shown}. {'; '.join(peaks)}.")


@public_api
def memory_mb(run: HasTrace | Trace, *kinds: str, rank: int | None = None) -> float:
    """Return the peak memory of a rank in MB (10⁶ bytes), as `track_memory` recorded it.

    For example, `memory_mb(run, "gradients", "optimizer state")` is the most that both together occupied at any time.
    On a CPU, only the tracked kinds are counted, without temporaries: the real peak is higher. On CUDA, and in a
    simulation without `measured=True`, "other" includes them.

    Args:
        run: a run or a trace.
        kinds: what to count: "parameters", "gathered parameters", "gradients", "buckets", "optimizer state",
            "activations", "other"; default: everything that was tracked.
        rank: the rank; default: the one that needs most.

    Raises:
        LabError: no rank tracked its memory, or not this one.
        TypeError: `run` is neither a run nor a trace.
        ValueError: an unknown kind.
    """
    trace = trace_of(run, "memory_mb")
    for kind in kinds:
        if kind not in MEMORY_KINDS:
            raise ValueError(f"memory_mb({kind!r}): expected {', '.join(map(repr, MEMORY_KINDS))}")
    rows = [MEMORY_KINDS.index(kind) for kind in kinds or MEMORY_KINDS]
    found = [use for use in memory_uses(trace) if rank in (None, use.rank)]
    tracked = any(use.nbytes[:-1].any() for use in found)  # a simulation without `track_memory` has only "other"
    if not found or (not tracked and set(kinds) - {MEMORY_KINDS[-1]}):
        whose = "no rank of this run has" if rank is None else f"rank {rank} of this run has not"
        raise LabError(
            f"memory_mb: {whose} tracked its memory; put `with lab.track_memory(model, optimizer):` around the training loop"
        )
    return max(float(use.nbytes[rows].sum(axis=0).max()) for use in found) / 1e6


def _draw(ax: Axes, usage: MemoryUse, trace: Trace, base: float, size: float, unit_ns: float) -> None:
    """Draw the areas of one rank, and its peak."""
    usage = _thinned(usage, trace)
    x = (np.append(usage.time_ns, max(trace.end_ns, usage.time_ns[-1])) - trace.start_ns) / unit_ns
    edges = base + np.vstack([np.zeros(len(x) - 1), np.cumsum(usage.nbytes, axis=0)]) / size
    edges = np.hstack([edges, edges[:, -1:]])  # after the last change, until the end
    for i, kind in enumerate(MEMORY_KINDS):
        if usage.nbytes[i].any():
            ax.fill_between(x, edges[i], edges[i + 1], step="post", facecolor=COLOURS[kind], linewidth=0, zorder=2)
    ax.plot(x, edges[-1], drawstyle="steps-post", color=INK, linewidth=0.7, zorder=3)
    peak = usage.peak
    ax.plot(x[peak], edges[-1, peak], "v", color="#D55E00", markersize=5, markeredgecolor="white", markeredgewidth=0.5, zorder=4)


def _thinned(usage: MemoryUse, trace: Trace) -> MemoryUse:
    """Reduce many points to the minimum and maximum in each of `COLUMNS` intervals, and the first and last point."""
    if len(usage.time_ns) <= 4 * COLUMNS:
        return usage
    column = (usage.time_ns - trace.start_ns) * COLUMNS // max(trace.duration_ns, 1)
    order = np.lexsort((usage.nbytes.sum(axis=0), column))
    last = np.flatnonzero(np.diff(column[order]))  # of each interval
    kept = np.unique(np.concatenate([[0, len(column) - 1, usage.peak], order[last], order[last + 1]]))
    return MemoryUse(usage.rank, usage.time_ns[kept], usage.nbytes[:, kept])


def _words(usage: MemoryUse, trace: Trace, unit: str, size: float) -> str:
    """A rank's peak and its split: "rank 0: peak 4.0 MB = parameters 1.0 + gradients 1.0 + activations 2.0"."""
    at = usage.nbytes[:, usage.peak] / size
    parts = [f"{kind} {_part(value, size)}" for kind, value in zip(MEMORY_KINDS, at, strict=True) if value > 0]
    return f"{trace.ranks[usage.rank]}: peak {three_digits(at.sum())} {unit} = {' + '.join(parts)}"


def _part(value: float, size: float) -> str:
    """A part of a peak in units of `size` bytes; a very small part has its own unit."""
    return three_digits(value) if value >= 0.00995 else bytes_in_words(value * size)


def _legend(ax: Axes, kinds: Sequence[str]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(facecolor=COLOURS[kind], label=kind) for kind in kinds]
    handles.append(Line2D([], [], linestyle="none", marker="v", color="#D55E00", markersize=5, label="peak"))
    ax.figure.legend(handles=handles, loc="outside lower left", ncols=len(handles))
