"""Defects of TensorFlow and Keras that ranks patch: with the patch, results equal one device's; without it, the
defect shows."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import labkit as lab
from labkit.worker.runtimes.tensorflow import patches, tensorflow_internals

pytestmark = [pytest.mark.processes, pytest.mark.tf]
if importlib.util.find_spec("tensorflow") is None:  # found, not imported: the notebook's process runs no TensorFlow
    pytest.skip("needs TensorFlow", allow_module_level=True)

TIMEOUT_S = 200
BATCH, STEPS, EPOCHS = 8, 2, 2


@pytest.fixture(scope="module")
def group() -> Iterator[lab.Group]:
    """Two workers with two logical CPUs each."""
    with lab.Group(2, runtime="tensorflow", devices_per_rank=2, timeout_s=TIMEOUT_S) as group:
        yield group


def without(patch: str, name: str) -> None:
    """In a rank: undo a patch."""
    entry = getattr(tensorflow_internals, patch)
    entry.set(name, entry[name].__wrapped__)


def fit(kind: str, *missing: str) -> dict[str, Any]:
    """Keras' whole loop on a model that is not built before; returns its results."""
    import keras
    import tensorflow as tf

    if missing:
        without(*missing)
    keras.backend.set_floatx("float64")
    keras.utils.set_random_seed(1)
    workers = kind == "workers"
    strategy = tf.distribute.MultiWorkerMirroredStrategy() if workers else tf.distribute.OneDeviceStrategy("/cpu:0")
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.05), loss, metrics=["accuracy"])
    random = np.random.RandomState(0)
    images, labels = random.standard_normal((BATCH * STEPS, 5)), random.randint(0, 3, BATCH * STEPS)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    data = tf.data.Dataset.from_tensor_slices((images, labels)).batch(BATCH, drop_remainder=True).with_options(options)
    history = model.fit(data, epochs=EPOCHS, shuffle=False, verbose=0).history
    return {
        "replicas": strategy.num_replicas_in_sync,
        "history": [history["loss"], history["accuracy"]],
        "evaluated": model.evaluate(data, verbose=0),
        "predicted": model.predict(data.map(lambda x, _: x), verbose=0),
        "weights": np.concatenate([v.numpy().ravel() for v in model.trainable_variables]),
    }


def test_keras_trains_evaluates_and_predicts_on_all_replicas_as_on_one_device(group: lab.Group) -> None:
    (serial,) = group[0].run(fit, "one").results
    for parallel in group.run(fit, "workers").results:
        assert (serial["replicas"], parallel["replicas"]) == (1, 4)
        for what in ("history", "evaluated", "predicted", "weights"):
            assert np.abs(np.array(parallel[what]) - np.array(serial[what])).max() < 1e-13, what


def replicas(*missing: str) -> int:
    import tensorflow as tf

    if missing:
        without(*missing)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    total = strategy.reduce("SUM", tf.function(lambda: strategy.run(lambda: tf.constant(1)))(), axis=None)
    assert int(total) == strategy.num_replicas_in_sync
    return int(total)


@pytest.mark.slow
def test_a_program_that_needs_patches_is_told_so_once(group: lab.Group, capsys: pytest.CaptureFixture[str]) -> None:
    group._announced.clear()
    for _ in range(2):
        group.run(fit, "workers")
    said = [line.removeprefix("labkit: ") for line in capsys.readouterr().out.splitlines() if "only because labkit" in line]
    assert sorted(said) == sorted([patches.FITS, patches.USES_ALL])


def test_without_the_patch_a_worker_uses_one_of_its_cpus(group: lab.Group, capsys: pytest.CaptureFixture[str]) -> None:
    assert group.run(replicas).results == [4, 4]
    group._announced.clear()
    assert group.run(replicas, "LOGICAL_CPUS", "_initialize_local_devices").results == [2, 2]
    assert "only because labkit" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "words"),
    [("_maybe_symbolic_build", "Attempt to convert a value (PerReplica"), ("reduce_per_replica", "reduction")],
)
def test_without_its_patch_keras_fails(group: lab.Group, name: str, words: str) -> None:
    with pytest.raises(lab.RankError) as caught:
        group.run(fit, "workers", "FIT", name)
    assert words in caught.value.failures[0].headline


def unknown_code() -> tuple[list[str], bool]:
    """The notice if Keras and TensorFlow are not as known, and whether they were left unchanged."""
    fit, cpus = tensorflow_internals.FIT, tensorflow_internals.LOGICAL_CPUS
    trainer = sys.modules["keras.src.backend.tensorflow.trainer"]
    new = trainer.reduce_per_replica = lambda values, *_: values
    cpus.paths = {"_initialize_local_devices": "tensorflow:gone"}
    del fit.found, cpus.found
    return patches.work_around_bugs_of_strategies(print), trainer.reduce_per_replica is new


def test_unknown_code_is_left_alone_with_a_notice(group: lab.Group) -> None:
    ((notes, untouched),) = group[0].run(unknown_code).results
    assert untouched
    assert [note.split(": labkit has no workaround for ")[0] for note in notes] == [
        "devices_per_rank under MultiWorkerMirroredStrategy",
        "Keras's fit under MultiWorkerMirroredStrategy",
    ]


# DTensor and placement over ranks


def sum_on_a_mesh() -> tuple[float, int, list[str]]:
    """As in TensorFlow's DTensor tutorials: a 2 × 2 mesh over all ranks, and a sum over all of it."""
    import tensorflow as tf
    from tensorflow.experimental import dtensor

    dtensor.initialize_accelerator_system("CPU")
    mesh = dtensor.create_distributed_mesh([("batch", 2), ("model", 2)], device_type="CPU")
    layout = dtensor.Layout(["batch", "model"], mesh)
    ones = dtensor.call_with_layout(tf.function(lambda: tf.ones((4, 4))), layout)
    return float(tf.reduce_sum(ones)), dtensor.num_clients(), [str(part.shape) for part in dtensor.unpack(ones)]


def test_a_mesh_of_dtensors_spans_the_ranks(group: lab.Group) -> None:
    assert group.run(sum_on_a_mesh).results == [(16.0, 2, ["(2, 2)"] * 2)] * 2


def multiply_on_the_other_rank() -> tuple[str, float]:
    """Placement with `tf.device`: rank 1 serves, rank 0 computes on it."""
    import json
    import os

    import tensorflow as tf

    cluster = tf.train.ClusterSpec(json.loads(os.environ["TF_CONFIG"])["cluster"])
    if os.environ["RANK"] == "1":
        tf.distribute.Server(cluster, job_name="worker", task_index=1).join()
    tf.config.experimental_connect_to_cluster(cluster, job_name="worker", task_index=0)
    with tf.device("/job:worker/task:1/cpu:0"):
        product = tf.ones((2, 3)) @ tf.ones((3, 2))
    return product.device, float(product[0, 0])


def test_a_rank_computes_on_a_device_of_another(group: lab.Group) -> None:
    assert group.run(multiply_on_the_other_rank).results == [("/job:worker/replica:0/task:1/device:CPU:0", 3.0), None]


# Several devices intended, one used


def mean_several_devices() -> list[int]:
    import keras
    import tensorflow as tf

    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=["cpu:0"]))
    strategies = [tf.distribute.MirroredStrategy(), tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])]
    return [strategy.num_replicas_in_sync for strategy in strategies]


def test_keras_distribution_says_that_it_does_nothing_and_a_mirrored_strategy_takes_all_devices(group: lab.Group) -> None:
    run = group[0].run(mean_several_devices)
    assert run.results == [[2, 2]]
    assert run.output.count("keras.distribution does nothing on the TensorFlow backend") == 1
