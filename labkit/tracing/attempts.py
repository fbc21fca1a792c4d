"""Joins the traces of two attempts of a run, between which all ranks were replaced."""

from __future__ import annotations

from typing import Any

import numpy as np

from labkit.recording.events import STORED, Columns
from labkit.tracing.trace import Trace


def followed(earlier: Trace, later: Trace) -> Trace:
    """Return the trace of a run whose first attempts were `earlier`, and whose last one was `later`.

    Fresh ranks number their operations from the beginning. Here the numbers go on, so that operations of two attempts
    are not taken for the same one.
    """
    ids: dict[str, int] = {}
    highest = max(int(numbered["match"].max(initial=0)) for numbered in (earlier.columns.data, earlier.waits))
    rows, waits = _renumbered(earlier, ids, 0)
    more_rows, more_waits = _renumbered(later, ids, highest)
    facts = later.info | {
        "dropped": [before + after for before, after in zip(earlier.dropped, later.dropped, strict=True)],
        "notes": list(dict.fromkeys((*earlier.notes, *later.notes))),
        "clock_error_ns": max(earlier.clock_error_ns, later.clock_error_ns),
        "restarts_ns": (*earlier.restarts_ns, later.start_ns),
    }
    columns = Columns(np.concatenate([rows, more_rows]), list(ids))
    return Trace(
        columns, (*earlier.scalars, *later.scalars), start_ns=earlier.start_ns, end_ns=later.end_ns, profile=later.profile,
        waits=np.concatenate([waits, more_waits]), **facts,
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
