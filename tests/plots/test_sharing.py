"""Figures say where ranks waited for cores so long that the picture is distorted, and where gloo moved GPU tensors."""

from collections.abc import Sequence

import pytest

import labkit as lab
from labkit.plots.timeline import figure_of
from labkit.tracing.measurement import lacking_cores
from labkit.tracing.trace import Trace

from synthetic import MS, Book  # isort: skip

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
    book = Book()
    for rank in range(4):
        for number, delay in enumerate((3, 4)):
            book.whole(rank, "step", 1 + 5 * number, 6 + 5 * number, wait_delay_ns=delay * MS)
        book.compute(rank, "forward", 1, 11)
        book.whole(rank, "call", 1, 11, issue_delay_ns=MS, wait_delay_ns=4 * MS)
    trace = Trace(book.spans, ranks=[f"rank {rank}" for rank in range(4)], cores=2)
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


@pytest.mark.parametrize("told", [True, False])
def test_figures_say_that_communication_includes_copies_to_the_host(told):
    book = Book()
    for rank in (0, 1):
        book.compute(rank, "forward", 0, 4, device="cuda")
        book.travel(rank, "all_reduce", 4, 6, wait=(4, 6), group="world", match=1, device="cuda", through_host=told)
    trace = Trace(book.spans, ranks=["rank 0", "rank 1"])
    note = "gloo moved GPU tensors through the host's memory: communication includes these copies."
    assert [note in text for text in alt_texts(trace, trace)] == [told] * 5


def test_the_number_of_cores_may_be_unknown():
    assert "4 ranks shared cores: what" in lab.timeline(sharing(3, cores=0)).figure.alt_text


def test_the_line_is_below_the_legend_and_in_the_figure():
    figure = lab.timeline(sharing(3)).figure
    figure.canvas.draw()
    (note,) = [text for text in figure.axes[0].texts if NOTE in text.get_text()]
    box, legends = note.get_window_extent(), [a for a in figure.axes[0].get_children() if type(a).__name__ == "Legend"]
    assert box.y0 >= 0
    assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1
    assert all(box.y1 < legend.get_window_extent().y0 for legend in legends)
