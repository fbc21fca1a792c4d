"""Joins the traces of the attempts of a run, between which all ranks were replaced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from labkit.recording.events import STORED, Columns
from labkit.tracing.trace import Trace


def joined_attempts(attempts: Sequence[Trace]) -> Trace:
    """Return the trace of a run from those of its attempts.

    Fresh ranks number their operations from the beginning. Here the numbers go on, so that operations of two attempts
    are not taken for the same one.
    """
    ids: dict[str, int] = {}
    highest, rows, waits = 0, [], []
    for attempt in attempts:
        own, own_waits = _renumbered(attempt, ids, highest)
        highest = max(highest, *(int(numbered["match"].max(initial=0)) for numbered in (own, own_waits)))
        rows.append(own)
        waits.append(own_waits)
    first, last = attempts[0], attempts[-1]
    facts = last.info | {
        "dropped": [sum(lost) for lost in zip(*(attempt.dropped for attempt in attempts), strict=True)],
        "notes": list(dict.fromkeys(note for attempt in attempts for note in attempt.notes)),
        "clock_error_ns": max(attempt.clock_error_ns for attempt in attempts),
        "restarts_ns": [attempt.start_ns for attempt in attempts[1:]],
    }
    return Trace(
        Columns(np.concatenate(rows), list(ids)), [scalar for attempt in attempts for scalar in attempt.scalars],
        start_ns=first.start_ns, end_ns=last.end_ns, profile=last.profile, waits=np.concatenate(waits), **facts,
    )  # fmt: skip


def _renumbered(trace: Trace, ids: dict[str, int], before: int) -> tuple[Any, Any]:
    """Return the spans and waits of a trace, with texts numbered by `ids`, after so many operations of each group."""
    table = np.array([ids.setdefault(name, len(ids)) for name in trace.columns.names], np.uint32)
    rows, waits = trace.columns.data.copy(), trace.waits.copy()
    for field in STORED:
        if field.is_text and field.place != "of rank":
            rows[field.name] = table[rows[field.name]]
    waits["group"] = table[waits["group"]]
    for numbered in (rows, waits):
        numbered["match"][numbered["match"] > 0] += before
    return rows, waits
