"""The exercise of lesson 06 that only computes: the bytes per step of a transformer whose layers are split."""

from __future__ import annotations

from typing import Any

from labkit.exercises.judging import AnswerError, Exercise, OnRanks
from labkit.exercises.tensor_parallel import LESSON

__all__ = ["EXERCISES"]


def _bytes_per_step(answer: Any, _: OnRanks) -> str:
    for layers, batch, sequence, hidden, ranks, value_bytes in (
        (1, 64, 28, 128, 2, 4), (3, 2, 5, 7, 4, 2), (2, 4, 10, 6, 3, 4), (5, 3, 4, 8, 1, 2),
    ):  # fmt: skip
        n = batch * sequence * hidden * value_bytes
        expected = layers * 4 * 2 * (ranks - 1) / ranks * n
        given = answer(layers, batch, sequence, hidden, ranks, value_bytes)
        arguments = (layers, batch, sequence, hidden, ranks, value_bytes)
        details = (f"bytes_per_step{arguments}: given {_whole(given)}, expected {_whole(expected)}",)
        if isinstance(given, bool) or not isinstance(given, (int, float)):
            raise AnswerError("expected a number of bytes", *details)
        if abs(given - expected) <= 1e-6 * max(expected, 1):
            continue
        for value, hint in (
            (layers * 4 * n, "n bytes per all_reduce: a rank of a ring sends 2(p − 1)/p times that, and alone it sends nothing"),
            (expected / 2, "that is half: the forward pass has two all_reduces per layer, and the backward pass has two more"),
            (expected / layers, "that is one layer; there are several"),
            (expected / value_bytes, "those are numbers, not bytes: each takes value_bytes"),
            (
                expected * ranks,
                "that is what all ranks send together: one rank passes on 2(p − 1) pieces of n/p bytes, not of n bytes",
            ),
            (
                layers * 12 * hidden * hidden * value_bytes * 2 * (ranks - 1) / ranks,
                "those are the parameters, as in data parallelism; here activations travel: batch × sequence × hidden",
            ),
            (expected / ranks, "the all_reduce is of the whole activation on every rank, not of 1/p of it"),
            (expected / sequence, "each example has `sequence` tokens"),
        ):  # fmt: skip
            if abs(given - value) <= 1e-6 * max(value, 1):
                raise AnswerError(hint, *details)
        if any(given and abs(given * unit - expected) <= 0.01 * expected for unit in (1e3, 1e6, 1 << 10, 1 << 20)):
            raise AnswerError("the number of bytes is asked for, not of kB or MB", *details)
        raise AnswerError(
            "count the all_reduces of a layer in forward and backward, and multiply by what a rank of a ring sends in each",
            *details,
        )
    return "Four all_reduces per layer, each of the whole activation: more ranks do not make it less."


def _whole(number: Any) -> str:
    """A number with separators, without an exponent; anything else as Python shows it."""
    return f"{number:,.10g}" if isinstance(number, (int, float)) and abs(number) < 1e10 else repr(number)


EXERCISES = (
    Exercise(
        "bytes_per_step",
        LESSON,
        "bytes_per_step(layers, batch, sequence, hidden, ranks, value_bytes) returns how many bytes each rank sends per training "
        "step of a transformer, if every layer is split as in Megatron-LM and all_reduce is a ring.",
        _bytes_per_step,
    ),
)
