"""`critical_path`: the chain of work and communication that a step had to wait for, across all ranks."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import Final

from labkit.errors.wrong_calls import public_api
from labkit.recording.schema import KINDS
from labkit.tracing.replaying.graph import END, ISSUE, WAIT, Graph, graph_of
from labkit.tracing.replaying.times import Times, measured, play
from labkit.tracing.step_times import HasTrace, median_step, trace_of
from labkit.tracing.trace import Trace

# Two ranks that wake up from the same collective continue up to 1 ms apart, in random order: so long does the system
# take to schedule a process (on two cores, half of 364 all-reduces began 0.5 ms apart, 95 % less than 0.75 ms). Whoever
# arrives so little earlier was not held up by the other. Of a short collective, 1 ms may be most of the time, and then
# it matters.
TOGETHER_NS: Final = 1_000_000
SHARE: Final = 0.2  # of the collective's own duration


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a critical path, from `start_ns` to `end_ns`."""

    rank: int  # the rank that worked, or that waited for the operation
    name: str  # the name of the innermost span, or of the operation; "" outside of all spans
    kind: str  # "compute" or "communication"; "step" or "call" between the spans of a step or a call; "" outside of these
    start_ns: int
    end_ns: int

    @property
    def duration_ns(self) -> int:
        """The duration in nanoseconds."""
        return self.end_ns - self.start_ns


@public_api
def critical_path(run: HasTrace | Trace, step: int | None = None) -> list[Piece]:
    """Return the critical path of a step: what had to end before the next could begin, back from the end of the step.

    Where a rank waited, the path leads to the rank for which it waited. Where the ranks of a collective arrived
    together, the path stays on its rank: no more than 1 ms and a fifth of the collective's duration apart, which is how
    exactly a system schedules processes, or no more than the error between the ranks' clocks. The pieces of the path
    follow one another without gaps, and their durations add up to that of the step, from the first rank's start to the
    last rank's end. They overstate what a change would bring, since another path may be nearly as long: ask
    `lab.replay` or `lab.what_helps`.

    Args:
        run: a run or a trace.
        step: the number of the step, negative from the end; default: the step of median length, or the whole run if it
            has no steps.

    Returns:
        the pieces, from the first to the last.

    Raises:
        LabError: the trace has no such step, or cannot be replayed; the message says why.
        TypeError: neither a run nor a trace, or `step` is not a whole number.

    Source: C.-Q. Yang, B. P. Miller, "Critical path analysis for the execution of parallel and distributed programs",
        ICDCS 1988.
    """
    trace = trace_of(run, "critical_path")
    if step is None and len(trace.step_bounds()):
        step = median_step(trace)
    window = trace if step is None else trace.step(step)
    return path_between(trace, window.start_ns, window.end_ns)


def path_between(trace: Trace, start_ns: int, end_ns: int) -> list[Piece]:
    """Return the critical path of a part of a trace, in order."""
    graph = graph_of(trace, "critical_path")
    return path_in(graph, play(graph, measured(graph)), start_ns, end_ns)


def path_in(graph: Graph, times: Times, start_ns: int, end_ns: int) -> list[Piece]:
    """Return the critical path of a part of a trace with these times, in order."""
    return _Walk(graph, times, start_ns, end_ns).pieces


class _Walk:
    """Follows the causes back, from the last event of a window to its start."""

    def __init__(self, graph: Graph, times: Times, start_ns: int, end_ns: int) -> None:
        self.graph, self.times, self.start_ns, self.now = graph, times, start_ns, end_ns
        self.data = graph.trace.columns.data
        self.found: list[Piece] = []
        self.at_ns = at = [[times.at_ns[time] or 0 for time in thread.times] for thread in graph.threads]
        self.issues = {
            thread.times[event] >> 2: (number, event)
            for number, thread in enumerate(graph.threads)
            for event, kind in enumerate(thread.kinds)
            if kind == ISSUE
        }
        last = [(own[bisect_right(own, end_ns) - 1], number) for number, own in enumerate(at) if own and own[0] <= end_ns]
        if last:
            _, thread = max(last, key=lambda one: (one[0], -one[1]))
            self._from(thread, bisect_right(at[thread], end_ns) - 1)
        self.pieces = self.found[::-1]

    def _from(self, number: int, event: int) -> None:
        """Follow the path back from an event of a thread, at `now` or before it."""
        thread, at = self.graph.threads[number], self.at_ns[number]
        self._back_to(at[event], thread.rank, thread.inside[event + 1] if event + 1 < len(at) else -1)
        while self.now > self.start_ns:
            row = thread.times[event] >> 2
            if thread.kinds[event] == WAIT and self.times.waited[row]:
                place = self._through(row, thread.rank)
            elif event:
                self._back_to(at[event - 1], thread.rank, thread.inside[event])
                event -= 1
                continue
            elif thread.request >= 0:
                place = self.issues[thread.request]
                self._back_to(self.at_ns[place[0]][place[1]], thread.rank, thread.request)
            else:
                self._back_to(self.start_ns, thread.rank, -1)
                return
            number, event = place
            thread, at = self.graph.threads[number], self.at_ns[number]

    def _through(self, row: int, rank: int) -> tuple[int, int]:
        """Follow an operation back to the issue that it waited for; return the thread and the number of that event."""
        own = self.issues.get(row)
        if own is not None and self._together(row, own_ns := self.at_ns[own[0]][own[1]]):
            self._back_to(own_ns, rank, row)
            return own
        while True:
            self._back_to(self.times.begun_ns[row], rank, row)
            cause = self.times.cause[row]
            if cause >= 0:
                number, event = self.issues[cause]
                self._back_to(self.at_ns[number][event], rank, row)
                return number, event
            row = ~cause

    def _together(self, row: int, issued_ns: int) -> bool:
        """Whether a collective that a rank issued then had to wait for no other rank longer than times are exact."""
        if self.times.cause[row] < 0 or not self.graph.types[self.data["name"][row]].collective:
            return False
        begun_ns, end_ns = self.times.begun_ns[row], self.times.at_ns[4 * row + END] or 0
        scheduler_ns = min(TOGETHER_NS, SHARE * (end_ns - begun_ns))
        return begun_ns - issued_ns <= max(scheduler_ns, self.graph.trace.clock_error_ns)

    def _back_to(self, time_ns: int, rank: int, row: int) -> None:
        """Add the piece from `time_ns` to `now`, within the window."""
        since = max(min(time_ns, self.now), self.start_ns)
        if since == self.now:
            return
        name, kind = "", ""
        if row >= 0:
            name, kind = self.graph.trace.columns.names[self.data["name"][row]], KINDS[self.data["kind"][row]]
        after = self.found[-1] if self.found else None
        if after is not None and (after.rank, after.name, after.kind) == (rank, name, kind):
            self.found[-1] = replace(after, start_ns=since)
        else:
            self.found.append(Piece(rank, name, kind, since, self.now))
        self.now = since
