"""What labkit replaces in TensorFlow and Keras in a rank: workarounds for bugs, and checks of strategies and TF_CONFIG.

Code that differs from the known versions is not changed, and a note tells the student. So does a note, once, where a
program only works because of a workaround: elsewhere it would fail, or use one CPU.
"""

from __future__ import annotations

import itertools
import linecache
import sys
import types
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Final

from labkit.errors.exceptions import LabError
from labkit.errors.lists import counted
from labkit.worker.runtimes.base import has_server
from labkit.worker.runtimes.tensorflow import callbacks
from labkit.worker.runtimes.tensorflow.tensorflow_internals import (
    AUTOGRAPH,
    DEVICE_DATASETS,
    DISTRIBUTION,
    FILES,
    FIT,
    LOGICAL_CPUS,
    MIRRORED,
    PARAMETER_SERVERS,
    TRAINS_ALONE,
)  # fmt: skip

USES_ALL: Final = (
    "MultiWorkerMirroredStrategy uses all CPUs of a rank only because labkit patches it; elsewhere it uses one per process."
)
FITS: Final = (
    "Keras's fit and evaluate work under MultiWorkerMirroredStrategy only because labkit patches Keras; elsewhere they fail "
    "(keras-team/keras#20585): write the loop yourself, or use tf_keras."
)


def replace_functions_of_datasets_and_autograph() -> None:
    """Load AutoGraph's functions from memory, and delete the iterators of distributed datasets at once."""
    numbers = itertools.count(1)

    def load_source(_: Callable[..., Any], source: str, delete_on_exit: bool) -> Any:  # noqa: ARG001  # TensorFlow's
        """Load a function of AutoGraph's from memory."""
        name = f"__autograph_generated_file{next(numbers)}"
        module = types.ModuleType(name)
        module.__file__ = filename = f"{name}.py"
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)  # for tracebacks
        exec(compile(source, filename, "exec", dont_inherit=True), module.__dict__)
        sys.modules[name] = module
        return module, filename

    def create_device_dataset(create: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make, without autotuning, a small dataset through which a distributed dataset passes batches to a device."""
        import tensorflow as tf

        options = tf.data.Options()
        options.autotune.enabled = False
        return create(*args, **kwargs).with_options(options)

    AUTOGRAPH.apply(load_source=load_source)
    DEVICE_DATASETS.apply(_create_device_dataset=create_device_dataset)


def work_around_bugs_of_strategies(say: Callable[[str], None]) -> list[str]:
    """Patch TensorFlow and Keras in this process. Call it once, before the student's code runs.

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


def check_strategies(jobs: Collection[str], job: str, apart: Callable[[], int]) -> None:
    """Make the strategies' constructors raise errors in this process, and warn if several ranks train apart."""

    def check_and_make(make: Callable[..., None], strategy: Any, devices: Any = None, *args: Any, **kwargs: Any) -> None:
        if isinstance(devices, Sequence) and not isinstance(devices, str):
            _check_devices(devices)
        if (ranks := apart()) > 1:
            warnings.warn(
                f"MirroredStrategy connects only the devices of one rank, so {ranks} ranks train {ranks} models, each on all "
                "data. To train one model, use tf.distribute.MultiWorkerMirroredStrategy(), or one rank with several devices: "
                f'lab.Group(1, runtime="tensorflow", devices_per_rank={ranks}).',
                stacklevel=3,
            )
        make(strategy, devices, *args, **kwargs)

    def refuse(*_: Any, **__: Any) -> None:
        raise LabError(
            f"tf.distribute.ParameterServerStrategy belongs to the chief, and this rank's job is {job!r}: it runs what the chief "
            "sends. Use group['chief'].run(...), or call tf.distribute.Server(...).join() on workers and servers."
        )

    MIRRORED.apply(__init__=check_and_make)
    if "chief" in jobs and has_server(jobs, job):
        PARAMETER_SERVERS.apply(__init__=refuse)


def _check_devices(devices: Sequence[Any]) -> None:
    """Check the devices without initialising TensorFlow, which the program may still want to configure.

    Raises:
        LabError: this rank lacks one of them.
    """
    import tensorflow as tf

    for device in devices:
        named = tf.DeviceSpec.from_string(str(device))
        kind = named.device_type or "CPU"
        physical = tf.config.get_visible_devices(kind)
        has = sum(len(tf.config.get_logical_device_configuration(one) or [one]) for one in physical)
        if (named.device_index or 0) >= has:
            advice = "lab.Group(..., devices_per_rank=2) gives each rank two; between processes, use MultiWorkerMirroredStrategy."
            if kind != "CPU":
                advice = (
                    "MirroredStrategy() without a list takes all devices that the rank has, GPUs or CPUs; "
                    "lab.Group(..., devices_per_rank=2) gives it two."
                )
            raise LabError(f"MirroredStrategy names {device!r}, but this rank has {_number(has, kind)}. {advice}")


def _number(count: int, kind: str) -> str:
    return counted(count, f"{kind} device") if count else f"no {kind}"


def warn_if_alone(rank: int) -> None:
    """Have MultiWorkerMirroredStrategy warn, in this process, if it is made without a cluster; `rank` is its number."""

    def warn_and_begin(begin: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        warnings.warn(
            f"MultiWorkerMirroredStrategy finds no cluster in TF_CONFIG, so rank {rank} trains alone. labkit sets TF_CONFIG in "
            "each rank: remove the line that deletes or empties it.",
            stacklevel=3,
        )
        return begin(*args, **kwargs)

    TRAINS_ALONE.apply(_initialize_local=warn_and_begin)


def check_config(jobs: Sequence[tuple[str, int]], rank: int, args: Sequence[Any]) -> None:
    """Warn if a program makes this rank a part of a cluster in which it cannot work."""
    import tensorflow as tf

    server = tf.train.ServerDef.FromString(next((arg for arg in args if isinstance(arg, bytes)), b""))
    cluster = {job.name: len(job.tasks) for job in server.cluster.job}
    if problem := mistake(server.job_name, server.task_index, cluster, jobs, rank):
        warnings.warn(problem, stacklevel=4)


def mistake(job: str, task: int, cluster: Mapping[str, int], jobs: Sequence[tuple[str, int]], rank: int) -> str:
    """Return what is wrong with a rank's job and task; "" if they can be right."""
    own_job, own_task = jobs[rank]
    named = {name for name, _ in jobs}
    if (job, task) != (own_job, own_task) and (job, task) in jobs:
        return (
            f"TF_CONFIG makes this rank {job} {task}, but it is {own_job} {own_task}, and another rank is {job} {task}: "
            "they would wait for each other without end. Take the task from the TF_CONFIG that labkit has set."
        )
    for other, tasks in cluster.items() if job == own_job else ():
        has = sum(name == other for name, _ in jobs)
        if tasks > has and other in named:
            return (
                f"TF_CONFIG names {tasks} tasks of the job {other!r}, but this group has {has}: unless the program starts the "
                "others itself, the ranks wait for them without end. labkit has set a TF_CONFIG that fits the group."
            )
    return ""
