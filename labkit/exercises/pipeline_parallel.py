"""The exercises of lesson 05: a pipeline's bubble, balanced stages, and a GPipe and a 1F1B step over messages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from labkit.exercises.judging import AnswerError, Exercise, OnRanks, number_of, showing, whole_numbers
from labkit.exercises.known_mistakes import judge_result
from labkit.exercises.pipeline_steps import judge_gpipe_step, judge_one_f_one_b_step

__all__ = ["EXERCISES"]

LESSON = "05_pipeline_parallel"


def _bubble(answer: Any, _: OnRanks) -> str:
    for forward, backward, m in (
        ([1.0, 1.0, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0], 8),
        ([1.0, 2.0, 1.0], [2.0, 4.0, 2.0], 5),
        ([3.0, 1.0], [2.0, 5.0], 4),  # the slowest stage of the backward passes is another one
        ([1.5], [3.0], 3),
    ):
        s, work = len(forward), m * (sum(forward) + sum(backward))
        step = sum(forward) + sum(backward) + (m - 1) * (max(forward) + max(backward))
        right = 1 - work / (s * step)
        case = f"bubble(forward={forward}, backward={backward}, micro_batches={m})"
        with showing(case):
            given = number_of(answer(list(forward), list(backward), m))
        slowest = max(f + b for f, b in zip(forward, backward, strict=True))
        one_stage = sum(forward) + sum(backward) + (m - 1) * slowest
        mistakes = {
            "right as a percentage: return a share between 0 and 1": 100 * right,
            "that is the idle time relative to the work; the bubble is relative to the whole step": (s * step - work) / work,
            ("those are the idle seconds of all ranks, not a share", "divide by the seconds of all ranks"): s * step - work,
            "that is the share in which the ranks work; the bubble is the rest": 1 - right,
            "that holds for equal stages; here the slowest stage sets the pace of all the others": (s - 1) / (m + s - 1),
            "one stage too many: the last stage waits for s - 1 others, not for s": s / (m + s),
            (
                "the slowest forward pass and the slowest backward pass can belong to different stages",
                "GPipe runs all forward passes first, so take the two maxima separately",
            ): 1 - work / (s * one_stage),
            ("one rank's step is compared with the work of all ranks", "s ranks have s times the step"): 1 - work / step,
        }
        otherwise = (
            "not the idle share of this pipeline: when does the first micro-batch leave the last stage, and how long after it "
            "does each of the others?"
        )
        details = (case, f"given {given:.4g}, expected {right:.4g}")
        judge_result(given, right, mistakes, otherwise, *details, same=lambda a, b: math.isclose(a, b, abs_tol=1e-6))
    return "The idle share of any GPipe pipeline whose messages take no time, with equal and unequal stages."


def _balanced_stages(answer: Any, _: OnRanks) -> str:
    random = np.random.default_rng()
    drawn = [([int(c) for c in random.integers(1, 10, size=9)], stages) for stages in (2, 3, 4)]
    fixed = [
        ([1, 1, 1, 1, 1, 1, 1, 1], 4),
        ([1, 1, 1, 6, 1, 1], 3),
        ([5, 5, 1, 1, 5, 5], 4),
        ([2, 3, 9], 3),
        ([4, 4, 4, 1, 1], 2),
    ]
    for costs, stages in (*fixed, *drawn):
        given = answer(list(costs), stages)
        case = f"balanced_stages({costs}, {stages})"
        sizes = _as_sizes(given, len(costs), stages, case)
        slowest, best = _slowest(costs, sizes), _smallest_maximum(costs, stages)
        if slowest == best:
            continue
        sums = [sum(costs[sum(sizes[:i]) : sum(sizes[: i + 1])]) for i in range(stages)]
        details = (f"given {sizes}: the stages cost {sums}", f"the slowest stage can cost {best}")
        if max(sizes) - min(sizes) <= 1 and sizes != _filled(costs, stages):
            raise AnswerError(f"{case}: the stages have equal numbers of layers, but layers cost different amounts", *details)
        if sizes == _filled(costs, stages):
            raise AnswerError(
                f"{case}: filling each stage up to the mean cost leaves too much, or too little, for the last one",
                *details,
                cure="look for the smallest limit that no stage has to exceed",
            )
        raise AnswerError(f"{case}: another split has a faster slowest stage, which sets the pace", *details)
    return "No other split into consecutive layers has a faster slowest stage."


def _as_sizes(given: Any, layers: int, stages: int, case: str) -> list[int]:
    """The answer as a list of whole numbers, one per stage, that add up to the number of layers."""
    if isinstance(given, (list, tuple)) and given and all(isinstance(part, (list, tuple)) for part in given):
        raise AnswerError(f"{case}: given {given}; expected the number of layers of each stage, not their costs")
    sizes = whole_numbers(given, "a list with the number of layers of each stage", case)
    if len(sizes) == stages - 1:
        raise AnswerError(
            f"{case}: given {sizes}: {stages} stages have {stages - 1} cuts; expected each stage's number of layers"
        )
    if len(sizes) != stages:
        raise AnswerError(f"{case}: given {sizes}; expected one number per stage: {stages} numbers")
    if min(sizes) < 1:
        raise AnswerError(f"{case}: given {sizes}; a rank without a layer would only pass messages on: at least 1 each")
    if sum(sizes) != layers:
        raise AnswerError(f"{case}: given {sizes}: {sum(sizes)} layers in all, but the model has {layers}")
    return sizes


def _slowest(costs: Sequence[int], sizes: Sequence[int]) -> int:
    ends = np.cumsum(sizes)
    return max(sum(costs[end - size : end]) for end, size in zip(ends, sizes, strict=True))


def _smallest_maximum(costs: Sequence[int], stages: int) -> int:
    """The smallest possible cost of the slowest stage, by trying where the last stage begins."""
    if stages == 1:
        return sum(costs)
    return min(max(_smallest_maximum(costs[:k], stages - 1), sum(costs[k:])) for k in range(stages - 1, len(costs)))


def _filled(costs: Sequence[int], stages: int) -> list[int]:
    """The greedy split: close a stage when its cost reaches the mean, and leave one layer for each stage to come."""
    mean, cost, size = sum(costs) / stages, 0, 0
    sizes: list[int] = []
    for i, c in enumerate(costs):
        cost, size = cost + c, size + 1
        open_stages, left = stages - len(sizes) - 1, len(costs) - i - 1
        if open_stages and (cost >= mean or left == open_stages):
            sizes.append(size)
            cost = size = 0
    return [*sizes, size]


EXERCISES = (
    Exercise(
        "bubble",
        LESSON,
        "bubble(forward, backward, micro_batches) returns the idle share of all ranks in a GPipe step. `forward` and `backward` "
        "list the seconds of each stage's pass of one micro-batch; messages take no time.",
        _bubble,
    ),
    Exercise(
        "balanced_stages",
        LESSON,
        "balanced_stages(costs, stages) returns how many consecutive layers each stage gets, as a list, so that the slowest "
        "stage is as fast as possible. Every stage gets at least one layer.",
        _balanced_stages,
    ),
    Exercise(
        "gpipe_step",
        LESSON,
        "gpipe_step(stage, inputs, targets, micro_batches) runs on every rank: all forward passes, then all backward passes. "
        "Afterwards the .grad of the stage's parameters is that of mse_loss over the whole batch.",
        judge_gpipe_step,
    ),
    Exercise(
        "one_f_one_b_step",
        LESSON,
        "one_f_one_b_step(stage, inputs, targets, micro_batches) does the same in the order of 1F1B: no rank holds the "
        "activations of more micro-batches than there are stages.",
        judge_one_f_one_b_step,
    ),
)
