"""`busy_shares`: the share of the steps in which each rank or device computes."""

import pytest

from labkit.errors.exceptions import LabError
from labkit.plots.busy import busy_shares
from labkit.recording.schema import READING
from labkit.tracing.trace import Trace

from synthetic import Book  # isort: skip


def book_with_steps(count):
    book = Book()
    for number in range(count):
        book.whole(0, "step", 10 * number, 10 * (number + 1))
    return book


def test_each_device_has_its_own_share_and_the_call_around_them_does_not_count():
    book = book_with_steps(2)
    book.compute(0, "train_step", 0, 20)  # the call, which lasts as long as both devices work
    for start in (0, 10):
        book.compute(0, "forward", start, start + 4, device="CPU:0", measured=True)
        book.compute(0, "forward", start + 2, start + 5, device="CPU:0", measured=True)  # overlaps: counts once
        book.compute(0, "forward", start + 5, start + 7, device="CPU:1", measured=True)
    assert busy_shares(book.trace(1)) == {"CPU:0": pytest.approx(0.5), "CPU:1": pytest.approx(0.2)}


def test_ranks_without_devices_and_waiting_is_not_computing():
    book = book_with_steps(1)
    book.whole(1, "step", 0, 10)
    book.compute(0, "forward", 0, 3)
    book.travel(0, "recv", 3, 10, wait=(3, 10))
    book.compute(1, "forward", 3, 9)
    assert busy_shares(book.trace(2)) == {"rank 0": pytest.approx(0.3), "rank 1": pytest.approx(0.6)}


def test_of_three_steps_the_first_does_not_count():
    book = book_with_steps(3)
    book.compute(0, "forward", 0, 10)
    book.compute(0, "forward", 10, 15)
    assert busy_shares(book.trace(1)) == {"rank 0": pytest.approx(0.25)}


def test_a_step_in_which_tensorflows_profiler_is_read_does_not_count():
    book = book_with_steps(4)
    for start in (0, 10, 20, 30):
        book.compute(0, "forward", start, start + 6)
    book.compute(0, READING, 26, 30)
    assert busy_shares(book.trace(1)) == {"rank 0": pytest.approx(0.6)}


def test_without_steps_the_whole_run_counts():
    book = Book()
    book.whole(0, "call", 0, 10)
    book.compute(0, "forward", 0, 5)
    assert busy_shares(book.trace(1)) == {"rank 0": pytest.approx(0.5)}


def test_a_run_that_recorded_nothing():
    with pytest.raises(LabError, match="busy_shares: the ranks recorded nothing"):
        busy_shares(Trace(ranks=["rank 0"]))
