"""Figures say correctly for whom a rank waits: another rank, another device of the same rank, or either."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
import pytest

mpl.use("agg")

from matplotlib.text import Text

from labkit.plots.bars import STYLES
from labkit.plots.breakdown import breakdown, compare
from labkit.plots.explorer.window import about
from labkit.plots.live.drawing import svg
from labkit.plots.live.frame import LiveFrame, LiveRow, Past
from labkit.plots.timeline import timeline
from labkit.plots.view import view_of
from labkit.tracing.trace import Trace

from synthetic import Book, model_parallel  # isort: skip


def of_devices(ranks: int, *, across: bool, messages: bool = False) -> Trace:
    """Each rank has two of TensorFlow's devices; they reduce among themselves, or those of all ranks together."""
    book = Book()
    for rank in range(ranks):
        for device, came in ((0, 0.0), (1, rank + 2.0)):
            book.compute(rank, "forward", came / 2, came, device=f"CPU:{device}", measured=True)
            shared = {"group": "all" if across else f"of rank {rank}", "match": 1, "device": f"CPU:{device}"}
            book.travel(rank, "all_reduce", came, 5, wait=(came, 5), nbytes=1000, **shared)
        if messages:
            book.travel(rank, "send" if rank else "recv", 5 + rank, 8, wait=(5 + rank, 8), peer=1 - rank, group="m", match=1)
    return book.trace(ranks)


def words_for_waiting(trace: Trace) -> set[str]:
    """What the figures of a trace call waiting for others; all of them must agree."""
    figures = [timeline(trace), breakdown(trace), compare(a=trace, b=trace)]
    reported = [[text.get_text() for text in ax.figure.findobj(Text)] for ax in figures]
    reported.append([style["legend"] for style in about(view_of(trace, None, ""), 0)["styles"]])
    data = STYLES["data"].legend
    found = [{text for text in texts if text.startswith("waiting") and text != data} for texts in reported]
    assert [words for words in found if words != found[0]] == []
    return found[0]


def test_devices_of_one_rank_wait_for_each_other():
    assert words_for_waiting(of_devices(1, across=False)) == {"waiting for another device"}
    assert words_for_waiting(of_devices(2, across=False)) == {"waiting for another device"}


def test_ranks_with_devices_may_wait_for_either():
    assert words_for_waiting(of_devices(2, across=True)) == {"waiting for another rank or device"}
    assert words_for_waiting(of_devices(2, across=False, messages=True)) == {"waiting for another rank or device"}


def test_ranks_without_devices_wait_for_ranks():
    assert words_for_waiting(model_parallel()) == {"waiting for another rank"}


def test_a_single_rank_never_waits_for_another():
    book = Book()
    book.compute(0, "forward", 0, 1)
    book.travel(0, "all_reduce", 1, 4, wait=(1, 4), group="world", match=1, done=False)
    assert words_for_waiting(book.trace(1)) == {"waiting"}


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_live_picture_of_a_single_rank_never_waits_for_another(ranks: int):
    names = tuple(f"rank {i}" for i in range(ranks))
    waiting = np.zeros((len(STYLES), 256))
    waiting[list(STYLES).index("waiting")] = 1.0
    past = Past([(np.zeros_like(waiting), waiting)] * ranks, 256)
    page = svg(LiveFrame("train", 0, None, (), [LiveRow(name, "", blocked=False) for name in names], past, None), "a")
    assert ("another rank" in page) == (ranks > 1)
