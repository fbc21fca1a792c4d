"""Spans narrower than a pixel are visible in the timeline and do not look longer than they were."""

from __future__ import annotations

import numpy as np
import pytest

from labkit.plots.timeline import timeline

from synthetic import made  # isort: skip


def orange_of(ax, row, rows):
    """How strong the orange of communication is in a row's lane, per column of pixels, from 0 to 1."""
    ax.figure.canvas.draw()
    pixels = np.asarray(ax.figure.canvas.buffer_rgba())[..., :3].astype(float)
    box = ax.get_window_extent()
    y = len(pixels) - box.y1 + (row + 0.75) * box.height / rows
    line = pixels[int(y), int(box.x0) + 2 : int(box.x1) - 2]
    return (line[:, 0] - line[:, 2]) / (0xD5 - 0)


def test_short_events_are_drawn_as_hairlines():
    trace = made([*(("all_reduce", at, at + 2, None) for at in (1000, 5000, 12_000)), ("call", 0, 17_000)])
    before = trace.shares()
    seen = orange_of(timeline(trace), 0, 1)
    assert sum(seen > 0.3) >= 3
    assert sum(seen) < 3 * 2  # a pixel or so for each
    assert trace.shares() == before


def test_many_short_events_close_together_do_not_look_like_one_long_one():
    trace = made([*(("all_reduce", at, at + 0.1, None) for at in range(0, 17_000, 20)), ("call", 0, 17_000)])
    seen = orange_of(timeline(trace), 0, 1)
    assert (seen > 0.02).mean() > 0.5  # something is visible nearly everywhere,
    assert seen.mean() < 0.3  # but nowhere much of it


def test_a_hairline_covers_nothing_of_equal_importance():
    ax = timeline(made([("forward", 0, 5000), ("optimizer", 5000, 5000.5), ("backward", 5000.5, 17_000)]))
    (short,) = [p for c in ax.collections if c.get_label() == "optimizer" for p in c.get_paths()]
    assert (short.vertices[:4, 0].min(), short.vertices[:4, 0].max()) == pytest.approx((5, 5.0005))
