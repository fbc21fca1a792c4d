"""The live picture's memory of a run: the latest spans in full, the whole run in bins, and its progress in steps.

Memory is bounded, and the time per frame is about constant, however many spans a run records and however long it lasts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from labkit.errors.lists import counted
from labkit.errors.units import clock_time, rate_in_words
from labkit.plots.bars import STYLES, coverage, lanes, style_of
from labkit.plots.live.curves import recorded
from labkit.plots.style import shortened
from labkit.recording.events import COLUMNS, Columns, under_way
from labkit.recording.schema import CALL, COMMUNICATION, COMPUTE, ENDED, STEP, STEPS_IN_ALL, Pending
from labkit.tracing.trace import Trace

KEPT: Final = 4000  # spans: a step of a large model on many ranks; processed in 4 ms
EXACT: Final = 6000  # spans per update whose nesting and overlap are resolved; if there are more, only sums are binned
BINS: Final = 256  # over the time shown: about three pixels each
FIRST_NS: Final = 500_000_000  # the time axis starts with half a second and doubles when it is full

_NUMBER: Final = {name: i for i, name in enumerate(STYLES)}
KEPT_STEPS: Final = 100  # per rank; the rate is the mean over these
STALLED: Final = 5  # times the longest step so far without the end of a step: rate and time left are no longer true
STALLED_NS: Final = 2_000_000_000  # the least time without the end of a step for which that is said
NAMES_SHOWN: Final = 4  # the most recorded values in the text


class Recent:
    """The recent spans of a run, and the whole run in bins; only the ranks `called` call the function."""

    def __init__(self, ranks: tuple[str, ...], start_ns: int, called: Sequence[int] | None = None) -> None:
        self.ranks, self.start_ns = ranks, start_ns
        self.shown_ns = FIRST_NS
        self.dropped_ns = 0  # all spans that ended after this time are kept; 0: no span was dropped
        self._rows = np.empty(0, COLUMNS)
        self._unbinned = np.empty(0, COLUMNS)
        # The last update is kept back, since the next may contain an operation's other ranks.
        self._last, self._last_ns = np.empty(0, COLUMNS), start_ns
        self._ids: dict[str, int] = {"": 0}
        self._styles = np.zeros(1, np.uint8)  # of a compute span, by the number of its name
        self._bins = np.zeros((len(ranks), len(STYLES), BINS))  # ns
        self._binned_ns = self.complete_ns = start_ns  # when bins were last filled, and until when they are complete
        running = range(len(ranks)) if called is None else called
        # When each rank's function returned; None if it is running; the run's start if the rank was not called.
        self._before_ns = [None if rank in running else start_ns for rank in range(len(ranks))]
        self.returned_ns = list(self._before_ns)
        self.silent: Mapping[int, int] = {}  # by rank, the time of the last report of a machine that does not answer
        self.ended_ns: dict[int, int] = {}  # when processes ended without which the others went on, by rank
        # By rank, from when its function was no longer running until all ranks were replaced, for each time they were.
        self._away_ns: list[list[tuple[int, int]]] = [[] for _ in ranks]

    @property
    def bin_ns(self) -> float:
        """Width of a bin."""
        return self.shown_ns / BINS

    @property
    def restarts_ns(self) -> list[int]:
        """When all ranks had been replaced, and the function was called again, for each time."""
        return [until for _, until in self._away_ns[0]]

    def add(self, new: Trace, now_ns: int, *, drawn: bool = True) -> None:
        """Add completed spans. If no frame is `drawn`, the bins are filled later: at once is cheaper than in parts."""
        rows = self._renamed(new.columns)
        for rank, end in zip(*(rows[rows["kind"] == CALL][field].tolist() for field in ("rank", "end_ns")), strict=True):
            self.returned_ns[rank] = end
        for scalar in new.scalars:
            if scalar.name == ENDED:
                self.ended_ns[scalar.rank] = scalar.time_ns
                self.returned_ns[scalar.rank] = self.returned_ns[scalar.rank] or scalar.time_ns
        while now_ns > self.start_ns + self.shown_ns:
            self._bins = np.concatenate(
                [self._bins[..., ::2] + self._bins[..., 1::2], np.zeros_like(self._bins[..., ::2])], axis=-1
            )
            self.shown_ns *= 2
        full = len(self._unbinned) + len(self._last) + len(rows) > EXACT
        if (drawn or full) and now_ns - self._binned_ns >= self.bin_ns:
            self._bin(np.concatenate([self._unbinned, self._last]), rows, now_ns)
            self._unbinned, self.complete_ns, self._binned_ns = self._unbinned[:0], self._last_ns, now_ns
        else:
            self._unbinned = np.concatenate([self._unbinned, self._last])
        self._last, self._last_ns = rows, now_ns
        several = rows["count"] > 1
        self.dropped_ns = max(self.dropped_ns, int(rows["start_ns"][several].max(initial=0)))
        self._rows = np.concatenate([self._rows, rows[~several]])
        if len(self._rows) > KEPT:
            self.dropped_ns = max(self.dropped_ns, int(self._rows["end_ns"][:-KEPT].max()))
            self._rows = self._rows[-KEPT:].copy()  # a view would keep the whole array alive

    def restart(self, now_ns: int) -> None:
        """Keep the bins, and forget the spans of ranks that were replaced: fresh ones number operations from 1."""
        self._bin(np.concatenate([self._unbinned, self._last]), self._last[:0], now_ns)
        for away, returned_ns in zip(self._away_ns, self.returned_ns, strict=True):
            away.append((self._last_ns if returned_ns is None else returned_ns, now_ns))
        self._rows, self._unbinned, self._last = self._rows[:0], self._unbinned[:0], self._last[:0]
        self._last_ns = self.complete_ns = self._binned_ns = self.dropped_ns = now_ns
        self.returned_ns, self.ended_ns = list(self._before_ns), {}

    def trace(self, now_ns: int, pending: Sequence[Sequence[Pending]]) -> Trace:
        """Return the latest spans; functions and operations that are still running end at `now_ns`."""
        pending = [() if rank in self.ended_ns else of_rank for rank, of_rank in enumerate(pending)]
        silent = self.silent.items()
        running = under_way(self.start_ns, now_ns, self._id, calls=self._running(), pending=pending, silent=silent)
        rows = np.concatenate([self._rows, running])
        return Trace(Columns(rows, list(self._ids)), ranks=self.ranks, start_ns=self.start_ns, end_ns=now_ns)

    def binned(self, rank: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the time in ns that each style covers in each bin of a rank's two lanes, shape (styles, bins) each."""
        covered = self._bins[rank].copy()
        compute, communication = covered.copy(), covered.copy()
        compute[_TRAVELS], communication[~_TRAVELS] = 0, 0
        returned_ns = self.returned_ns[rank]
        reported_ns = min(self.silent.get(rank, self.complete_ns), self.complete_ns)
        called = self._before(reported_ns if returned_ns is None else min(returned_ns, reported_ns))
        called = called - sum(self._before(until) - self._before(since) for since, until in self._away_ns[rank])
        occupied = self._bins[rank][_EXCLUSIVE].sum(axis=0)  # the rank computed in a span or was blocked
        compute[_NUMBER["unlabelled"]] = np.maximum(called - occupied, 0)
        compute[_NUMBER["unknown"]] = self._before(self.complete_ns) - self._before(reported_ns)
        return compute, communication

    def _before(self, end_ns: int) -> NDArray[np.float64]:
        """Return the time in each bin before a moment."""
        return np.clip(end_ns - self.start_ns - np.arange(BINS) * self.bin_ns, 0, self.bin_ns)

    def _running(self) -> list[tuple[int, str]]:
        """Return the ranks whose function has not returned."""
        return [(rank, "") for rank, end in enumerate(self.returned_ns) if end is None]

    def _bin(self, rows: Any, later: Any, now_ns: int) -> None:
        """Add spans to the bins; `later` ones tell when the other ranks arrived at their operations."""
        if not len(rows):
            return
        if len(rows) > EXACT or (rows["count"] > 1).any():
            self._bin_sums(rows)
            return
        running = under_way(self.start_ns, now_ns, self._id, calls=self._running())
        both = np.concatenate([rows, later[: EXACT - len(rows)], running])
        both["flags"][len(rows) :] |= _LATER
        edges = (self.start_ns + np.arange(BINS + 1) * self.bin_ns).astype(np.int64)
        trace = Trace(Columns(both, list(self._ids)), ranks=self.ranks, start_ns=self.start_ns, end_ns=int(edges[-1]))
        current = (trace.columns.data["flags"] & _LATER) == 0
        for rank in np.flatnonzero(np.bincount(rows["rank"])).tolist():
            compute, communication = lanes(trace, rank)
            self._fill(rank, coverage(communication[current[communication.span]], edges))
            self._fill(rank, coverage(compute[current[compute.span] & (compute.style != _NUMBER["unlabelled"])], edges))

    def _bin_sums(self, rows: Any) -> None:
        """Add each span to the bin of its start, without resolving overlap; for very many spans, which are short."""
        style = self._styles[rows["name"]]
        travels = rows["kind"] == COMMUNICATION
        blocked = rows["wait_end_ns"] > rows["wait_start_ns"]
        style = np.where(travels, np.where(blocked, _NUMBER["exposed"], _NUMBER["hidden"]), style)
        at = ((rows["start_ns"] - self.start_ns) / self.bin_ns).astype(np.int64)
        keep = (travels | (rows["kind"] == COMPUTE)) & (at >= 0) & (at < BINS)
        flat = (rows["rank"].astype(np.int64) * len(STYLES) + style) * BINS + at
        sums = np.bincount(flat[keep], (rows["end_ns"] - rows["start_ns"])[keep], self._bins.size).reshape(self._bins.shape)
        for rank in np.flatnonzero(np.bincount(rows["rank"])).tolist():
            self._fill(rank, sums[rank])

    def _fill(self, rank: int, covered: NDArray[Any]) -> None:
        """Add time to bins, up to their width.

        Outer spans end after their inner spans, so they are added later and get the time that these have left.
        """
        for which in (_EXCLUSIVE, ~_EXCLUSIVE):
            room = np.maximum(self.bin_ns - self._bins[rank][which].sum(axis=0), 0)
            more = covered[which]
            self._bins[rank][which] += more * np.minimum(1, room / np.maximum(more.sum(axis=0), 1e-9))

    def _renamed(self, columns: Columns) -> Any:
        """Return the rows of a trace, with their texts renumbered to this object's ids."""
        rows = columns.data.copy()
        for field in ("name", "group"):
            used = np.flatnonzero(np.bincount(rows[field])) if len(rows) else np.zeros(1, np.int64)
            table = np.zeros(used[-1] + 1, np.uint32)
            table[used] = [self._id(columns.names[i]) for i in used.tolist()]
            rows[field] = table[rows[field]]
        rows["line"] = 0
        return rows

    def _id(self, text: str) -> int:
        number = self._ids.setdefault(text, len(self._ids))
        if number == len(self._styles):
            self._styles = np.append(self._styles, np.uint8(_NUMBER[style_of(text)]))
        return number


_LATER: Final = 1 << 15  # an unused flag, which marks spans that must not be binned yet
_TRAVELS: Final = np.array([style in ("exposed", "hidden", "unwaited", "waiting", "issued") for style in STYLES])
# A rank is in at most one of these at a time; the others overlap with them.
_EXCLUSIVE: Final = np.array([style not in ("hidden", "unwaited", "issued", "unlabelled") for style in STYLES])


class _StepsOfRank:
    """The steps of one rank."""

    def __init__(self) -> None:
        self.last: deque[tuple[int, int]] = deque(maxlen=KEPT_STEPS)  # start and end in ns
        self.ended_ns = 0  # when the last step ended
        self.longest_ns = 0
        self.count = 0  # in the whole run
        self.in_loop = 0  # in the current loop
        self.loops = 0
        self.loop_length = 0  # 0: unknown

    @property
    def last_took_ns(self) -> int:
        """How long the last steps took."""
        return self.last[-1][1] - self.last[0][0] if self.last else 0

    def add(self, loops: list[tuple[int, int]], steps: list[tuple[int, int]], sums: list[tuple[int, int]]) -> None:
        """Add new loops as (start in ns, length), steps as (start, end), and sums of steps as (start, count)."""
        since = 0
        if loops:
            self.loops += len(loops)
            since, self.loop_length = loops[-1]
            self.in_loop = 0
        for start, count in sums:
            self.count += count
            self.in_loop += count * (start >= since)
        self.ended_ns = max([self.ended_ns, *(end for _, end in steps), *(start for start, _ in sums)])
        self.longest_ns = max([self.longest_ns, *(end - start for start, end in steps)])
        for start, end in steps:
            if self.last and start < self.last[-1][1]:
                continue  # a step of an outer loop
            self.last.append((start, end))
            self.count += 1
            self.in_loop += end > since  # in `zip(steps(a), steps(b))`, the second loop begins within the first step


class Progress:
    """The steps and recorded values of a run of so many ranks so far."""

    def __init__(self, ranks: int) -> None:
        self._steps = [_StepsOfRank() for _ in range(ranks)]
        self._values: dict[str, dict[int, float]] = {}

    def add(self, new: Trace) -> None:
        """Add the newly completed spans and values."""
        loops: dict[int, list[tuple[int, int]]] = {}
        for scalar in new.scalars:
            if scalar.name == STEPS_IN_ALL:
                loops.setdefault(scalar.rank, []).append((scalar.time_ns, int(scalar.value)))
        for scalar in recorded(new.scalars):
            self._values.setdefault(scalar.name, {})[scalar.rank] = scalar.value
        data = new.columns.data
        steps = data[data["kind"] == STEP]
        for rank, own in enumerate(self._steps):
            rows = steps[steps["rank"] == rank]
            if len(rows) or rank in loops:
                is_sum = rows["count"] > 1
                each, sums = rows[~is_sum], rows[is_sum]
                own.add(
                    loops.get(rank, []),
                    list(zip(each["start_ns"].tolist(), each["end_ns"].tolist(), strict=True)),
                    list(zip(sums["start_ns"].tolist(), sums["count"].tolist(), strict=True)),
                )

    @property
    def done(self) -> int:
        """The number of steps completed by all ranks that have any."""
        slowest = self._slowest()
        return slowest.count if slowest else 0

    @property
    def fraction(self) -> float | None:
        """The completed fraction of the current loop, from 0 to 1; None if its length is unknown."""
        slowest = self._slowest()
        return min(slowest.in_loop / slowest.loop_length, 1.0) if slowest and slowest.loop_length else None

    def last_step(self) -> tuple[int, int] | None:
        """Return start and end in ns, over all ranks, of the last step that all ranks have completed; None for none."""
        done, found = self.done, []
        for own in self._steps:
            ahead = own.count - done
            if own.count and ahead < len(own.last):
                found.append(own.last[-1 - ahead])
        if not done or not found:
            return None
        return min(start for start, _ in found), max(end for _, end in found)

    def parts(self, now_ns: int = 0) -> tuple[str, ...]:
        """Return texts for steps, rate and time left ("" if unknown), and for each of the last values.

        Long after the last step, its age takes the place of the rate; not if the current time is not given.
        """
        steps, rate, left, slowest = "", "", "", self._slowest()
        if slowest is not None:
            length = slowest.loop_length
            number = length or slowest.count
            steps = (f"{slowest.in_loop} of " if length else "") + counted(number, "step")
            since_ns = now_ns - slowest.ended_ns
            going_on = slowest.count and slowest.in_loop != length
            if going_on and since_ns > max(STALLED * slowest.longest_ns, STALLED_NS):
                rate = f"no step for {clock_time(since_ns / 1e9)}"
            elif slowest.last_took_ns:
                per_s = len(slowest.last) * 1e9 / slowest.last_took_ns
                rate = rate_in_words(per_s, "step")
                if length:
                    left = clock_time((length - slowest.in_loop) / per_s)
                    left = f"{left} left" if slowest.loops == 1 else f"{left} left in this loop"
        values = [
            f"{shortened(name, 20)} {sum(of.values()) / len(of):.4g}" for name, of in list(self._values.items())[:NAMES_SHOWN]
        ]
        return (steps, rate, left, *values)

    def _slowest(self) -> _StepsOfRank | None:
        return min((own for own in self._steps if own.count or own.loops), key=lambda own: own.count, default=None)
