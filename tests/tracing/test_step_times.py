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


def test_the_median_step_leaves_out_the_first():
    assert step_ms(trace([50, 3, 5, 4])) == 4
    assert step_ms(trace([50, 3, 5, 4], [50, 3, 5, 4])) == 4


def test_one_or_two_steps_all_count():
    assert step_ms(trace([50])) == 50
    assert step_ms(trace([50, 10])) == 30


def test_a_step_lasts_as_long_as_on_the_slowest_rank():
    both = trace([9, 2, 2, 2], [9, 6, 1, 8])
    assert step_ms(both) == 6
    assert (step_ms(both, rank=0), step_ms(both, rank=1)) == (2, 6)


def test_only_steps_that_all_ranks_have_completed_count_and_ranks_without_steps_do_not():
    assert step_ms(trace([9, 2, 2, 8, 8], [9, 1, 3])) == 2.5
    assert step_ms(trace([9, 2, 4, 6], [])) == 4


def test_in_nested_loops_the_innermost_steps_count():
    book = Book()
    for start in (0, 10, 20):
        book.whole(0, "step", start, start + 10)
        for inner in (0, 5):
            book.whole(0, "step", start + inner, start + inner + 4)
    book.whole(0, "call", 0, 30)
    assert step_ms(book.trace(1)) == 4


def test_a_run_is_taken_as_its_trace():
    assert step_ms(SimpleNamespace(trace=trace([50, 3, 5, 4]))) == 4


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
    with pytest.raises(TypeError, match=r"best_of\(call=None\): expected a function"):
        best_of(1, {"fast": fast, "slow": None}, 100)
    with pytest.raises(ValueError, match="expected at least one function"):
        best_of(1, {})


def test_invalid_arguments():
    with pytest.raises(TypeError, match=r"expected the number of tries first, as in lab\.best_of\(5, group\.run, train\)"):
        best_of(print, 5)
    with pytest.raises(ValueError, match="expected at least one try"):
        best_of(0, print)
    with pytest.raises(TypeError, match=r"best_of\(call=None\): expected a function"):
        best_of(1, None)
    with pytest.raises(TypeError, match=r"best_of\(key='step'\): expected a function"):
        best_of(1, print, key="step")
    with pytest.raises(TypeError, match=r"best_of\(key=.*\): expected a function of one argument, the run"):
        best_of(1, print, key=lambda: 1)


def test_a_run_whose_key_is_nan_is_never_the_fastest():
    numbers = iter([float("nan"), 2.0, 3.0])
    assert best_of(3, lambda: next(numbers), key=lambda number: number) == 2.0


@pytest.mark.parametrize("returned", [None, [1, 2], "fast"])
def test_a_key_without_a_number_is_explained(returned):
    with pytest.raises(TypeError, match=r"best_of\(key=\.\.\.\): the key returned .*; expected one number for each run"):
        best_of(2, print, key=lambda _: returned)
