"""The picture of `traffic`: bytes by operation over time, and from rank to rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from labkit.errors import LabError
from labkit.pictures.flows import Flows, flows_of, over_time
from labkit.pictures.gantt import view_of
from labkit.pictures.operations import colour_of
from labkit.pictures.sheet import GREY, INKS, WIDTH_IN, HasTrace, bytes_in_words, pyplot, sheet, trace_of, unit_of
from labkit.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["traffic"]

TEXTURES: Final = (
    "",
    "////",
    "....",
    "\\\\\\\\",
    "xxxx",
    "----",
    "||||",
    "++++",
)  # of the operations of one colour, in one figure
SHOWN: Final = len(TEXTURES)  # operations with a look of their own; the grey is for all others
OTHERS: Final = "#B4BAC4"
BINS: Final = 150
NUMBERED: Final = 8  # ranks: beyond it the matrix has no room for numbers
UNITS: Final = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))


def traffic(run: HasTrace | Trace, *, step: int | range | str = "all", ax: Axes | None = None) -> Axes:
    """Draw what travelled: on the left the bytes per second by operation over time, on the right the bytes from rank to rank.

    A message or a remote call goes from the one who sends to the one who receives. A collective is counted in one way, whatever
    the backend does: a broadcast and a scatter as messages from their root to each other rank, a gather and a reduce as messages
    from each to the root; an all-to-all as one from each to each; the others as a ring of their ranks would move them: in an
    all-reduce of S bytes on n ranks, each sends 2·(n - 1)/n·S to the next. Bytes are those of tensors (of remote calls, of what
    is pickled), spread evenly from the moment when all ranks had come to the end. An operation has one colour in all figures.

    Args:
        run: a run or a trace.
        step: a step's number, a range of them, or "all" for the whole run.
        ax: where to draw both, next to each other; default: a figure of its own.

    Returns:
        the left Axes; the matrix is the next one of its figure.

    Raises:
        LabError: there is nothing to draw, no such step, or nothing travelled between ranks.
        TypeError: something else than a run or a trace was given.

    Source: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
    """
    plt = pyplot()
    view = view_of(trace_of(run, "traffic"), step, "")
    trace, flows = view.shown, flows_of(view.shown)
    if not len(flows.name):
        raise LabError("traffic: nothing that labkit knows the size of travelled between ranks")
    matrix = flows.matrix(len(trace.ranks))
    with sheet():
        if ax is None:
            below = 0.75 + 0.19 * -(-min(len(flows.name), SHOWN + 1) // 2)  # the legend has two columns
            height = 0.45 + 1.9 + below
            sides = {"left": 0.075, "right": 0.96, "top": 1 - 0.45 / height, "bottom": below / height}
            ax = plt.subplots(figsize=(WIDTH_IN, height), gridspec_kw=sides)[1]
        from mpl_toolkits.axes_grid1 import make_axes_locatable  # type: ignore[import-untyped]  # part of matplotlib

        beside = make_axes_locatable(ax)
        right = beside.append_axes("right", size="48%", pad=0.55 + 0.07 * max(map(len, trace.ranks)))
        scale = beside.append_axes("right", size="2.5%", pad=0.08) if len(trace.ranks) > NUMBERED else None
        _draw_rates(ax, trace, flows)
        _draw_matrix(right, scale, trace.ranks, matrix, flows)
        ax.set_title(f"What travelled  ·  {view.in_words()}, {bytes_in_words(matrix.sum())} in all")
    return ax


def _draw_rates(ax: Axes, trace: Trace, flows: Flows) -> None:
    edges = np.linspace(trace.start_ns, trace.end_ns, BINS + 1).astype(np.int64)
    moved = over_time(flows, edges)
    labels = [f"{name}: {count} ×, {bytes_in_words(n)}" for name, count, n in _in_words(flows)]
    looks = _looks(flows.name[:SHOWN])
    if len(labels) > SHOWN:
        rest = slice(SHOWN, None)
        moved = np.vstack([moved[:SHOWN], moved[rest].sum(axis=0)])
        others = f"{len(labels) - SHOWN} others" if len(labels) > SHOWN + 1 else "another one"
        labels = [*labels[:SHOWN], f"{others}: {bytes_in_words(flows.by_operation()[rest].sum())}"]
        looks.append({"facecolor": OTHERS})
    rate = moved / np.diff(edges) * 1e9
    unit, size = next((u for u in UNITS if rate.sum(axis=0).max() >= u[1]), UNITS[-1])
    time_unit, unit_ns = unit_of(trace.duration_ns)
    x = (edges - trace.start_ns) / unit_ns
    floor = np.zeros(BINS)
    for values, label, look in zip(rate / size, labels, looks, strict=True):
        ax.stairs(floor + values, x, baseline=floor, fill=True, label=label, linewidth=0, **look)
        floor = floor + values
    ax.stairs(floor, x, color=GREY, linewidth=0.5)
    ax.set(xlim=(0, x[-1]), ylim=(0, 1.06 * floor.max()))
    ax.set_xlabel(f"time since the start [{time_unit}]")
    ax.set_ylabel(f"sent by all ranks [{unit}/s]")
    ax.legend(loc="upper left", bbox_to_anchor=(-0.02, -0.23), ncols=2 if len(labels) > 1 else 1, borderaxespad=0)


def _looks(names: Sequence[str]) -> list[dict[str, Any]]:
    """Of each operation: the colour of its kind, and a texture where it is not the first of them by its name."""
    found, taken = {}, Counter[str]()
    for name in sorted(names):
        colour = colour_of(name)
        light = sum(int(colour[i : i + 2], 16) for i in (1, 3, 5)) > 3 * 128
        found[name] = {"facecolor": colour, "hatch": TEXTURES[taken[colour]], "edgecolor": INKS["dark" if light else "light"]}
        taken[colour] += 1
    return [found[name] for name in names]


def _in_words(flows: Flows) -> list[tuple[str, int, float]]:
    return list(zip(flows.name, flows.count, flows.by_operation().tolist(), strict=True))


def _draw_matrix(ax: Axes, scale: Axes | None, ranks: tuple[str, ...], matrix: NDArray[np.float64], flows: Flows) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    unit, size = next((u for u in UNITS if matrix.max() >= u[1]), UNITS[-1])
    colours: Any = LinearSegmentedColormap.from_list("sent", ["#FFFFFF", "#F3B58A", "#D55E00"])
    n = len(ranks)
    shown = np.ma.masked_where(np.eye(n, dtype=bool), matrix / size)
    image = ax.imshow(shown, cmap=colours, vmin=0, vmax=matrix.max() / size, aspect="auto")
    short = [name.removeprefix("rank ") for name in ranks]
    if n <= 2 * NUMBERED:
        ax.set_xticks(range(n), short)
        ax.set_yticks(range(n), short)
    ax.tick_params(length=0)
    rules = ["as a ring of its ranks"] * flows.rings + ["as its root's messages"] * flows.roots
    note = "\n(a collective counts " + "\nor ".join(rules) + ")" if rules else ""
    ax.set_xlabel(("to rank" if short != list(ranks) else "to") + note)
    ax.set_ylabel("from rank" if short != list(ranks) else "from")
    ax.set_title(f"from rank to rank [{unit}]")
    for spine in ax.spines.values():
        spine.set(visible=True, color="#C6CBD3", linewidth=0.6)
    if scale is not None:
        ax.figure.colorbar(image, cax=scale)
        return
    for (row, column), nbytes in np.ndenumerate(matrix):
        if row != column:
            ax.text(
                column, row, _number(nbytes / size), ha="center", va="center", fontsize=8.5 if n <= 4 else 7,
                color=INKS["dark"] if nbytes else GREY,
            )  # fmt: skip


def _number(value: float) -> str:
    """Three digits at most."""
    return "0" if not value else f"{value:.0f}" if value >= 99.5 else f"{value:.1f}" if value >= 9.95 else f"{value:.2g}"
