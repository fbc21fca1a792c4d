"""The form of an exercise: what a check and the ranks get, and what a verdict shows of a case."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from labkit.errors.exceptions import RankError
from labkit.teaching.exercises.comparisons import AnswerError, expect_numbers, wrong_if
from labkit.teaching.exercises.exercise import Exercise, exercise
from labkit.teaching.exercises.random_state import OTHER_CASES, other_inputs


def wrong(one: Exercise, answer: Any) -> AnswerError:
    with pytest.raises(AnswerError) as caught:
        one.judge(answer)
    return caught.value


class Runs:
    """An answer whose runs on ranks do this."""

    def __init__(self, on: Callable[..., Any]) -> None:
        self.on = on


def raising(error: Exception) -> Callable[..., Any]:
    def on(*_: Any, **__: Any) -> Any:
        raise error

    return on


def rank_error(headline: str, hint: str = "") -> RankError:
    failure: Any = SimpleNamespace(name="rank 0", headline=headline, traceback="line 3")
    return RankError([failure], hint=hint)


@pytest.fixture
def product() -> Exercise:  # in a fixture: an exercise of a module is one of a course's own
    @exercise("w1", "Twice, each time.", [(1, 2), (5, 4)], other=lambda random: (random.randint(10, 99), 1))
    def product(answer: Any, a: int, b: int) -> None:
        """product(a, b) returns
        a times b."""
        expect_numbers(answer(a, b), a * b, [(a + b, "that is the sum", "use *")], "not the product")

    return product


def test_the_docstring_is_the_task_and_the_function_gives_the_name(product: Exercise) -> None:
    assert (product.name, product.lesson, product.number) == ("product", "w1", False)
    assert product.target == "product(a, b) returns a times b."


def test_a_check_without_ranks_calls_the_answer_for_each_case(product: Exercise) -> None:
    calls = []

    def answer(a: int, b: int) -> int:
        calls.append((a, b))
        return a * b

    assert product.judge(answer) is None
    assert product.passed == "Twice, each time."
    assert calls == [(1, 2), (5, 4)]
    error = wrong(product, lambda a, b: a + b)
    assert (error.message, error.cure) == ("that is the sum", "use *")
    assert error.details == ("product(1, 2)", "given 3, expected 2")


def test_a_grader_judges_with_other_cases_too(product: Exercise) -> None:
    known = {(1, 2): 2, (5, 4): 20}
    assert product.judge(lambda *case: known[case]) is None
    calls: list[tuple[int, int]] = []
    with other_inputs(1):
        assert product.judge(lambda a, b: calls.append((a, b)) or a * b) is None
    assert len(calls) == 2 + OTHER_CASES
    with other_inputs(1):
        assert wrong(product, lambda *case: known.get(case, 0)).message == "not the product"


def each_rank(answer: Any, length: int) -> Any:
    return answer(length)


def test_the_ranks_get_the_case_without_their_number_and_the_check_gets_all_of_it() -> None:
    seen, ran = [], []

    @exercise(
        "w1",
        "Right.",
        [(3, 10), (2, 20)],
        on_ranks=each_rank,
        runtime="bare",
        devices_per_rank=lambda ranks, length: ranks + length,
    )
    def share(results: Any, ranks: int, length: int) -> None:
        """A share."""
        seen.append((results, ranks, length))

    def on(ranks: Any, function: Any, *args: Any, **options: Any) -> Any:
        ran.append((ranks, function, args, options))
        return ["a"] * ranks

    answer = Runs(on)
    assert share.judge(answer) is None
    assert ran == [
        (3, each_rank, (answer, 10), {"runtime": "bare", "devices_per_rank": 13}),
        (2, each_rank, (answer, 20), {"runtime": "bare", "devices_per_rank": 22}),
    ]
    assert seen == [(["a"] * 3, 3, 10), (["a"] * 2, 2, 20)]


@pytest.mark.parametrize(("ranks", "started"), [(["master", "worker"], ["master", "worker"]), (lambda axes: axes * 2, 8)])
def test_the_ranks_can_be_given_apart_from_the_case(ranks: Any, started: Any) -> None:
    ran = []

    @exercise("w1", "Right.", [(4,)], on_ranks=each_rank, ranks=ranks)
    def mesh(results: Any, axes: int) -> None:
        """A mesh."""
        assert axes == 4

    answer = Runs(lambda ranks, _, *args: ran.append((ranks, args)))
    mesh.judge(answer)
    assert ran == [(started, (answer, 4))]


@pytest.mark.parametrize(
    ("call", "shown"),
    [
        ("share(x, {length}) on {ranks} ranks", ("share(x, 10) on 3 ranks", "more")),
        (lambda ranks, length: f"{ranks} and {length}", ("3 and 10", "more")),
        ("wrong", ("more",)),  # the message says it already
        ("", ("more",)),
    ],
)
def test_a_verdict_shows_the_call_in_words(call: Any, shown: tuple[str, ...]) -> None:
    @exercise("w1", "Right.", [(3, 10)], on_ranks=each_rank, call=call)
    def share(results: Any, ranks: int, length: int) -> None:
        """A share."""
        wrong_if(True, "wrong here", "", "more")

    assert wrong(share, Runs(lambda *_, **__: [])).details == shown


ERRORS = {"NoneType": ("it is None", "skip it"), "deadlock in send": "all send", "deadlock": "some wait"}


@pytest.mark.parametrize(
    ("error", "hint", "cure"),
    [
        (rank_error("TypeError: NoneType has no x"), "it is None", "skip it"),
        (rank_error("TypeError", hint="p.grad is NoneType"), "it is None", "skip it"),
        (AnswerError("deadlock: 2 ranks", waits_in=("send", "send")), "all send", ""),
        (AnswerError("deadlock: 2 ranks", waits_in=("send", "recv")), "some wait", ""),
        (AnswerError("NoneType", "a detail"), "NoneType", ""),  # of a judge, which has explained it
    ],
)
def test_errors_of_libraries_and_deadlocks_are_explained(error: Exception, hint: str, cure: str) -> None:
    @exercise("w1", "Right.", [(3,)], on_ranks=each_rank, errors=ERRORS, call="share(x)")
    def share(results: Any, ranks: int) -> None:
        """A share."""

    given = wrong(share, Runs(raising(error)))
    assert (given.message, given.cure) == (hint, cure)
    assert given.details[0] == "share(x)"


def test_an_unknown_error_is_the_ranks_own() -> None:
    @exercise("w1", "Right.", [(3,), (4,)], on_ranks=each_rank, errors=lambda ranks: {"": "uneven"} if ranks == 4 else {})
    def share(results: Any, ranks: int) -> None:
        """A share."""

    with pytest.raises(RankError):
        share.judge(Runs(raising(rank_error("TypeError: NoneType has no x"))))

    def on(ranks: int, *_: Any) -> Any:
        if ranks == 4:
            raise rank_error("ValueError")

    assert wrong(share, Runs(on)).message == "uneven"
    waits = AnswerError("deadlock: 2 ranks", waits_in=("send",))  # the empty text is a part of messages only

    def stuck(ranks: int, *_: Any) -> Any:
        if ranks == 4:
            raise waits

    assert wrong(share, Runs(stuck)) is waits


def test_cases_can_be_drawn_at_each_judgement() -> None:
    drawn = iter([(1,), (2,)])
    seen = []

    @exercise("w1", "Right.", lambda _: [next(drawn)])
    def any_case(answer: Any, number: int) -> None:
        """Any case."""
        seen.append(number)

    any_case.judge(None)
    any_case.judge(None)
    assert seen == [1, 2]


def test_a_check_can_give_a_score() -> None:
    @exercise("w1", "It takes {score:.1f} ms.")
    def fast(answer: Any) -> float:
        """As fast as you can."""
        return answer()

    assert fast.judge(lambda: 2.25) == 2.25
