"""`replay`: a run as it would have been after a change, computed from its trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from labkit.costs.link import Link
from labkit.costs.network import Network, nodes_over
from labkit.errors.exceptions import LabError
from labkit.errors.lists import listed
from labkit.errors.units import time_in_words
from labkit.errors.wrong_calls import check_number, public_api
from labkit.recording.events import WAITS, Columns
from labkit.recording.schema import STEP
from labkit.tracing.replaying.changes import AS_RECORDED, AsRecorded, ProgramChanges, had_cores, of_other_threads, rules_for
from labkit.tracing.replaying.graph import END, START, TIMES, WAIT_END, WAIT_START, Graph, graph_of
from labkit.tracing.replaying.times import Rules, Times, measured, play
from labkit.tracing.step_times import HasTrace, spread_ns, trace_of
from labkit.tracing.trace import Trace

DELAYS = ("issue_delay_ns", "wait_delay_ns")


@public_api
def replay(
    run: HasTrace | Trace,
    *,
    link: Link | Network | AsRecorded | None = AS_RECORDED,
    own_cores: bool = False,
    faster: Mapping[str, float] | None = None,
    slower: Mapping[str, float] | None = None,
    rank: int | None = None,
    free: Sequence[str] = (),
    like_others: int | None = None,
    one_bucket: bool = False,
) -> Trace:
    """Compute what a run would have looked like after a change, from its trace; nothing is executed.

    For example, `lab.replay(run, faster={"backward": 2})` is a trace that figures and `step_ms` accept like any other.
    Without a change, it is the recorded one. Its `notes` say what was changed, and how much the recorded steps differ:
    a smaller gain means nothing. docs/replay.md explains the model and what it cannot answer.

    Args:
        run: a run or a trace.
        link: over this emulated link or network; None for no emulated link.
        own_cores: as if each rank had a core of its own. A run that had enough cores stays as it is, also one that
            could not be replayed.
        faster: by how much spans or operations are faster, by name: `{"backward": 2}` halves all backward passes, also
            those of numbered micro-batches ("backward 3").
        slower: by how much they are slower.
        rank: only the spans and operations of this rank are faster or slower.
        free: the names of operations that take no time once all ranks have arrived.
        like_others: this rank works as fast as the others do on average: a straggler is cured.
        one_bucket: DistributedDataParallel averages all gradients of a backward pass at its end, in one all-reduce.

    Returns:
        the computed trace.

    Raises:
        LabError: the trace cannot be replayed, or lacks what a change needs; the message says why.
        TypeError, ValueError: an invalid argument.
    """
    trace = trace_of(run, "replay")
    changes = ProgramChanges(link, own_cores, faster or {}, slower or {}, rank, free, like_others, one_bucket)
    for name, number in (("rank", rank), ("like_others", like_others)):
        if number is not None:
            expected = f"replay({name}={number!r}): expected the number of a rank, 0 to {len(trace.ranks) - 1}"
            check_number(number, expected, whole=True, at_least=0, below=len(trace.ranks))
    if changes == ProgramChanges(own_cores=True) and had_cores(trace):
        return trace
    if isinstance(link, Network):
        changes = replace(changes, link=link.of(len(trace.ranks)))
    graph = graph_of(trace, "replay")
    words = changes.in_words(trace.ranks)
    if apart := of_other_threads(graph, changes):
        words += f"; that other threads wait for {listed(apart)} is not known, and so without effect"
    return replay_of(graph, measured(graph), changes, words)[0]


def replay_of(graph: Graph, recorded: Rules, changes: ProgramChanges, words: str) -> tuple[Trace, Times]:
    """Return what `replay` does, and the times of all events, given the rules of the recorded run."""
    try:
        rules = rules_for(graph, recorded, changes)
        times = play(graph, rules)
        found = replayed(graph, rules, times, words)
    except OverflowError:
        raise LabError("replay: after this change the run would last longer than 292 years, more than a trace can hold") from None
    if changes.own_cores:  # no thread lacks a core any more
        for name in DELAYS:
            found.columns.data[name] = 0
    return found, times


def replayed(graph: Graph, rules: Rules, times: Times, changed: str) -> Trace:
    """Return the trace with times that were computed with these rules; `changed` are the changes in words."""
    trace, link = graph.trace, rules.link
    data = trace.columns.data.copy()
    known = np.array([time is not None for time in times.at_ns], bool).reshape(-1, 4)
    at_ns = np.array([time or 0 for time in times.at_ns], np.int64).reshape(-1, 4)
    moved = [_MovedTimes(graph, at_ns, rank) for rank in range(len(trace.ranks))]
    clock_of = data["rank"]
    for column, name in enumerate(TIMES):
        recorded = data[name].copy()
        data[name] = np.where(known[:, column], at_ns[:, column], recorded)
        for rank, clock in enumerate(moved):
            alone = ~known[:, :2].any(axis=1) & (clock_of == rank) & (recorded > 0)
            data[name][alone] = clock(recorded[alone])
    waited = known[:, WAIT_END]
    blocking = waited & ~known[:, WAIT_START]  # one call issues it and waits for it
    data["wait_start_ns"][blocking] = data["start_ns"][blocking]
    gone = waited & (data["wait_end_ns"] <= data["wait_start_ns"])
    data["wait_start_ns"][gone] = data["wait_end_ns"][gone] = 0
    done = np.array([time or 0 for time in times.done_ns], np.int64)
    data["backend_ns"] = np.where(graph.done_known | (trace.link is None and link is not None), done, 0)
    data["nbytes"] = rules.nbytes
    kept = np.ones(len(data), bool)
    kept[list(rules.instead)] = False
    facts = trace.info | {
        "link": link,
        "replayed": True,
        "nodes": nodes_over(link, len(trace.ranks)),
        "notes": [*trace.notes, f"Replayed, not run: {changed}. {_spread_in_words(trace)}".strip()],
    }
    complete = np.flatnonzero(gone & (data["group"] > 0))
    waits: Any = np.empty(len(complete), WAITS)
    for name in ("rank", "group", "match"):
        waits[name] = data[name][complete]
    waits["time_ns"] = at_ns[complete, WAIT_END]
    scalars = []
    for rank, clock in enumerate(moved):
        own = [scalar for scalar in trace.scalars if scalar.rank == rank]
        moments = clock(np.array([scalar.time_ns for scalar in own], np.int64)).tolist()
        scalars += [replace(scalar, time_ns=time_ns) for scalar, time_ns in zip(own, moments, strict=True)]
    columns = Columns(data[kept], trace.columns.names, around=trace.columns.around[kept])
    return Trace(columns, scalars, start_ns=trace.start_ns, end_ns=_end_ns(graph, times), waits=waits, **facts)


def replayed_steps(graph: Graph, times: Times) -> Trace:
    """Return the steps of the trace with these times, for their lengths; those of no thread stay as recorded."""
    trace = graph.trace
    rows = np.flatnonzero(trace.columns.data["kind"] == STEP)
    data = trace.columns.data[rows].copy()
    for which, name in ((START, "start_ns"), (END, "end_ns")):
        moved = [times.at_ns[4 * row + which] for row in rows.tolist()]
        data[name] = [recorded if time is None else time for time, recorded in zip(moved, data[name].tolist(), strict=True)]
    columns = Columns(data, trace.columns.names)
    return Trace(columns, ranks=trace.ranks, start_ns=trace.start_ns, end_ns=_end_ns(graph, times))


def _end_ns(graph: Graph, times: Times) -> int:
    """Return when the replayed run ends: as long after its last event as the recorded one."""
    trace = graph.trace
    last = max((thread.at_ns[-1] for thread in graph.threads_of(followed=True) if thread.at_ns), default=trace.end_ns)
    apart = {time for thread in graph.threads_of(followed=False) for time in thread.times}
    counted = (at for time, at in enumerate(times.at_ns) if at is not None and time not in apart)
    latest = max(counted, default=trace.start_ns)
    return max(latest + trace.end_ns - last, trace.start_ns)


class _MovedTimes:
    """Moves times that no event determines, such as those of recorded values, along with the events around them."""

    def __init__(self, graph: Graph, at_ns: Any, rank: int) -> None:
        threads = [graph.threads[rank]]
        if not threads[0].times:  # a rank that only serves calls
            threads = [thread for thread in graph.threads_of(followed=True) if thread.rank == rank]
        # A wait that begins during another one is moved to where that one begins, and so would others be.
        events = [
            (at, time)
            for thread in threads
            for at, time in zip(thread.at_ns, thread.times, strict=True)
            if time & 3 != WAIT_START
        ]
        self.recorded, times = np.array(sorted(events), np.int64).reshape(-1, 2).T
        self.moved = np.maximum.accumulate(at_ns.ravel()[times])

    def __call__(self, time_ns: Any) -> Any:
        if not len(self.recorded):
            return time_ns
        inside = np.interp(time_ns, self.recorded, self.moved)
        before = self.moved[0] - self.recorded[0] + time_ns
        after = self.moved[-1] - self.recorded[-1] + time_ns
        found = np.where(time_ns < self.recorded[0], before, np.where(time_ns > self.recorded[-1], after, inside))
        return np.rint(found).astype(np.int64)


def _spread_in_words(trace: Trace) -> str:
    spread = spread_ns(trace)
    if not any(spread):
        return ""
    low, middle, high = map(time_in_words, spread)
    return f"The recorded steps lasted {middle} (median); half of them lasted {low} to {high}."
