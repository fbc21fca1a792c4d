"""Workarounds for bugs of TensorFlow and Keras under MultiWorkerMirroredStrategy, with the versions that have them.

- TensorFlow 2.21: a worker computes on one CPU, even if it has several logical CPUs. No issue is known. Remove the
  workaround when a worker uses all of them; from then on it has no effect.
- Keras 3.15.1, keras-team/keras#20585: `fit` and `evaluate` fail with "Attempt to convert a value (PerReplica...", and
  then because they average a scalar along axis 0. Remove the two workarounds when the issue is closed.

Code that differs from these versions is not changed, and a note tells the student. So does a note, once, where a
program only works because of a workaround: elsewhere it would fail, or use one CPU.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final

from labkit.worker.runtimes.tensorflow import callbacks

__all__ = ["apply"]

DEVICES: Final = "_initialize_local_devices"  # method of CollectiveAllReduceExtended
BUILD: Final = "_maybe_symbolic_build"  # method of TensorFlowTrainer
REDUCE: Final = "reduce_per_replica"  # function in the same module
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
    from keras.src.backend.tensorflow import trainer
    from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceExtended

    _warn_where_one_device_computes()
    notes = []
    if hasattr(CollectiveAllReduceExtended, DEVICES):
        _use_all_logical_cpus(CollectiveAllReduceExtended, say)
    else:
        notes.append(_unknown("devices_per_rank under MultiWorkerMirroredStrategy", "TensorFlow", tf.__version__))
    build = getattr(getattr(trainer, "TensorFlowTrainer", None), BUILD, None)
    reduce = getattr(trainer, REDUCE, None)
    if build is not None and reduce is not None and {"reduce", "MEAN"} <= _words(build) and {"MEAN", 0} <= _words(reduce):
        _build_from_own_batch(trainer.TensorFlowTrainer, say)
        _average_over_replicas(trainer)
    else:
        notes.append(_unknown("Keras's fit under MultiWorkerMirroredStrategy", "Keras", keras.__version__))
    if not callbacks.apply(say):
        notes.append(_unknown("Keras's files under MultiWorkerMirroredStrategy", "Keras", keras.__version__))
    return notes


def _unknown(feature: str, package: str, version: str) -> str:
    return f"{feature}: labkit has no workaround for {package} {version}; this may fail."


def _words(function: Any) -> set[Any]:
    """Return the names and constants in a function and in the functions that it defines."""

    def within(code: types.CodeType) -> Iterator[Any]:
        yield from code.co_names
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                yield from within(constant)
            elif isinstance(constant, (str, int)):
                yield constant

    return set(within(function.__code__))


def _in_multi_worker_mode(strategy: Any) -> bool:
    import tensorflow as tf

    return isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy) and strategy.extended._in_multi_worker_mode()


def _warn_where_one_device_computes() -> None:
    """Warn about `keras.distribution`, which on the TensorFlow backend silently computes on one device."""
    import keras
    from keras.src.distribution import distribution_lib

    set_distribution = distribution_lib.set_distribution

    @functools.wraps(set_distribution)
    def set_and_warn(value: Any) -> None:
        if value is not None and keras.backend.backend() == "tensorflow":
            warnings.warn("keras.distribution does nothing on the TensorFlow backend: use tf.distribute or DTensor", stacklevel=2)
        set_distribution(value)

    distribution_lib.set_distribution = keras.distribution.set_distribution = set_and_warn


def _use_all_logical_cpus(extended: Any, say: Callable[[str], None]) -> None:
    """Make the strategy use all logical CPUs; without GPUs it uses only CPU:0."""
    original = getattr(extended, DEVICES)

    @functools.wraps(original)
    def initialize_local_devices(self: Any, cluster_resolver: Any, worker_device: str) -> tuple[tuple[str, ...], str]:
        import tensorflow as tf

        devices, kind = original(self, cluster_resolver, worker_device)
        logical = tf.config.get_logical_device_configuration(tf.config.list_physical_devices("CPU")[0]) or ()
        if kind == "CPU" and len(devices) < len(logical):
            say(USES_ALL)
            devices = tuple(f"{worker_device}/device:CPU:{i}" for i in range(len(logical)))
        return devices, kind

    setattr(extended, DEVICES, initialize_local_devices)


def _build_from_own_batch(trainer: Any, say: Callable[[str], None]) -> None:
    """Make Keras build a model from a local batch; it averages one over all replicas, which several workers cannot."""
    original = getattr(trainer, BUILD)

    @functools.wraps(original)
    def maybe_symbolic_build(self: Any, iterator: Any = None, data_batch: Any = None) -> Any:
        from keras import tree

        strategy = self._distribute_strategy
        if strategy is None or not _in_multi_worker_mode(strategy):
            return original(self, iterator=iterator, data_batch=data_batch)
        say(FITS)
        for _, _, batches in iterator or ():
            data_batch = tree.map_structure(lambda part: strategy.experimental_local_results(part)[0], next(batches))
            break
        with strategy.scope():
            self._symbolic_build(data_batch=data_batch)
        return None

    setattr(trainer, BUILD, maybe_symbolic_build)


def _average_over_replicas(trainer: Any) -> None:
    """Make Keras average the results of a step over replicas without an axis, since they are scalars."""
    original = getattr(trainer, REDUCE)

    @functools.wraps(original)
    def reduce_per_replica(values: Any, strategy: Any, reduction: str) -> Any:
        from keras import tree

        operation = {"auto": "MEAN", "mean": "MEAN", "sum": "SUM"}.get(reduction)
        if operation is None or not _in_multi_worker_mode(strategy):
            return original(values, strategy, reduction)
        return tree.map_structure(lambda value: strategy.reduce(operation, value, axis=None), values)

    setattr(trainer, REDUCE, reduce_per_replica)
