"""The exercises of lesson 12: right answers pass, and wrong ones get an explanation."""

from __future__ import annotations

import importlib.util
import math
import os
import signal

import pytest
from answers import Answers, judge

from labkit.teaching.exercises.check import check

pytestmark = pytest.mark.tf
if importlib.util.find_spec("tensorflow") is None:  # found, not imported: the notebook's process runs no TensorFlow
    pytest.skip("needs TensorFlow", allow_module_level=True)

answers = Answers()
right, wrong = answers.right, answers.wrong

# plan_epoch


@right("plan_epoch")
def plan_epoch(examples, per_replica, devices):
    batch = per_replica * sum(devices)
    steps = examples // batch
    shares = []
    for own in devices:
        shares.append(per_replica * own * steps)
    return batch, steps, shares


@right("plan_epoch")
def plan_step_by_step(examples, per_replica, devices):
    batch, steps, shares = sum(per_replica for own in devices for _ in range(own)), 0, [0] * len(devices)
    while examples >= batch:
        examples, steps = examples - batch, steps + 1
        shares = [share + per_replica * own for share, own in zip(shares, devices, strict=True)]
    return [batch, steps, shares]


@wrong("plan_epoch", "one part for each worker", cure="one for each device")
def plan_of_workers(examples, per_replica, devices):
    batch = per_replica * len(devices)
    return batch, examples // batch, [per_replica * (examples // batch)] * len(devices)


@wrong("plan_epoch", "the last step is not full", cure="round down")
def plan_rounded_up(examples, per_replica, devices):
    batch = per_replica * sum(devices)
    steps = math.ceil(examples / batch)
    return batch, steps, [per_replica * own * steps for own in devices]


@wrong("plan_epoch", "only whole steps count", cure="`//` rounds down")
def plan_of_fractions(examples, per_replica, devices):
    batch = per_replica * sum(devices)
    return batch, examples / batch, [per_replica * own * examples / batch for own in devices]


@wrong("plan_epoch", "these are the examples of one step")
def plan_of_a_step(examples, per_replica, devices):
    batch = per_replica * sum(devices)
    return batch, examples // batch, [per_replica * own for own in devices]


@wrong("plan_epoch", "as much as one replica", cure="count its devices")
def plan_of_equal_workers(examples, per_replica, devices):
    batch = per_replica * sum(devices)
    return batch, examples // batch, [per_replica * (examples // batch) for _ in devices]


@wrong("plan_epoch", "are read by nobody", cure="in each step")
def plan_with_the_rest(examples, per_replica, devices):
    batch = per_replica * sum(devices)
    return batch, examples // batch, [examples * own / sum(devices) for own in devices]


@wrong("plan_epoch", "a list with a number for each worker", cure="in a loop over devices")
def plan_of_one_number(examples, per_replica, devices):
    batch = per_replica * sum(devices)
    return batch, examples // batch, batch * (examples // batch)


@wrong("plan_epoch", "that is the batch of one replica")
def plan_of_a_replica(examples, per_replica, devices):
    return per_replica, examples // per_replica, [per_replica * own for own in devices]


@wrong("plan_epoch", "all results are whole numbers")
def plan_in_floats(examples, per_replica, devices):
    batch, steps, shares = plan_epoch(examples, per_replica, devices)
    return batch, float(steps), shares


# hybrid_train


@right("hybrid_train")
def hybrid_train(strategy, weight, data, global_batch, steps, rate):
    import tensorflow as tf

    def on_replica(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((tf.linalg.matvec(x, weight) - y) ** 2) / global_batch
        gradient = tf.distribute.get_replica_context().all_reduce("SUM", tape.gradient(loss, weight))
        weight.assign_sub(rate * gradient)
        return loss

    step = tf.function(lambda x, y: strategy.reduce("SUM", strategy.run(on_replica, args=(x, y)), axis=None))
    batches = iter(strategy.experimental_distribute_dataset(data))
    return [float(step(*next(batches))) for _ in range(steps)]


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


def training(divide, reduce="SUM", exchange="SUM", distribute=True, times=1):
    """A training with one thing that may be wrong."""

    def train_wrongly(strategy, weight, data, global_batch, steps, rate):
        import tensorflow as tf

        def on_replica(x, y):
            with tf.GradientTape() as tape:
                losses = (tf.linalg.matvec(x, weight) - y) ** 2
                loss = tf.reduce_sum(losses) / global_batch if divide == "global" else tf.reduce_mean(losses)
            gradient = tape.gradient(loss, weight)
            if exchange:
                gradient = tf.distribute.get_replica_context().all_reduce(exchange, gradient)
            if times:
                weight.assign_sub(rate * gradient)
            return loss

        def step(x, y):
            loss = strategy.run(on_replica, args=(x, y))
            return strategy.reduce(reduce, loss, axis=None) if reduce else loss

        batches = iter(strategy.experimental_distribute_dataset(data) if distribute else data)
        losses = [tf.function(step)(*next(batches)) for _ in range(steps * max(1, times))]
        return [float(loss) for loss in losses] if reduce else losses

    return train_wrongly


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


wrong(
    "hybrid_train",
    "4 times those of one device: the replicas' losses are summed",
    training("replica"),
    cure="by the global batch",
)
wrong("hybrid_train", "the replicas have drifted apart", training("global", exchange=""), cure="over all replicas")
wrong(
    "hybrid_train",
    "0.25 times those of one device: each replica has divided",
    training("global", exchange="MEAN"),
    cure="sum the gradients",
)
wrong("hybrid_train", "expected a list of numbers", training("global", reduce=""), cure="strategy.reduce")
wrong("hybrid_train", "the losses are 0.25 times the expected ones", training("global", reduce="MEAN"))
wrong("hybrid_train", "the weight has not changed", training("global", times=0), cure="assign_sub")
wrong("hybrid_train", "exactly `steps` updates", training("global", times=2))
wrong("hybrid_train", "every replica got the whole batch", training("global", distribute=False), cure="a quarter of it")
wrong(
    "hybrid_train",
    "every replica computed the whole batch",
    training("whole", exchange="", distribute=False),
    cure="a quarter of it",
)
value = training("whole", exchange="", distribute=False, reduce="MEAN")
wrong("hybrid_train", "never exchanged a gradient", value, cure="run the step on the strategy")


# run_epochs


@right("run_epochs")
def run_epochs(coordinator, step, batches, epochs):
    means = []
    for _ in range(epochs):
        results = [coordinator.schedule(step, args=(batch,)) for batch in batches]
        coordinator.join()
        means.append(sum(float(result.fetch()) for result in results) / len(results))
    return means


@right("run_epochs")
def fetch_all_at_the_end(coordinator, step, batches, epochs):
    import numpy as np

    everything = []
    for _ in range(epochs):
        everything.append([coordinator.schedule(step, args=(batch,)) for batch in batches])
        coordinator.join()
    return list(np.mean(coordinator.fetch(everything), axis=1))


@right("run_epochs")
def fetch_all_of_an_epoch(coordinator, step, batches, epochs):
    """`fetch` waits for its result, too."""
    means = []
    for _ in range(epochs):
        results = [coordinator.schedule(step, args=(batch,)) for batch in batches]
        means.append(sum(float(result.fetch()) for result in results) / len(results))
    return means


@wrong("run_epochs", "before all batches of this one are done")
def fetch_one_of_an_epoch(coordinator, step, batches, epochs):
    everything = []
    for _ in range(epochs):
        results = [coordinator.schedule(step, args=(batch,)) for batch in batches]
        results[-1].fetch()
        everything.append(results)
    return [sum(float(result.fetch()) for result in results) / len(results) for results in everything]


@wrong("run_epochs", "the chief waits after each call", cure="schedule all batches first")
def join_each(coordinator, step, batches, epochs):
    means = []
    for _ in range(epochs):
        results = []
        for batch in batches:
            results.append(coordinator.schedule(step, args=(batch,)))
            coordinator.join()
        means.append(sum(float(result.fetch()) for result in results) / len(results))
    return means


@wrong("run_epochs", "the chief waits after each call", cure="schedule all batches first")
def fetch_each(coordinator, step, batches, epochs):
    means = []
    for _ in range(epochs):
        means.append(sum(float(coordinator.schedule(step, args=(batch,)).fetch()) for batch in batches) / len(batches))
    return means


@wrong("run_epochs", "before all batches of this one are done")
def join_once(coordinator, step, batches, epochs):
    results = [[coordinator.schedule(step, args=(batch,)) for batch in batches] for _ in range(epochs)]
    coordinator.join()
    return [sum(float(result.fetch()) for result in part) / len(part) for part in results]


@wrong("run_epochs", "nothing was scheduled")
def chief_alone(coordinator, step, batches, epochs):
    return [sum(float(step(batch)) for batch in batches) / len(batches) for _ in range(epochs)]


@wrong("run_epochs", "no number yet: result.fetch()")
def never_fetched(coordinator, step, batches, epochs):
    means = []
    for _ in range(epochs):
        results = [coordinator.schedule(step, args=(batch,)) for batch in batches]
        coordinator.join()
        means.append(sum(float(result) for result in results) / len(results))
    return means


@wrong("run_epochs", "these are sums", cure="by the number of batches")
def epoch_sums(coordinator, step, batches, epochs):
    means = []
    for _ in range(epochs):
        results = [coordinator.schedule(step, args=(batch,)) for batch in batches]
        coordinator.join()
        means.append(sum(float(result.fetch()) for result in results))
    return means


@wrong("run_epochs", "args is a tuple of arguments: args=(batch,)")
def no_tuple(coordinator, step, batches, epochs):
    return [coordinator.schedule(step, args=batch) for batch in batches]


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


wrong("train_safely", "although the folder has a checkpoint", resuming(restore=False), cure="latest_checkpoint(folder)")
wrong("train_safely", "the checkpoint says that 0 steps are finished", resuming(count=""), cure="add 1 to checkpoint.step")
wrong("train_safely", "reads the data from the beginning", resuming(skip=False), cure="data.skip")
wrong("train_safely", "batch 3 is trained twice", resuming(count="after"), cure="before you save")
wrong("train_safely", "left no checkpoint", resuming(save="end"), cure="not only at the end")
wrong("train_safely", "it saves after every step, not after every 2", resuming(save="each"), cure="a multiple of `every`")
wrong("train_safely", "how many are done at that moment?", resuming(save="odd"), cure="count the step in checkpoint.step first")
wrong("train_safely", "the checkpoints are beside the folder", resuming(prefix=""), cure="the folder and a slash")
wrong("train_safely", "it makes too many steps", resuming(more=True), cure="steps - finished")


@wrong("train_safely", "is it restored before the first step?", cure="the weight as well as the step")
def only_the_step(folder, checkpoint, data, train_step, steps, every):
    import tensorflow as tf

    number = tf.train.Checkpoint(step=checkpoint.step)
    train_safely(folder, number, data, train_step, steps, every)


@wrong("train_safely", "it never trained batch 5", cure="until `steps` are done")
def train_a_few(folder, checkpoint, data, train_step, steps, every):
    train_safely(folder, checkpoint, data, train_step, min(steps, 3), every)


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
        return run_epochs(coordinator, step, batches, epochs)

    verdict = check("run_epochs", crashing)
    assert verdict.passed == passed, str(verdict)
    assert ("killed by SIGSEGV" in verdict.message) == (not passed)
    assert len(runs.read_text().split()) == 2
