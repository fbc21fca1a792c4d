"""How long a step of a run took, and which of several runs was fastest: arithmetic on traces made by hand."""

from types import SimpleNamespace

import pytest
from synthetic import Book

from labkit.errors.exceptions import LabError
from labkit.tracing.step_times import best_of, step_ms


def trace(*durations_of_ranks):
    """A trace in which each rank's steps follow one another and last so many milliseconds."""
    book = Book()
    for rank, durations in enumerate(durations_of_ranks):
        at = 0.0
        book.whole(rank, "call", 0, sum(durations) + 1)
        for duration in durations:
            book.whole(rank, "step", at, at + duration)
            at += duration
    return book.trace(len(durations_of_ranks))


@pytest.mark.parametrize(
    ("durations", "rank", "step"),
    [
        ([[50, 3, 5, 4]], None, 4),  # the first is left out
        ([[50, 3, 5, 4], [50, 3, 5, 4]], None, 4),
        ([[50]], None, 50),  # one or two all count
        ([[50, 10]], None, 30),
        ([[9, 2, 2, 2], [9, 6, 1, 8]], None, 6),  # rank 1 is always the last
        ([[35, 65, 35, 65], [50, 35, 65, 35]], None, 50),  # they take turns, so that together they end one in every 50 ms
        ([[9, 2, 2, 2], [9, 6, 1, 8]], 0, 2),
        ([[9, 2, 2, 2], [9, 6, 1, 8]], 1, 6),
        ([[9, 2, 2, 8, 8], [9, 1, 3]], None, 2),  # only steps that all ranks have completed
        ([[9, 2, 4, 6], []], None, 4),  # a rank without steps does not count
    ],
)
def test_the_median_step(durations, rank, step):
    assert step_ms(trace(*durations), rank) == step_ms(SimpleNamespace(trace=trace(*durations)), rank) == step


def test_time_between_two_loops_does_not_count():
    book = Book()
    for rank, steps in enumerate(([(0, 3), (3, 6), (40, 45)], [(2, 4), (4, 8), (43, 47)])):
        book.whole(rank, "call", 0, 60)
        for start, end in steps:
            book.whole(rank, "step", start, end)
    assert step_ms(book.trace(2)) == 5.5  # of 4 and 7: from 4 to 8, from 40 to 47


def test_no_steps():
    with pytest.raises(LabError, match=r"step_ms: the ranks have recorded no steps; write `for batch in lab\.steps"):
        step_ms(trace([], []))
    with pytest.raises(LabError, match="step_ms: rank 1 has recorded no steps"):
        step_ms(trace([1], []), rank=1)


@pytest.mark.parametrize(("rank", "error"), [(2, ValueError), (-1, ValueError), ("0", TypeError), (True, TypeError)])
def test_invalid_ranks(rank, error):
    with pytest.raises(error, match=r"step_bounds\(rank="):
        step_ms(trace([1], [1]), rank=rank)


def test_the_run_with_the_shortest_step_is_returned():
    runs = [trace([9, 4, 4]), trace([9, 2, 2]), trace([1, 3, 3])]
    rest = iter(runs)
    assert best_of(3, lambda: next(rest)) is runs[1]
    numbers = iter([float("nan"), 2.0, 3.0])  # a run whose key is NaN is never the fastest
    assert best_of(3, lambda: next(numbers), key=lambda number: number) == 2.0


def test_arguments_reach_the_call_and_a_key_decides():
    given = []

    def call(*args, **options):
        given.append((args, options))
        return len(given)

    assert best_of(4, call, 1, "two", three=3, key=lambda number: -number) == 4
    assert given == [((1, "two"), {"three": 3})] * 4


def test_several_calls_take_turns_and_each_has_its_best():
    order = []

    def fast(first):
        order.append("fast")
        return first + len(order)

    def slow(first):
        order.append("slow")
        return first - len(order)

    assert best_of(3, {"fast": fast, "slow": slow}, 100, key=lambda number: number) == {"fast": 101, "slow": 94}
    assert order == ["fast", "slow"] * 3


@pytest.mark.parametrize(
    ("arguments", "options", "error", "says"),
    [
        ((print, 5), {}, TypeError, r"expected the number of tries first, from 1, as in lab\.best_of\(5, group\.run, train\)"),
        ((0, print), {}, ValueError, "expected the number of tries first, from 1"),
        ((1, None), {}, TypeError, r"best_of\(call=None\): expected a function"),
        ((1, {"fast": print, "slow": None}, 100), {}, TypeError, r"best_of\(call=None\): expected a function"),
        ((1, {}), {}, ValueError, "expected at least one function"),
        ((1, print), {"key": "step"}, TypeError, r"best_of\(key='step'\): expected a function"),
    ],
)
def test_invalid_arguments(arguments, options, error, says):
    with pytest.raises(error, match=says):
        best_of(*arguments, **options)


@pytest.mark.parametrize("returned", [None, [1, 2], "fast"])
def test_a_key_without_a_number_is_explained(returned):
    with pytest.raises(TypeError, match=r"best_of\(key=\.\.\.\): the key returned .*; expected one number for each run"):
        best_of(2, print, key=lambda _: returned)
