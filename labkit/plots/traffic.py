"""`traffic`: bytes by operation over time, and from rank to rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from labkit.errors.exceptions import LabError
from labkit.errors.units import bytes_in_words, unit_of, unit_of_bytes
from labkit.errors.wrong_calls import public_api
from labkit.plots.flows import Flows, flows_of, over_time
from labkit.plots.style import CHIP, INK, INKS, axes_for, describe, pyplot, shortened
from labkit.plots.view import view_of
from labkit.recording.operations import OperationType, type_of
from labkit.tracing.step_times import HasTrace, trace_of
from labkit.tracing.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Textures that distinguish operations of the same colour in one figure.
TEXTURES: Final = ("", "////", "....", "\\\\\\\\", "xxxx", "----", "||||", "++++")
MOST: Final = len(TEXTURES)  # operations with their own colour and texture; all others are grey
SMALL: Final = 0.01  # operations with a smaller share of the bytes are drawn together as "others"
OTHERS: Final = "#B4BAC4"
BINS: Final = 150
NUMBERED: Final = 8  # ranks; with more, the matrix has no room for numbers
WIDE_CELLS: Final = 4  # ranks, up to which a cell has room for a number and its unit
LONGEST_TITLE: Final = 74  # characters beside the title of the matrix
TITLED: Final = 2 * NUMBERED  # ranks; with more, it has no room for their names either
CHARACTER_IN: Final = 0.07
NODES_IN: Final = 0.2  # width of the names of nodes beside the matrix
MATRIX_IN: Final = 2.1  # width of the matrix in a new figure
LONGEST: Final = 56  # characters of an operation's name


@public_api
def traffic(run: HasTrace | Trace, *, step: int | range | str = "all", ax: Axes | None = None) -> Axes:
    """Draw the communicated bytes: on the left by operation over time, on the right from rank to rank.

    A message or remote call counts from its sender to its receiver. Collectives are counted independently of the
    backend's algorithm. A broadcast or scatter counts as messages from the root to each other rank; a gather or reduce
    as messages from each rank to the root; an all-to-all as messages between all pairs. The others count as a ring
    algorithm moves them: in an all-reduce of S bytes on n ranks, each rank sends 2·(n - 1)/n·S to the next. If a rank
    has several TensorFlow devices, each counts as a rank. Over a `labkit.Network` or on several machines, lines
    separate the nodes, and the title gives the bytes between nodes.

    Bytes are those of tensors, and for remote calls those of the pickled data. They are spread evenly over the time
    from the arrival of the last rank to the end of the operation: while operations wait for one another on a link, the
    sum of these means can be above what it carries. An operation has the same colour in all figures; operations with
    less than a hundredth of the bytes are drawn as one. Those of a device mesh are counted by axis.
    Operations of unknown size are listed below the figure; "?" then stands between ranks of which nothing is known.

    Args:
        run: a run or a trace.
        step: a step number, a range of steps, "median" for the step of median length, or "all" for the whole run.
        ax: the axes to draw both parts into, side by side; default: a new figure.

    Returns:
        the left Axes; the matrix is the next Axes of its figure.

    Raises:
        LabError: the trace is empty, has no such step or no communication of known size, or matplotlib is not
            installed.
        TypeError: `run` is neither a run nor a trace.

    Source: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
    """
    pyplot()  # first of all, that matplotlib is not installed
    view = view_of(trace_of(run, "traffic"), step, "")
    trace, flows = view.shown, flows_of(view.shown, view.bounds_of_ranks())
    if not len(flows.name) and flows.unsized:
        raise LabError(f"traffic: there is nothing to draw: the sizes of all operations are unknown ({_unsized(flows)})")
    if not len(flows.name):
        raise LabError("traffic: there is nothing to draw: labkit recorded no bytes between ranks")
    matrix, labels = flows.matrix(), _labels(flows)
    entries = [*labels, *([f"not counted, as of unknown size: {_unsized(flows)}"] if flows.unsized else [])]
    ranks, rules = _short(flows.ends), _rules(flows)
    longest = max(len(name.removeprefix("rank ")) for name in ranks)
    upright = len(ranks) * (longest * CHARACTER_IN + 0.06) > MATRIX_IN and longest > 2
    # Two columns in the legend, if they leave room for the text below the matrix.
    columns = 2 if len(entries) > 1 and max(map(len, entries)) <= (36 if rules or upright else 56) else 1
    least = "at least " if flows.unsized else ""
    some = f", {bytes_in_words(flows.between_ranks())} between ranks" if flows.devices and len(trace.ranks) > 1 else ""
    some += f", {bytes_in_words(flows.between_nodes())} between nodes" if len(flows.node) else ""
    titles = f"What travelled  ·  {view.in_words()},", f"{least}{bytes_in_words(matrix.sum())} in all{some}"
    title = (" " if sum(map(len, titles)) <= LONGEST_TITLE else "\n").join(titles)
    top_in = 0.45 + 0.17 * title.count("\n")
    names_in = 0.0 if len(ranks) > TITLED else longest * CHARACTER_IN if upright else 0.15
    below = max(0.75 + 0.19 * -(-len(entries) // columns), 0.45 + names_in + 0.17 * rules.count("\n"))
    height = top_in + 1.9 + below
    sides = {"left": 0.095, "right": 0.96, "top": 1 - top_in / height, "bottom": below / height}
    with axes_for(ax, height, gridspec_kw=sides) as ax:
        from mpl_toolkits.axes_grid1 import make_axes_locatable  # type: ignore[import-untyped]  # part of matplotlib

        beside = make_axes_locatable(ax)
        right = beside.append_axes("right", size="48%", pad=0.55 + CHARACTER_IN * max(map(len, ranks)))
        pad = 0.08 + NODES_IN * bool(len(flows.node))
        scale = beside.append_axes("right", size="2.5%", pad=pad) if len(ranks) > NUMBERED else None
        _draw_rates(ax, trace, flows, labels, "step" if view.zoomed else "run")
        if flows.unsized:
            ax.plot([], [], linestyle="none", label=entries[-1])
        ax.legend(loc="upper left", bbox_to_anchor=(-0.02, -0.23), ncols=columns, borderaxespad=0)
        _draw_matrix(right, scale, flows, ranks, rules, upright)
        ax.set_title(title)
    return describe(
        ax, f"What travelled: {view.in_words()}, {least}{bytes_in_words(matrix.sum())} in all{some}. {'; '.join(entries)}."
    )


@public_api
def sent_mb(run: HasTrace | Trace, rank: int | None = None) -> float:
    """Return how many MB (10⁶ bytes) a rank sends in a step, counted as `traffic` counts them.

    A run without `lab.steps` counts as one step. What is sent before the first step or after the last does not count,
    nor do TensorFlow's messages and copies of which its profiler does not say the size; `traffic` lists them.

    Args:
        run: a run or a trace.
        rank: the rank; default: the mean of all ranks.

    Raises:
        LabError: the ranks recorded nothing, or the size of a collective is unknown.
        TypeError: `run` is neither a run nor a trace.
        ValueError: there is no such rank.
    """
    trace = trace_of(run, "sent_mb")
    if rank is not None and rank not in range(len(trace.ranks)):
        raise ValueError(f"sent_mb(rank={rank!r}): expected a rank from 0 to {len(trace.ranks) - 1}")
    steps = len(trace.step_bounds())
    last = trace.end_ns + 1
    bounds = view_of(trace, range(steps) if steps else "all", "").bounds_of_ranks()
    if bounds is not None:
        last = int(bounds[:, 1].max())
        bounds[:, 1] = trace.end_ns  # what a rank has begun in its last step may end after it
    flows = flows_of(trace, bounds)
    if unknown := ", ".join(f"{count} × {name}" for name, count in flows.unsized if type_of(name).collective):
        raise LabError(f"sent_mb: the sizes of {unknown} are unknown; lab.traffic draws those that are known")
    counted = flows.start_ns < last
    if rank is not None:
        counted &= flows.rank[flows.source] == rank
    among = len(trace.ranks) if rank is None else 1
    return float(flows.nbytes[counted].sum()) / max(steps, 1) / among / 1e6


def _short(ranks: Sequence[str]) -> list[str]:
    """Return the names of ranks, shortened as far as they remain distinct."""
    tried = ([shortened(name, most) for name in ranks] for most in range(18, max(map(len, ranks))))
    return next((names for names in tried if len(set(names)) == len(names)), list(ranks))


def _shown(flows: Flows) -> int:
    """Return how many operations, most bytes first, get their own colour and texture.

    If only one operation would be left over, it gets its own too.
    """
    nbytes = flows.by_operation()
    large = max(int((nbytes >= SMALL * nbytes.sum()).sum()), 1)
    return min(large + (len(nbytes) == large + 1), MOST)


def _labels(flows: Flows) -> list[str]:
    """Return the legend's texts: one per operation with its own colour and texture, and one for all others."""
    nbytes, shown = flows.by_operation(), _shown(flows)
    each = zip(flows.name[:shown], flows.count, nbytes.tolist(), strict=False)
    labels = [f"{shortened(name, LONGEST)}: {count} ×, {bytes_in_words(n)}" for name, count, n in each]
    if (more := len(flows.name) - shown) > 0:
        labels.append(f"{f'{more} others' if more > 1 else '1 other'}: {bytes_in_words(nbytes[shown:].sum())}")
    return labels


def _unsized(flows: Flows) -> str:
    return ", ".join(f"{count} × {shortened(name, LONGEST)}" for name, count in flows.unsized)


def _endpoint(flows: Flows) -> str:
    """Return the word for what sends and receives."""
    return "device" if flows.devices else "rank"


def _rules(flows: Flows) -> str:
    """Return the note that says how collectives are counted."""
    rules = [f"as a ring of its {_endpoint(flows)}s"] * flows.rings + ["as its root's messages"] * flows.roots
    return "\n(a collective counts " + "\nor ".join(rules) + ")" if rules else ""


def _draw_rates(ax: Axes, trace: Trace, flows: Flows, labels: list[str], part: str) -> None:
    edges = np.linspace(trace.start_ns, trace.end_ns, BINS + 1).astype(np.int64)
    moved = over_time(flows, edges)
    shown = _shown(flows)
    looks = _looks(flows.name[:shown], flows.type)
    if len(moved) > shown:
        moved = np.vstack([moved[:shown], moved[shown:].sum(axis=0)])
        looks.append({"facecolor": OTHERS})
    rate = moved / np.diff(edges) * 1e9
    unit, size = unit_of_bytes(rate.sum(axis=0).max())
    time_unit, unit_ns = unit_of(trace.duration_ns)
    x = (edges - trace.start_ns) / unit_ns
    floor = np.zeros(BINS)
    for values, label, look in zip(rate / size, labels, looks, strict=True):
        ax.stairs(floor + values, x, baseline=floor, fill=True, label=label, linewidth=0, **look)
        floor = floor + values
    ax.stairs(floor, x, color=INK, linewidth=0.5)
    ax.set(xlim=(0, x[-1]), ylim=(0, 1.06 * floor.max()))
    ax.set_xlabel(f"time since the first rank began the {part} [{time_unit}]")  # longer than the step of any one rank
    ax.set_ylabel(f"sent by all {_endpoint(flows)}s [{unit}/s],\nmean of each operation")


def _looks(names: Sequence[str], types: Sequence[OperationType]) -> list[dict[str, Any]]:
    """Return each operation's colour, with a texture if an operation earlier in the alphabet has the same colour."""
    found, used = {}, Counter[str]()
    for name, kind in sorted(zip(names, types, strict=False), key=lambda pair: pair[0]):
        colour = kind.colour
        light = sum(int(colour[i : i + 2], 16) for i in (1, 3, 5)) > 3 * 128
        found[name] = {"facecolor": colour, "hatch": TEXTURES[used[colour]], "edgecolor": INKS["dark" if light else "light"]}
        used[colour] += 1
    return [found[name] for name in names]


def _draw_matrix(ax: Axes, scale: Axes | None, flows: Flows, ranks: list[str], rules: str, upright: bool) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    matrix, endpoint = flows.matrix(), _endpoint(flows)
    unit, size = unit_of_bytes(matrix.max())
    colours: Any = LinearSegmentedColormap.from_list("sent", [(0.835, 0.369, 0.0, alpha) for alpha in (0.16, 1.0)])
    n = len(ranks)
    shown = np.ma.masked_where(matrix == 0, matrix / size)  # nothing sent: the page shows through
    image = ax.imshow(shown, cmap=colours, vmin=0, vmax=matrix.max() / size, aspect="auto")
    short = [name.removeprefix("rank ") for name in ranks]
    if n <= TITLED:
        ax.set_xticks(range(n), short)
        ax.set_yticks(range(n), short)
    if n > NUMBERED:
        ax.tick_params(labelsize=6.5)
    if upright:
        ax.tick_params(axis="x", labelrotation=90)
    ax.tick_params(length=0)
    numbered = short != ranks or flows.devices
    ax.set_xlabel((f"to {endpoint}" if numbered else "to") + rules)
    ax.set_ylabel(f"from {endpoint}" if numbered else "from")
    ax.set_title(f"from {endpoint} to {endpoint} [{unit}]")
    for spine in ax.spines.values():
        spine.set(visible=True, color=INK, alpha=0.5, linewidth=0.6)
    _draw_nodes(ax, flows)
    if scale is not None:
        ax.figure.colorbar(image, cax=scale)
        return
    for (row, column), nbytes in np.ndenumerate(matrix):
        if row != column:
            text = _cell(nbytes, size, n) if nbytes or not flows.unsized else "?"
            ax.text(
                column, row, text, ha="center", va="center", fontsize=8.5 if n <= 4 else 7,
                color=INKS["dark"] if nbytes else INK, bbox=CHIP if nbytes else None,
            )  # fmt: skip


def _draw_nodes(ax: Axes, flows: Flows) -> None:
    """Draw lines between the nodes of a network, and each node's name beside its rows."""
    for node in np.unique(flows.node).tolist():
        first, last = np.flatnonzero(flows.node == node)[[0, -1]].tolist()
        if first:
            for line in (ax.axhline, ax.axvline):
                line(first - 0.5, color=INK, linewidth=1.6)
        ax.annotate(
            f"node {node}", (1, (first + last) / 2), xytext=(4, 0), xycoords=ax.get_yaxis_transform(),
            textcoords="offset points", rotation=90, va="center", fontsize=8, annotation_clip=False,
        )  # fmt: skip


def _cell(nbytes: float, size: float, ranks: int = 2) -> str:
    """Format bytes in units of `size`, with at most two decimals; below a tenth of it in a smaller one if that fits."""
    value = nbytes / size
    if 0 < value < 0.0995:
        return bytes_in_words(nbytes) if ranks <= WIDE_CELLS else f"{value:.2f}" if value >= 0.01 else "<.01"
    return f"{value:.0f}" if not value or value >= 99.5 or size == 1 else f"{value:.1f}" if value >= 0.995 else f"{value:.2g}"
