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
        for begin, end, device in ((0, 4, 0), (2, 5, 0), (5, 7, 1)):  # what overlaps counts once
            book.compute(0, "forward", start + begin, start + end, device=f"CPU:{device}", measured=True)
    assert busy_shares(book.trace(1)) == {"CPU:0": pytest.approx(0.5), "CPU:1": pytest.approx(0.2)}


def test_ranks_without_devices_and_waiting_is_not_computing():
    book = book_with_steps(1)
    book.whole(1, "step", 0, 10)
    book.compute(0, "forward", 0, 3)
    book.travel(0, "recv", 3, 10, wait=(3, 10))
    book.compute(1, "forward", 3, 9)
    assert busy_shares(book.trace(2)) == {"rank 0": pytest.approx(0.3), "rank 1": pytest.approx(0.6)}


@pytest.mark.parametrize(
    ("steps", "forward", "reading", "share"),
    [
        (3, [(0, 10), (10, 15)], [], 0.25),  # of three steps the first does not count
        (4, [(0, 6), (10, 16), (20, 26), (30, 36)], [(26, 30)], 0.6),  # nor one in which TensorFlow's profiler is read
        (0, [(0, 5)], [], 0.5),  # without steps, the whole run
    ],
)
def test_which_part_of_a_run_counts(steps, forward, reading, share):
    book = book_with_steps(steps)
    if not steps:
        book.whole(0, "call", 0, 10)
    for name, times in (("forward", forward), (READING, reading)):
        for start, end in times:
            book.compute(0, name, start, end)
    assert busy_shares(book.trace(1)) == {"rank 0": pytest.approx(share)}


def test_a_run_that_recorded_nothing():
    with pytest.raises(LabError, match="busy_shares: the ranks recorded nothing"):
        busy_shares(Trace(ranks=["rank 0"]))
