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
right, wrong, mutant = answers.right, answers.wrong, answers.mutant


# replica_loss


@right("replica_loss")
def loss_by_tensorflow(losses, global_batch, penalty):
    import tensorflow as tf

    mean = tf.nn.compute_average_loss(losses, global_batch_size=global_batch)
    return mean + tf.nn.scale_regularization_loss(penalty)


@wrong("replica_loss", "TypeError: replica_loss_of_one() takes 1 positional argument but 3 were given")
def replica_loss_of_one(losses):
    import tensorflow as tf

    return tf.reduce_sum(losses) / 64


SUM, MEAN, SHARE = "tf.reduce_sum(losses)", "tf.reduce_mean(losses)", "penalty / replicas"
LOSS, RETURN, IMPORT = f"{SUM} / global_batch + {SHARE}", "end the function with `return`", "    import tensorflow as tf\n"
NO_MODULE = "begin with `import tensorflow as tf`"
mutant("replica_loss", f"{SUM} / global_batch", MEAN, "2 times too large on 2 replicas", cure="by the global batch")
mutant("replica_loss", LOSS, f"{MEAN} + penalty", "2 times too large on 2 replicas", cure="by the global batch")
mutant("replica_loss", SHARE, "penalty", "every replica adds the whole penalty: it is added 2 times")
mutant("replica_loss", LOSS, f"({SUM} + penalty) / global_batch", "the penalty is divided by the global batch")
mutant("replica_loss", f" + {SHARE}", "", "the penalty is missing", cure="share of it")
mutant("replica_loss", " / global_batch", "", "the loss is a sum, not a mean", cure="divide by the global batch")
HALVED = f"({MEAN} + penalty) / replicas"
mutant("replica_loss", LOSS, HALVED, "right for equal shares", cure="divide the sum by the global batch")
mutant("replica_loss", SUM, "sum(losses)", "use tf.reduce_sum: in a graph Python cannot loop over a tensor")
mutant("replica_loss", SUM, "__import__('numpy').sum(losses)", "it has no gradient: numpy", cure="tf.reduce_sum")
mutant("replica_loss", "global_batch +", "64 +", "divided by 64, and the global batch is 4 here: divide by the argument global")
mutant("replica_loss", f"{SUM} / global_batch", "tf.reduce_max(losses)", "do not add up")
mutant("replica_loss", SUM, "losses", "it returns several numbers: return one")
mutant("replica_loss", f"return {LOSS}", LOSS, RETURN)
mutant("replica_loss", IMPORT, "", NO_MODULE)


# global_batches


@right("global_batches")
def seeded_batches(strategy, examples, per_replica):
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices(examples).shuffle(1000, seed=1)
    data = data.batch(per_replica * strategy.num_replicas_in_sync, drop_remainder=True)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return strategy.experimental_distribute_dataset(data.with_options(options))


@wrong("global_batches", "on two ranks each reads all examples", cure="AutoShardPolicy.DATA")
def batches_not_dealt_out(strategy, examples, per_replica):
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices(examples)
    data = data.batch(per_replica * strategy.num_replicas_in_sync, drop_remainder=True)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return strategy.experimental_distribute_dataset(data.with_options(options))


SLICES, BATCH = "tf.data.Dataset.from_tensor_slices(examples)", "per_replica * strategy.num_replicas_in_sync"
RETURNED = "return strategy.experimental_distribute_dataset(data)"
ITERATED, EXAMPLES = "return iter(strategy.experimental_distribute_dataset(data))", RETURNED.replace("data)", "examples)")
mutant("global_batches", BATCH, "per_replica * 2", "Right for 2 replicas, wrong for 3", cure="strategy.num_replicas_in_sync")
mutant("global_batches", SLICES, f"{SLICES}.shuffle(1000)", "The ranks shuffle differently", cure="give the shuffle a seed")
mutant("global_batches", SLICES, SLICES.replace("examples", "examples[:20]"), "expected 2 examples per rank and step")
mutant("global_batches", BATCH, "64", "there are no steps", cure="strategy.num_replicas_in_sync")
mutant("global_batches", SLICES, f"{SLICES}.repeat()", "it does not end")
mutant("global_batches", BATCH, "per_replica", "which batch does a strategy split?", cure="strategy.num_replicas_in_sync")
mutant("global_batches", ", drop_remainder=True", "", "the last batch is smaller", cure="drop_remainder=True")
mutant("global_batches", RETURNED, "return data", "one batch for all 2 replicas", cure="experimental_distribute_dataset")
ONE_STEP = SLICES.replace("examples", f"examples[: {BATCH}]")
mutant("global_batches", SLICES, ONE_STEP, "expected 2 steps with 2 examples per replica")
TWICE = SLICES.replace("(examples)", "([*examples[:4], *examples[:4]])")
mutant("global_batches", SLICES, TWICE, "some examples occur twice: do the replicas share one dataset?")
mutant("global_batches", RETURNED, "", RETURN)
mutant("global_batches", RETURNED, ITERATED, "it returns an iterator, which can be read only once")
mutant("global_batches", IMPORT, "", NO_MODULE)
mutant("global_batches", RETURNED, EXAMPLES, "a strategy distributes a tf.data.Dataset")


# clipped_sum


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


@wrong("clipped_sum", "wrong below it", cure="clipping never lengthens a gradient")
def always_scaled(gradients, limit):
    import tensorflow as tf

    total = tf.distribute.get_replica_context().all_reduce("SUM", gradients)
    return [gradient * limit / tf.linalg.global_norm(total) for gradient in total]


@wrong("clipped_sum", "no all-reduce inside an `if`")
def summed_if_needed(gradients, limit):
    import tensorflow as tf

    if tf.linalg.global_norm(gradients) > limit:
        gradients = tf.distribute.get_replica_context().all_reduce("SUM", gradients)
    return tf.clip_by_global_norm(gradients, limit)[0]


REDUCE, CLIP = (
    'tf.distribute.get_replica_context().all_reduce("SUM", gradients)',
    "clipped, _ = tf.clip_by_global_norm(total, limit)",
)
CLIPPED = "return clipped"
SINGLY = "clipped = [tf.clip_by_norm(gradient, limit) for gradient in total]"
IN_REPLICA = '[tf.distribute.get_strategy().reduce("SUM", gradient, axis=None) for gradient in gradients]'
mutant("clipped_sum", CLIP, "clipped = total", "summed, but not clipped")
mutant("clipped_sum", '"SUM"', '"MEAN"', "the mean over the ranks", cure="by the global batch already")
mutant("clipped_sum", CLIP, SINGLY, "each gradient was clipped by itself", cure="all of them together")
mutant("clipped_sum", REDUCE, "gradients", "each rank has its own gradients only, clipped: nothing was exchanged")
mutant("clipped_sum", CLIPPED, "return gradients", "each rank has its own gradients only: nothing was exchanged")
mutant("clipped_sum", "clipped, _ =", "clipped =", "returns two things")
mutant("clipped_sum", CLIPPED, "", RETURN)
mutant("clipped_sum", IMPORT, "", NO_MODULE)
mutant("clipped_sum", REDUCE, IN_REPLICA, "the function already runs in a replica")
mutant("clipped_sum", CLIP, "clipped = tf.clip_by_norm(total, limit)", "tf.clip_by_global_norm takes the list as it is")


# waited_ms


@right("waited_ms")
def waited_by_comprehension(spans):
    def wait(step, start):
        return max(s for _, other, s, _ in spans if other == step) - start

    return {rank: sum(wait(step, start) for r, step, start, _ in spans if r == rank) for rank, *_ in spans}


@wrong("waited_ms", "the rank that comes first is the one that waits")
def lateness(spans):
    first = {step: min(s for _, other, s, _ in spans if other == step) for _, step, _, _ in spans}
    return {rank: sum(start - first[step] for r, step, start, _ in spans if r == rank) for rank, *_ in spans}


WAITED, WAIT, FOR = "return waited", "last[step] - start", "for rank, step, start, _ in spans:"
MOMENT, ENDS = "max(s for _, _, s, _ in spans) - start", "for rank, step, start, end in spans:\n        waited[rank] += end - "
STEPS = "len({step for _, step, _, _ in spans})"
FINAL = "(last[step] - start) * (step == max(last))"
mutant(
    "waited_ms", f"{FOR}\n        waited[rank] += {WAIT}", f"{ENDS}start", "once the last rank has come, a rank no longer waits"
)
mutant("waited_ms", f"{FOR}\n        waited[rank] += {WAIT}", f"{ENDS}last[step]", "in which the numbers are summed")
mutant("waited_ms", WAITED, "return {rank: ms for rank, ms in waited.items() if ms}", "the keys are the ranks, here [0, 1]")
mutant("waited_ms", WAIT, f"({WAIT}) / {STEPS}", "that is the mean of the steps")
mutant("waited_ms", WAIT, FINAL, "one step only")
mutant("waited_ms", WAIT, MOMENT, "until the last start of all steps", cure="among the spans of the same step")
mutant("waited_ms", WAITED, "return list(waited.values())", "expected a dictionary")
mutant("waited_ms", WAITED, 'return {f"rank {rank}": ms for rank, ms in waited.items()}', "the keys are the ranks")
NOTHING = "from its own start to the latest start of any rank"
mutant("waited_ms", WAIT, "0", "from when, and for whom", cure=NOTHING)


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
