"""The exercise of lesson 12 about a killed training: right answers pass, and wrong ones get an explanation."""

from __future__ import annotations

import importlib.util

import pytest
from answers import Answers, judge

pytestmark = [pytest.mark.tf, pytest.mark.slow]
if importlib.util.find_spec("tensorflow") is None:  # found, not imported: the notebook's process runs no TensorFlow
    pytest.skip("needs TensorFlow", allow_module_level=True)

answers = Answers()
right, wrong = answers.right, answers.wrong

# train_safely


@right("train_safely")
def train_safely(folder, checkpoint, data, train_step, steps, every):
    import tensorflow as tf

    latest = tf.train.latest_checkpoint(folder)
    if latest:
        checkpoint.restore(latest)
    finished = int(checkpoint.step)
    for batch in data.skip(finished).take(steps - finished):
        train_step(batch)
        checkpoint.step.assign_add(1)
        if int(checkpoint.step) % every == 0:
            checkpoint.save(folder + "/checkpoint")


@right("train_safely")
def train_managed(folder, checkpoint, data, train_step, steps, every):
    import tensorflow as tf

    manager = tf.train.CheckpointManager(checkpoint, folder, max_to_keep=1)
    checkpoint.restore(manager.latest_checkpoint)
    for number, batch in enumerate(data):
        if number == steps:
            break
        if number < int(checkpoint.step):
            continue
        train_step(batch)
        checkpoint.step.assign(number + 1)
        if (number + 1) % every == 0:
            manager.save()


def resuming(restore=True, skip=True, count="before", save="every", more=False, prefix="/checkpoint"):
    """A training with one thing that may be wrong."""

    def train_unsafely(folder, checkpoint, data, train_step, steps, every):
        import tensorflow as tf

        if restore and tf.train.latest_checkpoint(folder):
            checkpoint.restore(tf.train.latest_checkpoint(folder))
        finished = int(checkpoint.step)
        data = data.skip(finished) if skip else data
        for number, batch in enumerate(data.take(steps if more else steps - finished), finished + 1):
            train_step(batch)
            if count == "before":
                checkpoint.step.assign_add(1)
            if save == "each" or number % every == {"every": 0, "odd": 1}.get(save):
                checkpoint.save(folder + prefix)
            if count == "after":
                checkpoint.step.assign_add(1)
        if save == "end":
            checkpoint.save(folder + "/checkpoint")

    return train_unsafely


wrong("train_safely", "although the folder has a checkpoint", resuming(restore=False))
wrong("train_safely", "the checkpoint says that 0 steps are finished", resuming(count=""))
wrong("train_safely", "reads the data from the beginning", resuming(skip=False))
wrong("train_safely", "batch 3 is trained twice", resuming(count="after"))
wrong("train_safely", "left no checkpoint", resuming(save="end"))
wrong("train_safely", "it saves after every step, not after every 2", resuming(save="each"))
wrong("train_safely", "how many are done at that moment?", resuming(save="odd"))
wrong("train_safely", "the checkpoints are beside the folder", resuming(prefix=""))
wrong("train_safely", "it makes too many steps", resuming(more=True))


@wrong("train_safely", "is it restored before the first step?")
def only_the_step(folder, checkpoint, data, train_step, steps, every):
    import tensorflow as tf

    number = tf.train.Checkpoint(step=checkpoint.step)
    train_safely(folder, number, data, train_step, steps, every)


@pytest.mark.parametrize("answer", answers.parameters())
def test_the_verdict_fits_the_answer(answer) -> None:
    judge(answer)


def test_every_exercise_has_right_and_wrong_answers_here() -> None:
    answers.complete("tf_resume")
