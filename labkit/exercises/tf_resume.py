"""An exercise of lesson 12: a training that continues from its latest checkpoint after its process was killed."""

from __future__ import annotations

import math
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from labkit.errors.causes import Cause
from labkit.errors.exceptions import RankError
from labkit.exercises.explained import explaining
from labkit.exercises.judging import AnswerError, Exercise, OnRanks, listing, showing
from labkit.exercises.tf_hybrid import EXPLAINED, LESSON

__all__ = ["EXERCISES"]

TRAINED, EVERY, DIES_AT = 8, 2, 5  # killed in step 5, when the checkpoint of 4 finished steps is the latest
COUNTER = "step/.ATTRIBUTES/VARIABLE_VALUE"  # the name of `checkpoint.step` in a checkpoint


class _Resumed(NamedTuple):
    """What one process found.

    Args:
        stored: the finished steps that the latest checkpoint counted at the start; -1 if there was no such number.
        trained: the batches.
        weight: the weight at the end.
        counted: the finished steps that `checkpoint.step` counts at the end.
    """

    stored: int
    trained: list[int]
    weight: float
    counted: int


def _train_and_die(answer: Callable[..., Any], folder: str, log: str, dies_at: int | None) -> _Resumed:
    """Train in `folder`, and write into the file `log` after how many steps something was saved."""
    import tensorflow as tf

    class Logged(tf.train.Checkpoint):  # type: ignore[misc]  # TensorFlow has no types
        def _write(self, *args: Any, **options: Any) -> Any:  # called by `save` and by a CheckpointManager
            with Path(log).open("a") as lines:
                lines.write(f"{len(trained)}\n")
            return super()._write(*args, **options)

    weight = tf.Variable(1.0, dtype=tf.float64)
    checkpoint = Logged(step=tf.Variable(0, dtype=tf.int64), weight=weight)
    trained: list[int] = []
    latest, stored = tf.train.latest_checkpoint(folder), -1
    if latest and COUNTER in dict(tf.train.list_variables(latest)):
        stored = int(tf.train.load_variable(latest, COUNTER))

    def train_step(batch: Any) -> None:
        trained.append(int(batch))
        if int(batch) == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        weight.assign(weight / 2 + tf.cast(batch, tf.float64))

    answer(folder, checkpoint, tf.data.Dataset.range(10**6), train_step, TRAINED, EVERY)
    return _Resumed(stored, trained, float(weight.numpy()), int(checkpoint.step.numpy()))


def _train_safely(answer: Callable[..., Any], on: OnRanks) -> str:
    expected = 1.0
    for batch in range(TRAINED):
        expected = expected / 2 + batch
    on = explaining(on, EXPLAINED, runtime="tensorflow")
    call = f"train_safely(folder, checkpoint, data, train_step, {TRAINED}, {EVERY})"
    with tempfile.TemporaryDirectory() as parent, showing(call):
        folder, log = Path(parent, "checkpoints"), Path(parent, "saves.log")
        folder.mkdir()
        try:
            (alive,) = on(1, _train_and_die, answer, str(folder), str(log), DIES_AT)
        except RankError as error:
            if error.failures[0].cause is not Cause.KILLED:
                raise
        else:
            raise AnswerError(
                f"it never trained batch {DIES_AT}: call train_step(batch) for each batch of data until `steps` are done",
                f"given steps = {TRAINED}; trained the batches {alive.trained}",
            )
        _judge_saves(folder, [int(line) for line in log.read_text().split()] if log.exists() else [])
        (resumed,) = on(1, _train_and_die, answer, str(folder), str(log), None)
        _judge_resumed(resumed, expected)
    return "Killed in the middle, it continues from the latest checkpoint and ends like a training without a death."


def _judge_saves(folder: Path, saved: list[int]) -> None:
    """Judge what the first process saved before it was killed: after how many steps, and where.

    Raises:
        AnswerError: too often, too rarely, or not in the folder.
    """
    due = list(range(EVERY, DIES_AT, EVERY))
    when = f"it saved when {listing(saved) or 'no'} steps were done, expected {listing(due)}"
    details = (f"killed in step {DIES_AT}, every = {EVERY}", when)
    if not any(folder.glob("*.index")):
        if any(folder.parent.glob("*.index")):
            raise AnswerError(
                "the checkpoints are beside the folder: the prefix is the beginning of a file's path, and the files belong in "
                "the folder",
                *sorted(str(path.relative_to(folder.parent)) for path in folder.parent.glob("*.index")),
            )
        raise AnswerError(
            "killed in the middle, it left no checkpoint in the folder: save after every `every` steps, not only at the end",
            f"killed in step {DIES_AT}, every = {EVERY}",
        )
    if saved and saved == list(range(1, len(saved) + 1)):
        raise AnswerError(f"it saves after every step, not after every {EVERY}", *details)
    if saved not in ([], due):  # nothing: the answer saves another object
        raise AnswerError("it does not save when `every` steps are done: how many are done at that moment?", *details)


def _judge_resumed(resumed: _Resumed, expected: float) -> None:
    """Judge the process that starts after the death.

    Raises:
        AnswerError: it does not continue where the checkpoint is.
    """
    stored, trained, weight, counted = resumed
    first = DIES_AT // EVERY * EVERY
    due = list(range(first, TRAINED))
    details = (f"the checkpoint is of {first} finished steps, steps = {TRAINED}", f"it then trained the batches {trained}")
    if trained != due:
        if trained == list(range(TRAINED)) and stored == 0:
            raise AnswerError("it begins again at batch 0, for the checkpoint says that 0 steps are finished", *details)
        if trained == list(range(TRAINED)):
            raise AnswerError("it begins again at batch 0, although the folder has a checkpoint", *details)
        if trained == list(range(len(due))):
            raise AnswerError("it makes the right number of steps, but reads the data from the beginning", *details)
        if trained[: len(due)] == due:
            raise AnswerError("it makes too many steps: `steps` counts those before the death as well", *details)
        if trained and trained[0] == first - 1:
            raise AnswerError(
                f"batch {first - 1} is trained twice: the checkpoint of {first} finished steps says that fewer are finished",
                *details,
            )
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
