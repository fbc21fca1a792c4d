"""What labkit replaces in TensorFlow and Keras in a rank: workarounds for bugs, and checks of strategies and TF_CONFIG.

Code that differs from the known versions is not changed, and a note tells the student. So does a note, once, where a
program only works because of a workaround: elsewhere it would fail, or use one CPU.
"""

from __future__ import annotations

import contextlib
import itertools
import linecache
import os
import shutil
import sys
import types
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Final
from weakref import WeakKeyDictionary

from labkit.errors.exceptions import LabError
from labkit.errors.lists import counted
from labkit.recording.rank_facts import Fact, FactKind
from labkit.recording.record import student_line
from labkit.worker.runtimes.base import has_server
from labkit.worker.runtimes.tensorflow import tensorflow_internals as internals

USES_ALL: Final = (
    "MultiWorkerMirroredStrategy uses all CPUs of a rank only because labkit patches it; elsewhere it uses one per process."
)
FITS: Final = (
    "Keras's fit and evaluate work under MultiWorkerMirroredStrategy only because labkit patches Keras; elsewhere they fail "
    "(keras-team/keras#20585): write the loop yourself, or use tf_keras."
)
WRITES_ONE_PATH: Final = (
    "Keras writes the files of all workers to one path only because labkit patches it; elsewhere, give each worker its own path."
)
SAVE_ATTEMPTS: Final = 10  # each of the other workers removes the folder once per training


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

    internals.AUTOGRAPH.apply(load_source=load_source)
    internals.DEVICE_DATASETS.apply(_create_device_dataset=create_device_dataset)


def work_around_bugs_of_strategies(say: Callable[[str], None]) -> list[str]:
    """Patch TensorFlow and Keras in this process, once; return a sentence for each workaround that does not fit."""
    import keras
    import tensorflow as tf

    if internals.DISTRIBUTION.apply(set_distribution=_warn_and_set):
        keras.distribution.set_distribution = internals.DISTRIBUTION["set_distribution"]
    internals.LOGICAL_CPUS.apply(_initialize_local_devices=partial(_use_all_logical_cpus, say))
    internals.FIT.apply(_maybe_symbolic_build=partial(_build_from_own_batch, say), reduce_per_replica=_average_over_replicas)
    write, shared = partial(_write_whole, say), SharedBackups()
    internals.FILES.apply(
        save=write, save_weights=write, _load_model=shared.load, _save_model=shared.save, on_train_end=shared.end
    )
    of_keras = f"Keras {keras.__version__}"
    needed = (internals.LOGICAL_CPUS, f"TensorFlow {tf.__version__}"), (internals.FIT, of_keras), (internals.FILES, of_keras)
    unknown = ((entry.lost, version) for entry, version in needed if not entry.found)
    return [f"{lost}: labkit has no workaround for {version}; this may fail." for lost, version in unknown]


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
    if not _has_other_workers(strategy):
        return build(trainer, iterator=iterator, data_batch=data_batch)
    say(FITS)
    for _, _, batches in iterator or ():
        data_batch = tree.map_structure(lambda part: strategy.experimental_local_results(part)[0], next(batches))
        break
    with strategy.scope():
        internals.FIT.of(trainer, "_symbolic_build")(data_batch=data_batch)
    return None


def _average_over_replicas(reduce: Callable[..., Any], values: Any, strategy: Any, reduction: str) -> Any:
    """Make Keras average the results of a step over replicas without an axis, since they are scalars."""
    from keras import tree

    operation = {"auto": "MEAN", "mean": "MEAN", "sum": "SUM"}.get(reduction)
    if operation is None or not _has_other_workers(strategy):
        return reduce(values, strategy, reduction)
    return tree.map_structure(lambda value: strategy.reduce(operation, value, axis=None), values)


def _has_other_workers(strategy: Any) -> bool:
    import tensorflow as tf

    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return False
    return bool(strategy.num_replicas_in_sync > len(strategy.extended.worker_devices))


def _task(model: Any) -> int | None:
    """Return the number of this worker; None if it does not train together with others."""
    strategy: Any = getattr(model, "distribute_strategy", None)
    return int(strategy.cluster_resolver.task_id) if _has_other_workers(strategy) else None


# All workers may write to one path. Each writes a temporary file of its own, which then replaces the target: all have
# the same model, so it does not matter which one is last.


def _write_whole(say: Callable[[str], None], write: Any, model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
    path = os.fspath(filepath) if isinstance(filepath, (str, os.PathLike)) else ""
    task = None if args or kwargs.keys() - {"overwrite"} or "://" in path else _task(model)
    folder, name = os.path.split(path)
    if not name or task is None or not kwargs.get("overwrite", True) or os.path.isdir(path):
        return write(model, filepath, *args, **kwargs)
    say(WRITES_ONE_PATH)
    own = os.path.join(folder, f".worker{task}-{name}")
    try:
        write(model, own, overwrite=True)
        os.replace(own, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(own)
    return None


class SharedBackups:
    """Lets all workers write, read and remove one backup; they do not finish the training at exactly the same time."""

    def __init__(self) -> None:
        self._over: set[str] = set()  # backups of finished trainings, which another worker may not have removed yet

    def load(self, load_model: Callable[..., None], callback: Any) -> None:
        """Load a backup when training begins, unless it belongs to a training that is over."""
        if os.path.abspath(callback.backup_dir) not in self._over:
            load_model(callback)

    def save(self, save_model: Callable[..., None], callback: Any) -> None:
        """Save a backup, again if another worker removes the folder meanwhile."""
        if _task(callback.model) is None:
            save_model(callback)
            return
        self._over.discard(os.path.abspath(callback.backup_dir))
        for attempt in range(1, SAVE_ATTEMPTS + 1):
            os.makedirs(callback.backup_dir, exist_ok=True)
            try:
                save_model(callback)
            except (FileNotFoundError, FileExistsError):
                # Another worker has finished the training and is removing the folder, file by file.
                # This worker removes what it saves here when it finishes.
                if attempt == SAVE_ATTEMPTS:
                    raise
            else:
                return

    def end(self, on_train_end: Callable[..., None], callback: Any, logs: Any = None) -> None:
        """Remove the backup when training ends."""
        if _task(callback.model) is None:
            on_train_end(callback, logs)
        elif callback.delete_checkpoint:
            self._over.add(os.path.abspath(callback.backup_dir))
            shutil.rmtree(callback.backup_dir, ignore_errors=True)


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

    internals.MIRRORED.apply(__init__=check_and_make)
    if "chief" in jobs and has_server(jobs, job):
        internals.PARAMETER_SERVERS.apply(__init__=refuse)


def _check_devices(devices: Sequence[Any]) -> None:
    """Check that this rank has the devices, without initialising TensorFlow: the program may still configure it."""
    import tensorflow as tf

    for device in devices:
        named = tf.DeviceSpec.from_string(str(device))
        kind = named.device_type or "CPU"
        physical = tf.config.get_visible_devices(kind)
        has = sum(len(tf.config.get_logical_device_configuration(one) or [one]) for one in physical)
        if (named.device_index or 0) >= has:
            number = counted(has, f"{kind} device") if has else f"no {kind}"
            between = "; between processes, use MultiWorkerMirroredStrategy" if kind == "CPU" else ""
            raise LabError(
                f"MirroredStrategy names {device!r}, but this rank has {number}. MirroredStrategy() without a list takes "
                f"all that it has; lab.Group(..., devices_per_rank=2) gives each rank two{between}."
            )


def warn_if_alone(rank: int) -> None:
    """Have MultiWorkerMirroredStrategy warn, in this process, if it is made without a cluster; `rank` is its number."""

    def warn_and_begin(begin: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        warnings.warn(
            f"MultiWorkerMirroredStrategy finds no cluster in TF_CONFIG, so rank {rank} trains alone. labkit sets TF_CONFIG in "
            "each rank: remove the line that deletes or empties it.",
            stacklevel=3,
        )
        return begin(*args, **kwargs)

    internals.TRAINS_ALONE.apply(_initialize_local=warn_and_begin)


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


class EmptyReplicas:
    """The facts of one rank, in the place of `TrainingFacts` of a rank of torch."""

    def __init__(self) -> None:
        self._batches: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # taken so far, by iterator
        self.begin_run(check=False)

    def begin_run(self, *, check: bool) -> None:  # noqa: ARG002  # nothing is compared
        """Forget the previous run."""
        self._facts: list[Fact] = []

    def take(self) -> list[Fact]:
        """Return the facts of the run."""
        return self._facts

    def install(self) -> None:
        """Look from now on at each batch."""

        def take_next(original: Callable[..., Any], iterator: Any) -> Any:
            batch = original(iterator)
            with contextlib.suppress(Exception):  # what goes wrong here never reaches the program
                self._look(iterator, batch)
            return batch

        internals.DISTRIBUTED_BATCHES.apply(__next__=take_next)

    def _look(self, iterator: Any, batch: Any) -> None:
        import tensorflow as tf

        number = self._batches[iterator] = self._batches.get(iterator, 0) + 1
        for part in tf.nest.flatten(batch):
            parts = part.values if isinstance(part, tf.distribute.DistributedValues) else (part,)
            empty = [replica for replica, value in enumerate(parts) if value.shape[0] == 0]
            if empty:
                self._facts.append(Fact(FactKind.EMPTY_REPLICAS, number - 1, student_line(), values={"replicas": empty}))
                return
