"""When operations on an emulated link can have started: the earliest time from which the link's model counts."""

from __future__ import annotations

from labkit.tracing.trace import Trace

FROM_ROOT = ("broadcast", "scatter")
TO_ROOT = ("gather", "reduce")


def link_starts(trace: Trace) -> list[int]:
    """Return for each span when the last rank without which it cannot complete had arrived, ns.

    Most operations need all their ranks. With a root, a rank needs the root that sends to it, or nobody: the link lets
    it go on although others have not arrived (`SharedLink.due_ns`), and whether they had depends on the backend.
    """
    roots = {(s.group, s.match): s.start_ns for s in trace if s.root == s.rank}
    starts = []
    for span, ready_ns in zip(trace, trace.ready().tolist(), strict=True):
        if span.name in FROM_ROOT:
            ready_ns = roots[span.group, span.match]
        elif span.name in TO_ROOT and span.rank != span.root:
            ready_ns = span.start_ns
        starts.append(max(span.start_ns, ready_ns))
    return starts
