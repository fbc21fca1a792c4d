"""Set operations on intervals: union, intersection, difference, length. Sets are disjoint and ascending, in ns."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Intervals = NDArray[np.int64]  # shape (n, 2): start and end in ns, disjoint and ascending


def union(start_ns: Any, end_ns: Any) -> Intervals:
    """Merge intervals, which may overlap and be in any order, into disjoint ascending ones; empty ones are dropped."""
    start, end = np.asarray(start_ns, np.int64), np.asarray(end_ns, np.int64)
    keep = end > start
    start, end = start[keep], end[keep]
    if not len(start):
        return np.empty((0, 2), np.int64)
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    first = np.append(True, start[1:] > reach[:-1])  # touching intervals are merged
    last = np.append(first[1:], True)
    return np.stack([start[first], reach[last]], axis=1)


def intersection(a: Intervals, b: Intervals) -> Intervals:
    """The time that both sets cover."""
    if not len(a) or not len(b):
        return np.empty((0, 2), np.int64)
    edges = _edges(a, b)
    inside = _covers(a, edges[:-1]) & _covers(b, edges[:-1])
    return union(edges[:-1][inside], edges[1:][inside])


def difference(a: Intervals, b: Intervals) -> Intervals:
    """The time that the first set covers and the second does not."""
    if not len(a) or not len(b):
        return a
    edges = _edges(a, b)
    inside = _covers(a, edges[:-1]) & ~_covers(b, edges[:-1])
    return union(edges[:-1][inside], edges[1:][inside])


def length(a: Intervals) -> int:
    """Total length of a set in ns."""
    return int((a[:, 1] - a[:, 0]).sum())


def _edges(a: Intervals, b: Intervals) -> NDArray[np.int64]:
    """All boundaries, ascending. A stable sort merges sorted parts, ten times faster than `np.unique`."""
    return np.sort(np.concatenate([a.ravel(), b.ravel()]), kind="stable")


def _covers(a: Intervals, moments: NDArray[np.int64]) -> NDArray[np.bool_]:
    at = np.searchsorted(a[:, 0], moments, side="right") - 1
    covered: NDArray[np.bool_] = (at >= 0) & (moments < a[np.maximum(at, 0), 1])
    return covered
