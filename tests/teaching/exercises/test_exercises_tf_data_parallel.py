"""The exercises of lesson 10: right answers pass, and wrong ones get an explanation."""

from __future__ import annotations

import importlib.util

import pytest
from answers import Answers

from labkit.teaching.exercises.check import check

pytestmark = pytest.mark.tf
if importlib.util.find_spec("tensorflow") is None:  # found, not imported: the notebook's process runs no TensorFlow
    pytest.skip("needs TensorFlow", allow_module_level=True)

answers = Answers()

right, wrong, mutant = answers.of("replica_loss")


@right
def loss_by_tensorflow(losses, global_batch, penalty):
    import tensorflow as tf

    mean = tf.nn.compute_average_loss(losses, global_batch_size=global_batch)
    return mean + tf.nn.scale_regularization_loss(penalty)


@wrong("TypeError: replica_loss_of_one() takes 1 positional argument but 3 were given")
def replica_loss_of_one(losses):
    import tensorflow as tf

    return tf.reduce_sum(losses) / 64


SUM, MEAN, SHARE = "tf.reduce_sum(losses)", "tf.reduce_mean(losses)", "penalty / replicas"
LOSS = f"{SUM} / global_batch + {SHARE}"
RETURN = "end the function with `return`"
IMPORT = "    import tensorflow as tf\n"
NO_MODULE = "begin with `import tensorflow as tf`"
mutant(f"{SUM} / global_batch", MEAN, "2 times too large on 2 replicas", cure="by the global batch")
mutant(LOSS, f"{MEAN} + penalty", "2 times too large on 2 replicas", cure="by the global batch")
mutant(SHARE, "penalty", "every replica adds the whole penalty: it is added 2 times")
mutant(LOSS, f"({SUM} + penalty) / global_batch", "the penalty is divided by the global batch")
mutant(f" + {SHARE}", "", "the penalty is missing", cure="share of it")
mutant(" / global_batch", "", "the loss is a sum, not a mean", cure="divide by the global batch")
HALVED = f"({MEAN} + penalty) / replicas"
mutant(LOSS, HALVED, "right for equal shares", cure="divide the sum by the global batch")
mutant(SUM, "sum(losses)", "use tf.reduce_sum: in a graph Python cannot loop over a tensor")
mutant(SUM, "__import__('numpy').sum(losses)", "it has no gradient: numpy", cure="tf.reduce_sum")
mutant("global_batch +", "64 +", "divided by 64, and the global batch is 4 here: divide by the argument global")
mutant(f"{SUM} / global_batch", "tf.reduce_max(losses)", "do not add up")
mutant(SUM, "losses", "it returns several numbers: return one")
mutant(f"return {LOSS}", LOSS, RETURN)
mutant(IMPORT, "", NO_MODULE)


right, wrong, mutant = answers.of("global_batches")


@right
def seeded_batches(strategy, examples, per_replica):
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices(examples).shuffle(1000, seed=1)
    data = data.batch(per_replica * strategy.num_replicas_in_sync, drop_remainder=True)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return strategy.experimental_distribute_dataset(data.with_options(options))


SLICES, BATCH = "tf.data.Dataset.from_tensor_slices(examples)", "per_replica * strategy.num_replicas_in_sync"
RETURNED = "return strategy.experimental_distribute_dataset(data)"
ITERATED = "return iter(strategy.experimental_distribute_dataset(data))"
EXAMPLES = RETURNED.replace("data)", "examples)")
NOT_DEALT_OUT = """options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    data = data.with_options(options)
    """
mutant(RETURNED, NOT_DEALT_OUT + RETURNED, "on two ranks each reads all examples", cure="AutoShardPolicy.DATA")
mutant(BATCH, "per_replica * 2", "Right for 2 replicas, wrong for 3", cure="strategy.num_replicas_in_sync")
mutant(SLICES, f"{SLICES}.shuffle(1000)", "The ranks shuffle differently", cure="give the shuffle a seed")
mutant(SLICES, SLICES.replace("examples", "examples[:20]"), "expected 2 examples per rank and step")
mutant(BATCH, "64", "there are no steps", cure="strategy.num_replicas_in_sync")
mutant(SLICES, f"{SLICES}.repeat()", "it does not end")
mutant(BATCH, "per_replica", "which batch does a strategy split?", cure="strategy.num_replicas_in_sync")
mutant(", drop_remainder=True", "", "the last batch is smaller", cure="drop_remainder=True")
mutant(RETURNED, "return data", "one batch for all 2 replicas", cure="experimental_distribute_dataset")
ONE_STEP = SLICES.replace("examples", f"examples[: {BATCH}]")
mutant(SLICES, ONE_STEP, "expected 2 steps with 2 examples per replica")
TWICE = SLICES.replace("(examples)", "([*examples[:4], *examples[:4]])")
mutant(SLICES, TWICE, "some examples occur twice: do the replicas share one dataset?")
mutant(RETURNED, "", RETURN)
mutant(RETURNED, ITERATED, "it returns an iterator, which can be read only once")
mutant(IMPORT, "", NO_MODULE)
mutant(RETURNED, EXAMPLES, "a strategy distributes a tf.data.Dataset")


right, wrong, mutant = answers.of("clipped_sum")


@right
def clipped_by_hand(gradients, limit):
    import tensorflow as tf

    total = tf.distribute.get_replica_context().all_reduce("SUM", gradients)
    norm = tf.sqrt(tf.add_n([tf.reduce_sum(gradient**2) for gradient in total]))
    return [gradient * tf.minimum(1.0, limit / norm) for gradient in total]


@wrong("no all-reduce inside an `if`")  # no edited solution: AutoGraph reads the source of an `if`
def summed_if_needed(gradients, limit):
    import tensorflow as tf

    if tf.linalg.global_norm(gradients) > limit:
        gradients = tf.distribute.get_replica_context().all_reduce("SUM", gradients)
    return tf.clip_by_global_norm(gradients, limit)[0]


REDUCE = 'tf.distribute.get_replica_context().all_reduce("SUM", gradients)'
CLIP = "clipped, _ = tf.clip_by_global_norm(total, limit)"
BEFORE = f"total, _ = tf.clip_by_global_norm(gradients, limit)\n    clipped = {REDUCE.replace('gradients', 'total')}"
ALWAYS_SCALED = "clipped = [gradient * limit / tf.linalg.global_norm(total) for gradient in total]"
CLIPPED = "return clipped"
SINGLY = "clipped = [tf.clip_by_norm(gradient, limit) for gradient in total]"
IN_REPLICA = '[tf.distribute.get_strategy().reduce("SUM", gradient, axis=None) for gradient in gradients]'
OWN_CLIPPED = "each rank clipped its own gradients before the sum"
mutant(f"total = {REDUCE}\n    {CLIP}", BEFORE, OWN_CLIPPED, cure="sum first")
mutant(CLIP, ALWAYS_SCALED, "wrong below it", cure="clipping never lengthens a gradient")
mutant(CLIP, "clipped = total", "summed, but not clipped")
mutant('"SUM"', '"MEAN"', "the mean over the ranks", cure="by the global batch already")
mutant(CLIP, SINGLY, "each gradient was clipped by itself", cure="all of them together")
mutant(REDUCE, "gradients", "each rank has its own gradients only, clipped: nothing was exchanged")
mutant(CLIPPED, "return gradients", "each rank has its own gradients only: nothing was exchanged")
mutant("clipped, _ =", "clipped =", "returns two things")
mutant(CLIPPED, "", RETURN)
mutant(IMPORT, "", NO_MODULE)
mutant(REDUCE, IN_REPLICA, "the function already runs in a replica")
mutant(CLIP, "clipped = tf.clip_by_norm(total, limit)", "tf.clip_by_global_norm takes the list as it is")


right, wrong, mutant = answers.of("waited_ms")


@right
def waited_by_comprehension(spans):
    def wait(step, start):
        return max(s for _, other, s, _ in spans if other == step) - start

    return {rank: sum(wait(step, start) for r, step, start, _ in spans if r == rank) for rank, *_ in spans}


WAITED, WAIT, FOR = "return waited", "last[step] - start", "for rank, step, start, _ in spans:"
MOMENT = "max(s for _, _, s, _ in spans) - start"
ENDS = "for rank, step, start, end in spans:\n        waited[rank] += end - "
STEPS = "len({step for _, step, _, _ in spans})"
LATENESS = "start - min(other for _, same, other, _ in spans if same == step)"
FINAL = "(last[step] - start) * (step == max(last))"
mutant(f"{FOR}\n        waited[rank] += {WAIT}", f"{ENDS}start", "once the last rank has come, a rank no longer waits")
mutant(f"{FOR}\n        waited[rank] += {WAIT}", f"{ENDS}last[step]", "in which the numbers are summed")
mutant(WAITED, "return {rank: ms for rank, ms in waited.items() if ms}", "the keys are the ranks, here [0, 1]")
mutant(WAIT, LATENESS, "the rank that comes first is the one that waits")
mutant(WAIT, f"({WAIT}) / {STEPS}", "that is the mean of the steps")
mutant(WAIT, FINAL, "one step only")
mutant(WAIT, MOMENT, "until the last start of all steps", cure="among the spans of the same step")
mutant(WAITED, "return list(waited.values())", "expected a dictionary")
mutant(WAITED, 'return {f"rank {rank}": ms for rank, ms in waited.items()}', "the keys are the ranks")
NOTHING = "from its own start to the latest start of any rank"
mutant(WAIT, "0", "from when, and for whom", cure=NOTHING)


test_the_verdict_fits_the_answer = answers.test_of_verdicts()
test_every_exercise_has_right_and_wrong_answers_here = answers.test_of_completeness("tf_data_parallel")


@pytest.mark.processes
def test_a_report_names_no_line_of_the_judge() -> None:
    verdict = check("replica_loss", replica_loss_of_one)
    assert "tf_data_parallel.py" not in str(verdict)
