"""Programs for TensorFlow that set or remove TF_CONFIG, in which all workers write the same files, or a worker is
killed."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from time_limits import some_limit_does

import labkit as lab
from labkit.errors.exit_reasons import Cause
from labkit.group.collector import Records
from labkit.ipc.tracebacks import HEADLINE_CHARACTERS, headline
from labkit.recording.clock import Clock
from labkit.recording.ring_layout import record_dtype
from labkit.recording.schema import READING
from labkit.worker.runtimes.tensorflow import patches
from labkit.worker.runtimes.tensorflow.patches import mistake

pytestmark = pytest.mark.tf
if importlib.util.find_spec("tensorflow") is None:  # found, not imported: the notebook's process runs no TensorFlow
    pytest.skip("needs TensorFlow", allow_module_level=True)

EPOCHS, STEPS, BATCH = 3, 2, 8


@pytest.fixture(scope="module")
def two() -> Iterator[lab.Group]:
    with lab.Group(2, runtime="tensorflow", timeout_s=200) as group:
        yield group


# TF_CONFIG


def replicas(how: str) -> int:
    """The beginning of a tutorial pasted with its own TF_CONFIG."""
    import tensorflow as tf

    config = json.loads(os.environ.pop("TF_CONFIG"))
    if how == "ports":
        config["cluster"]["worker"] = ["localhost:12345", "localhost:23456"]
        os.environ["TF_CONFIG"] = json.dumps(config)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()

    def count() -> Any:
        return tf.distribute.get_replica_context().all_reduce("SUM", tf.constant(1))

    @tf.function
    def step() -> Any:
        return strategy.run(count)

    return int(strategy.experimental_local_results(step())[0])


@pytest.mark.processes
def test_without_tf_config_a_rank_says_that_it_trains_alone(two: lab.Group) -> None:
    run = two.run(replicas, "none")
    assert run.results == [1, 1]
    for rank in range(2):
        assert run.output.count(f"so rank {rank} trains alone") == 1


@pytest.mark.processes
def test_the_ports_of_a_tutorial_work_in_the_ranks_network(two: lab.Group) -> None:
    if not all(two.run(private).results):
        pytest.skip("the ports would be the machine's")
    run = two.run(replicas, "ports")
    assert (run.results, run.output) == ([2, 2], "")


def private() -> bool:
    from processes import network_of_ranks

    return bool(network_of_ranks().private)


WORKERS = [("worker", 0), ("worker", 1)]
SERVED = [("chief", 0), ("worker", 0), ("ps", 0)]


@pytest.mark.parametrize(
    ("jobs", "rank", "started", "words"),
    [
        (WORKERS, 1, ("worker", 0, {"worker": 2}), "makes this rank worker 0, but it is worker 1"),
        (WORKERS, 1, ("worker", 1, {"worker": 3}), "names 3 tasks of the job 'worker', but this group has 2"),
        ([("worker", 0)], 0, ("worker", 0, {"worker": 2}), "names 2 tasks of the job 'worker', but this group has 1"),
        (WORKERS, 1, ("worker", 1, {"worker": 2}), ""),
        (WORKERS, 0, ("chief", 0, {"chief": 1, "worker": 9}), ""),  # it has started the cluster inside this rank
        (SERVED, 0, ("chief", 0, {"chief": 1, "worker": 1, "ps": 1}), ""),
        (SERVED, 0, ("chief", 0, {"chief": 1, "worker": 2, "ps": 1}), "names 2 tasks of the job 'worker', but this group has 1"),
        (SERVED, 0, ("chief", 0, {"chief": 1, "worker": 1, "ps": 1, "evaluator": 1}), ""),  # which is no part of the cluster
    ],
)
def test_an_impossible_place_in_a_cluster_is_named(
    jobs: list[tuple[str, int]], rank: int, started: tuple[str, int, dict[str, int]], words: str
) -> None:
    said = mistake(*started, jobs, rank)
    assert words in said
    assert bool(words) == bool(said)


def all_as_worker_0() -> None:
    import tensorflow as tf

    config = json.loads(os.environ["TF_CONFIG"])
    os.environ["TF_CONFIG"] = json.dumps(config | {"task": {"type": "worker", "index": 0}})
    tf.distribute.MultiWorkerMirroredStrategy()


@pytest.mark.processes
def test_ranks_that_start_as_the_same_worker_are_warned_before_they_wait(capsys: pytest.CaptureFixture[str]) -> None:
    def reported_once(limit_s: float) -> bool:
        with lab.Group(2, runtime="tensorflow", timeout_s=limit_s) as group, pytest.raises(lab.LabError):
            group.run(all_as_worker_0)
        out, err = capsys.readouterr()
        return (out + err).count("TF_CONFIG makes this rank worker 0, but it is worker 1") == 1

    assert some_limit_does(reported_once)


# Files


def fit(folder: str, die_in: int | None = None, twice: bool = False, own: bool = False) -> Any:
    """Keras's loop with backups and checkpoints, one path for all workers; a worker may be killed during an epoch."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(1)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    if own:
        folder = f"{folder}/{os.environ['RANK']}"
    begun: list[int] = []

    class Epochs(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002  # Keras gives both
            begun.append(epoch)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
            if begun[-1] == die_in and batch == 1 and os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)

    with strategy.scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    random = np.random.RandomState(0)
    data = tf.data.Dataset.from_tensor_slices((random.rand(BATCH * STEPS, 5), random.randint(0, 3, BATCH * STEPS))).batch(BATCH)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    for _ in range(1 + twice):
        callbacks = [
            keras.callbacks.ModelCheckpoint(f"{folder}/model-{{epoch}}.keras"),
            keras.callbacks.BackupAndRestore(f"{folder}/backup"),
            Epochs(),
        ]
        model.fit(data.with_options(options), epochs=EPOCHS, shuffle=False, verbose=0, callbacks=callbacks)
    return begun, np.concatenate([v.numpy().ravel() for v in model.trainable_variables])


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


MODELS = [f"model-{epoch}.keras" for epoch in range(1, EPOCHS + 1)]


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True], ids=["one path", "own paths"])
@pytest.mark.processes
def test_training_continues_from_the_backup_after_a_worker_was_killed(two: lab.Group, tmp_path: Path, own: bool) -> None:
    (tmp_path / "whole").mkdir()
    whole = two.run(fit, str(tmp_path / "whole")).results
    assert files(tmp_path / "whole") == MODELS
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    with pytest.raises(lab.RankError) as caught:
        two.run(fit, str(tmp_path), die_in=1, own=own)
    assert caught.value.failures[0].cause is Cause.KILLED
    resumed = two.run(fit, str(tmp_path), own=own).results
    assert [begun for begun, _ in resumed] == [[1, 2]] * 2
    for (_, weights), (_, expected) in zip(resumed, whole, strict=True):
        assert np.abs(weights - expected).max() < 1e-6
    assert "backup" not in files(tmp_path / "0" if own else tmp_path), "it is removed at the end"


@pytest.mark.processes
def test_a_second_fit_starts_again(two: lab.Group, tmp_path: Path) -> None:
    runs = two.run(fit, str(tmp_path), twice=True).results
    assert [begun for begun, _ in runs] == [[*range(EPOCHS), *range(EPOCHS)]] * 2
    assert files(tmp_path) == MODELS


class Backup:
    """Like BackupAndRestore; another worker removes a file of the folder during the first `disturbed` saves."""

    delete_checkpoint = True
    model = None

    def __init__(self, folder: Path, disturbed: int) -> None:
        self.backup_dir = str(folder)
        self.disturbed = disturbed

    def _load_model(self) -> None: ...

    def on_train_end(self, logs: Any = None) -> None: ...

    def _save_model(self) -> None:
        written = Path(self.backup_dir) / "written"
        written.touch()
        if self.disturbed:
            self.disturbed -= 1
            written.unlink()
        written.rename(written.with_name("weights"))


def test_a_backup_is_saved_again_if_another_worker_was_removing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "_task", lambda _: 0)
    shared, disturbed = patches.SharedBackups(), Backup(tmp_path / "backup", disturbed=2)
    shared.save(Backup._save_model, disturbed)
    assert files(tmp_path / "backup") == ["weights"]
    shared.end(Backup.on_train_end, disturbed)
    assert files(tmp_path) == []
    with pytest.raises(FileNotFoundError):  # not for ever
        shared.save(Backup._save_model, Backup(tmp_path / "other", disturbed=1000))


# Reports about a dead worker


@pytest.mark.parametrize(
    ("spans", "last"), [(["step", "compute", READING], "step"), ([READING], ""), (["step", "backward"], "backward")]
)
def test_the_last_action_of_a_dead_rank_is_not_labkits(spans: list[str], last: str) -> None:
    rows = np.zeros(len(spans), record_dtype())
    rows["name"] = range(len(spans))
    reader = SimpleNamespace(dropped=0, read=lambda: rows, names=lambda: spans)
    process = SimpleNamespace(place=None, clock=Clock())
    records = Records([SimpleNamespace(name="rank 0", label="rank 0", reader=reader, process=process)])  # type: ignore[list-item]
    records.drain()
    assert records.last_span(0) == last


def test_a_headline_is_not_cut_by_only_a_few_characters() -> None:
    text = "x" * (HEADLINE_CHARACTERS + 20)
    assert headline(ValueError(text)).count("x") == len(text)
    assert "characters left out" in headline(ValueError(text * 2))


# Devices that a rank does not have


def mirrored_on(devices: list[str], own: int = 0) -> int:
    import tensorflow as tf

    if own:
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * own)
    return tf.distribute.MirroredStrategy(devices).num_replicas_in_sync


@pytest.mark.parametrize("devices", [["CPU:0", "CPU:1"], ["/cpu:1"], ["/job:localhost/replica:0/task:0/device:CPU:1"]])
@pytest.mark.processes
def test_a_strategy_for_devices_that_the_rank_does_not_have_is_refused(two: lab.Group, devices: list[str]) -> None:
    """Its first all-reduce would wait for the missing replica without end."""
    with pytest.raises(lab.RankError) as failed:
        two.run(mirrored_on, devices)
    assert f"MirroredStrategy names {devices[-1]!r}, but this rank has 1 CPU device." in str(failed.value)
    assert "use MultiWorkerMirroredStrategy" in str(failed.value)


@pytest.mark.processes
def test_a_strategy_for_gpus_that_the_rank_does_not_have_gets_advice_that_fits(two: lab.Group) -> None:
    with pytest.raises(lab.RankError) as failed:
        two.run(mirrored_on, ["/gpu:0", "/gpu:1"])
    assert "MirroredStrategy names '/gpu:0', but this rank has no GPU. MirroredStrategy() without a list" in str(failed.value)
    assert "MultiWorkerMirroredStrategy" not in str(failed.value)


@pytest.mark.processes
def test_ranks_that_train_apart_are_told_so_once(two: lab.Group, capsys: pytest.CaptureFixture[str]) -> None:
    def said() -> list[str]:
        return [line for line in "".join(capsys.readouterr()).splitlines() if "2 ranks train 2 models" in line]

    two[0].run(mirrored_on, ["CPU:0"])
    assert not said()
    two.run(mirrored_on, ["CPU:0"])
    (line,) = said()
    assert line.startswith("[ranks 0-1] test_tf_careless.py, line")


@pytest.mark.processes
def test_a_strategy_for_the_devices_of_a_rank_is_made(two: lab.Group) -> None:
    assert two.run(mirrored_on, ["CPU:0"]).results == [1, 1]
    assert two.run(mirrored_on, ["CPU:0", "CPU:1"], own=2).results == [2, 2], "configured by the program"
    with lab.Group(1, runtime="tensorflow", devices_per_rank=2) as one:
        assert one.run(mirrored_on, ["CPU:0", "/cpu:1"]).results == [2]


# Calls that TensorFlow allows only before its first operation


def late_strategy() -> None:
    import tensorflow as tf

    tf.ones(3)
    tf.distribute.MultiWorkerMirroredStrategy()


def late_devices() -> None:
    import tensorflow as tf

    tf.ones(3)
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, 2 * [tf.config.LogicalDeviceConfiguration()])


def missing_device() -> None:
    import tensorflow as tf

    tf.config.set_soft_device_placement(False)
    with tf.device("CPU:1"):
        tf.Variable(1.0)


def reduces_in_a_branch() -> None:
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

    def reduce() -> Any:
        return tf.distribute.get_replica_context().all_reduce("SUM", tf.constant(1.0))

    def step() -> Any:
        return tf.cond(tf.constant(1.0) > 0, reduce, lambda: 0.0)

    tf.function(lambda: strategy.run(step))()


@pytest.mark.parametrize(
    ("program", "hint"),
    [
        (late_strategy, "create the strategy first"), (late_devices, "`devices_per_rank`"),
        (missing_device, "devices_per_rank=2"), (reduces_in_a_branch, "tf.cond excludes that"),
    ],
)  # fmt: skip
@pytest.mark.processes
def test_the_cure_for_an_error_of_tensorflows_is_named(two: lab.Group, program: Any, hint: str) -> None:
    with pytest.raises(lab.RankError) as failed:
        two.run(program)
    assert hint in failed.value.hint
    whole = failed.value.failures[0].headline.endswith("in `tf.function`.")
    assert whole or program is not reduces_in_a_branch, "the end of a long message is kept"
    assert failed.value.hint.split()[0] in failed.value.report()


# Datasets of unlike length


def fit_more_on_rank_1() -> None:
    import keras
    import tensorflow as tf

    batches = 3 + int(os.environ["RANK"])
    with tf.distribute.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    data = tf.data.Dataset.from_tensor_slices((tf.ones((batches, 8, 4)), tf.ones((batches, 8, 1)))).with_options(options)
    model.fit(data, epochs=2, verbose=0)


@pytest.mark.processes
def test_datasets_of_unlike_length_are_named(two: lab.Group) -> None:
    with pytest.raises(lab.RankError) as failed:
        two.run(fit_more_on_rank_1)
    assert "datasets of unlike length" in failed.value.hint
