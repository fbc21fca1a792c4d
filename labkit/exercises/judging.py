"""What every exercise is made of: `Exercise`, `AnswerError`, and the comparisons that several judges share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "AnswerError",
    "Exercise",
    "OnRanks",
    "call",
    "compare",
    "differ",
    "factor",
    "listing",
    "plural",
    "takes_number_for_list",
]

TOLERANCE = 1e-4  # relative: a sum in another order differs by 1e-6 in float32, the mistakes here by 1e-1


class OnRanks(Protocol):
    """How a judge runs a function on fresh ranks: one result per rank comes back, in rank order."""

    def __call__(self, ranks: Any, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """Start a group of `ranks` (a number or names; `options` are the group's) and let each rank call `function(*args)`."""


@dataclass(frozen=True, slots=True)
class Exercise:
    """Something to write, and how it is judged.

    Args:
        name: what `lab.check` calls it.
        lesson: the notebook it belongs to, as in "02_data_parallel".
        target: what the student's function shall do, in one or two sentences.
        judge: called with the student's answer and an `OnRanks`; returns the sentence that a right answer earns, or raises
            `AnswerError`.
        number: whether the answer is a number, not a function or a class.
    """

    name: str
    lesson: str
    target: str
    judge: Callable[[Any, OnRanks], str]
    number: bool = False


class AnswerError(Exception):
    """A wrong answer: the sentence that says what is wrong and where to look, and lines with what was given and expected."""

    def __init__(self, message: str, *details: str) -> None:
        super().__init__(message)
        self.message = message
        self.details = details


def call(answer: Callable[..., Any], *args: Any) -> Any:
    """What each rank runs where the student's function needs nothing around it."""
    return answer(*args)


def takes_number_for_list(error: str) -> bool:
    """Whether a TypeError's text is that of code which treats a whole number as if it were a list."""
    return error.endswith(
        ("'int' object is not iterable", "object of type 'int' has no len()", "'int' object is not subscriptable")
    )


def compare(
    got: Sequence[Mapping[str, NDArray[Any]]],
    expected: Mapping[str, NDArray[Any]],
    *,
    what: str,
    explain: Callable[[float], str | None] = lambda _: None,
) -> None:
    """Hold the arrays of every rank against the expected ones, and say in what way they differ.

    Args:
        got: per rank, arrays by name.
        expected: the arrays that each rank should have.
        what: what they are, as the subject of a sentence: "the gradients".
        explain: given the factor by which all arrays are too large, the cause; None where there is no known one.

    Raises:
        AnswerError: they differ.
    """
    for rank, arrays in enumerate(got):
        for name, array in expected.items():
            if name not in arrays:
                raise AnswerError(f"{what} of {name} are missing on rank {rank}")
            if np.shape(arrays[name]) != np.shape(array):
                raise AnswerError(
                    f"{what} of {name} have the wrong shape on rank {rank}",
                    f"given {tuple(np.shape(arrays[name]))}, expected {tuple(array.shape)}",
                )
    bad = differ(got, expected)
    if not bad:
        return
    common = factor([a[n] for a in got for n in expected], [expected[n] for _ in got for n in expected])
    if common is not None:
        cause = explain(common)
        size = f"each is {common:.4g} times what it should be" + (f" on {len(got)} ranks" if len(got) > 1 else "")
        raise AnswerError(f"{what} {cause}: {size}" if cause else f"{what} are off by a factor: {size}")
    good = [name for name in expected if name not in bad]
    largest = max(float(np.abs(a[n] - expected[n]).max()) for a in got for n in bad)
    alike = all(_close(arrays[n], got[0][n]) for arrays in got for n in expected)
    details = [f"largest difference {largest:.3g}, in {listing(sorted(bad))}"]
    if good:
        details.append(f"right: {listing(good)}")
    if not alike:
        details.append("the ranks do not even agree with each other")
    raise AnswerError(f"{what} are not those of one process with the whole batch", *details)


def differ(got: Sequence[Mapping[str, NDArray[Any]]], expected: Mapping[str, NDArray[Any]]) -> set[str]:
    """The names of those arrays that some rank lacks, or has otherwise than expected (but for rounding)."""
    return {name for arrays in got for name, array in expected.items() if name not in arrays or not _close(arrays[name], array)}


def factor(got: Sequence[Any], expected: Sequence[Any]) -> float | None:
    """The one number that all `got` are larger by than `expected`; None where there is no such number."""
    a = np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in got])
    b = np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in expected])
    square = float(b @ b)
    if a.shape != b.shape or square == 0:
        return None
    ratio = float(a @ b) / square
    return ratio if np.isfinite(ratio) and abs(ratio) > TOLERANCE and _close(a, ratio * b) else None


def _close(a: Any, b: Any) -> bool:
    """Equal but for rounding, against the size of the largest number: single entries may be sums that cancel."""
    size = float(np.abs(b).max(initial=0.0))
    return bool(np.all(np.abs(np.asarray(a, np.float64) - b) <= TOLERANCE * max(size, 1e-12)))


def plural(count: int, noun: str) -> str:
    """Join a number and its noun: "1 rank", "3 ranks"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def listing(items: Sequence[Any], most: int = 6) -> str:
    """Write out a list: "a, b and c", cut after `most`."""
    words = [str(item) for item in items]
    if len(words) > most:
        return f"{', '.join(words[:most])} and {len(words) - most} more"
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
