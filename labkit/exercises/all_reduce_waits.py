"""Judges `waited_ms` of lesson 10: how long each rank waits for the others in all-reduces."""

from __future__ import annotations

import math
from typing import Any

from labkit.exercises.judging import AnswerError, OnRanks, number_of, showing
from labkit.exercises.known_mistakes import judge_result

__all__ = ["judge_waits"]

TimedSpan = tuple[int, int, float, float]
# All-reduces (rank, step, start, end). In the second case there are three ranks, another is last in each step, and the
# spans are in no order; in the third, ranks end at different times, and the earliest step is not numbered 0; in the
# fourth, rank 1 never waits.
TIMELINES: tuple[list[TimedSpan], ...] = (
    [(0, 0, 1.0, 6.0), (1, 0, 4.0, 6.0), (0, 1, 11.0, 13.0), (1, 1, 10.0, 13.0)],
    [(2, 1, 9.0, 12.0), (0, 0, 2.0, 5.0), (1, 0, 1.0, 5.0), (0, 1, 8.0, 12.0), (2, 0, 4.0, 5.0), (1, 1, 10.0, 12.0)],
    [(1, 7, 20.0, 29.0), (0, 7, 26.0, 27.0), (0, 8, 30.0, 36.5), (1, 8, 33.5, 36.0)],
    [(0, 0, 1.0, 6.0), (1, 0, 4.0, 6.0), (0, 1, 9.0, 13.0), (1, 1, 10.0, 13.0)],
)


def judge_waits(answer: Any, _: OnRanks) -> str:
    """Judge `waited_ms` on several timelines.

    Raises:
        AnswerError: the waiting times are wrong.
    """
    for spans in TIMELINES:
        with showing(f"waited_ms({spans})"):
            _judge_waits(answer(list(spans)), spans)
    return "A rank waits from its own start until the last rank of the same step has started."


def _judge_waits(answered: Any, spans: list[TimedSpan]) -> None:
    expected = _waits(spans, "others")
    details = (f"given {answered!r}", f"expected {expected}")
    if not isinstance(answered, dict):
        raise AnswerError("expected a dictionary with a number for each rank", *details)
    if set(answered) != set(expected):
        raise AnswerError(f"the keys are the ranks, here {sorted(expected)}", *details)
    given = {rank: number_of(ms) for rank, ms in answered.items()}
    steps = len({step for _, step, _, _ in spans})
    mistakes = {
        "those are whole all-reduces; once the last rank has come, a rank no longer waits": _waits(spans, "length"),
        "that is how late each rank came; the rank that comes first is the one that waits": _waits(spans, "late"),
        "that is the time after the last rank came, in which the numbers are summed": _waits(spans, "end"),
        "that is the mean of the steps: add them up": {rank: ms / steps for rank, ms in expected.items()},
        "that is one step only: add up all steps": _waits(spans, "last step"),
        (
            "here all ranks wait until the last start of all steps, but they meet in every step",
            "look for the last start among the spans of the same step",
        ): _waits(spans, "one moment"),
    }
    otherwise = (
        "that is not the time in which a rank waits: from when, and for whom, does it wait in a step?",
        "in each step, a rank waits from its own start to the latest start of any rank in that step",
    )
    judge_result(given, expected, mistakes, otherwise, *details, same=_equal)


def _waits(spans: list[TimedSpan], mistake: str) -> dict[int, float]:
    """Return for each rank the sum over its spans of what an answer, or a usual mistake, takes for waiting."""
    total = dict.fromkeys(sorted({rank for rank, *_ in spans}), 0.0)
    final = max(step for _, step, _, _ in spans)
    for rank, step, start, end in spans:
        starts = [s for _, other, s, _ in spans if other == step]
        total[rank] += {
            "others": max(starts) - start,
            "length": end - start,
            "late": start - min(starts),
            "end": end - max(starts),
            "last step": (max(starts) - start) * (step == final),
            "one moment": max(s for _, _, s, _ in spans) - start,
        }[mistake]
    return total


def _equal(given: dict[int, float], expected: dict[int, float]) -> bool:
    return all(math.isclose(given[rank], expected[rank], rel_tol=1e-6, abs_tol=1e-9) for rank in expected)
