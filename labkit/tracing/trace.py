"""`Trace`: the spans of all ranks of a run on one clock, and what can be computed from them."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from labkit.costs.link import Link
from labkit.costs.network import Network
from labkit.errors.exceptions import LabError
from labkit.errors.wrong_calls import check_number, public_api
from labkit.recording.events import COLUMNS, WAITS, Columns, ProfilerEvent, Scalar, under_way
from labkit.recording.ring_buffer import OTHER_SCALARS, OTHER_SPANS
from labkit.recording.schema import (
    AUTOMATIC,
    CALL,
    COMMUNICATION,
    COMPUTE,
    DATA,
    ENDED,
    FIELDS,
    KINDS,
    MEMORY,
    SCALAR,
    STEP,
    UNKNOWN,
    UNSHOWN,
    UNWAITED,
    WAIT,
    Pending,
    Span,
)
from labkit.tracing.intervals import Intervals, blocked, difference, intersection, length, union, waits_for_data
from labkit.tracing.trace_file import FACTS, KEY, packed, write_events, writing

if TYPE_CHECKING:
    from pandas import DataFrame

_LOST: Final = {
    "spans": f"spans have more different names than can be kept; further ones are called '{OTHER_SPANS}'. Let a span's name say "
    "what is done, not which repetition it is: span('forward'), not span(f'forward {i}').",
    "values": f"`record` was given more different names than can be kept; further ones are called '{OTHER_SCALARS}'.",
    "sizes": "tensors of more different shapes were sent than can be kept; whether further ones fit on all ranks is not checked.",
    "groups": "there were more process groups, tags and lines of code than can be kept; who waits for whom may not be found.",
}


CHUNK: Final = 10_000  # events that are serialized at once: the text of a million takes 230 MB


def about_names(kinds: Iterable[str]) -> list[str]:
    """A line for each kind of name (see `recording.ring_buffer.NO_ROOM`) for which a rank had no room."""
    found = set(kinds)
    return [words for kind, words in _LOST.items() if kind in found]


@dataclass(frozen=True, slots=True)
class Share:
    """The time of a trace as one rank spent it, in nanoseconds.

    The parts `compute_ns`, `data_ns` (waiting for the next batch), `exposed_ns` and `idle_ns` add up to `window_ns`.
    `overlap_ns` is the part of `compute_ns` that overlaps communication; `waiting_ns` the part of `idle_ns` in which
    the rank was blocked until a peer arrived, `unknown_ns` the part in which its machine did not answer.
    """

    rank: int
    window_ns: int
    compute_ns: int
    communication_ns: int
    overlap_ns: int
    idle_ns: int
    waiting_ns: int
    data_ns: int = 0
    unknown_ns: int = 0

    @property
    def exposed_ns(self) -> int:
        """Exposed communication: communication that does not overlap compute."""
        return self.communication_ns - self.overlap_ns


class Trace:
    """The spans of all ranks on one clock.

    Args:
        spans: the spans, in any order.
        scalars: the recorded values, in any order.
        ranks: the names of the ranks, in rank order.
        start_ns: start of the trace's window; default: the first span's start.
        end_ns: end of the window; default: the last span's end.
        dropped: lost records per rank, which were written faster than they could be read.
        notes: notes for the reader, such as a missing rank, or how well clocks agree.
        profile: events of torch's profiler, in any order; `save` writes them below each rank's own rows.
        nodes: the node of each rank, if the ranks were on several machines or communicated over a `labkit.Network`.
        link: the emulated `labkit.Link` or `Network` over which they communicated, if any.
        replayed: whether `labkit.replay` computed it; figures say so.
        simulated: the number of ranks that `labkit.simulate` simulated, of which `ranks` are shown; 0 for a run.
        cores: how many cores the ranks shared, on all machines together; 0 if unknown.
        clock_error_ns: a bound on the error between the clocks of the ranks' machines; 0 on one machine. A shorter time
            between two ranks does not count as waiting.
        waits: the waits for operations that were complete already, in any order: an array of `recording.events.WAITS`,
            for spans given as `Columns`; None if there are none.
        restarts_ns: when a group with `restarts` called the function again on fresh ranks; empty if it never did. Then
            only the steps of the last attempt count.

    Attributes:
        columns: the spans in one numpy array.
        waits: the waits, in order of time. Only those of the rank's function are known, not those of its threads.

    Raises:
        ValueError: a span has a rank without a name, or the end is before the start.
    """

    @public_api
    def __init__(
        self,
        spans: Iterable[Span] | Columns = (),
        scalars: Iterable[Scalar] = (),
        *,
        ranks: Sequence[str],
        start_ns: int | None = None,
        end_ns: int | None = None,
        dropped: Sequence[int] = (),
        notes: Sequence[str] = (),
        profile: Iterable[ProfilerEvent] = (),
        nodes: Sequence[int] = (),
        link: Link | Network | None = None,
        replayed: bool = False,
        simulated: int = 0,
        cores: float = 0.0,
        clock_error_ns: int = 0,
        waits: Any = None,
        restarts_ns: Sequence[int] = (),
    ) -> None:
        self.columns = spans if isinstance(spans, Columns) else Columns.of(spans)
        self.scalars = tuple(sorted(scalars, key=lambda s: s.time_ns))
        self.ranks, self.dropped = tuple(ranks), tuple(dropped) or (0,) * len(ranks)
        self.notes, self.nodes = tuple(notes), tuple(nodes)
        self.link, self.replayed, self.simulated = link, replayed, simulated
        self.cores, self.clock_error_ns = cores, clock_error_ns
        self.restarts_ns = tuple(restarts_ns)
        data = self.columns.data
        highest = int(data["rank"].max(initial=-1))
        if highest >= len(self.ranks):
            raise ValueError(f"a span of rank {highest}, but ranks={list(self.ranks)} names {len(self.ranks)}")
        first = start_ns if start_ns is not None else int(data["start_ns"][0]) if len(data) else 0
        self.start_ns = first
        self.end_ns = end_ns if end_ns is not None else int(data["end_ns"].max(initial=first))
        if self.end_ns < self.start_ns:
            raise ValueError(f"a trace from {self.start_ns} to {self.end_ns} ns: the end lies before the start")
        self.profile = tuple(profile)
        waits = np.empty(0, WAITS) if waits is None else waits
        if getattr(waits, "dtype", None) != WAITS:
            raise TypeError(f"Trace(waits={reprlib.repr(waits)}): expected an array of `labkit.recording.events.WAITS`")
        self.waits = waits[np.argsort(waits["time_ns"], kind="stable")]

    @property
    def origin(self) -> str:
        """What it is if it was not run: "replayed", or "simulated: 3 of 1,024 ranks"; otherwise ""."""
        if self.simulated:
            return f"simulated: {len(self.ranks)} of {self.simulated:,} ranks"
        return "replayed" if self.replayed else ""

    @property
    def info(self) -> dict[str, Any]:
        """What is known of it besides its events, as arguments of `Trace`."""
        return {name: getattr(self, name) for name in FACTS}

    def __len__(self) -> int:
        return len(self.columns)

    def __iter__(self) -> Iterator[Span]:
        return iter(self.columns)

    def __repr__(self) -> str:
        lost = f", {sum(self.dropped)} records lost" if any(self.dropped) else ""
        return f"<Trace of {len(self.ranks)} ranks, {len(self)} spans, {len(self.scalars)} scalars{lost}>"

    @property
    def failures_ns(self) -> tuple[int, ...]:
        """When ranks failed, in order of time; empty if none did."""
        return tuple(sorted(s.time_ns for s in self.scalars if s.name == ENDED))

    @property
    def duration_ns(self) -> int:
        """Length of the window in nanoseconds."""
        return self.end_ns - self.start_ns

    @property
    def spans(self) -> tuple[Span, ...]:
        """All spans, in order of their start."""
        return tuple(self)

    @public_api
    def filter(self, *, rank: int | None = None, kind: str | None = None, name: str | None = None) -> Trace:
        """Select the spans (scalars, waits) of one rank, kind or name; the window stays the same.

        Args:
            rank: a rank's number; default: all.
            kind: "compute", "communication", "step", ...; default: all.
            name: a span's name; default: all.

        Raises:
            TypeError, ValueError: an invalid argument.
        """
        data, keep = self.columns.data, np.ones(len(self), bool)
        if rank is not None:
            self._check_rank(rank, "filter")
            keep &= data["rank"] == rank
        if kind is not None:
            if kind not in KINDS:
                raise ValueError(f"kind={kind!r}: expected one of {', '.join(KINDS)}")
            keep &= data["kind"] == KINDS.index(kind)
        if name is not None:
            if not isinstance(name, str):
                raise TypeError(f"filter(name={name!r}): expected the name of spans, as in trace.filter(name='forward')")
            keep &= data["name"] == self.columns.name_id(name)
        scalars = [s for s in self.scalars if rank in (None, s.rank) and name in (None, s.name) and kind in (None, "scalar")]
        profile = [e for e in self.profile if rank in (None, e.rank) and name in (None, e.name) and kind is None]
        waits = self.waits if rank is None else self.waits[self.waits["rank"] == rank]
        others = {"profile": profile, "waits": waits if name is None and kind in (None, "wait") else None}
        return self._with(self.columns.where(keep), scalars, start_ns=self.start_ns, end_ns=self.end_ns, **others)

    @public_api
    def between(self, start_ns: int, end_ns: int) -> Trace:
        """Select the spans that overlap a time window, which becomes the trace's window; shares count time inside it.

        Memory values from before the window are moved to its start, since such a value holds until the next, or until
        the ranks are replaced.

        Args:
            start_ns: start of the window, on the trace's clock.
            end_ns: end of the window.
        """
        data = self.columns.data
        keep = (data["end_ns"] > start_ns) & (data["start_ns"] < end_ns)
        begun_ns = max((ns for ns in self.restarts_ns if ns <= start_ns), default=-math.inf)
        earlier = (s for s in self.scalars if begun_ns <= s.time_ns < start_ns)
        before = {(s.rank, s.name): s for s in earlier if s.name.startswith(MEMORY)}
        scalars = [replace(s, time_ns=start_ns) for s in before.values()]
        scalars += [s for s in self.scalars if start_ns <= s.time_ns <= end_ns]
        profile = [e for e in self.profile if e.end_ns > start_ns and e.start_ns < end_ns]
        waits = self.waits[(self.waits["time_ns"] >= start_ns) & (self.waits["time_ns"] <= end_ns)]
        part = self._with(self.columns.where(keep), scalars, start_ns=start_ns, end_ns=end_ns, profile=profile, waits=waits)
        part.restarts_ns = tuple(ns for ns in self.restarts_ns if start_ns < ns < end_ns)
        return part

    def last_attempt(self) -> Trace:
        """Return the part after the last restart: the whole trace if there was none."""
        if not self.restarts_ns:
            return self
        return self.between(self.restarts_ns[-1], max(self.restarts_ns[-1], self.end_ns))

    @public_api
    def step(self, number: int) -> Trace:
        """Select one step, from the first rank's start to the last rank's end; -1 is the last step.

        Steps are those of `lab.steps`; if the program does not use it, each ends with an optimizer's step.

        Raises:
            TypeError: `number` is not a whole number.
            LabError: there is no such step.
        """
        expected = f"step({number!r}): expected a step's number, such as step(0), or step(-1) for the last one"
        check_number(number, expected, whole=True)
        bounds = self.step_bounds()
        try:
            start, end = bounds[int(number)]
        except IndexError:
            hint = "" if len(bounds) else "; `for batch in lab.steps(batches):` marks them, or an optimizer's step"
            raise LabError(f"step {number}: all ranks of this trace have completed {len(bounds)} steps{hint}") from None
        return self.between(int(start), int(end))

    @public_api
    def step_bounds(self, rank: int | None = None) -> Intervals:
        """Return the bounds of each step: from the first rank's start to the last rank's end, shape (steps, 2), in ns.

        In nested loops, only the steps of the innermost count; in `zip(steps(a), steps(b))`, those of `a`. Ranks
        without steps are ignored; only steps that all other ranks have completed count, and after a restart only those
        of the last attempt. A step belongs to a window that contains its middle: ranks do not enter a step at the same
        time, so its window contains parts of neighbouring steps.

        Args:
            rank: only this rank's own steps; default: those of all ranks.
        """
        if rank is not None:
            self._check_rank(rank, "step_bounds")
        ranks = range(len(self.ranks)) if rank is None else [rank]
        since_ns = max((self.start_ns, *self.restarts_ns[-1:]))
        per_rank = [steps_of_rank(self.columns.data[self._is(one, STEP)], since_ns, self.end_ns) for one in ranks]
        count = min((len(steps) for steps in per_rank if len(steps)), default=0)
        bounds = [steps[:count] for steps in per_rank if len(steps)] or [np.empty((0, 2), np.int64)]
        return np.stack([np.min([b[:, 0] for b in bounds], 0), np.max([b[:, 1] for b in bounds], 0)], axis=1)

    def shares(self) -> tuple[Share, ...]:
        """Return how each rank spent the time of the window, in rank order.

        Compute is the time in compute spans, minus the time in which the rank was blocked in communication, or only
        waited for data (spans named "data"). For a rank whose program has no compute spans, the time in the function
        and in served calls counts instead. Communication lasts from the arrival of its last rank until it completes, so
        that waiting for a slow peer counts as idle time. A communication span that the program puts around recorded
        operations only labels them, and does not count; nor does an operation that nobody has waited for.
        """
        return tuple(self._share(rank) for rank in range(len(self.ranks)))

    @property
    def bubble(self) -> float:
        """The share of all ranks' time without compute, from 0 to 1: what a pipeline's stages lose by waiting.

        Raises:
            LabError: the window is empty.

        Source: for ideal pipelines, Y. Huang et al., "GPipe", 2019: (p - 1) / (m + p - 1) for p stages and m
            micro-batches.
        """
        if not self.duration_ns:
            raise LabError("this trace has no duration, so it has no bubble")
        return 1 - sum(share.compute_ns for share in self.shares()) / (self.duration_ns * len(self.ranks))

    @public_api
    def activity(self, rank: int) -> dict[str, Intervals]:
        """Return a rank's intervals in the window: "compute", "data", "communication", "waiting", each (n, 2) in ns."""
        self._check_rank(rank, "activity")
        window = np.array([[self.start_ns, self.end_ns]], np.int64)
        computing = self._computing(rank)
        blocked, waited = self.blocked(rank), self.columns.data["flags"] & UNWAITED == 0
        of_rank = self._is(rank, COMMUNICATION) & ~self.columns.around & waited
        rows, ready = self.columns.data[of_rank], self.ready()[of_rank]
        compute = difference(union(computing["start_ns"], computing["end_ns"]), blocked)
        transfer = union(ready, rows["end_ns"])
        waiting = difference(blocked, transfer)
        data = difference(intersection(waits_for_data(computing, self.columns.name_id(DATA)), compute), transfer)
        parts = {"compute": difference(compute, data), "data": data, "communication": transfer, "waiting": waiting}
        return {name: intersection(part, window) for name, part in parts.items()}

    @public_api
    def blocked(self, rank: int) -> Intervals:
        """Return when a rank was blocked and computed nothing, shape (n, 2) in ns; see `tracing.intervals`."""
        self._check_rank(rank, "blocked")
        return blocked(self.columns.data[self._is(rank, COMMUNICATION) & ~self.columns.around], self._computing(rank))

    def ready(self) -> NDArray[np.int64]:
        """Return for each span when its last rank had arrived, in ns: its own start if its rank was last.

        A rank that waited for less than `clock_error_ns` may have been the last. The operation then counts as ready
        when the rank began to wait, or at its start if it did not wait.
        """
        return self._ready_ns

    @public_api
    def save(self, path: str | Path) -> Path:
        """Write the Chrome trace format, for https://ui.perfetto.dev, chrome://tracing and `load_trace`.

        Args:
            path: path of the file; "~" is the home folder; a file whose name ends in ".gz" is compressed.

        Returns:
            the path.

        Raises:
            LabError: the file cannot be written.

        Source: "Trace Event Format", the Chromium project's Catapult documentation.
        """
        path = Path(path).expanduser()
        events = self._chrome()
        # Perfetto cannot read surrogate pairs (`\ud83d\ude00`), into which `json` would turn an emoji, for example.
        text = partial(json.dumps, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        with writing(path) as file:
            file.write('{"traceEvents":[')
            before = ""
            while chunk := list(islice(events, CHUNK)):
                file.write(before + text(chunk)[1:-1])
                before = ","
            window = {"start_ns": self.start_ns, "end_ns": self.end_ns}
            whole = packed(self.columns, self.waits, scalars=self.scalars, profile=self.profile, **window, **self.info)
            file.write("]," + text({"displayTimeUnit": "ms", KEY: whole})[1:])
        return path

    def to_pandas(self) -> DataFrame:
        """Return a pandas table: a row per span, in order of their start, and a column per field of `Span`."""
        try:
            from pandas import DataFrame
        except ImportError:
            raise LabError("to_pandas: pandas is not installed; `pip install pandas` installs it") from None
        return DataFrame(self.columns.by_field())

    def _chrome(self) -> Iterator[Any]:
        # Spans that overlap the window may have started before it.
        began = [self.start_ns, *self.columns.data["start_ns"][:1].tolist(), *(e.start_ns for e in self.profile)]
        zero_ns = min(began + [s.time_ns for s in self.scalars[:1]])
        return write_events(self, self.scalars, self.ranks, zero_ns, self.profile)

    def _with(self, columns: Columns, scalars: Iterable[Scalar], **others: Any) -> Trace:
        part = Trace(columns, scalars, **self.info, **others)
        part.labelled = self.labelled
        return part

    @cached_property
    def _ready_ns(self) -> NDArray[np.int64]:
        if not self.clock_error_ns:
            return self.columns.ready_ns
        data, ready = self.columns.data, self.columns.ready_ns
        since = np.maximum(data["start_ns"], data["wait_start_ns"])
        uncertain = (ready > since) & (ready - since < self.clock_error_ns)
        return np.where(uncertain, since, ready)

    @cached_property
    def labelled(self) -> frozenset[int]:
        """The ranks whose program recorded compute spans; for the others, the whole function counts as compute."""
        data = self.columns.data
        own = (data["kind"] == COMPUTE) & (data["flags"] & AUTOMATIC == 0)
        return frozenset(np.flatnonzero(np.bincount(data["rank"][own])).tolist())

    def _check_rank(self, rank: Any, method: str) -> None:
        last = len(self.ranks) - 1
        expected = f"{method}(rank={rank!r}): expected the number of a rank, 0 to {last}"
        check_number(rank, expected, whole=True, at_least=0, below=last + 1)

    def _is(self, rank: int, kind: int) -> NDArray[np.bool_]:
        data = self.columns.data
        chosen: NDArray[np.bool_] = (data["rank"] == rank) & (data["kind"] == kind)
        return chosen

    def _computing(self, rank: int) -> Any:
        """The rows that count as compute: compute spans; if the program recorded none, its calls, too."""
        computes = self._is(rank, COMPUTE)
        calls = self._is(rank, CALL) & ~self._is_unknown(rank)
        return self.columns.data[computes if rank in self.labelled else computes | calls]

    def _is_unknown(self, rank: int) -> NDArray[np.bool_]:
        named: NDArray[np.bool_] = self.columns.data["name"] == self.columns.name_id(UNKNOWN)
        return self._is(rank, CALL) & named

    def _share(self, rank: int) -> Share:
        parts = self.activity(rank)
        compute, data, communication = (length(parts[name]) for name in ("compute", "data", "communication"))
        overlap = length(intersection(parts["compute"], parts["communication"]))
        idle = self.duration_ns - compute - data - communication + overlap
        rows = self.columns.data[self._is_unknown(rank)]
        unknown = length(union(np.maximum(rows["start_ns"], self.start_ns), np.minimum(rows["end_ns"], self.end_ns)))
        return Share(rank, self.duration_ns, compute, communication, overlap, idle, length(parts["waiting"]), data, unknown)


def from_records(
    records: Sequence[Any],
    names: Sequence[Sequence[str]],
    ranks: Sequence[str],
    *,
    calls: Sequence[tuple[int, str]] = (),
    pending: Sequence[Sequence[Pending]] = (),
    silent: Sequence[tuple[int, int]] = (),
    dropped: Sequence[int] = (),
    start_ns: int | None = None,
    end_ns: int | None = None,
    **others: Any,
) -> Trace:
    """Make the trace of a run from the records that `recording.ring_buffer.RingReader` read for each rank.

    `records` are arrays of `recording.ring_buffer.record_dtype()`, `names` the tables of strings, read after those.
    What was in progress lasts until `end_ns`: `calls`, the ranks whose function has not returned, each with its name;
    and `pending`, per rank. `silent` are ranks whose machine does not answer, each with the time of its last report.
    """
    ids: dict[str, int] = {"": 0}

    def number(text: str) -> int:
        return ids.setdefault(text, len(ids))

    parts, scalars, waits = [np.empty(0, COLUMNS)], [], [np.empty(0, WAITS)]
    for rank, (rows, own) in enumerate(zip(records, names, strict=True)):
        table = np.array([number(text) for text in own], np.uint32)
        unwaited = rows[(rows["kind"] == WAIT) & (rows["flags"] & UNWAITED != 0)]
        is_scalar, is_wait = rows["kind"] == SCALAR, (rows["kind"] == WAIT) & (rows["flags"] & UNWAITED == 0)
        curve = rows[is_scalar]
        for name, time_ns, value in zip(*(curve[f].tolist() for f in ("name", "start_ns", "value")), strict=True):
            scalars.append(Scalar(rank, own[name], time_ns, value))
        waited = np.empty(int(is_wait.sum()), WAITS)
        waited["rank"], waited["group"] = rank, table[rows["group"][is_wait]]
        waited["match"], waited["time_ns"] = rows["match"][is_wait], rows["start_ns"][is_wait]
        waits.append(waited)
        rows = rows[(rows["kind"] != SCALAR) & (rows["kind"] != WAIT) & (rows["flags"] & UNSHOWN == 0)]
        part = np.empty(len(rows), COLUMNS)
        part["rank"], part["flags"] = rank, rows["flags"]
        for group, match in unwaited[["group", "match"]].tolist():
            part["flags"][(rows["kind"] == COMMUNICATION) & (rows["group"] == group) & (rows["match"] == match)] |= UNWAITED
        for field in FIELDS:
            if field.place in ("head", "tail"):
                part[field.name] = table[rows[field.name]] if field.is_text else rows[field.name]
        parts.append(part)
    if calls or any(pending) or silent:
        assert end_ns is not None and (start_ns is not None or not calls), "since when, and until when?"
        parts.append(under_way(start_ns or 0, end_ns, number, calls=calls, pending=pending, silent=silent))
    data = np.concatenate(parts)
    is_step, found = data["kind"] == STEP, data["flags"] & AUTOMATIC != 0
    if (is_step & ~found).any():
        data = data[~(is_step & found)]  # the program marks its steps itself
    columns = Columns(data, list(ids))
    others |= {"start_ns": start_ns, "end_ns": end_ns, "dropped": dropped, "waits": np.concatenate(waits)}
    return Trace(columns, scalars, ranks=ranks, **others)


def steps_of_rank(steps: Any, start_ns: int, end_ns: int) -> Intervals:
    """Return the bounds of those of a rank's steps that contain no other step, and whose middle is in a window.

    Of steps that overlap without one containing the other, as in `zip(steps(a), steps(b))`, the first counts.
    """
    steps = steps[np.lexsort((-steps["end_ns"], steps["start_ns"]))]
    first_end_ns = np.minimum.accumulate(steps["end_ns"][::-1])[::-1]  # of this step and those that start later
    innermost = steps[np.append(first_end_ns[1:] > steps["end_ns"][:-1], np.ones(len(steps[:1]), bool))]
    bounds: Intervals = np.stack([innermost["start_ns"], innermost["end_ns"]], axis=1)
    if (bounds[1:, 0] < bounds[:-1, 1]).any():
        apart: list[Any] = []
        for one in bounds:
            if not apart or one[0] >= apart[-1][1]:
                apart.append(one)
        bounds = np.stack(apart)
    middle = (bounds[:, 0] + bounds[:, 1]) // 2
    return bounds[(middle >= start_ns) & (middle <= end_ns)]
