"""The exercise of lesson 06 that only computes: the bytes per step of a transformer whose layers are split."""

from __future__ import annotations

from typing import Any

from labkit.exercises.judging import Exercise, OnRanks, number_of, showing
from labkit.exercises.known_mistakes import judge_result
from labkit.exercises.tensor_parallel import LESSON

__all__ = ["EXERCISES"]

RING = "a rank of a ring sends 2(p − 1)/p times n bytes, and alone it sends nothing"


def _bytes_per_step(answer: Any, _: OnRanks) -> str:
    # 4 ranks first: with 2, a rank of a ring sends n bytes, and half is what 1/p is.
    for arguments in ((3, 10, 5, 7, 4, 8), (1, 64, 28, 128, 2, 4), (2, 4, 10, 6, 3, 4), (5, 3, 4, 8, 1, 2)):
        with showing(f"bytes_per_step{arguments}"):
            _judge_bytes(answer(*arguments), *arguments)
    return "Four all_reduces per layer, each of the whole activation: more ranks do not make it less."


def _judge_bytes(given: Any, layers: int, batch: int, sequence: int, hidden: int, ranks: int, value_bytes: int) -> None:
    ring, n = 2 * (ranks - 1) / ranks, batch * sequence * hidden * value_bytes
    expected = layers * 4 * ring * n
    number = number_of(given)
    mistakes = {
        ("here a rank sends n bytes in an all_reduce of n bytes, however many ranks there are", RING): layers * 4 * n,
        ("here a rank sends 2n bytes in an all_reduce of n bytes, however many ranks there are", RING): layers * 4 * 2 * n,
        (
            "that is half: which passes have all_reduces, and how many?",
            "the forward pass has two all_reduces per layer, and the backward pass has two more",
        ): expected / 2,
        "that is one layer; there are several": expected / layers,
        "those are numbers, not bytes: each takes value_bytes": expected / value_bytes,
        (
            "that is what all ranks send together, and one rank is asked for",
            "one rank passes on 2(p − 1) pieces of n/p bytes, not of n bytes",
        ): expected * ranks,
        ("those are the parameters, as in data parallelism; here activations travel", "batch × sequence × hidden numbers"): (
            layers * 12 * hidden * hidden * value_bytes * ring
        ),
        "the all_reduce is of the whole activation on every rank, not of 1/p of it": expected / ranks,
        "each example has `sequence` tokens": expected / sequence,
    }
    otherwise = "count the all_reduces of a layer in forward and backward, and multiply by what a rank of a ring sends in each"
    if any(number and abs(number * unit - expected) <= 0.01 * expected for unit in (1e3, 1e6, 1 << 10, 1 << 20)):
        otherwise = "the number of bytes is asked for, not of kB or MB"
    details = f"given {_whole(number)}, expected {_whole(expected)}"
    judge_result(number, expected, mistakes, otherwise, details, same=lambda a, b: abs(a - b) <= 1e-6 * max(abs(b), 1))


def _whole(number: float) -> str:
    """A number with separators; without an exponent, unless it is very large."""
    return f"{number:,.10g}" if abs(number) < 1e10 else repr(number)


EXERCISES = (
    Exercise(
        "bytes_per_step",
        LESSON,
        "bytes_per_step(layers, batch, sequence, hidden, ranks, value_bytes) returns how many bytes each rank sends per training "
        "step of a transformer, if every layer is split as in Megatron-LM and all_reduce is a ring.",
        _bytes_per_step,
    ),
)
