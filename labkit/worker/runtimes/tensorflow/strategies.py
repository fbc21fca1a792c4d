"""Workarounds for bugs of TensorFlow and Keras under MultiWorkerMirroredStrategy.

Code that differs from the known versions is not changed, and a note tells the student. So does a note, once, where a
program only works because of a workaround: elsewhere it would fail, or use one CPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from labkit.worker.runtimes.tensorflow import callbacks
from labkit.worker.runtimes.tensorflow.tensorflow_internals import DISTRIBUTION, FILES, FIT, LOGICAL_CPUS

USES_ALL: Final = (
    "MultiWorkerMirroredStrategy uses all CPUs of a rank only because labkit patches it; elsewhere it uses one per process."
)
FITS: Final = (
    "Keras's fit and evaluate work under MultiWorkerMirroredStrategy only because labkit patches Keras; elsewhere they fail "
    "(keras-team/keras#20585): write the loop yourself, or use tf_keras."
)


def apply(say: Callable[[str], None]) -> list[str]:
    """Patch TensorFlow and Keras in this process. Call it once, before the student's code runs.

    Args:
        say: called with a note where a workaround takes effect.

    Returns:
        a sentence for each workaround that does not fit the installed code.
    """
    import keras
    import tensorflow as tf

    if DISTRIBUTION.apply(set_distribution=_warn_and_set):
        keras.distribution.set_distribution = DISTRIBUTION["set_distribution"]
    LOGICAL_CPUS.apply(_initialize_local_devices=partial(_use_all_logical_cpus, say))
    FIT.apply(_maybe_symbolic_build=partial(_build_from_own_batch, say), reduce_per_replica=_average_over_replicas)
    callbacks.apply(say)
    versions = {
        LOGICAL_CPUS: f"TensorFlow {tf.__version__}",
        FIT: f"Keras {keras.__version__}",
        FILES: f"Keras {keras.__version__}",
    }
    return [
        f"{entry.lost}: labkit has no workaround for {version}; this may fail."
        for entry, version in versions.items()
        if not entry.found
    ]


def _warn_and_set(set_distribution: Callable[..., None], value: Any) -> None:
    """Warn about `keras.distribution`, which on the TensorFlow backend silently computes on one device."""
    import keras

    if value is not None and keras.backend.backend() == "tensorflow":
        warnings.warn("keras.distribution does nothing on the TensorFlow backend: use tf.distribute or DTensor", stacklevel=3)
    set_distribution(value)


def _use_all_logical_cpus(
    say: Callable[[str], None], initialize: Callable[..., Any], extended: Any, cluster_resolver: Any, worker_device: str
) -> tuple[tuple[str, ...], str]:
    """Make the strategy use all logical CPUs; without GPUs it uses only CPU:0."""
    import tensorflow as tf

    devices, kind = initialize(extended, cluster_resolver, worker_device)
    logical = tf.config.get_logical_device_configuration(tf.config.list_physical_devices("CPU")[0]) or ()
    if kind == "CPU" and len(devices) < len(logical):
        say(USES_ALL)
        devices = tuple(f"{worker_device}/device:CPU:{i}" for i in range(len(logical)))
    return devices, kind


def _build_from_own_batch(
    say: Callable[[str], None], build: Callable[..., Any], trainer: Any, iterator: Any = None, data_batch: Any = None
) -> Any:
    """Make Keras build a model from a local batch; it averages one over all replicas, which several workers cannot."""
    from keras import tree

    strategy = trainer.distribute_strategy
    if not callbacks.has_other_workers(strategy):
        return build(trainer, iterator=iterator, data_batch=data_batch)
    say(FITS)
    for _, _, batches in iterator or ():
        data_batch = tree.map_structure(lambda part: strategy.experimental_local_results(part)[0], next(batches))
        break
    with strategy.scope():
        FIT.of(trainer, "_symbolic_build")(data_batch=data_batch)
    return None


def _average_over_replicas(reduce: Callable[..., Any], values: Any, strategy: Any, reduction: str) -> Any:
    """Make Keras average the results of a step over replicas without an axis, since they are scalars."""
    from keras import tree

    operation = {"auto": "MEAN", "mean": "MEAN", "sum": "SUM"}.get(reduction)
    if operation is None or not callbacks.has_other_workers(strategy):
        return reduce(values, strategy, reduction)
    return tree.map_structure(lambda value: strategy.reduce(operation, value, axis=None), values)
