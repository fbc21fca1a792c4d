"""What the live picture remembers of a run: the latest spans as they are and the whole in bins, so much and no more.

However many spans a run writes and however long it lasts, this takes the same memory and about the same time per frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from labkit.plots.bars import STYLES, coverage, lanes, style_of
from labkit.recording.events import COLUMNS, Columns, under_way
from labkit.recording.ring_buffer import CALL, COMMUNICATION, COMPUTE, SUM, Pending
from labkit.tracing.trace import Trace

__all__ = ["Recent"]

KEPT: Final = 4000  # spans: a step of a large model on many ranks; 4 ms of arithmetic
EXACT: Final = 6000  # spans at once whose nesting and overlap is worked out; of more than that only the sums are taken
BINS: Final = 256  # over the time shown: about three pixels each
FIRST_NS: Final = 500_000_000  # the time axis begins with half a second and doubles when it is full

_NUMBER: Final = {name: i for i, name in enumerate(STYLES)}


class Recent:
    """A bounded memory of a run under way.

    Args:
        ranks: their names.
        start_ns: when the run began.
        called: the numbers of those that call the function; None: all.
    """

    def __init__(self, ranks: tuple[str, ...], start_ns: int, called: Sequence[int] | None = None) -> None:
        self.ranks, self.start_ns = ranks, start_ns
        self.shown_ns = FIRST_NS
        self.forgotten_ns = 0  # every span that ended after this is still known one by one; 0: nothing was forgotten
        self._rows = np.empty(0, COLUMNS)
        self._fresh = np.empty(0, COLUMNS)  # not yet in bins: an operation's other ranks may come with the next update
        self._ids: dict[str, int] = {"": 0}
        self._styles = np.zeros(1, np.uint8)  # of a compute span, by the number of its name
        self._bins = np.zeros((len(ranks), len(STYLES), BINS))  # ns
        self._binned_ns = self.whole_ns = start_ns  # when bins were last filled, and up to when they are complete
        at_work = range(len(ranks)) if called is None else called
        # When each rank's function returned; None: it is at work; the run's start: it was not called.
        self.returned_ns = [None if rank in at_work else start_ns for rank in range(len(ranks))]

    @property
    def bin_ns(self) -> float:
        """Width of a bin."""
        return self.shown_ns / BINS

    def add(self, new: Trace, now_ns: int) -> None:
        """Take what was completed since the last time."""
        rows = self._renamed(new.columns)
        for rank, end in zip(*(rows[rows["kind"] == CALL][field].tolist() for field in ("rank", "end_ns")), strict=True):
            self.returned_ns[rank] = end
        while now_ns > self.start_ns + self.shown_ns:
            self._bins = np.concatenate(
                [self._bins[..., ::2] + self._bins[..., 1::2], np.zeros_like(self._bins[..., ::2])], axis=-1
            )
            self.shown_ns *= 2
        if now_ns - self._binned_ns >= self.bin_ns:
            self._bin(self._fresh, rows, now_ns)
            self._fresh, self.whole_ns, self._binned_ns = rows, self._binned_ns, now_ns
        else:
            self._fresh = np.concatenate([self._fresh, rows])
        several = (rows["flags"] & SUM) != 0
        self.forgotten_ns = max(self.forgotten_ns, int(rows["start_ns"][several].max(initial=0)))
        self._rows = np.concatenate([self._rows, rows[~several]])
        if len(self._rows) > KEPT:
            self.forgotten_ns = max(self.forgotten_ns, int(self._rows["end_ns"][:-KEPT].max()))
            self._rows = self._rows[-KEPT:].copy()  # a view would keep the whole alive

    def trace(self, now_ns: int, pending: Sequence[Sequence[Pending]]) -> Trace:
        """The latest spans, with what is still under way as if it ended now: functions that have not returned, operations."""
        rows = np.concatenate([self._rows, under_way(self.start_ns, now_ns, self._id, calls=self._at_work(), pending=pending)])
        return Trace(Columns(rows, list(self._ids)), ranks=self.ranks, start_ns=self.start_ns, end_ns=now_ns)

    def binned(self, rank: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """How much of each bin each style fills in a rank's lanes, compute and communication: shape (styles, bins), in ns."""
        covered = self._bins[rank].copy()
        compute, communication = covered.copy(), covered.copy()
        compute[_TRAVELS], communication[~_TRAVELS] = 0, 0
        returned_ns = self.returned_ns[rank]
        over = self.whole_ns if returned_ns is None else min(returned_ns, self.whole_ns)
        lived = np.clip(over - self.start_ns - np.arange(BINS) * self.bin_ns, 0, self.bin_ns)
        compute[_NUMBER["unlabelled"]] = np.maximum(lived - self._taken(rank), 0)
        return compute, communication

    def _at_work(self) -> list[tuple[int, str]]:
        """The ranks whose function has not returned."""
        return [(rank, "") for rank, end in enumerate(self.returned_ns) if end is None]

    def _taken(self, rank: int) -> NDArray[np.float64]:
        """How much of each bin the rank computed under a name or was blocked."""
        return self._bins[rank][_EXCLUSIVE].sum(axis=0)  # type: ignore[no-any-return]  # numpy's stubs say Any

    def _bin(self, rows: Any, later: Any, now_ns: int) -> None:
        """Add spans to the bins.

        Args:
            rows: the spans.
            later: what came after them: tells when the other ranks came to their operations.
            now_ns: the moment.
        """
        if not len(rows):
            return
        if len(rows) > EXACT or (rows["flags"] & SUM).any():
            self._bin_sums(rows)
            return
        at_work = under_way(self.start_ns, now_ns, self._id, calls=self._at_work())
        both = np.concatenate([rows, later[: EXACT - len(rows)], at_work])
        both["flags"][len(rows) :] |= _LATER
        edges = (self.start_ns + np.arange(BINS + 1) * self.bin_ns).astype(np.int64)
        trace = Trace(Columns(both, list(self._ids)), ranks=self.ranks, start_ns=self.start_ns, end_ns=int(edges[-1]))
        theirs = (trace.columns.data["flags"] & _LATER) == 0
        for rank in np.flatnonzero(np.bincount(rows["rank"])).tolist():
            compute, communication = lanes(trace, rank)
            self._pour(rank, coverage(communication[theirs[communication.span]], edges))
            self._pour(rank, coverage(compute[theirs[compute.span] & (compute.style != _NUMBER["unlabelled"])], edges))

    def _bin_sums(self, rows: Any) -> None:
        """The same for very many spans, which are short then: each in the bin of its start, without looking at their overlap."""
        style = self._styles[rows["name"]]
        travels = rows["kind"] == COMMUNICATION
        blocked = rows["wait_end_ns"] > rows["wait_start_ns"]
        style = np.where(travels, np.where(blocked, _NUMBER["exposed"], _NUMBER["hidden"]), style)
        at = ((rows["start_ns"] - self.start_ns) / self.bin_ns).astype(np.int64)
        keep = (travels | (rows["kind"] == COMPUTE)) & (at >= 0) & (at < BINS)
        flat = (rows["rank"].astype(np.int64) * len(STYLES) + style) * BINS + at
        sums = np.bincount(flat[keep], (rows["end_ns"] - rows["start_ns"])[keep], self._bins.size).reshape(self._bins.shape)
        for rank in np.flatnonzero(np.bincount(rows["rank"])).tolist():
            self._pour(rank, sums[rank])

    def _pour(self, rank: int, covered: NDArray[Any]) -> None:
        """Fill bins with what there is still room for: an outer span, which ends after those within it, takes what they left."""
        for which in (_EXCLUSIVE, ~_EXCLUSIVE):
            room = np.maximum(self.bin_ns - self._bins[rank][which].sum(axis=0), 0)
            more = covered[which]
            self._bins[rank][which] += more * np.minimum(1, room / np.maximum(more.sum(axis=0), 1e-9))

    def _renamed(self, columns: Columns) -> Any:
        """The rows of a trace, with their texts numbered as they are here."""
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


_LATER: Final = 1 << 15  # a flag of no meaning elsewhere
_TRAVELS: Final = np.array([style in ("exposed", "hidden", "waiting", "issued") for style in STYLES])
# A rank is in one of these at a time; the others go on beside them.
_EXCLUSIVE: Final = np.array([style not in ("hidden", "issued", "unlabelled") for style in STYLES])
