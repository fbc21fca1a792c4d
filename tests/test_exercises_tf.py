"""The exercises of lesson 10: right answers pass, and wrong ones hear why they are wrong."""

from __future__ import annotations

import importlib.util

import pytest
from answers import Answers, judge

pytestmark = [pytest.mark.tf, pytest.mark.slow]
if importlib.util.find_spec("tensorflow") is None:  # found, not imported: the notebook's process runs no TensorFlow
    pytest.skip("needs TensorFlow", allow_module_level=True)

answers = Answers()
right, wrong = answers.right, answers.wrong

# replica_loss


@right("replica_loss")
def replica_loss(losses, global_batch):
    import tensorflow as tf

    return tf.reduce_sum(losses) / global_batch


@wrong("replica_loss", "2 times too large on 2 replicas")
def replica_mean(losses, global_batch):
    import tensorflow as tf

    return tf.reduce_mean(losses)


@wrong("replica_loss", "the loss is a sum, not a mean")
def replica_sum(losses, global_batch):
    import tensorflow as tf

    return tf.reduce_sum(losses)


@wrong("replica_loss", "right for equal shares")
def replica_mean_halved(losses, global_batch):
    import tensorflow as tf

    return tf.reduce_mean(losses) / tf.distribute.get_replica_context().num_replicas_in_sync


@wrong("replica_loss", "do not add up")
def replica_largest(losses, global_batch):
    import tensorflow as tf

    return tf.reduce_max(losses)


# global_batches


@right("global_batches")
def global_batches(strategy, examples, per_replica):
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices(examples)
    data = data.batch(per_replica * strategy.num_replicas_in_sync, drop_remainder=True)
    return strategy.experimental_distribute_dataset(data)


@wrong("global_batches", "the batch that a strategy splits is the global one")
def per_replica_batches(strategy, examples, per_replica):
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices(examples).batch(per_replica, drop_remainder=True)
    return strategy.experimental_distribute_dataset(data)


@wrong("global_batches", "drop_remainder=True")
def ragged_batches(strategy, examples, per_replica):
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices(examples).batch(per_replica * strategy.num_replicas_in_sync)
    return strategy.experimental_distribute_dataset(data)


@wrong("global_batches", "one batch for all 2 replicas")
def undistributed_batches(strategy, examples, per_replica):
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(examples).batch(per_replica * strategy.num_replicas_in_sync, drop_remainder=True)


@wrong("global_batches", "expected 2 steps with 2 examples per replica")
def one_step_only(strategy, examples, per_replica):
    return global_batches(strategy, examples[: per_replica * strategy.num_replicas_in_sync], per_replica)


@pytest.mark.parametrize("answer", answers.parameters())
def test_the_verdict_fits_the_answer(answer) -> None:
    judge(answer)


def test_every_exercise_has_right_and_wrong_answers_here() -> None:
    answers.complete("tf_data_parallel")
