"""What all exercises share: `Exercise`, `AnswerError`, and functions that compare answers with expected values."""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
import reprlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from labkit.errors.lists import listed
from labkit.errors.wrong_calls import one_number

if TYPE_CHECKING:  # ranks import this file, too, and need neither
    from numpy.typing import NDArray

    from labkit.group.run import Run

__all__ = [
    "AnswerError",
    "Exercise",
    "Hint",
    "OnRanks",
    "Results",
    "call",
    "call_reporting_exit",
    "compare",
    "differ",
    "factor",
    "judge_exchange",
    "judge_on_rank",
    "listing",
    "showing",
    "takes_number_for_list",
    "whole_number",
    "whole_numbers",
    "without_judges",
]

CLOSE_FACTOR = 1e-3
MOST_ITEMS = 10_000  # of an iterator, which may have no end; right answers have a hundred
Hint = str | tuple[str, str]  # what points at a mistake, alone or with its cure
TOLERANCE = 1e-4  # relative; another order of summation changes a float32 by 1e-6, the mistakes here by 1e-1


class Results(list[Any]):
    """The result of each rank, in rank order, and the trace of the run.

    Args:
        run: the completed run.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run.results)
        self.trace = run.trace


class OnRanks(Protocol):
    """Runs a function on new ranks, for a judge."""

    def __call__(self, ranks: Any, function: Callable[..., Any], *args: Any, **options: Any) -> Results:
        """Start a group, and call `function(*args)` on each rank.

        Args:
            ranks: the number of ranks, or their names.
            function: the function to call.
            args: its arguments.
            options: options of the group.

        Returns:
            the result of each rank, in rank order.
        """


@dataclass(frozen=True, slots=True)
class Exercise:
    """An exercise, and the function that judges answers to it.

    Args:
        name: its name in `lab.check`.
        lesson: the notebook that contains it, such as "02_data_parallel".
        target: the task, in one or two sentences.
        judge: called with the student's answer and an `OnRanks`; returns the message for a right answer, or raises
            `AnswerError`.
        number: whether the answer is a number rather than a function or a class.
    """

    name: str
    lesson: str
    target: str
    judge: Callable[[Any, OnRanks], str]
    number: bool = False


class AnswerError(Exception):
    """A wrong answer.

    Args:
        message: one sentence: what is wrong and where to look; or a pair of it and the cure.
        details: further lines, such as what was given and what was expected.
        cure: a sentence that says what to do, where the message only points at the mistake. `check` adds it to the
            message from the second wrong answer on.
        deadlock: whether ranks waited for each other for ever.
        waits_in: the operations in which they did.
    """

    def __init__(
        self, message: Hint, *details: str, cure: str = "", deadlock: bool = False, waits_in: tuple[str, ...] = ()
    ) -> None:
        if isinstance(message, tuple):
            message, cure = message
        super().__init__(message)
        self.message = message
        self.details = details
        self.cure = cure
        self.deadlock, self.waits_in = deadlock, waits_in


@contextlib.contextmanager
def showing(call: str) -> Iterator[None]:
    """Let every `AnswerError` of the `with` block show the call that was judged.

    Args:
        call: the call, such as "average_gradients(model) on 3 ranks".
    """
    try:
        yield
    except AnswerError as wrong:
        if call not in wrong.message:
            wrong.details = (call, *wrong.details)
        raise


def call(answer: Callable[..., Any], *args: Any) -> Any:
    """Call the student's function, on a rank, with nothing around it; a list of what an iterator gives can be sent."""
    result = answer(*args)
    return list(itertools.islice(result, MOST_ITEMS)) if isinstance(result, Iterator) else result


def call_reporting_exit(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function on a rank, for which `exit()` would be a normal end, with None as its result.

    Raises:
        RuntimeError: it called `exit()`.
    """
    try:
        return function(*args)
    except SystemExit:
        raise RuntimeError("it called exit(): end a function with `return`") from None


def without_judges(function: Callable[..., Any], *args: Any) -> Any:
    """`call_reporting_exit` on a rank to which the judge was sent by value: it has no use for labkit's exercises."""
    sys.modules["labkit.exercises"] = None  # type: ignore[assignment]  # an `import` of it, or of a part of it, fails
    return call_reporting_exit(function, *args)


def judge_on_rank(on: OnRanks, judge: Callable[[Any], str], answer: Any) -> str:
    """Run a whole judge on one rank, for an answer that returns no data but an object that the judge uses.

    Raises:
        AnswerError: the judge raised it.
    """
    (verdict,) = on(1, _judged, judge, answer)
    if isinstance(verdict, AnswerError):
        raise verdict
    return str(verdict)


def _judged(judge: Callable[[Any], str], answer: Any) -> str | AnswerError:
    try:
        return judge(answer)
    except AnswerError as wrong:
        return wrong


def number_of(given: Any) -> float:
    """Return the number that the student's function has returned.

    Raises:
        AnswerError: it has returned no number.
    """
    number = None if isinstance(given, str) else one_number(given)
    if given is None:
        raise AnswerError("the function returns nothing: print only shows the number; `return` gives it to the caller")
    if number is None or math.isnan(number):
        raise AnswerError(f"given {reprlib.repr(given)}: expected one number")
    return number


def judge_exchange(results: Results, least: int, subject: str) -> None:
    """Check that every rank took part in the exchange, whose result is right.

    Args:
        results: the run.
        least: bytes that each rank must have exchanged.
        subject: "the gradients".

    Raises:
        AnswerError: a rank exchanged fewer.
    """
    for rank in range(len(results)):
        spans = results.trace.filter(rank=rank, kind="communication").spans
        if all(span.sized for span in spans) and (exchanged := sum(span.nbytes for span in spans)) < least:
            raise AnswerError(
                f"{subject} are right, but the ranks have not exchanged them: how can a rank know those of the others?",
                f"rank {rank} took part in operations on {exchanged} bytes; {subject} have {least}",
            )


def whole_number(given: Any) -> int | None:
    """Return a whole number; None for anything else, a float such as 2.0 too: it cannot be an index or a length."""
    try:
        return None if isinstance(given, (bool, np.bool_)) else operator.index(given)
    except TypeError:
        return None


def whole_numbers(given: Any, expected: str, *details: str) -> list[int]:
    """Return the whole numbers that the student's function has returned.

    Args:
        given: what it has returned.
        expected: what was asked for, in words.
        details: further lines of the verdict.

    Raises:
        AnswerError: something else.
    """
    try:
        items = list(given)
    except TypeError:
        raise AnswerError(f"given {reprlib.repr(given)}: expected {expected}", *details) from None
    wrong = next((item for item in items if whole_number(item) is None), None)
    if wrong is not None and one_number(wrong) is not None:
        raise AnswerError(f"{wrong} is not a whole number: `/` gives a float, `//` rounds down to a whole number", *details)
    if wrong is not None:
        raise AnswerError(f"given {reprlib.repr(given)}: expected {expected}", *details)
    return [operator.index(item) for item in items]


def takes_number_for_list(error: str) -> bool:
    """Whether a TypeError's message comes from code that treats a whole number as a list."""
    return error.endswith(
        ("'int' object is not iterable", "object of type 'int' has no len()", "'int' object is not subscriptable")
    )


def compare(
    got: Sequence[Mapping[str, NDArray[Any]]],
    expected: Mapping[str, NDArray[Any]],
    *,
    subject: str,
    oracle: str = "one process with the whole batch",
    causes: Mapping[float, Hint] = MappingProxyType({}),
) -> None:
    """Compare the arrays of all ranks with the expected ones, and explain how they differ.

    Args:
        got: for each rank, arrays by name.
        expected: the arrays that each rank should have.
        subject: the subject of the sentence: "the gradients".
        oracle: whose arrays the expected ones are.
        causes: what a factor means by which all arrays are too large; with its cure, if it has one.

    Raises:
        AnswerError: the arrays differ.
    """
    for rank, arrays in enumerate(got):
        for name, array in expected.items():
            if name not in arrays:
                raise AnswerError(f"{subject} of {name} are missing on rank {rank}")
            if np.shape(arrays[name]) != np.shape(array):
                raise AnswerError(
                    f"{subject} of {name} have the wrong shape on rank {rank}",
                    f"given {tuple(np.shape(arrays[name]))}, expected {tuple(array.shape)}",
                )
    bad = differ(got, expected)
    if not bad:
        return
    common = factor([a[n] for a in got for n in expected], [expected[n] for _ in got for n in expected])
    if common is not None:
        hint = next((hint for known, hint in causes.items() if abs(common - known) < CLOSE_FACTOR), "are off by a factor")
        cause, cure = (hint, "") if isinstance(hint, str) else hint
        size = f"each is {common:.4g} times what it should be" + (f" on {len(got)} ranks" if len(got) > 1 else "")
        raise AnswerError(f"{subject} {cause}: {size}", cure=cure)
    good = [name for name in expected if name not in bad]
    largest = max(float(np.abs(a[n] - expected[n]).max()) for a in got for n in bad)
    alike = all(_close(arrays[n], got[0][n]) for arrays in got for n in expected)
    details = [f"largest difference {largest:.3g}, in {listing(sorted(bad))}"]
    if good:
        details.append(f"right: {listing(good)}")
    if not alike:
        details.append("the ranks do not even agree with each other")
    raise AnswerError(f"{subject} are not those of {oracle}", *details)


def differ(got: Sequence[Mapping[str, NDArray[Any]]], expected: Mapping[str, NDArray[Any]]) -> set[str]:
    """Return the names of arrays that are missing on some rank, or that differ there by more than rounding."""
    return {name for arrays in got for name, array in expected.items() if name not in arrays or not _close(arrays[name], array)}


def factor(got: Sequence[Any], expected: Sequence[Any]) -> float | None:
    """Return the common ratio of all values in `got` to those in `expected`; None if there is no such number."""
    a = np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in got])
    b = np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in expected])
    square = float(b @ b)
    if a.shape != b.shape or square == 0:
        return None
    ratio = float(a @ b) / square
    return ratio if np.isfinite(ratio) and abs(ratio) > TOLERANCE and _close(a, ratio * b) else None


def _close(a: Any, b: Any) -> bool:
    """Whether two arrays are equal up to rounding, relative to the largest number: in some entries terms may cancel."""
    size = float(np.abs(b).max(initial=0.0))
    return bool(np.all(np.abs(np.asarray(a, np.float64) - b) <= TOLERANCE * max(size, 1e-12)))


def listing(items: Sequence[Any], most: int = 6) -> str:
    """Join items to "a, b and c"; after `most` items, give the number of the others."""
    return listed(items, most=most)
