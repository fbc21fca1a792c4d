"""The geometry and the colours that the still and the moving picture share: what lies where in a rank's row, and how it looks.

A rank's row has two lanes, so that overlap can be seen: compute above, communication beneath it at about half the height. From
spans that nest and overlap come disjoint bars, by the same arithmetic as `Trace.activity`, so that what a picture shows adds up
to what `breakdown` says.
"""

from __future__ import annotations

import functools
import heapq
import re
from dataclasses import dataclass, replace
from typing import Any, Final
from unicodedata import east_asian_width

import numpy as np
from numpy.typing import NDArray

from labkit.errors.units import bytes_in_words
from labkit.recording.ring_buffer import CALL, COMMUNICATION, COMPUTE, SERVE
from labkit.tracing.intervals import Intervals, difference, union
from labkit.tracing.trace import Trace

__all__ = [
    "COMMUNICATION_LANE", "COMPUTE_LANE", "HAIRLINE_PX", "IMPORTANCE", "LANES", "STYLES", "Bars", "Style", "blend", "caption",
    "coverage", "crowded", "hairlines", "ink", "lanes", "style_of",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Style:
    """How one kind of bar looks.

    Args:
        colour: "#rrggbb".
        alpha: 1 for opaque; less where the page, light or dark, shall show through.
        hatch: True for stripes of the colour.
        legend: what it means, in the words of the legend.
    """

    colour: str
    alpha: float
    hatch: bool
    legend: str

    @property
    def rgba(self) -> tuple[float, float, float, float]:
        """The colour as four numbers from 0 to 1."""
        red, green, blue = (int(self.colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
        return red, green, blue, self.alpha


# The colours are Okabe and Ito's, which people with any colour blindness tell apart ("Color Universal Design", 2008,
# https://jfly.uni-koeln.de/color/): what a rank computes is cool, what travels between ranks is warm.
_TRAVEL: Final = "#D55E00"
STYLES: Final[dict[str, Style]] = {
    "data": Style("#8FD3C0", 1, False, "data"),
    "forward": Style("#56B4E9", 1, False, "forward"),
    "backward": Style("#0072B2", 1, False, "backward"),
    "optimizer": Style("#009E73", 1, False, "optimizer"),
    "compute": Style("#7C93C9", 1, False, "compute"),
    "unlabelled": Style("#8A93A5", 0.28, False, "in the function, in no span"),
    "exposed": Style(_TRAVEL, 1, False, "exposed communication"),
    "hidden": Style(_TRAVEL, 0.5, False, "hidden behind compute"),
    "waiting": Style(_TRAVEL, 0.16, True, "waiting for another rank"),
    "issued": Style(_TRAVEL, 0.16, False, "issued, others not there yet"),
}
_MICRO_BATCH: Final = re.compile(r"(?i)(?:forward|backward) (\d+)")  # "forward 3 of stage 1"
_NUMBER: Final = {name: i for i, name in enumerate(STYLES)}
IMPORTANCE: Final = {"unlabelled": 0, "issued": 1, "waiting": 2}  # 3 for the others: a hairline covers what is less important
_HAPPENS: Final = np.array([IMPORTANCE.get(name, 3) == 3 for name in STYLES])
HAIRLINE_PX: Final = 0.7  # a bar is drawn at least so wide, where there is room
CLOSE_PX: Final = 2.0  # narrower bars that lie no further apart
CROWD: Final = 8  # and are at least so many would look like one wide bar: their colours mix
SEEN: Final = 0.25  # and where bars share a pixel, what happens in it is at least so opaque

# Top and height of the lanes, as shares of the row, measured from its top. Tenths, so that coarse pixels hit them.
COMPUTE_LANE: Final = (0.1, 0.5)
COMMUNICATION_LANE: Final = (0.6, 0.3)
LANES: Final = (COMPUTE_LANE, COMMUNICATION_LANE)


@dataclass(frozen=True, slots=True)
class Bars:
    """Disjoint stretches of one lane, ascending; four arrays of one length.

    Args:
        start_ns: where each begins.
        end_ns: where it ends.
        style: its place in `STYLES`.
        span: the span it comes from, as a row of the trace's columns.
    """

    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    style: NDArray[np.uint8]
    span: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.start_ns)

    def __getitem__(self, keep: Any) -> Bars:
        """Some of the bars: a slice, a mask or their numbers."""
        return Bars(self.start_ns[keep], self.end_ns[keep], self.style[keep], self.span[keep])

    def of(self, style: str) -> Bars:
        """Only the bars of one style."""
        return self[self.style == _NUMBER[style]]


@functools.lru_cache(maxsize=4096)
def style_of(name: str) -> str:
    """The style of a compute span: by the first word of its name, so that "forward 3" and "forward_stage1" are forward.

    Of a call that is served, by that of the function or method: "serve Decoder.forward" is forward.
    """
    if name.startswith(SERVE):
        name = name.removeprefix(SERVE).partition(" ")[0].rpartition(".")[2]
    word = re.match(r"[a-z]+", name.lower())
    return word[0] if word and word[0] in ("data", "forward", "backward", "optimizer") else "compute"


def lanes(trace: Trace, rank: int) -> tuple[Bars, Bars]:
    """The bars of a rank's two lanes, compute and communication, clipped to the time that the trace looks at."""
    columns = trace.columns  # a million spans are drawn as arrays; as objects they would take seconds
    data = columns.data
    mine, kind = data["rank"] == rank, data["kind"]
    window = np.array([[trace.start_ns, trace.end_ns]], np.int64)

    named = np.flatnonzero(mine & (kind == COMPUTE))
    calls = np.flatnonzero(mine & (kind == CALL))
    travelling = np.flatnonzero(mine & (kind == COMMUNICATION) & ~columns.around)
    rows = data[travelling]
    ready = trace.ready()[travelling]
    blocked = trace.blocked(rank)
    transfer = union(ready, rows["end_ns"])

    labelled = _clip(_flatten(data["start_ns"], data["end_ns"], named), blocked, inside=False)
    taken = union(np.append(labelled.start_ns, blocked[:, 0]), np.append(labelled.end_ns, blocked[:, 1]))
    rest = _clip(_flatten(data["start_ns"], data["end_ns"], calls), taken, inside=False)
    by_name = np.array([_NUMBER[style_of(name)] for name in columns.names] or [0], np.uint8)
    labelled.style[:] = by_name[data["name"][labelled.span]]
    rest.style[:] = _NUMBER["unlabelled"]

    computing = labelled if rank in trace.labelled else _merge(labelled, rest)
    busy = union(computing.start_ns, computing.end_ns)
    each = np.arange(len(rows))
    moving = _flatten(ready, rows["end_ns"], each)
    waiting = _clip(_flatten(rows["wait_start_ns"], rows["wait_end_ns"], each), difference(blocked, transfer), inside=True)
    told = union(np.append(transfer[:, 0], waiting.start_ns), np.append(transfer[:, 1], waiting.end_ns))
    communication = _merge(
        _styled(_clip(moving, busy, inside=False), "exposed"),
        _styled(_clip(moving, busy, inside=True), "hidden"),
        _styled(waiting, "waiting"),
        _styled(_clip(_flatten(rows["start_ns"], ready, each), told, inside=False), "issued"),
    )
    communication = replace(communication, span=travelling[communication.span])
    return _clip(_merge(labelled, rest), window, inside=True), _clip(communication, window, inside=True)


def coverage(bars: Bars, edges: NDArray[np.int64]) -> NDArray[np.int64]:
    """How much of each bin each style fills.

    Args:
        bars: of one lane.
        edges: ascending, shape (bins + 1,), in ns.

    Returns:
        shape (styles, bins), in ns.
    """
    covered = np.zeros((len(STYLES), len(edges) - 1), np.int64)
    for number in np.flatnonzero(np.bincount(bars.style)):
        of_style = bars.style == number
        start, end = bars.start_ns[of_style], bars.end_ns[of_style]
        before = np.concatenate([[0], np.cumsum(end - start)])
        last = np.searchsorted(start, edges, side="right")  # bars begun by each edge; the last of them may reach beyond it
        beyond = np.where(last > 0, np.maximum(end[np.maximum(last - 1, 0)] - edges, 0), 0)
        covered[number] = np.diff(before[last] - beyond)
    return covered


def hairlines(bars: Bars, px_per_ns: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Where each bar is drawn, from and to, in ns: as it lies, or as a hairline where nothing as important is beside it.

    A bar of a tenth of a pixel would be a tenth as strong, which nobody sees: two milliseconds in a run of seconds. It grows into
    what is empty or less important, half of the way to the next bar at most; the time that it took is not looked up here.
    """
    left, right = bars.start_ns.astype(np.float64), bars.end_ns.astype(np.float64)
    importance = np.array([IMPORTANCE.get(name, 3) for name in STYLES])[bars.style]
    for level in (3, 2, 1):
        at = np.flatnonzero(importance >= level)
        start, end = left[at], right[at]
        before = np.append(-np.inf, end[:-1])
        after = np.append(start[1:], np.inf)
        lacks = np.maximum(HAIRLINE_PX / px_per_ns - (end - start), 0) * (importance[at] == level)
        left[at] = start - np.minimum(lacks / 2, np.maximum(start - before, 0) / 2)
        right[at] = end + np.minimum(lacks / 2, np.maximum(after - end, 0) / 2)
    return left, right


def crowded(bars: Bars, px_per_ns: float) -> NDArray[np.bool_]:
    """Which bars are so narrow, so many and so close together that hairlines would make them a wide bar."""
    narrow = (bars.end_ns - bars.start_ns) * px_per_ns < HAIRLINE_PX
    found = np.zeros(len(bars), bool)
    at = np.flatnonzero(narrow & (bars.style != _NUMBER["unlabelled"]))
    if len(at) < CROWD:
        return found
    start, end = bars.start_ns[at], bars.end_ns[at]
    crowd = np.cumsum(np.append(True, (start[1:] - end[:-1]) * px_per_ns > CLOSE_PX)) - 1
    first = np.flatnonzero(np.diff(crowd, prepend=-1))
    for begin, after in zip(first.tolist(), [*first[1:].tolist(), len(at)], strict=True):
        if after - begin >= CROWD:
            found[at[begin] : at[after - 1] + 1] = True
    return found & narrow


def blend(covered: NDArray[Any], bin_ns: float) -> NDArray[np.float64]:
    """The colour of each bin as the eye would see it from afar: its styles mixed, the uncovered part transparent.

    What happens for a small part of a bin only is made as strong as it takes to be seen.

    Args:
        covered: shape (styles, bins), in ns, as `coverage` gives it.
        bin_ns: width of a bin.

    Returns:
        red, green, blue, opacity from 0 to 1, shape (bins, 4).
    """
    colours = np.array([style.rgba for style in STYLES.values()])
    weights = covered.T * (colours[:, 3] / bin_ns)
    happens = weights[:, _HAPPENS].sum(axis=1)
    weights[:, _HAPPENS] *= np.where((happens > 0) & (happens < SEEN), SEEN / np.maximum(happens, 1e-12), 1)[:, None]
    opacity = weights.sum(axis=1)
    mixed = weights @ colours[:, :3] / np.maximum(opacity, 1e-12)[:, None]
    return np.column_stack([mixed, np.minimum(opacity, 1)])


def caption(trace: Trace, bar: int, bars: Bars, characters: float) -> str:
    """The text inside a bar: what it is, with its size where there is room, and of a micro-batch its number; else "".

    Args:
        trace: where the bars come from.
        bar: which of them.
        bars: of one lane.
        characters: how many fit.
    """
    style = list(STYLES)[bars.style[bar]]
    if style == "unlabelled":
        return ""
    row = trace.columns.data[bars.span[bar]]
    name = trace.columns.names[row["name"]]
    texts = [name]
    if row["nbytes"] and style in ("exposed", "hidden"):
        texts.insert(0, f"{name} {bytes_in_words(int(row['nbytes']))}")
    if number := _MICRO_BATCH.match(name):  # the colour says which way it goes
        texts = [number[1]] if number.end() == len(name) else [name, number[1]]
    shortest, kept = "", len(name)
    if characters >= 9:
        while kept and _columns(name[:kept]) > characters - 1:
            kept -= 1
        shortest = f"{name[:kept]}…"
    return next((text for text in texts if _columns(text) <= characters), shortest)


def _columns(text: str) -> int:
    """How wide a text is, in characters of usual width: those of East Asia and emoji take two."""
    return len(text) + sum(east_asian_width(c) in "FW" for c in text)


def ink(style: str) -> str:
    """The text colour on a style: "light", "dark", or, where the page shows through, "page" for the page's own."""
    look = STYLES[style]
    if look.alpha < 1:
        return "page"
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in look.rgba[:3]]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]  # as WCAG 2 defines it
    return "light" if luminance < 0.25 else "dark"


def _flatten(start_ns: Any, end_ns: Any, rows: NDArray[np.int64]) -> Bars:
    """Disjoint bars from spans that nest and overlap: at each moment the span that ends first, of those the one that began last.

    So an inner span covers an outer one; a call that a thread of an RPC rank is computing, one that waits for its turn; and an
    operation that is under way, those queued behind it.

    Args:
        start_ns: of all spans.
        end_ns: of all spans.
        rows: which of them to look at.
    """
    start, end = start_ns[rows], end_ns[rows]
    order = np.lexsort((-end, start))
    order = order[end[order] > start[order]]
    rows, start, end = rows[order], start[order], end[order]
    if (start[1:] < end[:-1]).any():
        begin, over, owner = _uncover(start.tolist(), end.tolist())
        start, end, rows = np.array(begin, np.int64), np.array(over, np.int64), rows[np.array(owner, np.int64)]
    return Bars(start, end, np.zeros(len(start), np.uint8), rows)


def _uncover(start: list[int], end: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Sweep over the spans in the order of their start; the heap holds those that have begun, on top the one to be seen."""
    begin: list[int] = []
    over: list[int] = []
    owner: list[int] = []
    under_way: list[tuple[int, int]] = []  # end and, negative so that the one that began last comes first, the number
    for i, now in enumerate([*start, max(end)]):
        since = start[i - 1] if i else now
        while under_way and since < now:
            stop, number = under_way[0]
            if stop > since:
                if owner and owner[-1] == -number and over[-1] == since:
                    over[-1] = min(stop, now)
                else:
                    begin.append(since)
                    over.append(min(stop, now))
                    owner.append(-number)
                since = over[-1]
            if stop <= now:
                heapq.heappop(under_way)
        if i < len(start):
            heapq.heappush(under_way, (end[i], -i))
    return begin, over, owner


def _clip(bars: Bars, intervals: Intervals, *, inside: bool) -> Bars:
    """The parts of bars that lie inside, or outside, of disjoint ascending intervals."""
    if not len(bars) or not len(intervals):
        return bars[:0] if inside else bars
    edges = np.sort(np.concatenate([bars.start_ns, bars.end_ns, intervals.ravel()]), kind="stable")
    left, right = edges[:-1], edges[1:]
    bar = np.searchsorted(bars.start_ns, left, side="right") - 1
    interval = np.searchsorted(intervals[:, 0], left, side="right") - 1
    within = (interval >= 0) & (left < intervals[interval, 1])
    keep = (bar >= 0) & (left < bars.end_ns[bar]) & (within == inside) & (left < right)
    left, right, bar = left[keep], right[keep], bar[keep]
    first = np.ones(len(left), bool)
    first[1:] = (left[1:] != right[:-1]) | (bar[1:] != bar[:-1])  # pieces of one bar that still touch become one again
    last = np.append(first[1:], True)[: len(left)]
    return Bars(left[first], right[last], bars.style[bar[first]], bars.span[bar[first]])


def _styled(bars: Bars, style: str) -> Bars:
    return replace(bars, style=np.full(len(bars), _NUMBER[style], np.uint8))


def _merge(*parts: Bars) -> Bars:
    """Several sets of bars that do not overlap, as one."""
    every = Bars(
        np.concatenate([part.start_ns for part in parts]),
        np.concatenate([part.end_ns for part in parts]),
        np.concatenate([part.style for part in parts]),
        np.concatenate([part.span for part in parts]),
    )
    return every[np.argsort(every.start_ns, kind="stable")]
