"""Small programs for a TensorFlow that lacks some private names: `python tensorflow_internals_program.py NAME...`.

For each NAME of an entry of labkit's table, they print what the ranks return and what is recorded, as a line of JSON.
In the ranks, `sitecustomize` takes the names of that entry out of the table, as if TensorFlow had renamed them. It does
so when a rank is set up, so that the server that has imported TensorFlow can start ranks for each entry.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import labkit as lab

HIDE = """
import os
from labkit.worker.runtimes.tensorflow import runtime, tensorflow_internals
set_up = runtime.TensorFlow.set_up
def hide_and_set_up(rank, offers):
    with open(os.environ["GONE"]) as file:
        entry = getattr(tensorflow_internals, file.read())
    entry.paths = dict.fromkeys(entry.paths, "tensorflow:gone")
    return set_up(rank, offers)
runtime.TensorFlow.set_up = hide_and_set_up
"""


def missing() -> list[str]:
    """Return what this rank lacks."""
    from labkit.worker.runtimes.tensorflow.tensorflow_internals import lost

    return lost()


def train() -> tuple[Any, ...]:
    """Sums over batches of a distributed dataset, in a tf.function with a loop, on all replicas."""
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        weight = tf.Variable(2.0)

    @tf.function
    def step(batch):  # AutoGraph cannot read annotations
        total = 0.0
        for _ in tf.range(3):
            parts = strategy.run(lambda x: tf.reduce_sum(x * weight), args=(batch,))
            total += strategy.reduce("SUM", parts, axis=None)
        with lab.span("scale"):
            return total / 3

    data = tf.data.Dataset.from_tensors(tf.ones(8)).repeat(16).batch(4)
    sums = [float(step(batch)) for batch in strategy.experimental_distribute_dataset(data)]
    return missing(), strategy.num_replicas_in_sync, sum(sums)


def save() -> tuple[Any, ...]:
    """Save a model of Keras in a folder of this rank's own."""
    import keras

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with tempfile.TemporaryDirectory() as folder:
        model.save(f"{folder}/model.keras")
        size = len(keras.models.load_model(f"{folder}/model.keras").weights)
    keras.distribution.set_distribution(None)
    return missing(), size


def coordinate() -> tuple[Any, ...]:
    """As the chief: let a worker compute with a variable on a parameter server."""
    import tensorflow as tf

    strategy = tf.distribute.ParameterServerStrategy(tf.distribute.cluster_resolver.TFConfigClusterResolver())
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        variable = tf.Variable(2.0)
    doubled = coordinator.schedule(tf.function(lambda: 2 * variable))
    coordinator.join()
    return missing(), float(doubled.fetch())


def read() -> tuple[Any, ...]:
    """Read from tf.data's service, and use two devices of this rank."""
    import tensorflow as tf

    service = tf.data.experimental.service
    dispatcher = service.DispatchServer()
    address = dispatcher.target.partition("://")[2]
    worker = service.WorkerServer(service.WorkerConfig(dispatcher_address=address))
    shared = tf.data.Dataset.range(5).apply(service.distribute("parallel_epochs", dispatcher.target))
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    total = sum(shared.as_numpy_iterator())
    del worker
    return missing(), strategy.num_replicas_in_sync, int(total)


def recorded(run: lab.Run) -> list[str]:
    """Return the names of all spans, without lines and numbers, with their bytes."""
    return sorted({f"{span.name.split(',')[0]} {span.nbytes or ''}".strip() for span in run.trace})


def run_what_concerns(name: str) -> lab.Run:
    """Run the program that the entry of this name may concern."""
    if name in ("CLUSTER", "PARAMETER_SERVERS"):
        with lab.Group({"chief": 1, "worker": 1, "ps": 1}, runtime="tensorflow", timeout_s=200) as group:
            return group["chief"].run(coordinate)
    with lab.Group(2, runtime="tensorflow", devices_per_rank=2, timeout_s=200) as group:
        if name in ("FILES", "DISTRIBUTION"):
            return group[0].run(save)
        if name in ("DATA_SERVICE", "MIRRORED"):
            return group[0].run(read)
        return group.run(train)


def main(names: list[str]) -> None:
    """Report on each entry."""
    for name in names:
        Path(os.environ["GONE"]).write_text(name)
        try:
            with contextlib.redirect_stdout(io.StringIO()) as said:
                run = run_what_concerns(name)
            report = {"results": run.results, "recorded": recorded(run), "said": said.getvalue()}
        except Exception as error:  # noqa: BLE001  # the other entries have their turn, too
            report = {"error": str(error)}
        print(json.dumps({"name": name} | report), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("LABKIT_SLOW_S", "180")
    main(sys.argv[1:])
