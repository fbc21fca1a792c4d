"""The exercises of lesson 12: right answers pass, and wrong ones get an explanation."""

from __future__ import annotations

import importlib.util
import os
import signal

import pytest
from answers import Answers, judge

from labkit.teaching.exercises.check import check

pytestmark = pytest.mark.tf
if importlib.util.find_spec("tensorflow") is None:  # found, not imported: the notebook's process runs no TensorFlow
    pytest.skip("needs TensorFlow", allow_module_level=True)

answers = Answers()
right, wrong, mutant = answers.right, answers.wrong, answers.mutant


# plan_epoch


@right("plan_epoch")
def plan_step_by_step(examples, per_replica, devices):
    batch, steps, shares = sum(per_replica for own in devices for _ in range(own)), 0, [0] * len(devices)
    while examples >= batch:
        examples, steps = examples - batch, steps + 1
        shares = [share + per_replica * own for share, own in zip(shares, devices, strict=True)]
    return [batch, steps, shares]


BATCH, FLOOR, SHARES = "per_replica * sum(devices)", "examples // global_batch", "steps * own * per_replica"
PLAN = "return global_batch, steps, shares"
mutant("plan_epoch", BATCH, "per_replica * len(devices)", "one part for each worker", cure="one for each device")
mutant("plan_epoch", FLOOR, f"-(-{FLOOR})", "the last step is not full", cure="round down")
mutant("plan_epoch", FLOOR, "examples / global_batch", "only whole steps count", cure="`//` rounds down")
mutant("plan_epoch", SHARES, "own * per_replica", "these are the examples of one step")
mutant("plan_epoch", SHARES, "steps * per_replica", "as much as one replica", cure="count its devices")
mutant("plan_epoch", SHARES, "examples * own / sum(devices)", "are read by nobody", cure="in each step")
ONE_LIST = "a list with a number for each worker"
mutant("plan_epoch", PLAN, "return global_batch, steps, global_batch * steps", ONE_LIST, cure="in a loop over devices")
mutant("plan_epoch", BATCH, "per_replica", "that is the batch of one replica")
mutant("plan_epoch", PLAN, "return global_batch, float(steps), shares", "all results are whole numbers")
mutant("plan_epoch", PLAN, "return global_batch, steps", "expected three things")
mutant("plan_epoch", BATCH, "per_replica * (sum(devices) + 1)", "which devices take part", cure="the number of all devices")
mutant("plan_epoch", FLOOR, "examples", "how often do the examples fill", cure="examples // the global batch")
mutant("plan_epoch", SHARES, "steps", "how many devices has it?", cure="in each step")


# hybrid_train


@right("hybrid_train")
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


@wrong("hybrid_train", "the replicas never exchanged a gradient", cure="distribute the dataset")
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
SUMMED, AVERAGED = (
    "4 times those of one device: the replicas' losses are summed",
    "0.25 times those of one device: each replica has",
)
TWICE, EVERY_REPLICA = LOSSES.replace("(steps)", "(2 * steps)"), "every replica computed the whole batch"
mutant("hybrid_train", LOSS, f"tf.reduce_mean({SQUARES})", SUMMED, cure="by the global batch")
mutant("hybrid_train", GRADIENT, "gradient", "the replicas have drifted apart", cure="over all replicas")
mutant("hybrid_train", GRADIENT, GRADIENT.replace("SUM", "MEAN"), AVERAGED, cure="sum the gradients")
mutant("hybrid_train", END, NO_NUMBERS, "expected a list of numbers", cure="strategy.reduce")
mutant("hybrid_train", PARTS, "parts", "a per-replica result is no number")
mutant("hybrid_train", PARTS, PARTS.replace("SUM", "MEAN"), "the losses are 0.25 times the expected ones")
mutant("hybrid_train", UPDATE, "pass", "the weight has not changed", cure="assign_sub")
mutant("hybrid_train", LOSSES, TWICE, "exactly `steps` updates")
mutant("hybrid_train", LOSSES, f"{LOSSES}[1:]", "expected a loss for each of the 3 steps, got 2")
mutant("hybrid_train", DISTRIBUTED, "data", "every replica got the whole batch", cure="a quarter of it")
wrong("hybrid_train", EVERY_REPLICA, whole_batches("SUM"), cure="a quarter of it")
wrong("hybrid_train", "never exchanged a gradient", whole_batches("MEAN"), cure="run the step on the strategy")


# run_epochs


@right("run_epochs")
def fetch_all_at_the_end(coordinator, step, batches, epochs):
    import numpy as np

    everything = []
    for _ in range(epochs):
        everything.append([coordinator.schedule(step, args=(batch,)) for batch in batches])
        coordinator.join()
    return list(np.mean(coordinator.fetch(everything), axis=1))


@wrong("run_epochs", "before all batches of this one are done")
def fetch_one_of_an_epoch(coordinator, step, batches, epochs):
    everything = []
    for _ in range(epochs):
        results = [coordinator.schedule(step, args=(batch,)) for batch in batches]
        results[-1].fetch()
        everything.append(results)
    return [sum(float(result.fetch()) for result in results) / len(results) for results in everything]


@wrong("run_epochs", "before all batches of this one are done")
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
mutant("run_epochs", "coordinator.join()", "pass")  # right: `fetch` waits for its result, too
mutant("run_epochs", RESULTS, f"[({CALL}, coordinator.join())[0] for batch in batches]", WAITS, cure=FIRST)
mutant("run_epochs", BODY, FETCHED_EACH, WAITS, cure=FIRST)
mutant("run_epochs", BODY, CHIEF, "nothing was scheduled")
mutant("run_epochs", "coordinator.join()", "step(batches[0])", "the chief also called step itself")
mutant("run_epochs", "in batches]", "in batches[:2]]", "expected 12 scheduled calls, 4 in each epoch, got 6")
mutant("run_epochs", FETCHED, "float(result)", "no number yet: result.fetch()")
mutant("run_epochs", " / len(results)", "", "these are sums", cure="by the number of batches")
mutant("run_epochs", MEAN, "float(results[-1].fetch())", "the losses of the last batch", cure="take the mean over all batches")
mutant("run_epochs", "return means", "return means[0]", "expected a list with one number for each epoch")
mutant("run_epochs", "args=(batch,)", "args=batch", "args is a tuple of arguments: args=(batch,)")


# train_safely


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


COUNT, DUE = "checkpoint.step.assign_add(1)", "if int(checkpoint.step) % every == 0:"
SAVE, LATEST = 'checkpoint.save(folder + "/checkpoint")', "latest = tf.train"
COUNT_AND_SAVE = f"{COUNT}\n        {DUE}\n            {SAVE}"
SAVE_AND_COUNT = f"if (int(checkpoint.step) + 1) % every == 0: {SAVE}\n        {COUNT}"
AT_ZERO, EACH = "the checkpoint says that 0 steps are finished", "it saves after every step, not after every 2"
mutant("train_safely", "if latest:", "if False:", "although the folder has a checkpoint", cure="latest_checkpoint(folder)")
mutant("train_safely", f"{COUNT}\n        {DUE}", "if int(batch) % every == 1:", AT_ZERO, cure="add 1 to checkpoint.step")
mutant("train_safely", "data.skip(finished)", "data", "reads the data from the beginning", cure="data.skip")
mutant("train_safely", COUNT_AND_SAVE, SAVE_AND_COUNT, "batch 3 is trained twice", cure="before you save")
LEFT_OUT = "skip(finished + (finished > 0))"
mutant("train_safely", "skip(finished)", LEFT_OUT, "batch 4 is left out", cure="batches count from 0")
mutant("train_safely", f"    {DUE}\n            {SAVE}", SAVE, "left no checkpoint", cure="not only at the end")
mutant("train_safely", "% every", "% 1", EACH, cure="a multiple of `every`")
mutant(
    "train_safely",
    "every == 0",
    "every == 1",
    "how many are done at that moment?",
    cure="count the step in checkpoint.step first",
)
mutant("train_safely", '"/checkpoint"', '""', "the checkpoints are beside the folder", cure="the folder and a slash")
mutant("train_safely", "take(steps - finished)", "take(steps)", "it makes too many steps", cure="steps - finished")
RESTORED, ONLY_STEP = "is it restored before the first step?", "checkpoint = tf.train.Checkpoint(step=checkpoint.step)"
mutant("train_safely", LATEST, f"{ONLY_STEP}\n    {LATEST}", RESTORED, cure="the weight as well as the step")
mutant("train_safely", LATEST, f"steps = 3\n    {LATEST}", "it never trained batch 5", cure="until `steps` are done")


@pytest.mark.parametrize("answer", answers.parameters())
@pytest.mark.processes
def test_the_verdict_fits_the_answer(answer) -> None:
    judge(answer)


def test_every_exercise_has_right_and_wrong_answers_here() -> None:
    answers.complete("tf_hybrid")


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
