"""The data that a browser needs to draw a time window of a trace: bars with their details, colours of shared pixels.

All times are nanoseconds since the trace's start, as float64, which is exact up to 104 days.
"""

from __future__ import annotations

import base64
import zlib
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from labkit.errors.lists import listed
from labkit.plots.bars import LANES, STYLES, Bars, blend, coverage, ink, legend_of, waiting_in_words
from labkit.plots.style import INKS
from labkit.plots.view import RESTARTED, View, bubble_in_words, numbered_steps, rows_of
from labkit.recording.group_keys import axis_of
from labkit.recording.schema import COMMUNICATION, CUDA, ENDED, OPEN, STEP, THROUGH_HOST
from labkit.tracing.intervals import Intervals
from labkit.tracing.trace import Trace

EXACT: Final = 3000  # bars of a lane that are sent one by one, however narrow: a usual run is sent once, as a whole
BARS_IN_ALL: Final = 40_000  # of an answer, at 104 bytes each: 4 MB
COLUMNS: Final = 6000  # of an answer: two pixels each on the widest screens
MIME: Final = "application/vnd.labkit.explorer+json"
SAVED_COLUMNS: Final = 2000  # of a run that has too many bars to be kept one by one
MOST_BYTES: Final = 150_000  # compressed; a larger run is not kept: notebooks stay small


def about(view: View, image: str) -> dict[str, Any]:
    """The constant data of an explorer; `image` is the class by which the page finds the still image."""
    whole = view.whole
    waiting = waiting_in_words([whole])
    return {
        "title": View("", whole, whole, range(0), view.steps).in_words() + bubble_in_words(whole),
        "ranks": list(whole.ranks),
        "rows": [{"name": row.name, "rank": row.rank} for row in view.rows],
        "duration": whole.duration_ns,
        "begin": view.shown.start_ns - whole.start_ns,
        "end": view.shown.end_ns - whole.start_ns,
        "lanes": LANES,
        "styles": [
            {"colour": s.colour, "alpha": s.alpha, "hatch": s.hatch, "legend": legend_of(name, waiting), "ink": ink(name)}
            for name, s in STYLES.items()
        ],
        "inks": INKS,
        "ends": [(s.rank, s.time_ns - whole.start_ns) for s in whole.scalars if s.name == ENDED],
        "restarts": [ns - whole.start_ns for ns in whole.restarts_ns],
        "ended": ENDED,
        "restarted": RESTARTED,
        "communication": list(STYLES).index("exposed"),  # from this style on, styles belong to the lower lane
        "image": image,
    }


@dataclass(frozen=True, slots=True)
class _Lane:
    """The data sent for one lane: bars one by one, and colours for bars narrower than a column."""

    bars: Bars  # the bars that are sent one by one
    complete: bool  # whether these are all bars
    # red, green, blue, opacity from 0 to 255, shape (columns, 4); None if `bars` suffices
    colours: NDArray[np.uint8] | None
    counts: NDArray[np.uint32]  # how many narrow bars start in each column
    most: NDArray[np.uint8]  # the style that covers most of each column
    styles: frozenset[int]  # all styles that occur, in a bar or in a colour


class Windows:
    """A trace, served window by window."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._rows = rows_of(trace)
        self._lanes: dict[int, tuple[Bars, Bars]] = {}
        self._steps: dict[int, tuple[NDArray[np.int64], Intervals]] = {}
        self._partners = _groups_in_words(trace)

    def look(self, start_ns: float, end_ns: float, columns: int, rank: int | None = None) -> tuple[dict[str, Any], list[bytes]]:
        """Return the data between two times since the trace's start: a header, which describes the buffers, and these.

        `columns` is the window's width in pixels; `rank` is the only rank to show, None for all.

        For bars: start and end, float64 (bars, 2); times of their spans and bytes, float64 (bars, 6); style, name,
        line, partner, operation and flags, int32 (bars, 6). For lanes with colours, one after the other: colours, uint8
        (columns, 4); counts, uint32 (columns,); most, uint8 (columns,). For rows: boundaries of steps, float64. Row,
        number, start and end of each rank's steps, float64 (n, 4).
        """
        trace, zero = self._trace, self._trace.start_ns
        start = zero + int(np.clip(start_ns, 0, trace.duration_ns - 1))
        end = zero + int(np.clip(end_ns, start - zero + 1, trace.duration_ns))
        columns = int(np.clip(columns, 1, COLUMNS))
        shown = [i for i, row in enumerate(self._rows) if rank in (None, row.rank)]
        limit = max(min(EXACT, BARS_IN_ALL // (2 * len(shown))), 1)
        columns = min(columns, max(BARS_IN_ALL // (2 * len(shown)), 1))
        edges = np.linspace(start, end, columns + 1).astype(np.int64)
        first_rows = {self._rows[number].rank: number for number in reversed(shown)}
        numbered = [self._numbers(rank_shown, row, start, end) for rank_shown, row in sorted(first_rows.items())]
        complete = max(map(len, numbered)) <= limit
        rows, sent, step_edges = [], [], []
        for number in shown:
            both = [_resolved(_within(bars, start, end), edges, limit) for bars in self._lanes_of(number)]
            steps = self._steps_of(self._rows[number].rank)[0]
            steps = steps[slice(*np.searchsorted(steps, (start, end + 1)))]
            complete &= len(steps) <= limit
            steps = steps if len(steps) <= limit else steps[:0]
            kinds = [{"bars": len(lane.bars), "complete": lane.complete, "mixed": lane.colours is not None} for lane in both]
            rows.append({"row": number, "lanes": kinds, "steps": len(steps)})
            sent += both
            step_edges.append(steps)
        texts, details = self._details([lane.bars for lane in sent])
        mixed = [lane for lane in sent if lane.colours is not None]
        buffers = [
            *details,
            b"".join(lane.colours.tobytes() for lane in mixed if lane.colours is not None),
            b"".join(lane.counts.tobytes() for lane in mixed),
            b"".join(lane.most.tobytes() for lane in mixed),
            (np.concatenate(step_edges) - zero).astype(np.float64).tobytes(),
            np.concatenate(numbered if complete else [np.empty((0, 4))]).tobytes(),
        ]
        complete &= all(lane.complete for lane in sent)
        styles = frozenset[int]().union(*(lane.styles for lane in sent))
        window = {"start": start - zero, "end": end - zero, "columns": columns, "complete": complete}
        return {**window, "rows": rows, "styles": sorted(styles), **texts}, buffers

    def _lanes_of(self, row: int) -> tuple[Bars, Bars]:
        if row not in self._lanes:
            self._lanes[row] = self._rows[row].lanes(self._trace)
        return self._lanes[row]

    def _steps_of(self, rank: int) -> tuple[NDArray[np.int64], Intervals]:
        """The boundaries of a rank's steps, and the numbered steps above its row."""
        if rank not in self._steps:
            data = self._trace.columns.data
            own = data[(data["rank"] == rank) & (data["kind"] == STEP)]
            edges: NDArray[np.int64] = np.unique([own["start_ns"], own["end_ns"]])
            self._steps[rank] = edges, numbered_steps(self._trace, rank)
        return self._steps[rank]

    def _numbers(self, rank: int, row: int, start_ns: int, end_ns: int) -> NDArray[np.float64]:
        """Row, number, start and end of a rank's numbered steps that overlap a window."""
        steps = self._steps_of(rank)[1]
        touch = np.flatnonzero((steps[:, 1] > start_ns) & (steps[:, 0] < end_ns))
        return np.column_stack([np.full(len(touch), row), touch, steps[touch] - self._trace.start_ns]).astype(np.float64)

    def _details(self, parts: list[Bars]) -> tuple[dict[str, Any], list[bytes]]:
        """The details of each bar: tables of texts, and buffers of times, bytes and indices into these tables."""
        trace, columns = self._trace, self._trace.columns
        start, end, style, span = (
            np.concatenate([getattr(bars, f) for bars in parts]) for f in ("start_ns", "end_ns", "style", "span")
        )
        rows, zero = columns.data[span], trace.start_ns
        waited = rows["wait_start_ns"] > 0
        times = np.column_stack([
            rows["start_ns"] - zero,
            trace.ready()[span] - zero,
            np.where(waited, rows["wait_start_ns"] - zero, np.nan),
            np.where(waited, rows["wait_end_ns"] - zero, np.nan),
            rows["end_ns"] - zero,
            rows["nbytes"],
        ]).astype(np.float64)  # fmt: skip
        used, place = np.unique(np.concatenate([rows["name"], rows["line"]]), return_inverse=True)
        name, line = place[: len(rows)], place[len(rows) :]
        travels = rows["kind"] == COMMUNICATION
        known = (rows["peer"] >= 0) & (rows["peer"] < len(trace.ranks))
        key = np.where(known, rows["peer"], len(trace.ranks) + rows["group"].astype(np.int64))
        groups, group = np.unique(rows["group"], return_inverse=True)
        keys, partner = np.unique(np.where(travels, key * len(groups) + group, -1), return_inverse=True)
        partners = [(k // len(groups), groups[k % len(groups)]) for k in keys.tolist()]
        shared = np.stack([rows["group"].astype(np.int64), rows["match"]], axis=1)
        operation = np.unique(shared, axis=0, return_inverse=True)[1].reshape(-1)
        flags = (rows["flags"] & OPEN != 0) + 2 * (rows["device"] == CUDA) + 4 * (rows["flags"] & THROUGH_HOST != 0)
        marks = np.column_stack([style, name, line, partner, np.where(rows["group"] > 0, operation, -1), flags])
        texts = {
            "texts": [columns.names[i] for i in used],
            "partners": [self._partner_in_words(k) for k, _ in partners],
            "axes": [axis_of(columns.names[of]) if k >= 0 else "" for k, of in partners],
        }
        bounds = np.column_stack([start - zero, end - zero]).astype(np.float64)
        return texts, [bounds.tobytes(), times.tobytes(), marks.astype(np.int32).tobytes()]

    def _partner_in_words(self, key: int) -> str:
        """The text for a key: a rank's number, or the number of ranks plus the number of a group's name."""
        count = len(self._trace.ranks)
        return "" if key < 0 else f"with {self._trace.ranks[key]}" if key < count else self._partners.get(key - count, "")


def _within(bars: Bars, start_ns: int, end_ns: int) -> Bars:
    """The bars that overlap a window."""
    return bars[int(np.searchsorted(bars.end_ns, start_ns, "right")) : int(np.searchsorted(bars.start_ns, end_ns, "left"))]


def _resolved(bars: Bars, edges: NDArray[np.int64], limit: int) -> _Lane:
    """One lane at the resolution of `edges`: up to `limit` bars, and colours for those narrower than a column."""
    columns = len(edges) - 1
    column_ns = (edges[-1] - edges[0]) / columns
    complete, styles = len(bars) <= limit, frozenset(np.unique(bars.style).tolist())
    if len(bars) <= 1.5 * columns and complete:
        return _Lane(bars, True, None, np.zeros(0, np.uint32), np.zeros(0, np.uint8), styles)
    narrow = bars.end_ns - bars.start_ns < column_ns
    small = bars[narrow]
    covered = coverage(small, edges)
    colours = np.round(255 * blend(covered, column_ns)).astype(np.uint8)
    at = np.clip(np.searchsorted(edges, small.start_ns, "right") - 1, 0, columns - 1)
    counts = np.bincount(at, minlength=columns).astype(np.uint32)
    most = covered.argmax(axis=0).astype(np.uint8)
    return _Lane(bars if complete else bars[~narrow], complete, colours, counts, most, styles)


def _groups_in_words(trace: Trace) -> dict[int, str]:
    """The participants in the collectives of each group, by the number of the group's name."""
    data = trace.columns.data
    rows = data[(data["kind"] == COMMUNICATION) & (data["group"] > 0) & (data["peer"] < 0)]
    words = {}
    for group in np.unique(rows["group"]).tolist():
        members = np.unique(rows["rank"][rows["group"] == group]).tolist()
        names = listed(trace.ranks[rank] for rank in members)
        some = names if len(members) <= 6 else f"{len(members)} of {len(trace.ranks)} ranks"
        words[group] = f"among all {len(members)} ranks" if len(members) == len(trace.ranks) else f"among {some}"
    return words


def saved(about: dict[str, Any], windows: Windows) -> dict[str, Any] | None:
    """The data of a run as JSON, for static pages, which have no kernel; None if too large for a notebook."""
    header, buffers = windows.look(0, about["duration"], SAVED_COLUMNS)
    packed = [base64.b64encode(zlib.compress(buffer, 9)).decode() for buffer in buffers]
    return {"about": about, "header": header, "buffers": packed} if sum(map(len, packed)) <= MOST_BYTES else None
