"""Reports about ranks that wait inside TensorFlow for ever: in which call, collective or start, and for whom."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import pytest
from reported import Reported

import labkit as lab
from labkit.errors.exit_reasons import Cause
from labkit.group.deadlock import Reason
from labkit.recording.group_keys import TENSORFLOW
from labkit.worker.runtimes.tensorflow.runtime import TensorFlow

pytestmark = [pytest.mark.processes, pytest.mark.tf]
if importlib.util.find_spec("tensorflow") is None:  # found, not imported: the notebook's process runs no TensorFlow
    pytest.skip("needs TensorFlow", allow_module_level=True)


@pytest.fixture(scope="module")
def two() -> Iterator[lab.Group]:
    with lab.Group(2, runtime="tensorflow", timeout_s=200) as group:
        yield group


def leave_alone(where: str) -> None:
    """Rank 1 returns before the others have finished."""
    import tensorflow as tf

    leaves = os.environ["RANK"] == "1"
    if where == "start" and leaves:
        return
    strategy = tf.distribute.MultiWorkerMirroredStrategy()

    @tf.function
    def step() -> Any:
        return strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", tf.constant(1.0)))

    @tf.function
    def train_twice() -> Any:
        return step() + step()

    train_twice()
    if not leaves:
        train_twice()


@pytest.mark.parametrize(
    ("where", "name"),
    [
        ("start", "TensorFlow's MultiWorkerMirroredStrategy (until all ranks have started their servers)"),
        ("graph", "TensorFlow's train_twice"),
    ],
)
def test_an_abandoned_rank_says_what_it_waits_in(
    two: lab.Group, monkeypatch: pytest.MonkeyPatch, reported: Reported, where: str, name: str
) -> None:
    monkeypatch.setattr(TensorFlow, "certain_after_s", 1.0)
    with pytest.raises(lab.RankError) as caught:
        two.run(leave_alone, where)
    assert [(failure.rank, failure.cause) for failure in caught.value.failures] == [(1, Cause.DEADLOCK)]
    assert reported.deadlock() == (Reason.RETURNED, [(0, name)])
    assert {operation.group for _, operation in reported.deadlocks[-1].waits} == {TENSORFLOW}
    assert all(line.startswith("test_tf_waits.py, line") for line in reported.lines())


def keras_on_one_worker_alone(what: str) -> None:
    """The workers train together; then worker 0 evaluates, predicts, or trains for another epoch."""
    import keras
    import numpy as np
    import tensorflow as tf

    first = os.environ["RANK"] == "0"
    with tf.distribute.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensor_slices((np.ones((16, 3)), np.ones((16, 2)))).batch(8)
    model.fit(data, epochs=1 + (first and what == "fit"), verbose=0)
    if first and what == "evaluate":
        model.evaluate(data, verbose=0)
    if first and what == "predict":
        model.predict(np.ones((8, 3)), verbose=0)


@pytest.mark.parametrize("what", ["fit", "evaluate", "predict"])
def test_keras_on_one_worker_alone_is_a_deadlock(
    two: lab.Group, monkeypatch: pytest.MonkeyPatch, reported: Reported, what: str
) -> None:
    """A thread of TensorFlow's waits in the collective, and the main thread for that thread."""
    monkeypatch.setattr(TensorFlow, "certain_after_s", 1.0)
    with pytest.raises(lab.RankError) as caught:
        two.run(keras_on_one_worker_alone, what)
    assert [(failure.rank, failure.cause) for failure in caught.value.failures] == [(1, Cause.DEADLOCK)]
    assert reported.deadlock() == (Reason.RETURNED, [(0, f"TensorFlow's TensorFlowTrainer.{what}")])
