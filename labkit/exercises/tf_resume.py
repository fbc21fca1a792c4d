"""An exercise of lesson 12: a training that continues from its latest checkpoint after its process was killed."""

from __future__ import annotations

import math
import os
import signal
import tempfile
from collections.abc import Callable
from typing import Any

from labkit.errors.causes import Cause
from labkit.errors.exceptions import RankError
from labkit.exercises.explained import explaining
from labkit.exercises.judging import AnswerError, Exercise, OnRanks
from labkit.exercises.tf_hybrid import EXPLAINED, LESSON

__all__ = ["EXERCISES"]

TRAINED, EVERY, DIES_AT = 8, 2, 5  # killed in step 5, when the checkpoint of 4 finished steps is the latest


def _train_and_die(answer: Callable[..., Any], folder: str, dies_at: int | None) -> tuple[list[int], float, int]:
    """Return the trained batches, the weight at the end, and the finished steps that the checkpoint counts."""
    import tensorflow as tf

    weight = tf.Variable(1.0, dtype=tf.float64)
    checkpoint = tf.train.Checkpoint(step=tf.Variable(0, dtype=tf.int64), weight=weight)
    trained: list[int] = []

    def train_step(batch: Any) -> None:
        trained.append(int(batch))
        if int(batch) == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        weight.assign(weight / 2 + tf.cast(batch, tf.float64))

    answer(folder, checkpoint, tf.data.Dataset.range(10**6), train_step, TRAINED, EVERY)
    return trained, float(weight.numpy()), int(checkpoint.step.numpy())


def _train_safely(answer: Callable[..., Any], on: OnRanks) -> str:
    expected = 1.0
    for batch in range(TRAINED):
        expected = expected / 2 + batch
    with tempfile.TemporaryDirectory() as folder:
        try:
            ((trained, _, _),) = explaining(on, EXPLAINED, runtime="tensorflow")(1, _train_and_die, answer, folder, DIES_AT)
        except RankError as error:
            if error.failures[0].cause is not Cause.KILLED:
                raise
        else:
            raise AnswerError(
                f"it never trained batch {DIES_AT}: call train_step(batch) for each batch of data until `steps` are done",
                f"given steps = {TRAINED}; trained the batches {trained}",
            )
        saved = sorted(name for name in os.listdir(folder) if name.endswith(".index"))
        _judge_saves(len(saved), saved)
        ((trained, weight, counted),) = explaining(on, EXPLAINED, runtime="tensorflow")(1, _train_and_die, answer, folder, None)
    _judge_resumed(trained, weight, counted, expected)
    return "Killed in the middle, it continues from the latest checkpoint and ends like a training without a death."


def _judge_saves(saves: int, files: list[str]) -> None:
    """Judge how often the first process saved before it was killed.

    Raises:
        AnswerError: too often, or never.
    """
    if not saves:
        raise AnswerError(
            "killed in the middle, it left no checkpoint in the folder: save after every `every` steps, not only at the end",
            f"killed in step {DIES_AT}, every = {EVERY}",
        )
    if saves > DIES_AT // EVERY:
        raise AnswerError(f"it saves too often: after every {EVERY} steps", f"{saves} checkpoints in {DIES_AT} steps: {files}")


def _judge_resumed(trained: list[int], weight: float, counted: int, expected: float) -> None:
    """Judge the process that starts after the death.

    Raises:
        AnswerError: it does not continue where the checkpoint is.
    """
    first = DIES_AT // EVERY * EVERY
    due = list(range(first, TRAINED))
    details = (f"the checkpoint is of {first} finished steps, steps = {TRAINED}", f"it then trained the batches {trained}")
    if trained != due:
        if trained == list(range(TRAINED)):
            raise AnswerError(
                "it begins again at batch 0: restore tf.train.latest_checkpoint(folder) first, and count the finished steps in "
                "checkpoint.step (assign_add) before you save",
                *details,
            )
        if trained == list(range(len(due))):
            raise AnswerError("it restores the step, but reads the data from the beginning: data.skip(finished steps)", *details)
        if trained[: len(due)] == due:
            raise AnswerError("it makes too many steps: `steps` counts those before the death as well", *details)
        if trained and trained[0] == first - 1:
            raise AnswerError("the last step before the checkpoint is made twice: count the step first, then save", *details)
        if trained and trained[0] == first + 1:
            raise AnswerError(f"batch {first} is left out: checkpoint.step is the number of finished steps", *details)
        raise AnswerError(f"expected the batches {due[0]} to {due[-1]}", *details)
    if not math.isclose(weight, expected, rel_tol=1e-12):
        raise AnswerError(
            "the batches are right, the weight is not that of a training without a death: is it restored before the first step?",
            f"weight {weight:.6f}, expected {expected:.6f}",
        )
    if counted != TRAINED:
        raise AnswerError(f"at the end, checkpoint.step counts {counted} finished steps of {TRAINED}", *details)


EXERCISES = (
    Exercise(
        "train_safely",
        LESSON,
        "train_safely(folder, checkpoint, data, train_step, steps, every): restore the latest checkpoint in folder, if any; "
        "train the batches that are still due until `steps` are done in all; count them in checkpoint.step and save after "
        "every `every` steps.",
        _train_safely,
    ),
)
