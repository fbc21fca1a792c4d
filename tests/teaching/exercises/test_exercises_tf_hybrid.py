"""The exercises of lesson 12: right answers pass, and wrong ones get an explanation."""

from __future__ import annotations

import importlib.util
import os
import signal

import pytest
from answers import Answers

from labkit.teaching.exercises.check import check

pytestmark = pytest.mark.tf
if importlib.util.find_spec("tensorflow") is None:  # found, not imported: the notebook's process runs no TensorFlow
    pytest.skip("needs TensorFlow", allow_module_level=True)

answers = Answers()

right, wrong, mutant = answers.of("plan_epoch")


@right
def plan_step_by_step(examples, per_replica, devices):
    batch, steps, shares = sum(per_replica for own in devices for _ in range(own)), 0, [0] * len(devices)
    while examples >= batch:
        examples, steps = examples - batch, steps + 1
        shares = [share + per_replica * own for share, own in zip(shares, devices, strict=True)]
    return [batch, steps, shares]


BATCH, FLOOR, SHARES = "per_replica * sum(devices)", "examples // global_batch", "steps * own * per_replica"
PLAN = "return global_batch, steps, shares"
mutant(BATCH, "per_replica * len(devices)", "one part for each worker", cure="one for each device")
mutant(FLOOR, f"-(-{FLOOR})", "the last step is not full", cure="round down")
mutant(FLOOR, "examples / global_batch", "only whole steps count", cure="`//` rounds down")
mutant(SHARES, "own * per_replica", "these are the examples of one step")
mutant(SHARES, "steps * per_replica", "as much as one replica", cure="count its devices")
mutant(SHARES, "examples * own / sum(devices)", "are read by nobody", cure="in each step")
ONE_LIST = "a list with a number for each worker"
mutant(PLAN, "return global_batch, steps, global_batch * steps", ONE_LIST, cure="in a loop over devices")
mutant(BATCH, "per_replica", "that is the batch of one replica")
mutant(PLAN, "return global_batch, float(steps), shares", "all results are whole numbers")
mutant(PLAN, "return global_batch, steps", "expected three things")
mutant(BATCH, "per_replica * (sum(devices) + 1)", "which devices take part", cure="the number of all devices")
mutant(FLOOR, "examples", "how often do the examples fill", cure="examples // the global batch")
mutant(SHARES, "steps", "how many devices has it?", cure="in each step")


right, wrong, mutant = answers.of("hybrid_train")


@right
def hybrid_across_replicas(strategy, weight, data, global_batch, steps, rate):
    import tensorflow as tf

    def on_replica(x, y):
        rest = tf.linalg.matvec(x, weight) - y
        return tf.reduce_sum(rest**2) / global_batch, 2 * tf.linalg.matvec(x, rest, transpose_a=True) / global_batch

    @tf.function
    def step(x, y):
        loss, gradient = strategy.run(on_replica, args=(x, y))
        total = strategy.reduce("SUM", gradient, axis=None)
        weight.assign_sub(rate * total)
        return strategy.reduce("SUM", loss, axis=None)

    losses = []
    for x, y in strategy.experimental_distribute_dataset(data.take(steps)):
        losses.append(step(x, y).numpy())
    return losses


@wrong("the replicas never exchanged a gradient", cure="distribute the dataset")
def every_worker_computes_the_whole_batch(strategy, weight, data, global_batch, steps, rate):
    import tensorflow as tf

    losses = []
    for x, y in data.take(steps):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.linalg.matvec(x, weight) - y) ** 2)
        weight.assign_sub(rate * tape.gradient(loss, weight))
        losses.append(float(loss))
    return losses


def whole_batches(reduce):
    def every_replica_computes_the_whole_batch(strategy, weight, data, global_batch, steps, rate):
        import tensorflow as tf

        def on_replica(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((tf.linalg.matvec(x, weight) - y) ** 2)
            weight.assign_sub(rate * tape.gradient(loss, weight))
            return loss

        def step(x, y):
            return strategy.reduce(reduce, strategy.run(on_replica, args=(x, y)), axis=None)

        return [float(tf.function(step)(*batch)) for batch in data.take(steps)]

    return every_replica_computes_the_whole_batch


SQUARES = "(tf.linalg.matvec(x, weight) - y) ** 2"
LOSS, UPDATE = f"tf.reduce_sum({SQUARES}) / global_batch", "weight.assign_sub(rate * gradient)"
GRADIENT = 'tf.distribute.get_replica_context().all_reduce("SUM", gradient)'
PARTS, LOSSES = 'strategy.reduce("SUM", parts, axis=None)', "[float(step(*next(batches))) for _ in range(steps)]"
DISTRIBUTED = "strategy.experimental_distribute_dataset(data)"
END = f"return {PARTS}\n    batches = iter({DISTRIBUTED})\n    return {LOSSES}"
NO_NUMBERS = END.replace(PARTS, "parts").replace("float", "")
SUMMED = "4 times those of one device: the replicas' losses are summed"
AVERAGED = "0.25 times those of one device: each replica has"
TWICE, EVERY_REPLICA = LOSSES.replace("(steps)", "(2 * steps)"), "every replica computed the whole batch"
mutant(LOSS, f"tf.reduce_mean({SQUARES})", SUMMED, cure="by the global batch")
mutant(GRADIENT, "gradient", "the replicas have drifted apart", cure="over all replicas")
mutant(GRADIENT, GRADIENT.replace("SUM", "MEAN"), AVERAGED, cure="sum the gradients")
mutant(END, NO_NUMBERS, "expected a list of numbers", cure="strategy.reduce")
mutant(PARTS, "parts", "a per-replica result is no number")
mutant(PARTS, PARTS.replace("SUM", "MEAN"), "the losses are 0.25 times the expected ones")
mutant(UPDATE, "pass", "the weight has not changed", cure="assign_sub")
mutant(LOSSES, TWICE, "exactly `steps` updates")
mutant(LOSSES, f"{LOSSES}[1:]", "expected a loss for each of the 3 steps, got 2")
mutant(DISTRIBUTED, "data", "every replica got the whole batch", cure="a quarter of it")
wrong(EVERY_REPLICA, whole_batches("SUM"), cure="a quarter of it")
wrong("never exchanged a gradient", whole_batches("MEAN"), cure="run the step on the strategy")


right, wrong, mutant = answers.of("run_epochs")


@right
def fetch_all_at_the_end(coordinator, step, batches, epochs):
    import numpy as np

    everything = []
    for _ in range(epochs):
        everything.append([coordinator.schedule(step, args=(batch,)) for batch in batches])
        coordinator.join()
    return list(np.mean(coordinator.fetch(everything), axis=1))


@wrong("before all batches of this one are done")
def fetch_one_of_an_epoch(coordinator, step, batches, epochs):
    everything = []
    for _ in range(epochs):
        results = [coordinator.schedule(step, args=(batch,)) for batch in batches]
        results[-1].fetch()
        everything.append(results)
    return [sum(float(result.fetch()) for result in results) / len(results) for results in everything]


@wrong("before all batches of this one are done")
def join_once(coordinator, step, batches, epochs):
    results = [[coordinator.schedule(step, args=(batch,)) for batch in batches] for _ in range(epochs)]
    coordinator.join()
    return [sum(float(result.fetch()) for result in part) / len(part) for part in results]


CALL, FETCHED = "coordinator.schedule(step, args=(batch,))", "float(result.fetch())"
RESULTS, MEAN = f"[{CALL} for batch in batches]", f"sum({FETCHED} for result in results) / len(results)"
BODY = f"results = {RESULTS}\n        coordinator.join()\n        means.append({MEAN})"
FETCHED_EACH = f"means.append(sum(float({CALL}.fetch()) for batch in batches) / len(batches))"
CHIEF = "means.append(sum(float(step(batch)) for batch in batches) / len(batches))"
WAITS, FIRST = "the chief waits after each call", "schedule all batches first"
mutant("coordinator.join()", "pass")  # right: `fetch` waits for its result, too
mutant(RESULTS, f"[({CALL}, coordinator.join())[0] for batch in batches]", WAITS, cure=FIRST)
mutant(BODY, FETCHED_EACH, WAITS, cure=FIRST)
mutant(BODY, CHIEF, "nothing was scheduled")
mutant("coordinator.join()", "step(batches[0])", "the chief also called step itself")
mutant("in batches]", "in batches[:2]]", "expected 12 scheduled calls, 4 in each epoch, got 6")
mutant(FETCHED, "float(result)", "no number yet: result.fetch()")
mutant(" / len(results)", "", "these are sums", cure="by the number of batches")
mutant(MEAN, "float(results[-1].fetch())", "the losses of the last batch", cure="take the mean over all batches")
mutant("return means", "return means[0]", "expected a list with one number for each epoch")
mutant("args=(batch,)", "args=batch", "args is a tuple of arguments: args=(batch,)")


right, wrong, mutant = answers.of("train_safely")


@right
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


COUNT, DUE = "checkpoint.step.assign_add(1)", "if int(checkpoint.step) % every == 0:"
SAVE, LATEST = 'checkpoint.save(folder + "/checkpoint")', "latest = tf.train"
COUNT_AND_SAVE = f"{COUNT}\n        {DUE}\n            {SAVE}"
SAVE_AND_COUNT = f"if (int(checkpoint.step) + 1) % every == 0: {SAVE}\n        {COUNT}"
AT_ZERO, EACH = "the checkpoint says that 0 steps are finished", "it saves after every step, not after every 2"
mutant("if latest:", "if False:", "although the folder has a checkpoint", cure="latest_checkpoint(folder)")
mutant(f"{COUNT}\n        {DUE}", "if int(batch) % every == 1:", AT_ZERO, cure="add 1 to checkpoint.step")
mutant("data.skip(finished)", "data", "reads the data from the beginning", cure="data.skip")
mutant(COUNT_AND_SAVE, SAVE_AND_COUNT, "batch 3 is trained twice", cure="before you save")
LEFT_OUT = "skip(finished + (finished > 0))"
mutant("skip(finished)", LEFT_OUT, "batch 4 is left out", cure="batches count from 0")
mutant(f"    {DUE}\n            {SAVE}", SAVE, "left no checkpoint", cure="not only at the end")
mutant("% every", "% 1", EACH, cure="a multiple of `every`")
mutant("every == 0", "every == 1", "how many are done at that moment?", cure="count the step in checkpoint.step first")
mutant('"/checkpoint"', '""', "the checkpoints are beside the folder", cure="the folder and a slash")
mutant("take(steps - finished)", "take(steps)", "it makes too many steps", cure="steps - finished")
RESTORED, ONLY_STEP = "is it restored before the first step?", "checkpoint = tf.train.Checkpoint(step=checkpoint.step)"
mutant(LATEST, f"{ONLY_STEP}\n    {LATEST}", RESTORED, cure="the weight as well as the step")
mutant(LATEST, f"steps = 3\n    {LATEST}", "it never trained batch 5", cure="until `steps` are done")


test_the_verdict_fits_the_answer = answers.test_of_verdicts()
test_every_exercise_has_right_and_wrong_answers_here = answers.test_of_completeness("tf_hybrid")


@pytest.mark.parametrize(("crashes", "passed"), [(1, True), (2, False)])
def test_a_crash_of_tensorflow_is_no_wrong_answer(crashes, passed, tmp_path) -> None:
    """A crash that does not happen again is not the student's; one that does is reported."""
    runs = tmp_path / "runs"

    def crashing(coordinator, step, batches, epochs):
        with runs.open("a") as file:
            file.write("one\n")
        if len(runs.read_text().split()) <= crashes:
            os.kill(os.getpid(), signal.SIGSEGV)
        return fetch_all_at_the_end(coordinator, step, batches, epochs)

    verdict = check("run_epochs", crashing)
    assert verdict.passed == passed, str(verdict)
    assert ("killed by SIGSEGV" in verdict.message) == (not passed)
    assert len(runs.read_text().split()) == 2
