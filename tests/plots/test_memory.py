"""What filled each rank's memory, as a figure and as one number."""

import numpy as np
import pytest

import labkit as lab
from labkit.plots.memory import _thinned, memory, memory_mb, memory_uses
from labkit.recording.schema import MEMORY, MEMORY_KINDS

from synthetic import Book, alone  # isort: skip


def followed(unit=1 << 20, ranks=2):
    book = Book()
    for rank in range(2):
        book.whole(rank, "call", 0, 100)
        book.scalar(rank, f"{MEMORY}parameters", 10, 2 * unit)
        book.scalar(rank, f"{MEMORY}activations", 20, (3 + rank) * unit)
        book.scalar(rank, f"{MEMORY}gradients", 30, unit)
        book.scalar(rank, f"{MEMORY}activations", 30, 0)
        book.scalar(rank, "loss", 30, 5)
    return book.trace(ranks)


def test_values_last_until_the_next():
    first, second = memory_uses(followed())
    assert first.time_ns.tolist() == [10_000_000, 20_000_000, 30_000_000]
    found = {kind: (row / 2**20).tolist() for kind, row in zip(MEMORY_KINDS, first.nbytes, strict=True) if row.any()}
    assert found == {"parameters": [2, 2, 2], "gradients": [0, 0, 1], "activations": [0, 3, 0]}
    assert (first.peak, second.peak) == (1, 1)


def test_the_figure_shows_the_peak_its_parts_and_the_units():
    ax = memory(followed())
    assert [t.get_text() for t in ax.texts] == [
        "rank 0: peak 5.24 MB = parameters 2.10 + activations 3.15",
        "rank 1: peak 6.29 MB = parameters 2.10 + activations 4.19",
    ]
    assert ax.get_ylabel() == "memory of a rank [MB]"
    assert ax.get_xlabel() == "time since the start of the run [ms]"
    legend = ax.figure.legends[0]
    assert [t.get_text() for t in legend.get_texts()] == ["parameters", "gradients", "activations", "peak"]
    heights = [np.ptp(area.get_paths()[0].vertices[:, 1]) for area in ax.collections]
    assert heights == pytest.approx([mib * 2**20 / 1e6 for mib in (2, 1, 3, 2, 1, 4)])


UNCOUNTED = "What fills the memory: tracked kinds, without temporaries"


@pytest.mark.parametrize(("kinds", "title"), [(["parameters"], UNCOUNTED), (["parameters", "other"], "What fills the memory")])
def test_the_title_says_if_temporaries_are_not_counted(kinds, title):
    """On CUDA and in simulations, "other" includes them."""
    book = Book()
    for kind in kinds:
        book.scalar(0, MEMORY + kind, 1, 4e6)
    book.whole(0, "call", 0, 3)
    ax = memory(book.trace(1))
    assert ax.get_title(loc="left").partition("  ·  ")[0] == title
    assert ("without temporaries" in ax.figure.alt_text) == (title == UNCOUNTED)


def test_the_figure_names_the_ranks_that_it_shows():
    """A trace of one rank, and a run in which only some ranks tracked their memory."""
    trace = followed()
    name = trace.ranks[0]
    assert memory(trace.filter(rank=0)).get_title(loc="left").startswith(f"{UNCOUNTED}  ·  {name}, ")
    book = Book()
    for rank in (0, 2):
        book.scalar(rank, f"{MEMORY}parameters", 1, 4e6)
        book.whole(rank, "call", 0, 3)
    assert "·  2 ranks, " in memory(book.trace(3)).get_title(loc="left")


def test_a_step_begins_with_the_existing_memory():
    book = Book()
    book.whole(0, "step", 0, 50)
    book.whole(0, "step", 50, 100)
    book.scalar(0, f"{MEMORY}parameters", 10, 2 << 20)
    book.scalar(0, f"{MEMORY}activations", 60, 1 << 20)
    book.scalar(0, "loss", 40, 7)
    trace = book.trace(1)
    found = {s.name: s.time_ns // 10**6 for s in trace.step(1).scalars}
    assert found == {f"{MEMORY}parameters": 50, f"{MEMORY}activations": 60}
    ax = memory(trace, step=1)
    assert ax.texts[0].get_text() == "rank 0: peak 3.15 MB = parameters 2.10 + activations 1.05"
    assert ax.get_xlabel() == "time since the start of the step [ms]"


def test_many_points_are_drawn_by_their_extremes():
    book = Book()
    book.whole(0, "call", 0, 1000)
    for i in range(40_000):
        book.scalar(0, f"{MEMORY}activations", i / 40, (i * 7919 % 1000) * 1024)
    (usage,) = memory_uses(trace := book.trace(1))
    thinned = _thinned(usage, trace)
    assert len(thinned.time_ns) < 3100
    assert thinned.nbytes.max() == usage.nbytes.max()
    assert (thinned.time_ns[0], thinned.time_ns[-1]) == (usage.time_ns[0], usage.time_ns[-1])
    assert (np.diff(thinned.time_ns) > 0).all()


@pytest.mark.parametrize(
    ("ask", "error", "said"),
    [
        (lambda: memory(alone()), lab.LabError, r"put `with lab.track_memory\(model, optimizer\):` around the training loop"),
        (lambda: memory_mb(followed(), "weights"), ValueError, r"memory_mb\('weights'\): expected 'parameters'"),
        (lambda: memory_mb(followed(ranks=3), rank=2), lab.LabError, "rank 2 of this run has not tracked its memory; put `with"),
        (lambda: memory_mb(3), TypeError, "expected a run"),
    ],
)
def test_what_cannot_be_answered_is_said(ask, error, said):
    with pytest.raises(error, match=said):
        ask()


def test_the_peak_is_that_of_the_fullest_rank_and_of_all_kinds_at_the_same_time():
    trace = followed(1_000_000, ranks=3)
    assert memory_mb(trace) == pytest.approx(6)  # of rank 1: parameters and activations; the gradients came later
    assert memory_mb(trace, rank=0) == pytest.approx(5)
    assert memory_mb(trace, "parameters", "gradients") == pytest.approx(3)
    assert memory_mb(trace, "optimizer state") == 0
