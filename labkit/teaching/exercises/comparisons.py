"""Compares what an answer gives with the oracle, and with what known mistakes give: each of these has a hint."""

from __future__ import annotations

import math
import operator
import reprlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from labkit.errors.lists import counted, listed
from labkit.errors.wrong_calls import one_number

if TYPE_CHECKING:  # ranks import this file, too, and need no types
    from numpy.typing import NDArray

CLOSE_FACTOR: Final = 1e-3
TOLERANCE: Final = 1e-4  # relative; another order of summation changes a float32 by 1e-6, the mistakes here by 1e-1
EXACT: Final = 1e-6  # relative; of numbers that Python computes
SMALLEST: Final = 1e-12  # a number below it may be the rounding error of a zero

Hint = str | tuple[str, str]  # what points at a mistake, alone or with its cure
Mistakes = Sequence[tuple[Any, ...]]  # each: the result of the mistake, its hint, and perhaps its cure


class AnswerError(Exception):
    """A wrong answer.

    Args:
        message: one sentence: what is wrong and where to look; or a pair of it and the cure.
        details: further lines, such as what was given and what was expected.
        cure: a sentence that says what to do, where the message only points at the mistake. `check` adds it to the
            message from the second wrong answer on.
        waits_in: the operations in which ranks waited for each other for ever.
    """

    def __init__(self, message: Hint, *details: str, cure: str = "", waits_in: tuple[str, ...] = ()) -> None:
        if isinstance(message, tuple):
            message, cure = message
        super().__init__(message)
        self.message = message
        self.details = details
        self.cure = cure
        self.waits_in = waits_in


def wrong_if(condition: object, hint: str, cure: str = "", *details: str) -> None:
    """Judge the answer as wrong if the condition holds.

    Args:
        condition: whether the answer has this fault. An array is no condition: it has no single truth value.
        hint: one sentence: what is wrong and where to look. Python makes it in any case, so it must not fail if the
            condition does not hold.
        cure: what to do; shown from the second wrong answer on.
        details: further lines of the verdict.

    Raises:
        AnswerError: the condition holds.
    """
    if condition:
        raise AnswerError(hint, *details, cure=cure)


def equal(a: Any, b: Any, within: float = EXACT) -> bool:
    """Whether two results are equal up to rounding.

    Args:
        a: a number, an array or a tensor, or lists, tuples and dictionaries of these.
        b: the other one.
        within: the largest difference, relative to the largest number of an array: in some entries, terms may cancel.
    """
    if isinstance(b, Mapping):
        return isinstance(a, Mapping) and a.keys() == b.keys() and all(equal(a[key], b[key], within) for key in b)
    if isinstance(b, (list, tuple)):
        return isinstance(a, (list, tuple)) and len(a) == len(b) and all(equal(x, y, within) for x, y in zip(a, b, strict=True))
    try:
        one, other = (np.asarray(x.detach() if hasattr(x, "detach") else x, np.float64) for x in (a, b))
    except (TypeError, ValueError):  # one of them is no number
        return False
    return one.shape == other.shape and (np.array_equal(one, other) or _close(one, other, within))


def expect(
    given: Any,
    right: Any,
    mistakes: Mistakes = (),
    hint: str = "",
    cure: str = "",
    *details: str,
    same: Callable[[Any, Any], bool] = equal,
) -> None:
    """Accept a result that equals the oracle's; else give the hint of the first mistake that has this result.

    The case that an exercise judges first must tell its mistakes apart, or one of them gets the hint of another.
    `judge` in tests/helpers/answers.py checks this for every exercise.

    Args:
        given: the answer's result.
        right: the oracle's.
        mistakes: the known ones: (result, hint) or (result, hint, cure).
        hint: of any other result; without it, the next lines of the judge explain such a result.
        cure: of any other result.
        details: further lines of the verdict.
        same: whether two results are equal up to rounding.

    Raises:
        AnswerError: the result is wrong.
    """
    hint, cure = _explained(given, right, mistakes, (hint, cure), same)
    wrong_if(hint, hint, cure, *details)


def _explained(
    given: Any, right: Any, mistakes: Mistakes, otherwise: tuple[str, str], same: Callable[[Any, Any], bool]
) -> tuple[str, str]:
    """Return hint and cure; without a hint, nothing is known to be wrong. A test notes here what is compared."""
    if same(given, right):
        return "", ""
    for result, hint, *cure in mistakes:
        if same(given, result):
            return hint, "".join(cure)
    return otherwise


def expect_numbers(
    given: Any,
    right: Any,
    mistakes: Mistakes = (),
    hint: str | Callable[[Any], Hint] = "",
    cure: str = "",
    *,
    form: str = "",
    same: Callable[[Any, Any], bool] = equal,
) -> None:
    """As `expect`, for a number or for numbers in a list or a dictionary; the verdict shows both results.

    Args:
        given: the answer's result, which may be anything.
        right: the oracle's. If a list begins with an `int`, the given numbers must be whole.
        mistakes: as for `expect`.
        hint: as for `expect`; or a function that gives the hint, or a pair with the cure, for the given numbers.
        cure: as for `expect`.
        form: what the result is, in words, if it is not one number: "a list with one share per rank".
        same: as for `expect`.

    Raises:
        AnswerError: the result is wrong, or has another form.
    """
    details = f"given {shown(given)}, expected {shown(right)}"
    try:
        numbers = _numbers(given, right, form)
    except AnswerError as wrong:
        wrong.details = (*wrong.details, details)
        raise
    otherwise = hint(numbers) if callable(hint) else hint
    if isinstance(otherwise, tuple):
        otherwise, cure = otherwise
    expect(numbers, right, mistakes, otherwise, cure, details, same=same)


def _numbers(given: Any, right: Any, form: str) -> Any:
    """Return the numbers of a result that has the same form as the oracle's."""
    if isinstance(right, dict):
        if not isinstance(given, dict):
            raise AnswerError(f"expected {form}")
        if missing := [key for key in right if key not in given]:
            raise AnswerError(f"{missing[0]} is missing: expected {form}")
        if extra := [key for key in given if key not in right]:
            raise AnswerError(f"{extra[0]} is no key here: expected {form}")
        return {key: number_of(given[key]) for key in right}
    if not isinstance(right, list):
        return number_of(given)
    try:
        numbers = whole_numbers(given, form) if isinstance(right[0], int) else [float(number) for number in given]
    except (TypeError, ValueError):
        raise AnswerError(f"expected {form}") from None
    if len(numbers) != len(right):
        raise AnswerError(f"{counted(len(numbers), 'number')} in place of {len(right)}: expected {form}")
    return numbers


def shown(value: Any) -> str:
    """Return a value as in code, with six digits of a number that is not whole."""
    if isinstance(value, float):
        return repr(value) if value.is_integer() else f"{value:.6g}"
    if isinstance(value, (list, tuple)):
        inside = ", ".join(map(shown, value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' * (len(value) == 1)})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {shown(each)}" for key, each in value.items()) + "}"
    return reprlib.repr(value)


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


def _close(a: Any, b: Any, within: float = TOLERANCE) -> bool:
    size = float(np.abs(b).max(initial=0.0))
    return bool(np.all(np.abs(np.asarray(a, np.float64) - b) <= max(within * size, SMALLEST)))


def listing(items: Sequence[Any], most: int = 6) -> str:
    """Join items to "a, b and c"; after `most` items, give the number of the others."""
    return listed(items, most=most)
