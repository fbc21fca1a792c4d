"""The exercises of lesson 10: right answers pass, and wrong ones get an explanation."""

from __future__ import annotations

import importlib.util

import pytest
from answers import Answers, judge

from labkit.teaching.exercises.check import check

pytestmark = pytest.mark.tf
if importlib.util.find_spec("tensorflow") is None:  # found, not imported: the notebook's process runs no TensorFlow
    pytest.skip("needs TensorFlow", allow_module_level=True)

answers = Answers()
right, wrong = answers.right, answers.wrong

# replica_loss


@right("replica_loss")
def replica_loss(losses, global_batch, penalty):
    import tensorflow as tf

    replicas = tf.distribute.get_replica_context().num_replicas_in_sync
    return tf.reduce_sum(losses) / global_batch + penalty / replicas


@right("replica_loss")
def loss_by_tensorflow(losses, global_batch, penalty):
    import tensorflow as tf

    mean = tf.nn.compute_average_loss(losses, global_batch_size=global_batch)
    return mean + tf.nn.scale_regularization_loss(penalty)


@wrong("replica_loss", "2 times too large on 2 replicas", cure="by the global batch")
def replica_mean(losses, global_batch, penalty):
    import tensorflow as tf

    return tf.reduce_mean(losses) + penalty / 2


@wrong("replica_loss", "2 times too large on 2 replicas", cure="by the global batch")
def replica_mean_and_penalty(losses, global_batch, penalty):
    import tensorflow as tf

    return tf.reduce_mean(losses) + penalty


@wrong("replica_loss", "every replica adds the whole penalty: it is added 2 times")
def penalty_on_each(losses, global_batch, penalty):
    import tensorflow as tf

    return tf.reduce_sum(losses) / global_batch + penalty


@wrong("replica_loss", "the penalty is divided by the global batch")
def everything_over_the_batch(losses, global_batch, penalty):
    import tensorflow as tf

    return (tf.reduce_sum(losses) + penalty) / global_batch


@wrong("replica_loss", "the penalty is missing", cure="share of it")
def no_penalty(losses, global_batch, penalty):
    import tensorflow as tf

    return tf.reduce_sum(losses) / global_batch


@wrong("replica_loss", "the loss is a sum, not a mean", cure="divide by the global batch")
def replica_sum(losses, global_batch, penalty):
    import tensorflow as tf

    return tf.reduce_sum(losses) + penalty / 2


@wrong("replica_loss", "right for equal shares", cure="divide the sum by the global batch")
def replica_mean_halved(losses, global_batch, penalty):
    import tensorflow as tf

    return (tf.reduce_mean(losses) + penalty) / tf.distribute.get_replica_context().num_replicas_in_sync


@wrong("replica_loss", "use tf.reduce_sum: in a graph Python cannot loop over a tensor")
def replica_sum_of_python(losses, global_batch, penalty):
    return sum(losses) / global_batch + penalty / 2


@wrong("replica_loss", "it has no gradient: numpy", cure="tf.reduce_sum")
def replica_sum_of_numpy(losses, global_batch, penalty):
    import numpy as np

    return np.sum(losses) / global_batch + penalty / 2


@wrong("replica_loss", "divided by 64, and the global batch is 4 here: divide by the argument global_batch")
def replica_loss_of_the_notebook(losses, global_batch, penalty):
    import tensorflow as tf

    return tf.reduce_sum(losses) / 64 + penalty / 2


@wrong("replica_loss", "do not add up")
def replica_largest(losses, global_batch, penalty):
    import tensorflow as tf

    return tf.reduce_max(losses) + penalty / 2


@wrong("replica_loss", "it returns several numbers: return one")
def replica_losses_not_added(losses, global_batch, penalty):
    return losses / global_batch + penalty / 2


@wrong("replica_loss", "end the function with `return`")
def replica_loss_kept(losses, global_batch, penalty):
    import tensorflow as tf

    tf.reduce_sum(losses) / global_batch


@wrong("replica_loss", "begin with `import tensorflow as tf`")
def replica_loss_of_no_module(losses, global_batch, penalty):
    return tf.reduce_sum(losses) / global_batch  # noqa: F821  # the mistake


@wrong("replica_loss", "TypeError: replica_loss_of_one() takes 1 positional argument but 3 were given")
def replica_loss_of_one(losses):
    import tensorflow as tf

    return tf.reduce_sum(losses) / 64


# global_batches


@right("global_batches")
def global_batches(strategy, examples, per_replica):
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices(examples)
    data = data.batch(per_replica * strategy.num_replicas_in_sync, drop_remainder=True)
    return strategy.experimental_distribute_dataset(data)


@right("global_batches")
def seeded_batches(strategy, examples, per_replica):
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices(examples).shuffle(1000, seed=1)
    data = data.batch(per_replica * strategy.num_replicas_in_sync, drop_remainder=True)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return strategy.experimental_distribute_dataset(data.with_options(options))


@wrong("global_batches", "Right for 2 replicas, wrong for 3", cure="strategy.num_replicas_in_sync")
def batches_for_two(strategy, examples, per_replica):
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices(examples).batch(per_replica * 2, drop_remainder=True)
    return strategy.experimental_distribute_dataset(data)


@wrong("global_batches", "The ranks shuffle differently", cure="give the shuffle a seed")
def unseeded_batches(strategy, examples, per_replica):
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices(examples).shuffle(1000)
    data = data.batch(per_replica * strategy.num_replicas_in_sync, drop_remainder=True)
    return strategy.experimental_distribute_dataset(data)


@wrong("global_batches", "on two ranks each reads all examples", cure="AutoShardPolicy.DATA")
def batches_not_dealt_out(strategy, examples, per_replica):
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices(examples)
    data = data.batch(per_replica * strategy.num_replicas_in_sync, drop_remainder=True)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return strategy.experimental_distribute_dataset(data.with_options(options))


@wrong("global_batches", "expected 2 examples per rank and step")
def batches_by_the_hundred(strategy, examples, per_replica):
    if len(examples) > 10:
        examples = examples[:20]
    return global_batches(strategy, examples, per_replica)


@wrong("global_batches", "there are no steps", cure="strategy.num_replicas_in_sync")
def batches_too_large(strategy, examples, per_replica):
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices(examples).batch(64, drop_remainder=True)
    return strategy.experimental_distribute_dataset(data)


@wrong("global_batches", "it does not end")
def endless_batches(strategy, examples, per_replica):
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices(examples).repeat()
    data = data.batch(per_replica * strategy.num_replicas_in_sync, drop_remainder=True)
    return strategy.experimental_distribute_dataset(data)


@wrong("global_batches", "which batch does a strategy split?", cure="strategy.num_replicas_in_sync")
def per_replica_batches(strategy, examples, per_replica):
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices(examples).batch(per_replica, drop_remainder=True)
    return strategy.experimental_distribute_dataset(data)


@wrong("global_batches", "the last batch is smaller", cure="drop_remainder=True")
def ragged_batches(strategy, examples, per_replica):
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices(examples).batch(per_replica * strategy.num_replicas_in_sync)
    return strategy.experimental_distribute_dataset(data)


@wrong("global_batches", "one batch for all 2 replicas", cure="experimental_distribute_dataset")
def undistributed_batches(strategy, examples, per_replica):
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(examples).batch(per_replica * strategy.num_replicas_in_sync, drop_remainder=True)


@wrong("global_batches", "expected 2 steps with 2 examples per replica")
def one_step_only(strategy, examples, per_replica):
    return global_batches(strategy, examples[: per_replica * strategy.num_replicas_in_sync], per_replica)


@wrong("global_batches", "end the function with `return`")
def batches_kept(strategy, examples, per_replica):
    global_batches(strategy, examples, per_replica)


@wrong("global_batches", "it returns an iterator, which can be read only once")
def batches_once(strategy, examples, per_replica):
    return iter(global_batches(strategy, examples, per_replica))


@wrong("global_batches", "begin with `import tensorflow as tf`")
def batches_of_no_module(strategy, examples, per_replica):
    return tf.data.Dataset.from_tensor_slices(examples)  # noqa: F821  # the mistake


@wrong("global_batches", "a strategy distributes a tf.data.Dataset")
def examples_distributed(strategy, examples, per_replica):
    return strategy.experimental_distribute_dataset(examples)


# clipped_sum


@right("clipped_sum")
def clipped_sum(gradients, limit):
    import tensorflow as tf

    total = tf.distribute.get_replica_context().all_reduce("SUM", gradients)
    clipped, _ = tf.clip_by_global_norm(total, limit)
    return clipped


@right("clipped_sum")
def clipped_by_hand(gradients, limit):
    import tensorflow as tf

    total = tf.distribute.get_replica_context().all_reduce("SUM", gradients)
    norm = tf.sqrt(tf.add_n([tf.reduce_sum(gradient**2) for gradient in total]))
    return [gradient * tf.minimum(1.0, limit / norm) for gradient in total]


@wrong("clipped_sum", "each rank clipped its own gradients before the sum", cure="sum first")
def clipped_before(gradients, limit):
    import tensorflow as tf

    clipped, _ = tf.clip_by_global_norm(gradients, limit)
    return tf.distribute.get_replica_context().all_reduce("SUM", clipped)


@wrong("clipped_sum", "summed, but not clipped")
def not_clipped(gradients, limit):
    import tensorflow as tf

    return tf.distribute.get_replica_context().all_reduce("SUM", gradients)


@wrong("clipped_sum", "the mean over the ranks", cure="by the global batch already")
def clipped_mean(gradients, limit):
    import tensorflow as tf

    mean = tf.distribute.get_replica_context().all_reduce("MEAN", gradients)
    return tf.clip_by_global_norm(mean, limit)[0]


@wrong("clipped_sum", "each gradient was clipped by itself", cure="all of them together")
def clipped_singly(gradients, limit):
    import tensorflow as tf

    total = tf.distribute.get_replica_context().all_reduce("SUM", gradients)
    return [tf.clip_by_norm(gradient, limit) for gradient in total]


@wrong("clipped_sum", "nothing was exchanged")
def clipped_alone(gradients, limit):
    import tensorflow as tf

    return tf.clip_by_global_norm(gradients, limit)[0]


@wrong("clipped_sum", "returns two things")
def clipped_with_norm(gradients, limit):
    import tensorflow as tf

    return tf.clip_by_global_norm(tf.distribute.get_replica_context().all_reduce("SUM", gradients), limit)


@wrong("clipped_sum", "wrong below it", cure="clipping never lengthens a gradient")
def always_scaled(gradients, limit):
    import tensorflow as tf

    total = tf.distribute.get_replica_context().all_reduce("SUM", gradients)
    return [gradient * limit / tf.linalg.global_norm(total) for gradient in total]


@wrong("clipped_sum", "end the function with `return`")
def clipped_and_kept(gradients, limit):
    clipped_sum(gradients, limit)


@wrong("clipped_sum", "begin with `import tensorflow as tf`")
def clipped_by_no_module(gradients, limit):
    return tf.clip_by_global_norm(gradients, limit)[0]  # noqa: F821  # the mistake


@wrong("clipped_sum", "the function already runs in a replica")
def reduced_in_a_replica(gradients, limit):
    import tensorflow as tf

    strategy = tf.distribute.get_strategy()
    return [strategy.reduce("SUM", gradient, axis=None) for gradient in gradients]


@wrong("clipped_sum", "no all-reduce inside an `if`")
def summed_if_needed(gradients, limit):
    import tensorflow as tf

    if tf.linalg.global_norm(gradients) > limit:
        gradients = tf.distribute.get_replica_context().all_reduce("SUM", gradients)
    return tf.clip_by_global_norm(gradients, limit)[0]


@wrong("clipped_sum", "tf.clip_by_global_norm takes the list as it is")
def clipped_as_one(gradients, limit):
    import tensorflow as tf

    return tf.clip_by_norm(tf.distribute.get_replica_context().all_reduce("SUM", gradients), limit)


# waited_ms


@right("waited_ms")
def waited_ms(spans):
    last = {}
    for _, step, start, _ in spans:
        last[step] = max(start, last.get(step, start))
    waited = {rank: 0.0 for rank, *_ in spans}
    for rank, step, start, _ in spans:
        waited[rank] += last[step] - start
    return waited


@right("waited_ms")
def waited_by_comprehension(spans):
    def wait(step, start):
        return max(s for _, other, s, _ in spans if other == step) - start

    return {rank: sum(wait(step, start) for r, step, start, _ in spans if r == rank) for rank, *_ in spans}


@wrong("waited_ms", "once the last rank has come, a rank no longer waits")
def whole_all_reduces(spans):
    return {rank: sum(end - start for r, _, start, end in spans if r == rank) for rank, *_ in spans}


@wrong("waited_ms", "the rank that comes first is the one that waits")
def lateness(spans):
    first = {step: min(s for _, other, s, _ in spans if other == step) for _, step, _, _ in spans}
    return {rank: sum(start - first[step] for r, step, start, _ in spans if r == rank) for rank, *_ in spans}


@wrong("waited_ms", "in which the numbers are summed")
def transfer(spans):
    return {rank: whole_all_reduces(spans)[rank] - waited_ms(spans)[rank] for rank, *_ in spans}


@wrong("waited_ms", "the keys are the ranks, here [0, 1]")
def without_ranks_that_never_waited(spans):
    return {rank: wait for rank, wait in waited_ms(spans).items() if wait}


@wrong("waited_ms", "that is the mean of the steps")
def mean_wait(spans):
    return {rank: wait / len({step for _, step, _, _ in spans}) for rank, wait in waited_ms(spans).items()}


@wrong("waited_ms", "one step only")
def wait_in_one_step(spans):
    final = max(step for _, step, _, _ in spans)
    return waited_ms([span for span in spans if span[1] == final])


@wrong("waited_ms", "until the last start of all steps", cure="among the spans of the same step")
def one_moment_for_all(spans):
    last = max(start for _, _, start, _ in spans)
    return {rank: sum(last - start for r, _, start, _ in spans if r == rank) for rank, *_ in spans}


@wrong("waited_ms", "expected a dictionary")
def waits_in_a_list(spans):
    return list(waited_ms(spans).values())


@wrong("waited_ms", "the keys are the ranks")
def waits_by_name(spans):
    return {f"rank {rank}": wait for rank, wait in waited_ms(spans).items()}


@wrong("waited_ms", "from when, and for whom", cure="from its own start to the latest start of any rank")
def no_waiting(spans):
    return {rank: 0.0 for rank, *_ in spans}


@pytest.mark.parametrize("answer", answers.parameters())
@pytest.mark.processes
def test_the_verdict_fits_the_answer(answer) -> None:
    judge(answer)


@pytest.mark.processes
def test_a_report_names_no_line_of_the_judge() -> None:
    verdict = check("replica_loss", replica_loss_of_one)
    assert "tf_data_parallel.py" not in str(verdict)


def test_every_exercise_has_right_and_wrong_answers_here() -> None:
    answers.complete("tf_data_parallel")
