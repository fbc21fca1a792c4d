"""Compares what an answer gives with the oracle, and with what known mistakes give: each of these has a hint."""

from __future__ import annotations

import math
import operator
import reprlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from labkit.errors.lists import listed
from labkit.errors.wrong_calls import one_number
from labkit.exercises.judging import AnswerError, Hint

if TYPE_CHECKING:  # ranks import this file, too, and need no types
    from numpy.typing import NDArray

CLOSE_FACTOR: Final = 1e-3
TOLERANCE: Final = 1e-4  # relative; another order of summation changes a float32 by 1e-6, the mistakes here by 1e-1
EXACT: Final = 1e-6  # relative; of numbers that Python computes
SMALLEST: Final = 1e-12  # a number below it may be the rounding error of a zero


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


def judge_result(
    given: Any,
    right: Any,
    mistakes: Mapping[Any, Any],
    otherwise: Hint = "",
    *details: str,
    same: Callable[[Any, Any], bool] = equal,
) -> None:
    """Accept a result that equals the oracle's; else give the hint of the first mistake that has this result.

    The case that an exercise judges first must tell its mistakes apart, or one of them gets the hint of another.
    `judge` in tests/helpers/answers.py checks this for every exercise.

    Args:
        given: the answer's result.
        right: the oracle's.
        mistakes: the result of each known mistake, by its hint: a sentence, or a pair of it and the cure.
        otherwise: the hint for any other result; if empty, the caller explains it.
        details: further lines of the verdict.
        same: whether two results are equal up to rounding.

    Raises:
        AnswerError: the result is wrong.
    """
    if same(given, right):
        return
    hint = next((hint for hint, result in mistakes.items() if same(given, result)), otherwise)
    if hint:
        raise AnswerError(hint, *details)


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
