"""What figures say beside the bars: for whom a rank waits, and that times are distorted by what ranks shared."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from matplotlib.text import Text

import labkit as lab
from labkit.plots.bars import STYLES
from labkit.plots.breakdown import breakdown, compare
from labkit.plots.explorer.window import about
from labkit.plots.live.drawing import LiveFrame, LiveRow, Past, svg
from labkit.plots.timeline import figure_of, timeline
from labkit.plots.view import view_of
from labkit.tracing.step_times import lacking_cores
from labkit.tracing.trace import Trace

from synthetic import MS, Book, made, model_parallel  # isort: skip

NOTE = "4 ranks shared 2 cores: what overlaps here may not overlap on cores of their own"


def sharing(lacked_ms: float, *, ranks: int = 4, cores: float = 2, device: str = "cpu") -> Trace:
    """Ranks that waited for a core for `lacked_ms` of the 10 ms between their first and their last measurement."""
    book = Book()
    for rank in range(ranks):
        book.compute(rank, "forward", 2, 11, device=device)
        for number, (at, delay) in enumerate(((1, 1.0), (11, 1 + lacked_ms))):
            delays = {"issue_delay_ns": int(delay * MS), "wait_delay_ns": int(delay * MS) if number == 0 else 0}
            wait = (at, at) if number == 0 else None
            book.travel(rank, "all_reduce", at, at + 1, wait=wait, group="world", match=number, **delays)
        # A thread that serves has waited longer, which does not delay the function.
        book.travel(rank, "reply f", 11.5, 12, served=True, issue_delay_ns=50 * MS)
    return Trace(book.spans, ranks=[f"rank {rank}" for rank in range(ranks)], cores=cores)


def alt_texts(*traces: Trace, names: Sequence[str] = "ab") -> list[str]:
    named = dict(zip(names, traces, strict=False))
    figures = [lab.timeline(named), lab.compare(named)]
    figures += [lab.timeline(traces[0]), lab.breakdown(traces[0])]
    return [axes.figure.alt_text for axes in figures] + [figure_of(traces[0], "train").alt_text]


def test_the_share_of_the_time_in_which_ranks_lacked_a_core():
    assert lacking_cores(sharing(3)) == pytest.approx(0.3)
    assert lacking_cores(sharing(0)) == 0
    assert lacking_cores(sharing(3, device="cuda")) == 0


def test_a_program_that_does_not_communicate_lacked_cores_in_its_call_and_its_steps():
    """Whole calls and steps carry the delays: 3 of 10 ms, of which 2 in the first step."""
    steps = [("step", 1 + 5 * n, 6 + 5 * n, {"wait_delay_ns": delay * MS}) for n, delay in enumerate((3, 4))]
    call = ("call", 1, 11, {"issue_delay_ns": MS, "wait_delay_ns": 4 * MS})
    trace = made(*[[*steps, ("forward", 1, 11), call]] * 4, cores=2)
    assert lacking_cores(trace) == pytest.approx(0.3)
    own = lab.replay(trace, own_cores=True)
    assert [step.duration_ns for step in own.filter(rank=0, kind="step")] == [3 * MS, 4 * MS]
    assert lacking_cores(own) == 0


@pytest.mark.parametrize(("lacked_ms", "told"), [(3, True), (1, False)])
def test_figures_say_it_where_it_matters(lacked_ms, told):
    trace = sharing(lacked_ms)
    texts = alt_texts(trace, trace)
    assert [f"{NOTE}; lab.replay(run, own_cores=True) shows it." in text for text in texts] == [told] * 5


def test_a_run_with_a_core_for_each_rank_is_not_meant():
    shared, own = sharing(3), lab.replay(sharing(3), own_cores=True)
    assert lacking_cores(own) == 0
    several, compared, *_ = alt_texts(shared, own, names=["as run", "own"])
    assert f" as run: {NOTE}." in several
    assert f" as run: {NOTE}." in compared
    assert not any("shared" in text for text in alt_texts(own, own))
    assert "4 ranks shared cores: what" in lab.timeline(sharing(3, cores=0)).figure.alt_text, "their number may be unknown"


@pytest.mark.parametrize("told", [True, False])
def test_figures_say_that_communication_includes_copies_to_the_host(told):
    gpu = {"device": "cuda"}
    reduced = ("all_reduce", 4, 6, (4, 6), gpu | {"through_host": told})
    trace = made(*[[("forward", 0, 4, gpu), reduced]] * 2)
    note = "gloo moved GPU tensors through the host's memory: communication includes these copies."
    assert [note in text for text in alt_texts(trace, trace)] == [told] * 5


# For whom a rank waits


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


def unfinished() -> Trace:
    return made([("forward", 0, 1), ("all_reduce", 1, 4, (1, 4), {"done": False})])


@pytest.mark.parametrize(
    ("trace", "whom"),
    [
        (of_devices(1, across=False), " for another device"),
        (of_devices(2, across=False), " for another device"),
        (of_devices(2, across=True), " for another rank or device"),
        (of_devices(2, across=False, messages=True), " for another rank or device"),
        (model_parallel(), " for another rank"),
        (unfinished(), ""),  # of a single rank
    ],
)
def test_for_whom_a_rank_waits(trace: Trace, whom: str):
    assert words_for_waiting(trace) == {f"waiting{whom}"}


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_live_picture_of_a_single_rank_never_waits_for_another(ranks: int):
    names = tuple(f"rank {i}" for i in range(ranks))
    waiting = np.zeros((len(STYLES), 256))
    waiting[list(STYLES).index("waiting")] = 1.0
    past = Past([(np.zeros_like(waiting), waiting)] * ranks, 256)
    page = svg(LiveFrame("train", 0, None, (), [LiveRow(name, "", blocked=False) for name in names], past, None), "a")
    assert ("another rank" in page) == (ranks > 1)
