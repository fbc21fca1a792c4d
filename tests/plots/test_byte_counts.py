"""`memory_mb` and `sent_mb`: the numbers behind two figures."""

import pytest

from labkit.errors.exceptions import LabError
from labkit.plots.memory import memory_mb
from labkit.plots.traffic import sent_mb
from labkit.recording.schema import MEMORY

from synthetic import Book  # isort: skip


def remembered():
    book = Book()
    for rank in range(2):
        book.whole(rank, "call", 0, 100)
        book.scalar(rank, f"{MEMORY}parameters", 10, 2e6)
        book.scalar(rank, f"{MEMORY}activations", 20, (3 + rank) * 1e6)
        book.scalar(rank, f"{MEMORY}gradients", 30, 1e6)
        book.scalar(rank, f"{MEMORY}activations", 30, 0)
    return book.trace(3)


def test_the_peak_is_that_of_the_fullest_rank_and_of_all_kinds_at_the_same_time():
    trace = remembered()
    assert memory_mb(trace) == pytest.approx(6)  # of rank 1: parameters and activations; the gradients came later
    assert memory_mb(trace, rank=0) == pytest.approx(5)
    assert memory_mb(trace, "parameters", "gradients") == pytest.approx(3)
    assert memory_mb(trace, "optimizer state") == 0


def test_what_memory_mb_refuses():
    with pytest.raises(ValueError, match=r"memory_mb\('weights'\): expected 'parameters'"):
        memory_mb(remembered(), "weights")
    with pytest.raises(LabError, match="rank 2 of this run has not tracked its memory; put `with"):
        memory_mb(remembered(), rank=2)
    with pytest.raises(TypeError, match="expected a run"):
        memory_mb(3)


def sending(steps):
    """In each step an all-reduce of 4 MB on four ranks; after the last step another one."""
    book = Book()
    for rank in range(4):
        for step in range(steps):
            book.whole(rank, "step", 20 * step, 20 * step + 20)
            book.travel(rank, "all_reduce", 20 * step + 2, 20 * step + 5, nbytes=4_000_000, group="world", match=step)
        book.travel(rank, "all_reduce", 101, 105, nbytes=4_000_000, group="world", match=9)
    return book.trace(4)


def test_bytes_are_those_of_a_step():
    assert sent_mb(sending(3)) == pytest.approx(6)  # 2·3/4 of 4 MB; not the all-reduce after the last step
    assert sent_mb(sending(3), rank=2) == pytest.approx(6)
    assert sent_mb(sending(0)) == pytest.approx(6)  # without steps, everything


def test_a_broadcast_counts_at_its_root():
    book = Book()
    for rank in range(4):
        book.travel(rank, "broadcast", 2, 5, nbytes=1_000_000, group="world", match=1, root=0)
    trace = book.trace(4)
    assert [sent_mb(trace, rank=rank) for rank in range(4)] == pytest.approx([3, 0, 0, 0])
    assert sent_mb(trace) == pytest.approx(0.75)


def test_what_a_late_rank_sends_before_its_first_step_does_not_count():
    """When rank 0 begins its first step, rank 1 still receives the model."""
    book = Book()
    for rank, late in ((0, 0), (1, 3)):
        book.travel(rank, "broadcast", 1, 6 + late, nbytes=8_000_000, group="world", match=1, root=0)
        book.whole(rank, "step", 7 + late, 17 + late)
        book.travel(rank, "all_reduce", 8 + late, 12 + late, nbytes=1_000_000, group="world", match=2)
    assert sent_mb(book.trace(2)) == pytest.approx(1)


def test_what_sent_mb_refuses():
    with pytest.raises(ValueError, match=r"sent_mb\(rank=4\): expected a rank from 0 to 3"):
        sent_mb(sending(1), rank=4)


def test_what_is_sent_in_operations_of_unknown_size_is_no_number():
    book = Book()
    for rank in range(2):
        book.travel(rank, "all_reduce", 0, 1, nbytes=100, group="world", match=1)
        book.travel(rank, "all_gather", 1, 2, sized=False, group="world", match=2)
    for rank in range(2):
        book.travel(rank, "copy", 2, 3, sized=False, peer=rank)  # within a rank
    with pytest.raises(LabError, match=r"sent_mb: the sizes of 1 × all_gather are unknown; lab\.traffic draws"):
        sent_mb(book.trace(2))
    book.spans = [span for span in book.spans if span.name != "all_gather"]
    assert sent_mb(book.trace(2)) == pytest.approx(1e-4)
