"""What each of several changes would save per step, by replay."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from labkit.costs.link import Link
from labkit.costs.network import Network
from labkit.errors.exceptions import LabError
from labkit.errors.units import three_digits, unit_of
from labkit.recording.schema import COMPUTE, OWN_THREAD
from labkit.tracing.patterns import BACKWARD, after_backward
from labkit.tracing.replaying.changes import ProgramChanges, as_one_message, pace_of_others, rules_for, shorten
from labkit.tracing.replaying.graph import Graph, graph_of
from labkit.tracing.replaying.replay import replayed_steps
from labkit.tracing.replaying.times import Rules, measured, play
from labkit.tracing.step_times import spread_ns
from labkit.tracing.trace import Trace

MOST: Final = 12
NOTICED: Final = 0.02  # a phase or an operation with a smaller share of the time is not asked about
PHASES: Final = 4
STRAGGLERS: Final = 2
WITHOUT_COMMUNICATION: Final = "communication takes no time"
BESIDE_BACKWARD: Final = "gradients travel beside backward, at best"
AS_ONE_MESSAGE: Final = "consecutive messages as one"


@dataclass(frozen=True, slots=True)
class Gain:
    """What a change saves."""

    change: str  # the change in words: "backward twice as fast"
    saved_ns: float  # by how much the median step is shorter; negative if it is longer
    in_spread: bool  # whether that is less than recorded steps differ from one another
    ideal: bool = False  # whether nobody can make this change; it bounds what others save


@dataclass(frozen=True, slots=True)
class Gains:
    """What several changes save."""

    gains: tuple[Gain, ...]  # what each change saves: first those that one can make, then the ideals, each the largest first
    step_ns: float  # the median of the recorded steps; of a run without steps, its duration
    low_ns: float  # half of the steps last between the two
    high_ns: float
    steps: bool  # whether the run has steps


class Questions:
    """Asks a trace, of which a graph is built once, what changes would save; a `LabError` if it cannot be replayed."""

    def __init__(self, trace: Trace, function: str) -> None:
        self.trace, self.graph = trace, graph_of(trace, function)
        self.recorded = measured(self.graph)
        self.low_ns, self.step_ns, self.high_ns = spread_ns(trace)
        self.steps = self.step_ns > 0
        if not self.steps:
            self.low_ns = self.step_ns = self.high_ns = float(trace.duration_ns)

    def all(self) -> Gains:
        """Return what each change saves that makes sense for the trace."""
        found = [self.ask(*one) for one in _questions(self.graph, self.recorded)]
        found += [self.without_communication(), self.beside_backward(), self.as_one_message()]
        slow = [self.ask(*one) for one in _slow_ranks(self.graph, self.recorded)]
        found += [gain for gain in slow if gain is not None and gain.saved_ns > 0]  # else, others are slow
        return self.gains(found)

    def gains(self, found: Iterable[Gain | None]) -> Gains:
        """Sort gains, without those that are not known."""
        known = [gain for gain in found if gain is not None]
        largest = sorted(known, key=lambda gain: -gain.saved_ns)[:MOST]
        kept = sorted(largest, key=lambda gain: gain.ideal)
        return Gains(tuple(kept), self.step_ns, self.low_ns, self.high_ns, self.steps)

    def ask(self, words: str, changes: ProgramChanges) -> Gain | None:
        """Return what a change saves; None if the trace lacks what it needs."""
        try:
            return self._gain(words, rules_for(self.graph, self.recorded, changes))
        except LabError:
            return None

    def without_communication(self) -> Gain | None:
        """Return what is saved if no operation takes any time; None if there are none."""
        took = taken_by(self.graph, self.recorded)
        rules = rules_for(self.graph, self.recorded, ProgramChanges(free=tuple(took)))
        return self._gain(WITHOUT_COMMUNICATION, rules, ideal=True) if took else None

    def beside_backward(self) -> Gain | None:
        """Return what is saved if gradients travel while the backward pass computes; None if none travel after it.

        Which layer's gradients an operation carries is not recorded. At best, the whole backward pass hides them.
        """
        rows, rules = after_backward(self.trace), self.recorded.copy()
        took_ns = float((self.trace.columns.data["end_ns"] - self.trace.ready())[rows].sum())
        if not took_ns:
            return None
        left = max(1 - work_in(self.graph)[BACKWARD] / took_ns, 0.0)
        for row in rows.tolist():
            shorten(rules, row, left)
        return self._gain(BESIDE_BACKWARD, rules, ideal=True)

    def as_one_message(self) -> Gain | None:
        """Return what is saved if consecutive collectives of one line travel as one message; None if there are none."""
        rules = as_one_message(self.graph, self.recorded)
        return None if rules is None else self._gain(AS_ONE_MESSAGE, rules)

    def _gain(self, words: str, rules: Rules, *, ideal: bool = False) -> Gain:
        after = replayed_steps(self.graph, play(self.graph, rules))
        saved_ns = self.step_ns - (spread_ns(after)[1] if self.steps else after.duration_ns)
        return Gain(words, saved_ns, abs(saved_ns) <= (self.high_ns - self.low_ns) / 2, ideal)


def gains_of(trace: Trace, function: str) -> Gains:
    """Replay a trace with each change that makes sense for it; the arguments and errors are those of `Questions`."""
    return Questions(trace, function).all()


def like_others(trace: Trace, rank: int) -> tuple[str, ProgramChanges]:
    """Return the question what is saved if a rank works as fast as the others."""
    return f"{trace.ranks[rank]} as fast as the others", ProgramChanges(like_others=rank)


def twice_as_fast(graph: Graph) -> Iterator[tuple[str, ProgramChanges]]:
    """Yield the questions what is saved if a phase of the computation is twice as fast, those of most work first."""
    work, total = work_in(graph), graph.trace.duration_ns * len(graph.trace.ranks)
    for name in sorted(work, key=lambda name: -work[name])[:PHASES]:
        if work[name] > NOTICED * total:
            yield f"{name} twice as fast", ProgramChanges(faster={name: 2})


def work_in(graph: Graph) -> defaultdict[str, float]:
    """Return how long all ranks computed in spans of each name, without the numbers of micro-batches."""
    data, names = graph.trace.columns.data, graph.trace.columns.names
    work: defaultdict[str, float] = defaultdict(float)
    for thread in graph.threads:
        for gap, row in zip(thread.gaps, thread.inside, strict=True):
            # Nobody is known to wait for what other threads do.
            if row >= 0 and data["kind"][row] == COMPUTE and not data["flags"][row] & OWN_THREAD:
                work[re.sub(r" \d+$", "", names[data["name"][row]])] += gap
    return work


def taken_by(graph: Graph, recorded: Rules) -> defaultdict[str, float]:
    """Return how long the operations of each name took, once all ranks had arrived."""
    data, names = graph.trace.columns.data, graph.trace.columns.names
    took: defaultdict[str, float] = defaultdict(float)
    for row in graph.trace.columns.travels.nonzero()[0].tolist():
        took[names[data["name"][row]]] += recorded.transfer[row]
    return took


def _slow_ranks(graph: Graph, recorded: Rules) -> Iterator[tuple[str, ProgramChanges]]:
    """Yield that ranks which spend more time in their spans than others be as fast as these."""
    saves = [pace_of_others(graph, recorded.gaps, rank)[1] for rank in range(len(graph.trace.ranks))]
    for rank in np.argsort(saves)[::-1][:STRAGGLERS].tolist():
        if saves[rank] > NOTICED * graph.trace.duration_ns:
            yield like_others(graph.trace, rank)


def _questions(graph: Graph, recorded: Rules) -> Iterator[tuple[str, ProgramChanges]]:
    """Yield the changes that make sense for a trace, each in a student's words."""
    trace = graph.trace
    yield from twice_as_fast(graph)
    if trace.columns.data["issue_delay_ns"].any():
        yield "a core for each rank", ProgramChanges(own_cores=True)
    took = taken_by(graph, recorded)
    if not took:
        return
    total = trace.duration_ns * len(trace.ranks)
    yield "all gradients in one bucket", ProgramChanges(one_bucket=True)
    if trace.link is None:
        for name in sorted(took, key=lambda name: -took[name])[:2]:
            if took[name] > NOTICED * total:
                yield f"{name} twice as fast", ProgramChanges(faster={name: 2})
    else:
        yield from better_links(trace)


def better_links(trace: Trace) -> Iterator[tuple[str, ProgramChanges]]:
    """Yield the questions what is saved over a link with twice the bandwidth, or with half the latency."""
    link = trace.link
    if isinstance(link, Network):
        for level, where in (("inside", "inside the nodes"), ("between", "between the nodes")):
            for words, better in _better(getattr(link, level)):
                changed: Any = {level: better}
                yield f"{words} {where}", ProgramChanges(link=replace(link, **changed))
    elif link is not None:
        for words, better in _better(link):
            yield words, ProgramChanges(link=better)


def _better(link: Link) -> Iterator[tuple[str, Link]]:
    yield "twice the bandwidth", Link(gbit_per_s=2 * link.gbit_per_s, latency_us=link.latency_us)
    if link.latency_us:
        yield "half the latency", Link(gbit_per_s=link.gbit_per_s, latency_us=link.latency_us / 2)


def gain_in_words(gain: Gain, gains: Gains, *, whole: bool = True) -> str:
    """Return what a change saves, as in "saves 4.1 ms of 21.3 ms"; without the whole, "saves 4.1 ms"."""
    unit, unit_ns = unit_of(gains.step_ns)
    saved, step = (f"{three_digits(ns / unit_ns)} {unit}" for ns in (abs(gain.saved_ns), gains.step_ns))
    of_step = f" of {step}" if whole else ""
    words = f"saves {saved}{of_step}" if gain.saved_ns >= 0 else f"costs {saved}"
    if abs(gain.saved_ns) < 0.005 * unit_ns:
        return "saves nothing"
    return words + (" (within the spread)" if gain.in_spread else "")
