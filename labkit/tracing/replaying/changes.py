"""The changes of a program that a replay can answer for: their arguments, and what they do to its times."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from labkit.costs.link import Link
from labkit.costs.network import Network
from labkit.errors.exceptions import LabError
from labkit.errors.lists import listed
from labkit.errors.wrong_calls import check_number, did_you_mean
from labkit.recording.schema import CALL, COMMUNICATION, COMPUTE, OWN_THREAD, STEP
from labkit.tracing.intervals import length, union
from labkit.tracing.limits import SMALL_BYTES
from labkit.tracing.replaying.graph import END, ISSUE, START, WAIT, WAIT_END, Graph
from labkit.tracing.replaying.times import Rules
from labkit.tracing.trace import Trace

LITTLE: Final = 0.2  # of the time between two operations: with more of the rank's own work, one may need the other's result


class AsRecorded(Enum):
    """The link that the run had, if any: an argument of its own, since None means no link."""

    AS_RECORDED = "as recorded"

    def __repr__(self) -> str:
        return self.value


AS_RECORDED: Final = AsRecorded.AS_RECORDED


@dataclass(frozen=True)
class ProgramChanges:
    """What is changed; the arguments are those of `replay`, and so are the errors."""

    link: Link | Network | AsRecorded | None = AS_RECORDED
    own_cores: bool = False
    faster: Mapping[str, float] = field(default_factory=dict)
    slower: Mapping[str, float] = field(default_factory=dict)
    rank: int | None = None
    free: Sequence[str] = ()
    like_others: int | None = None
    one_bucket: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.link, Link | Network | AsRecorded | None):
            raise TypeError(f"replay(link={self.link!r}): expected a lab.Link, a lab.Network, or None for no emulated link")
        for name in ("own_cores", "one_bucket"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"replay({name}={getattr(self, name)!r}): expected True or False")
        for name in ("faster", "slower"):
            given = getattr(self, name)
            if not isinstance(given, Mapping):
                raise TypeError(f'replay({name}={given!r}): expected factors by name, as in {name}={{"backward": 2}}')
            for span, factor in given.items():
                words = "expected the name of a span and a number above 1e-12 and below 1e12"
                expected = f"replay({name}={{{span!r}: {factor!r}}}): {words}"
                if not isinstance(span, str):
                    raise TypeError(expected)
                check_number(factor, expected, above=1e-12, below=1e12)
        names = tuple(self.free)  # an iterator could be read only once
        if isinstance(self.free, str) or not all(isinstance(name, str) for name in names):
            raise TypeError(f'replay(free={self.free!r}): expected names of operations, as in free=("all_reduce",)')
        object.__setattr__(self, "free", names)
        if self.rank is not None and not (self.faster or self.slower):
            raise ValueError(f"replay(rank={self.rank!r}): it belongs to faster= or slower=, which are not given")

    def in_words(self, ranks: Sequence[str]) -> str:
        """Return the changes, as in "backward 2 times as fast on rank 1"; "nothing changed" if there are none."""
        on = "" if self.rank is None else f" on {ranks[self.rank]}"
        said = [f"{name} {factor:g} times as fast{on}" for name, factor in self.faster.items()]
        said += [f"{name} {factor:g} times as slow{on}" for name, factor in self.slower.items()]
        if not isinstance(self.link, AsRecorded):
            said.append("no emulated link" if self.link is None else f"over {self.link}")
        said += ["a core for each rank"] if self.own_cores else []
        said += [f"{name} takes no time" for name in self.free]
        said += [] if self.like_others is None else [f"{ranks[self.like_others]} as fast as the others"]
        said += ["all gradients in one bucket"] if self.one_bucket else []
        return listed(said) or "nothing changed"


def rules_for(graph: Graph, recorded: Rules, changes: ProgramChanges) -> Rules:
    """Return the rules of a replay with these changes, given those of the recorded run (`times.measured`).

    A `LabError` says that the trace lacks what a change needs, a `ValueError` that it has no such name or rank.
    """
    rules = recorded.copy()
    if changes.own_cores:
        _own_cores(graph, rules)
    _change_gaps(graph, rules, changes)
    if changes.one_bucket:
        _one_bucket(graph, rules)
    for name, factor in _factors(changes):
        for row in _operations(graph, name, changes.rank):
            shorten(rules, row, factor)
    for name in changes.free:
        rows = _operations(graph, name, None)
        if not rows:
            names = _names(graph, operations=True)
            raise ValueError(f"replay(free=[{name!r}]): no operation is named {name!r}; {did_you_mean(name, names)}")
        for row in rows:
            shorten(rules, row, 0)
    if not isinstance(changes.link, AsRecorded):
        rules = replace(rules, link=changes.link)
        if changes.link is None:
            rules.late, rules.request_late = [0] * len(rules.late), {}
    return rules


def of_other_threads(graph: Graph, changes: ProgramChanges) -> list[str]:
    """Return the names that `changes` makes faster or slower of spans for whose threads nobody is known to wait."""
    data, names = graph.trace.columns.data, graph.trace.columns.names
    apart = (data["flags"] & OWN_THREAD != 0) & (data["kind"] == COMPUTE)
    chosen = [apart & _selected(graph, name) for name, _ in _factors(changes)]
    return [names[number] for which in chosen for number in np.unique(data["name"][which]).tolist()]


def shorten(rules: Rules, row: int, factor: float) -> None:
    """Let an operation take this share of its time, once all ranks have arrived; 0 for none at all."""
    rules.transfer[row] = round(rules.transfer[row] * factor)
    rules.faster[row] = rules.faster[row] / factor if factor else math.inf
    if row in rules.request:
        rules.request[row] = round(rules.request[row] * factor)
    if not factor:
        rules.late[row] = 0
        if row in rules.request:
            rules.request_late[row] = 0


def had_cores(trace: Trace) -> bool:
    """Whether each rank is known to have had a core of its own."""
    return 0 < len(trace.ranks) <= trace.cores


def _selected(graph: Graph, name: str) -> NDArray[np.bool_]:
    """Return for each span whether it has this name, perhaps followed by a number or a function: "backward 3"."""
    return graph.trace.columns.named(lambda one: one == name or one.startswith(f"{name} "))


def _names(graph: Graph, *, operations: bool = False) -> list[str]:
    data, names = graph.trace.columns.data, graph.trace.columns.names
    unnamed = np.isin(data["kind"], [STEP, CALL]) | (operations & (data["kind"] != COMMUNICATION))
    return [names[number] for number in np.unique(data["name"][~unnamed]).tolist()]


def _operations(graph: Graph, name: str, rank: int | None) -> list[int]:
    data = graph.trace.columns.data
    chosen = _selected(graph, name) & graph.trace.columns.travels
    if rank is not None:
        chosen &= data["rank"] == rank
    found: list[int] = chosen.nonzero()[0].tolist()
    return found


def _factors(changes: ProgramChanges) -> list[tuple[str, float]]:
    """Return the names with the factor by which their time is multiplied."""
    return [(name, 1 / factor) for name, factor in changes.faster.items()] + [*changes.slower.items()]


def _change_gaps(graph: Graph, rules: Rules, changes: ProgramChanges) -> None:
    """Multiply the threads' own work by the factors of the innermost span with a factor around it."""
    data = graph.trace.columns.data
    factor = np.full(len(data) + 1, np.nan)  # the last entry is for work outside of spans
    for name, times in _factors(changes):
        which = _selected(graph, name)
        if not which.any():
            raise ValueError(f"replay: no span is named {name!r}; {did_you_mean(name, _names(graph))}")
        factor[:-1][which if changes.rank is None else which & (data["rank"] == changes.rank)] = times
    if changes.like_others is None and np.isnan(factor).all():
        return
    for row in range(len(data)):
        at = row
        while at >= 0 and np.isnan(factor[at]):
            at = graph.parent[at]
        factor[row] = factor[at] if at >= 0 else np.nan
    factor = np.nan_to_num(factor, nan=1.0)
    if changes.like_others is not None:
        _like_others(graph, rules, changes.like_others, factor)
    rules.gaps = [
        [round(ns) for ns in (np.array(gaps) * factor[thread.inside]).tolist()] if len(gaps) else []
        for thread, gaps in zip(graph.threads, rules.gaps, strict=True)
    ]


def pace_of_others(graph: Graph, gaps: Sequence[Sequence[int]], rank: int) -> tuple[dict[int, float], float]:
    """Compare a rank's work with that of the other ranks, in spans of the same name, given each thread's gaps.

    Return, by the number of a name, how long its spans take on the other ranks, as a multiple of what they take on this
    one; and the time that this rank would save with their pace, in ns.
    """
    data, spent = graph.trace.columns.data, np.zeros((len(graph.trace.ranks), len(graph.trace.columns.names)))
    count = np.zeros_like(spent)
    for thread, own in zip(graph.threads, gaps, strict=True):
        inside = np.array(thread.inside, np.int64)
        rows = inside >= 0
        np.add.at(spent[thread.rank], data["name"][inside[rows]], np.array(own, np.float64)[rows])
    worked = np.isin(data["kind"], (COMPUTE, STEP))
    np.add.at(count, (data["rank"][worked], data["name"][worked]), 1)
    spent_there, count_there = spent.sum(axis=0) - spent[rank], count.sum(axis=0) - count[rank]
    names = np.flatnonzero((spent[rank] > 0) & (count[rank] > 0) & (count_there > 0))
    factor = spent_there[names] / count_there[names] * count[rank][names] / spent[rank][names]
    return dict(zip(names.tolist(), factor.tolist(), strict=True)), float((spent[rank][names] * (1 - factor)).sum())


def _like_others(graph: Graph, rules: Rules, rank: int, factor: NDArray[np.float64]) -> None:
    """Give a rank's spans the mean pace of the other ranks in spans of the same name."""
    data = graph.trace.columns.data
    paces, _ = pace_of_others(graph, rules.gaps, rank)
    if not paces:
        raise LabError(f"replay(like_others={rank}): the other ranks have no spans with the names of those of rank {rank}")
    for name, pace in paces.items():
        factor[:-1][(data["name"] == name) & (data["rank"] == rank)] *= pace


def _one_bucket(graph: Graph, rules: Rules) -> None:
    """Let the last all-reduce of each backward pass carry the bytes of all of them."""
    data = graph.trace.columns.data
    buckets: dict[tuple[int, int], list[int]] = defaultdict(list)
    blocking = (data["wait_start_ns"] == data["start_ns"]).tolist()
    inside = _selected(graph, "backward")
    for row in _operations(graph, "all_reduce", None):
        around = graph.parent[row]
        if around >= 0 and inside[around] and not blocking[row]:
            buckets[around, int(data["group"][row])].append(row)
    merged = [rows for rows in buckets.values() if len(rows) > 1]
    if not merged:
        raise LabError("replay(one_bucket=True): no backward pass of this run has several all-reduces that run beside it")
    key = {row: int(data["match"][row]) for rows in merged for row in rows}
    ends: dict[tuple[int, tuple[int, ...]], int] = defaultdict(int)
    for rows in merged:
        ends[int(data["group"][rows[0]]), tuple(key[row] for row in rows)] += 1
    if len({(group, match) for group, matches in ends for match in matches}) != sum(len(matches) for _, matches in ends):
        raise LabError("replay(one_bucket=True): the ranks start their all-reduces in different backward passes")
    for rows in merged:
        *first, last = rows
        rules.instead |= dict.fromkeys(first, last)
        rules.nbytes[last] += sum(rules.nbytes[row] for row in first)
        # Over an emulated link, the link's own time follows from the bytes; what the backend needs beside it, for each
        # operation again, it needs once. Without a link, the bytes take the time in which the backend was busy.
        taken, done = np.array([rules.transfer[row] for row in rows]), graph.done_ns[rows]
        rules.transfer[last] = length(union(done - taken, done)) if rules.link is None else int(taken.max())


def as_one_message(graph: Graph, recorded: Rules) -> Rules | None:
    """Return rules by which consecutive collectives of one line travel with the first of them; None if there are none.

    Nothing but little work happens between them. Whether one needs the result of another is not recorded. Passes
    through layers do not count: DistributedDataParallel's buckets are `one_bucket`. Without an emulated link, only
    small operations count, whose bytes are assumed to take no time.
    """
    found = _consecutive(graph)
    rules = recorded.copy()
    for first, *others in found:
        rules.instead |= dict.fromkeys(others, first)
        rules.nbytes[first] += sum(rules.nbytes[row] for row in others)
        rules.transfer[first] = max(rules.transfer[row] for row in (first, *others))
    return rules if found else None


def _consecutive(graph: Graph) -> list[list[int]]:
    """Return the collectives that could be one, on each rank in their order."""
    data = graph.trace.columns.data
    chosen = graph.trace.columns.travels & (data["nbytes"] > 0)
    chosen &= np.array([kind.collective for kind in graph.types], bool)[data["name"]]
    if graph.trace.link is None:
        chosen &= data["nbytes"] <= SMALL_BYTES
    passes = _selected(graph, "forward") | _selected(graph, "backward")
    keys, matches = data[["name", "group", "line"]].tolist(), data[["group", "match"]].tolist()
    starts = data["start_ns"].tolist()
    runs: dict[tuple[int, int, int], list[list[int]]] = defaultdict(list)
    between, took = defaultdict[tuple[int, int, int], int](int), defaultdict[tuple[int, int, int], int](int)
    for thread in graph.threads_of(followed=True):
        run: list[int] = []
        for event, (kind, time) in enumerate(zip(thread.kinds, thread.times, strict=True)):
            row = time >> 2
            around = graph.parent[row]
            if kind == ISSUE and chosen[row] and not (around >= 0 and passes[around]):
                if not run or keys[row] != keys[run[-1]]:
                    run = []
                    runs[keys[row]].append(run)
                else:
                    between[keys[row]] += thread.gaps[event]
                    took[keys[row]] += starts[row] - starts[run[-1]]
                run.append(row)
            elif kind != WAIT or not run or keys[row] != keys[run[-1]]:
                run = []
    together = Counter(matches[row] for row in chosen.nonzero()[0].tolist())
    alike = Counter(tuple(matches[row] for row in run) for of_line in runs.values() for run in of_line)
    return [
        run
        for key, of_line in runs.items()
        if between[key] <= LITTLE * took[key]
        for run in of_line
        if len(run) > 1 and alike[tuple(matches[row] for row in run)] == together[matches[run[0]]]
    ]


def _own_cores(graph: Graph, rules: Rules) -> None:
    """Take the time in which threads were ready to run, but had no core, out of their work and their waits.

    Only the ranks' own threads recorded it. An operation that took longer than the median of its name and size is
    assumed to have lacked a core, too.
    """
    data = graph.trace.columns.data
    issued, waited = (data[f"{when}_delay_ns"].tolist() for when in ("issue", "wait"))
    if not any(issued):
        if had_cores(graph.trace):
            return
        raise LabError(
            "replay(own_cores=True): this run did not record how long its threads waited for a core; that is recorded where "
            "ranks outnumber cores"
        )
    rules.gaps = [[*gaps] for gaps in rules.gaps]
    for thread, gaps in zip(graph.threads, rules.gaps, strict=True):
        before, since = 0, 0  # the delay up to the last event with a measurement, and the event after that
        for event, (kind, time) in enumerate(zip(thread.kinds, thread.times, strict=True)):
            row, which = time >> 2, time & 3
            delay = issued[row] if which == START else waited[row] if which in (END, WAIT_END) else 0
            if not delay:
                continue
            left = max(delay - before, 0) if before else 0
            work = sum(gaps[since : event + 1])
            kept = max(work - left, 0) / work if work else 0.0
            for one in range(since, event + 1):
                gaps[one] = round(gaps[one] * kept)
            if kind == WAIT:
                rules.lag[row] -= min(max(left - work, 0), max(rules.lag[row], 0))
            before, since = delay, event + 1
    alike = defaultdict[tuple[int, int], list[int]](list)
    names, nbytes = data["name"].tolist(), data["nbytes"].tolist()
    for row in {row for gate in graph.gates for row in gate.opens}:
        alike[names[row], nbytes[row]].append(row)
    for rows in alike.values():
        for taken_ns in (rules.transfer, rules.late):
            median_ns = int(np.median([taken_ns[row] for row in rows]))
            for row in rows:
                taken_ns[row] = min(taken_ns[row], median_ns)
