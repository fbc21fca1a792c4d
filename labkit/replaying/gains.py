"""What each of several changes would save per step, by replay."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from labkit.costs.link import Link
from labkit.costs.network import Network
from labkit.errors.exceptions import LabError
from labkit.recording.schema import COMMUNICATION, COMPUTE, OWN_THREAD
from labkit.replaying.changes import Changes, pace_of_others, rules_for
from labkit.replaying.graph import Graph, graph_of
from labkit.replaying.refusals import check_replayable
from labkit.replaying.replay import replayed, spread_ns
from labkit.replaying.times import Rules, measured, play
from labkit.tracing.trace import Trace

__all__ = ["Gain", "Gains", "gains_of"]

MOST: Final = 12
NOTICED: Final = 0.02  # a phase or an operation with a smaller share of the time is not asked about
PHASES: Final = 4
STRAGGLERS: Final = 2


@dataclass(frozen=True, slots=True)
class Gain:
    """What a change saves.

    Args:
        change: the change in words: "backward twice as fast".
        saved_ns: by how much the median step is shorter; negative if it is longer.
        in_spread: whether that is less than recorded steps differ from one another.
    """

    change: str
    saved_ns: float
    in_spread: bool


@dataclass(frozen=True, slots=True)
class Gains:
    """What several changes save, the largest first.

    Args:
        gains: what each change saves.
        step_ns: the median of the recorded steps; of a run without steps, its duration.
        low_ns, high_ns: the quartiles: half of the steps last between them.
        steps: whether the run has steps.
    """

    gains: tuple[Gain, ...]
    step_ns: float
    low_ns: float
    high_ns: float
    steps: bool


def gains_of(trace: Trace, function: str) -> Gains:
    """Replay a trace with each change that makes sense for it.

    Args:
        trace: the trace.
        function: the name of the calling function, for error messages.

    Raises:
        LabError: it cannot be replayed.
    """
    check_replayable(trace, function)
    graph = graph_of(trace)
    recorded = measured(graph)
    low_ns, before_ns, high_ns = spread_ns(trace)
    steps = before_ns > 0
    if not steps:
        low_ns = before_ns = high_ns = float(trace.duration_ns)
    found = []
    for words, changes in _questions(graph, recorded):
        try:
            rules = rules_for(graph, recorded, changes)
        except LabError:  # the trace lacks what this change needs
            continue
        after = replayed(graph, rules, play(graph, rules), words)
        saved_ns = before_ns - (spread_ns(after)[1] if steps else after.duration_ns)
        found.append(Gain(words, saved_ns, abs(saved_ns) <= (high_ns - low_ns) / 2))
    found.sort(key=lambda gain: -gain.saved_ns)
    return Gains(tuple(found[:MOST]), before_ns, low_ns, high_ns, steps)


def _questions(graph: Graph, recorded: Rules) -> Iterator[tuple[str, Changes]]:
    """Yield the changes that make sense for a trace, each in a student's words."""
    trace, nothing = graph.trace, Changes()
    data, names = trace.columns.data, trace.columns.names
    work: defaultdict[str, float] = defaultdict(float)
    for thread in graph.threads:
        for gap, row in zip(thread.gaps, thread.inside, strict=True):
            # Nobody is known to wait for what other threads do.
            if row >= 0 and data["kind"][row] == COMPUTE and not data["flags"][row] & OWN_THREAD:
                work[re.sub(r" \d+$", "", names[data["name"][row]])] += gap
    total = trace.duration_ns * len(trace.ranks)
    for name in sorted(work, key=lambda name: -work[name])[:PHASES]:
        if work[name] > NOTICED * total:
            yield f"{name} twice as fast", replace(nothing, faster={name: 2})
    saves = [pace_of_others(graph, recorded.gaps, rank)[1] for rank in range(len(trace.ranks))]
    for rank in np.argsort(saves)[::-1][:STRAGGLERS].tolist():
        if saves[rank] > NOTICED * trace.duration_ns:
            yield f"{trace.ranks[rank]} as fast as the others", replace(nothing, like_others=rank)
    yield "a core for each rank", replace(nothing, own_cores=True)
    travels = (data["kind"] == COMMUNICATION) & ~trace.columns.around
    took: defaultdict[str, float] = defaultdict(float)
    for row in travels.nonzero()[0].tolist():
        took[names[data["name"][row]]] += recorded.transfer[row]
    if not took:
        return
    yield "communication takes no time", replace(nothing, free=tuple(took))
    yield "all gradients in one bucket", replace(nothing, one_bucket=True)
    if trace.link is None:
        for name in sorted(took, key=lambda name: -took[name])[:2]:
            if took[name] > NOTICED * total:
                yield f"{name} twice as fast", replace(nothing, faster={name: 2})
    elif isinstance(trace.link, Network):
        for level in ("inside", "between"):
            for words, link in _better(getattr(trace.link, level)):
                where = "inside the nodes" if level == "inside" else "between the nodes"
                better = replace(trace.link, inside=link) if level == "inside" else replace(trace.link, between=link)
                yield f"{words} {where}", replace(nothing, link=better)
    else:
        for words, link in _better(trace.link):
            yield words, replace(nothing, link=link)


def _better(link: Link) -> list[tuple[str, Link]]:
    better = [("twice the bandwidth", Link(gbit_per_s=2 * link.gbit_per_s, latency_us=link.latency_us))]
    if link.latency_us:
        better.append(("half the latency", Link(gbit_per_s=link.gbit_per_s, latency_us=link.latency_us / 2)))
    return better
