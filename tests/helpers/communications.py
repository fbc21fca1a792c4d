"""The communications of a rank in a form in which those of a real and of a simulated rank can be compared."""

from __future__ import annotations

from typing import Any

from labkit.group.simulation.program import Program
from labkit.recording.group_keys import GroupKind, ends_of, kind_of, ranks_of
from labkit.tracing.trace import Trace


def members_and_tag(key: str, size: int) -> tuple[tuple[int, ...], int]:
    """The ranks of a process group, or the two ends of a message with its tag, by the key in a real record."""
    if kind_of(key) is GroupKind.PAIR:
        *ends, tag = ends_of(key)
        return tuple(ends), tag
    return tuple(ranks_of(key) or range(size)), 0


def real_communications(trace: Trace, rank: int) -> list[tuple[Any, ...]]:
    size = len(trace.ranks)
    spans = trace.filter(rank=rank, kind="communication")
    return [(span.name, span.nbytes, *members_and_tag(span.group, size), span.peer, span.root) for span in spans]


def simulated_communications(program: Program) -> list[tuple[Any, ...]]:
    return [(c.name, c.nbytes, c.group, c.tag, c.peer, c.root) for c in program.communications]
