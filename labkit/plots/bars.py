"""Bars: the geometry and colours shared by the timeline, the live picture and the explorer.

A rank's row has two lanes, so that overlap is visible: compute above, communication below it at about half the height.
Spans nest and overlap; they become disjoint bars by the same arithmetic as `Trace.activity`, so that the bars add up to
the shares that `breakdown` shows.
"""

from __future__ import annotations

import functools
import heapq
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final
from unicodedata import east_asian_width

import numpy as np
from numpy.typing import NDArray

from labkit.errors.units import bytes_in_words
from labkit.recording.events import device_number
from labkit.recording.group_keys import axis_of
from labkit.recording.operations import SERVE, type_of
from labkit.recording.schema import CALL, COMMUNICATION, COMPUTE, DATA, UNKNOWN, UNWAITED
from labkit.tracing.intervals import Intervals, difference, union
from labkit.tracing.trace import Trace


@dataclass(frozen=True, slots=True)
class Style:
    """The appearance of one kind of bar."""

    colour: str  # "#rrggbb"
    alpha: float  # opacity, 1 for opaque; lower values let the page, light or dark, show through
    hatch: str  # the texture in the colour, as matplotlib writes it: "//////" for stripes, "...." for dots, "" for none
    legend: str

    @property
    def rgba(self) -> tuple[float, float, float, float]:
        """The colour as four numbers from 0 to 1."""
        red, green, blue = (int(self.colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
        return red, green, blue, self.alpha


# Okabe and Ito's palette, which remains distinguishable with any colour blindness ("Color Universal Design", 2008,
# https://jfly.uni-koeln.de/color/): compute has cool colours, communication warm ones.
_COMMUNICATION_COLOUR: Final = "#D55E00"
STYLES: Final[dict[str, Style]] = {
    DATA: Style("#8FD3C0", 1, "", "waiting for data"),
    "forward": Style("#56B4E9", 1, "", "forward"),
    "backward": Style("#0072B2", 1, "", "backward"),
    "optimizer": Style("#009E73", 1, "", "optimizer"),
    "compute": Style("#7C93C9", 1, "", "compute"),
    "unlabelled": Style("#8A93A5", 0.33, "", "in the function, in no span"),
    "unknown": Style("#8A93A5", 0.1, "//////", "unknown: its machine does not answer"),
    "exposed": Style(_COMMUNICATION_COLOUR, 1, "", "exposed communication"),
    # Less vivid than "exposed", and of medium lightness: less striking on white pages and on dark ones.
    "hidden": Style("#B08968", 1, "", "hidden behind compute"),
    # The program went on without it, so it is neither hidden nor exposed: crosses mark a mistake.
    "unwaited": Style(_COMMUNICATION_COLOUR, 0.3, "xxxx", "never waited for"),
    "waiting": Style(_COMMUNICATION_COLOUR, 0.16, "//////", "waiting for another rank"),
    "issued": Style(_COMMUNICATION_COLOUR, 0.16, "....", "issued, others not there yet"),
}
ALONE: Final = "waiting"  # of a single rank without known devices, which cannot wait for another rank
_WORDS: Final = {
    (True, False): STYLES["waiting"].legend,
    (False, True): "waiting for another device",
    (True, True): "waiting for another rank or device",
}
_MICRO_BATCH: Final = re.compile(r"(?i)(?:forward|backward) (\d+)")  # "forward 3 of stage 1"
_NUMBER: Final = {name: i for i, name in enumerate(STYLES)}
# 3 for others; hairlines may cover less important styles.
IMPORTANCE: Final = {"unlabelled": 0, "unknown": 0, "issued": 1, "waiting": 2}
_ACTIVE: Final = np.array([IMPORTANCE.get(name, 3) == 3 for name in STYLES])
HAIRLINE_PX: Final = 0.7  # the minimum width of a bar, if there is space
SLIVER_PX: Final = 8  # a bar below this width divides another one without making two of it
# `CROWD` or more narrower bars, with gaps of at most `CLOSE_PX`, would look like one wide bar: their colours are mixed.
CLOSE_PX: Final = 2.0
CROWD: Final = 8
MIN_OPACITY: Final = 0.25  # of activity in a pixel that several bars share

# Top and height of the lanes, as fractions of the row, measured from its top: multiples of 0.1, which align with coarse
# pixels.
COMPUTE_LANE: Final = (0.1, 0.5)
COMMUNICATION_LANE: Final = (0.6, 0.3)
LANES: Final = (COMPUTE_LANE, COMMUNICATION_LANE)


@dataclass(frozen=True, slots=True)
class Bars:
    """Disjoint bars of one lane in ascending order; four arrays of shape (bars,)."""

    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    style: NDArray[np.uint8]  # index into `STYLES`
    span: NDArray[np.int64]  # index of the bar's span in the trace's columns

    def __len__(self) -> int:
        return len(self.start_ns)

    def __getitem__(self, keep: Any) -> Bars:
        """Select bars by a slice, a mask or indices."""
        return Bars(self.start_ns[keep], self.end_ns[keep], self.style[keep], self.span[keep])

    def of(self, style: str) -> Bars:
        """Select the bars of one style."""
        return self[self.style == _NUMBER[style]]


@functools.lru_cache(maxsize=4096)
def style_of(name: str) -> str:
    """Return the style of a compute span by the first word of its name: "forward 3" and "forward_stage1" are forward.

    Only "data" must be the whole name, since `Trace.shares` does not count it as compute: "data_parallel" computes.
    A served call has the style of its function or method: "serve Decoder.forward" is forward.
    """
    if type_of(name) is SERVE:
        name = SERVE.function_in(name).partition(" ")[0].rpartition(".")[2]
    word = re.match(r"[a-z]+", name.lower())
    return DATA if name == DATA else word[0] if word and word[0] in ("forward", "backward", "optimizer") else "compute"


def lanes(trace: Trace, rank: int) -> tuple[Bars, Bars]:
    """Return the bars of a rank's two lanes, compute and communication, clipped to the trace's window."""
    columns = trace.columns  # arrays: a million spans as objects would take seconds
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
    labelled = replace(labelled, style=by_name[data["name"][labelled.span]])
    is_unknown = data["name"][rest.span] == columns.name_id(UNKNOWN)
    rest = replace(rest, style=np.where(is_unknown, _NUMBER["unknown"], _NUMBER["unlabelled"]).astype(np.uint8))

    computing = labelled if rank in trace.labelled else _merge(labelled, rest)
    busy = union(computing.start_ns, computing.end_ns)
    each = np.arange(len(rows))
    moving = _flatten(ready, rows["end_ns"], each)
    waiting = _clip(_flatten(rows["wait_start_ns"], rows["wait_end_ns"], each), difference(blocked, transfer), inside=True)
    shown = union(np.append(transfer[:, 0], waiting.start_ns), np.append(transfer[:, 1], waiting.end_ns))
    communication = _merge(
        _styled(_clip(moving, busy, inside=False), "exposed"),
        _styled(_clip(moving, busy, inside=True), "hidden"),
        _styled(waiting, "waiting"),
        _styled(_clip(_flatten(rows["start_ns"], ready, each), shown, inside=False), "issued"),
    )
    spans = travelling[communication.span]
    moves = np.isin(communication.style, [_NUMBER["exposed"], _NUMBER["hidden"]])
    unwaited = moves & (data["flags"][spans] & UNWAITED != 0)
    style = np.where(unwaited, np.uint8(_NUMBER["unwaited"]), communication.style)
    communication = replace(communication, span=spans, style=style)
    return _clip(_merge(labelled, rest), window, inside=True), _clip(communication, window, inside=True)


def coverage(bars: Bars, edges: NDArray[np.int64]) -> NDArray[np.int64]:
    """The time in ns that each style covers in each bin, shape (styles, bins); `edges` has shape (bins + 1,)."""
    covered = np.zeros((len(STYLES), len(edges) - 1), np.int64)
    for number in np.flatnonzero(np.bincount(bars.style)):
        of_style = bars.style == number
        start, end = bars.start_ns[of_style], bars.end_ns[of_style]
        before = np.concatenate([[0], np.cumsum(end - start)])
        last = np.searchsorted(start, edges, side="right")  # how many bars start before each edge; the last may cross it
        beyond = np.where(last > 0, np.maximum(end[np.maximum(last - 1, 0)] - edges, 0), 0)
        covered[number] = np.diff(before[last] - beyond)
    return covered


def hairlines(bars: Bars, px_per_ns: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Widen narrow bars to hairlines where this hides nothing as important; return start and end to draw, in ns.

    A bar of a tenth of a pixel, such as two milliseconds in a run of seconds, would be drawn at a tenth of its opacity,
    which is invisible. It is extended into empty or less important space, at most half of the way to the next bar.
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
    """Mask the bars that are so narrow, numerous and close together that hairlines would merge into one wide bar."""
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
    """Mix the colour of each bin: red, green, blue and opacity from 0 to 1, shape (bins, 4).

    It is the mean of the styles' colours, weighted by the time `covered`, shape (styles, bins) in ns; uncovered time is
    transparent. Activity that fills a small part of a bin gets at least the opacity `MIN_OPACITY`.
    """
    colours = np.array([style.rgba for style in STYLES.values()])
    weights = covered.T * (colours[:, 3] / bin_ns)
    active = weights[:, _ACTIVE].sum(axis=1)
    weights[:, _ACTIVE] *= np.where((active > 0) & (active < MIN_OPACITY), MIN_OPACITY / np.maximum(active, 1e-12), 1)[:, None]
    opacity = weights.sum(axis=1)
    mixed = weights @ colours[:, :3] / np.maximum(opacity, 1e-12)[:, None]
    return np.column_stack([mixed, np.minimum(opacity, 1)])


def caption(trace: Trace, bar: int, bars: Bars, characters: float) -> str:
    """Return the text inside a bar, if so many characters fit: its name with its axis in a mesh and its size.

    If these are too long: the axis or the micro-batch's number alone; "" if nothing fits.
    """
    style = list(STYLES)[bars.style[bar]]
    if style == "unlabelled":
        return ""
    row, names = trace.columns.data[bars.span[bar]], trace.columns.names
    name, axis = names[row["name"]], axis_of(names[row["group"]])
    if axis:
        name = f"{name} {axis}"
    texts = [name, axis] if axis else [name]
    if row["nbytes"] and style in ("exposed", "hidden", "unwaited"):
        texts.insert(0, f"{name} {bytes_in_words(int(row['nbytes']))}")
    if number := _MICRO_BATCH.match(name):  # the colour tells forward from backward
        texts = [number[1]] if number.end() == len(name) else [name, number[1]]
    shortest, kept = "", len(name)
    if characters >= 9:
        while kept and _display_width(name[:kept]) > characters - 1:
            kept -= 1
        shortest = f"{name[:kept]}…"
    return next((text for text in texts if _display_width(text) <= characters), shortest)


def captioned(bars: Bars, px_per_ns: float) -> NDArray[np.bool_]:
    """Mask the bars that get a caption: of the pieces of one span with only a sliver in between, the widest."""
    chosen = np.ones(len(bars), bool)
    last: dict[tuple[int, int], tuple[int, int]] = {}  # by span and style, the chosen piece and the end of the latest one
    wide_ns = bars.end_ns - bars.start_ns
    keys = zip(bars.span.tolist(), bars.style.tolist(), strict=True)
    for i, key in enumerate(keys):
        best, latest_ns = last.get(key, (i, 0))
        if best != i and (bars.start_ns[i] - latest_ns) * px_per_ns < SLIVER_PX:
            best, narrower = (i, best) if wide_ns[i] > wide_ns[best] else (best, i)
            chosen[narrower] = False
        else:
            best = i
        last[key] = best, int(bars.end_ns[i])
    return chosen


def _display_width(text: str) -> int:
    """Return the width of a text in character cells: East Asian characters and emoji take two."""
    return len(text) + sum(east_asian_width(c) in "FW" for c in text)


def ink(style: str) -> str:
    """Return the text colour on a style: "light", "dark", or "page" (the page's own) where the page shows through."""
    look = STYLES[style]
    if look.alpha < 1:
        return "page"
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in look.rgba[:3]]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]  # relative luminance, as defined by WCAG 2
    return "light" if luminance < 0.2 else "dark"


def _flatten(start_ns: Any, end_ns: Any, rows: NDArray[np.int64]) -> Bars:
    """Turn nested and overlapping spans, those of the given rows, into disjoint bars.

    At any time, the bar is the span that ends first; of several, the newest. So an inner span covers an outer one, a
    call that a thread of an RPC rank executes covers one that is queued, and a running operation covers those queued
    behind it.
    """
    start, end = start_ns[rows], end_ns[rows]
    order = np.lexsort((-end, start))
    order = order[end[order] > start[order]]
    rows, start, end = rows[order], start[order], end[order]
    if (start[1:] < end[:-1]).any():
        starts, ends, owners = _visible_pieces(start.tolist(), end.tolist())
        start, end, rows = np.array(starts, np.int64), np.array(ends, np.int64), rows[np.array(owners, np.int64)]
    return Bars(start, end, np.zeros(len(start), np.uint8), rows)


def _visible_pieces(start: list[int], end: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Sweep over spans in the order of their start, and return starts, ends and span index of the visible pieces."""
    starts: list[int] = []
    ends: list[int] = []
    owners: list[int] = []
    running: list[tuple[int, int]] = []  # a heap of (end, -index): its top is the visible span
    for i, now in enumerate([*start, max(end)]):
        since = start[i - 1] if i else now
        while running and since < now:
            stop, number = running[0]
            if stop > since:
                if owners and owners[-1] == -number and ends[-1] == since:
                    ends[-1] = min(stop, now)
                else:
                    starts.append(since)
                    ends.append(min(stop, now))
                    owners.append(-number)
                since = ends[-1]
            if stop <= now:
                heapq.heappop(running)
        if i < len(start):
            heapq.heappush(running, (end[i], -i))
    return starts, ends, owners


def _clip(bars: Bars, intervals: Intervals, *, inside: bool) -> Bars:
    """Return the parts of bars inside, or outside, disjoint ascending intervals."""
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
    first[1:] = (left[1:] != right[:-1]) | (bar[1:] != bar[:-1])  # rejoin touching pieces of one bar
    last = np.append(first[1:], True)[: len(left)]
    return Bars(left[first], right[last], bars.style[bar[first]], bars.span[bar[first]])


def _styled(bars: Bars, style: str) -> Bars:
    return replace(bars, style=np.full(len(bars), _NUMBER[style], np.uint8))


def _merge(*parts: Bars) -> Bars:
    """Join sets of bars that do not overlap each other."""
    every = Bars(
        np.concatenate([part.start_ns for part in parts]),
        np.concatenate([part.end_ns for part in parts]),
        np.concatenate([part.style for part in parts]),
        np.concatenate([part.span for part in parts]),
    )
    return every[np.argsort(every.start_ns, kind="stable")]


def waiting_in_words(traces: Iterable[Trace]) -> str:
    """The legend's text for waiting: "waiting for another rank", "waiting for another device", or both."""
    found = [_waits_for(trace) for trace in traces]
    waits = any(ranks for ranks, _ in found), any(devices for _, devices in found)
    return _WORDS.get(waits, ALONE)


def legend_of(style: str, waiting: str) -> str:
    """The legend's text for a style, given that of `waiting_in_words` for waiting."""
    return waiting if style == "waiting" else STYLES[style].legend


def _waits_for(trace: Trace) -> tuple[bool, bool]:
    """Whether a rank may wait for another rank, and whether for another device of its own."""
    data = trace.columns.data
    travels = data[data["kind"] == COMMUNICATION]
    waits = travels["wait_end_ns"] > travels["wait_start_ns"]
    of_device = waits & (device_number(travels) > 0)  # devices are numbered if a rank has several
    if not of_device.any():
        return len(trace.ranks) > 1, False
    # In a group of devices of a single rank, no operation waits for another rank.
    groups = np.unique(travels["group"][of_device]).tolist()
    across = any(len(np.unique(travels["rank"][travels["group"] == group])) > 1 for group in groups)
    return len(trace.ranks) > 1 and (across or bool((waits & ~of_device).any())), True
