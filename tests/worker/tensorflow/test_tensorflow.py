"""TensorFlow's ranks: quiet, fresh for each run, equal to one device, and named when they fail."""

from __future__ import annotations

import errno
import functools
import importlib.util
import json
import os
import signal
import socket
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cells import Cells
from doings import waiting
from processes import network_of_ranks, who_listens
from python_programs import python
from reported import Reported

import labkit as lab
from labkit.errors.exit_reasons import Cause
from labkit.group.deadlock import Reason
from labkit.ipc.options import Options, Place
from labkit.ipc.protocol import Offer, RankConfig
from labkit.worker.network_namespace import PrivateNetwork
from labkit.worker.runtimes.tensorflow.runtime import TensorFlow

pytestmark = [pytest.mark.processes, pytest.mark.tf]
if importlib.util.find_spec("tensorflow") is None:  # found, not imported: the notebook's process runs no TensorFlow
    pytest.skip("needs TensorFlow", allow_module_level=True)

GLOBAL_BATCH = 12
STEPS = 5


@pytest.fixture(scope="module")
def one() -> Iterator[lab.Group]:
    with lab.Group(1, runtime="tensorflow", devices_per_rank=2, timeout_s=200) as group:
        yield group


@pytest.fixture(scope="module")
def two() -> Iterator[lab.Group]:
    with lab.Group(2, runtime="tensorflow", timeout_s=200) as group:
        yield group


# The environment of a rank


def surroundings() -> dict[str, Any]:
    import tensorflow as tf

    return {
        "config": json.loads(os.environ.get("TF_CONFIG", "{}")),
        "devices": [d.name for d in tf.config.list_logical_devices()],
        "threads": (
            tf.config.threading.get_intra_op_parallelism_threads(),
            tf.config.threading.get_inter_op_parallelism_threads(),
        ),
        "torchrun": (os.environ["RANK"], os.environ["WORLD_SIZE"]),
    }


def test_one_rank_has_its_devices_and_no_cluster(one: lab.Group) -> None:
    (found,) = one.run(surroundings).results
    assert found["devices"] == ["/device:CPU:0", "/device:CPU:1"]
    assert found["config"] == {}
    assert found["torchrun"] == ("0", "1")


def test_a_cluster_is_named_in_tf_config() -> None:
    with lab.Group(2, runtime="tensorflow", threads=3) as group:
        found = group.run(surroundings).results
    workers = found[0]["config"]["cluster"]["worker"]
    assert [f["config"]["task"] for f in found] == [{"type": "worker", "index": 0}, {"type": "worker", "index": 1}]
    assert found[1]["config"]["cluster"] == {"worker": workers}
    assert len(set(workers)) == 2
    assert {address.split(":")[0] for address in workers} == {"127.0.0.1"}
    assert [f["threads"] for f in found] == [(3, 3), (3, 3)]


def try_the_port() -> tuple[int, int, int]:
    """The results of binding the rank's own port before the strategy is made, and of connecting to it before and
    after."""
    import tensorflow as tf

    network = network_of_ranks()
    config = json.loads(os.environ["TF_CONFIG"])
    host, port = config["cluster"]["worker"][config["task"]["index"]].split(":")
    with network.call(socket.socket) as thief:
        try:
            thief.bind((host, int(port)))
            bound = 0
        except OSError as error:
            bound = error.errno or -1
    with network.call(socket.socket) as client:
        before = client.connect_ex((host, int(port)))
    tf.distribute.MultiWorkerMirroredStrategy()
    with network.call(socket.socket) as client:
        after = client.connect_ex((host, int(port)))
    return bound, before, after


def test_a_port_is_held_until_tensorflow_serves_it(two: lab.Group) -> None:
    assert two.run(try_the_port).results == [(errno.EADDRINUSE, errno.ECONNREFUSED, 0)] * 2


@pytest.mark.parametrize(
    ("ranks", "each", "gpus", "own"),
    [
        (1, 1, "ab", "a"),
        (1, 2, "abc", "ab"),
        (2, 1, "ab", "b"),
        (2, 2, "abcd", "cd"),
        (1, 2, "a", ""),
        (2, 1, "a", ""),
        (2, 1, "", ""),
    ],
)
def test_each_rank_gets_the_gpus_it_asked_for_or_none(ranks: int, each: int, gpus: str, own: str) -> None:
    names = tuple(map(str, range(ranks)))

    def runtime(**more: Any) -> TensorFlow:
        options = Options(names=names, runtime="tensorflow", devices_per_rank=each, **more)
        place = Place.here(ranks - 1, ranks)
        return TensorFlow(RankConfig(ranks - 1, options, place=place), PrivateNetwork(), lambda: None)

    offers = [Offer(gpus=tuple(runtime()._own(gpus)))] * ranks
    share, notes = runtime()._share(gpus, offers)
    assert "".join(share) == own
    assert bool(notes) == (bool(gpus) and not own)
    asked = runtime(devices="cuda")
    if not own:
        with pytest.raises(lab.LabError, match=f"TensorFlow sees {len(gpus)} GPU"):
            asked._share(gpus, offers)


def test_without_a_gpu_cuda_is_refused_with_an_explanation() -> None:
    from labkit.worker.runtimes.devices import gpu_count

    if gpu_count():
        pytest.skip("this machine has a GPU")
    with pytest.raises(lab.LabError, match="has no visible GPU"):
        lab.Group(1, runtime="tensorflow", devices="cuda")


# Equal to one device


def train(kind: str, dtype: str = "float64") -> list[Any]:
    """A custom loop with the strategy named by `kind`; the weights after `STEPS` steps."""
    import keras
    import tensorflow as tf

    keras.backend.set_floatx(dtype)
    keras.utils.set_random_seed(1)
    strategy = strategy_of(tf, kind)
    with strategy.scope():
        model = small_model()
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        optimizer.build(model.trainable_variables)
    data = strategy.experimental_distribute_dataset(examples(tf, dtype))

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
            loss = tf.nn.compute_average_loss(losses, global_batch_size=GLOBAL_BATCH)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def train_step(x: Any, y: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(step, args=(x, y)), axis=None)

    for x, y in data:
        train_step(x, y)
    return [v.numpy() for v in model.trainable_variables]


def fit(kind: str) -> list[Any]:
    """The same with Keras' own loop."""
    import keras
    import tensorflow as tf

    keras.backend.set_floatx("float64")
    keras.utils.set_random_seed(1)
    with strategy_of(tf, kind).scope():
        model = small_model()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss)
    model.fit(examples(tf, "float64"), epochs=1, shuffle=False, verbose=0)
    return [v.numpy() for v in model.trainable_variables]


def strategy_of(tf: Any, kind: str) -> Any:
    if kind == "mirrored":
        return tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])
    return tf.distribute.MultiWorkerMirroredStrategy() if kind == "workers" else tf.distribute.OneDeviceStrategy("/cpu:0")


def small_model() -> Any:
    import keras
    from keras import layers

    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(4, 3, activation="tanh"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


def examples(tf: Any, dtype: str) -> Any:
    random = np.random.RandomState(0)
    images = random.standard_normal((GLOBAL_BATCH * STEPS, 8, 8, 1)).astype(dtype)
    labels = random.randint(0, 10, GLOBAL_BATCH * STEPS)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return tf.data.Dataset.from_tensor_slices((images, labels)).batch(GLOBAL_BATCH, drop_remainder=True).with_options(options)


@pytest.fixture(scope="module")
def serial(one: lab.Group) -> list[Any]:
    (weights,) = one.run(train, "one").results
    return weights


def difference(weights: list[Any], others: list[Any]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(weights, others, strict=True))


def test_mirrored_equals_one_device(one: lab.Group, serial: list[Any]) -> None:
    assert difference(one.run(train, "mirrored").results[0], serial) < 1e-13


def test_keras_fit_on_two_replicas_equals_one_device(one: lab.Group) -> None:
    fitted = {kind: one.run(fit, kind).results[0] for kind in ("one", "mirrored")}
    assert difference(fitted["mirrored"], fitted["one"]) < 1e-13


@pytest.mark.parametrize("ranks", [2, 4])
def test_workers_equal_one_device(ranks: int, serial: list[Any]) -> None:
    with lab.Group(ranks, runtime="tensorflow", timeout_s=200) as group:
        run = group.run(train, "workers")
    assert [difference(weights, serial) < 1e-13 for weights in run.results] == [True] * ranks
    assert run.output == ""


def test_single_precision_results_are_equal_up_to_rounding(one: lab.Group, two: lab.Group) -> None:
    (serial,) = one.run(train, "one", "float32").results
    assert max(difference(weights, serial) for weights in two.run(train, "workers", "float32").results) < 1e-6


# Runs in a row


def adding_up() -> Any:
    """A TensorFlow function with which all workers add up a number of each."""
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()

    @tf.function
    def total(x: Any = 1.0) -> Any:
        return strategy.run(lambda y: tf.distribute.get_replica_context().all_reduce("SUM", tf.identity(y)), args=(x,))

    return total


def sum_of_ranks() -> float:
    return float(adding_up()())


def test_a_group_runs_again_and_again(two: lab.Group) -> None:
    for _ in range(8):
        run = two.run(sum_of_ranks)
        assert (run.results, run.output) == ([2.0, 2.0], "")


def test_only_the_students_prints_appear_and_the_notebook_imports_no_tensorflow() -> None:
    program = textwrap.dedent("""
        import sys
        import labkit as lab

        def train():
            import keras
            import tensorflow as tf
            strategy = tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])
            with strategy.scope():
                model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
                model.compile("sgd", "mse")
            data = tf.data.Dataset.from_tensor_slices((tf.ones((8, 3)), tf.ones((8, 2)))).batch(4)
            model.fit(data, epochs=2, shuffle=False, verbose=0)
            print(len(tf.config.list_logical_devices()), "devices")

        with lab.Group(1, runtime="tensorflow", devices_per_rank=2) as group:
            group.run(train)
        print([name for name in sys.modules if name.startswith(("tensorflow", "keras"))])
    """)
    done = python("-c", program)
    assert (done.stdout, done.stderr) == ("[rank 0] 2 devices\n[]\n", "")


# AutoGraph on functions that exist only in a cell


def test_autograph_reads_the_cell(cells: Cells, one: lab.Group) -> None:
    cells("""
        def collatz(n):
            import tensorflow as tf

            @tf.function
            def steps(n):
                count = 0
                while n != 1:
                    if n % 2 == 0:
                        n = n // 2
                    else:
                        n = 3 * n + 1
                    count += 1
                for _ in tf.range(2):
                    count += 1
                return count

            return int(steps(tf.constant(n)))
    """)
    assert one.run(cells.collatz, 27).results == [113]


def test_autograph_writes_no_file(cells: Cells, one: lab.Group, tmp_path: Path) -> None:
    """A rank that is killed meanwhile would leave the file behind."""
    cells("""
        def doubled(folder):
            import tempfile
            import tensorflow as tf
            tempfile.tempdir = folder
            tempfile.NamedTemporaryFile = None
            double = tf.function(lambda x: x + x)
            return int(double(tf.constant(4))), [m for m in __import__("sys").modules if "autograph_generated" in m] != []
    """)
    assert one.run(cells.doubled, str(tmp_path)).results == [(8, True)]
    assert list(tmp_path.iterdir()) == []


def test_an_error_in_a_graph_shows_the_cells_own_lines(cells: Cells, one: lab.Group) -> None:
    cells("""
        def multiply():
            import tensorflow as tf

            @tf.function
            def product(x):
                for _ in tf.range(3):
                    x = x @ tf.zeros((3, 3))
                return x

            return product(tf.zeros((2, 2)))
    """)
    with pytest.raises(lab.RankError) as caught:
        one.run(cells.multiply)
    failure = caught.value.failures[0]
    assert failure.headline.startswith("ValueError: Dimensions must be equal, but are 2 and 3")
    assert "x = x @ tf.zeros((3, 3))" in failure.traceback
    assert "autograph" not in failure.traceback
    assert "site-packages" not in failure.traceback


# Iterators of distributed datasets


def tuned_when_distributed() -> list[bool | None]:
    """Whether each iterated dataset is autotuned, in the order in which a distributed dataset begins to iterate
    them."""
    import tensorflow as tf

    tuned: list[bool | None] = []
    begin = tf.data.Dataset.__iter__

    def watched(dataset: Any) -> Any:
        tuned.append(dataset.options().autotune.enabled)
        return begin(dataset)

    tf.data.Dataset.__iter__ = watched
    iter(strategy_of(tf, "mirrored").experimental_distribute_dataset(tf.data.Dataset.range(8).batch(4)))
    return tuned


def test_datasets_that_feed_devices_are_not_autotuned(one: lab.Group) -> None:
    assert one.run(tuned_when_distributed).results == [[False, False]]


# Spans


def timed_steps(steps: int) -> None:
    import tensorflow as tf

    total = adding_up()
    for _ in lab.steps(range(steps)):
        with lab.span("forward+backward"):
            x = tf.reduce_sum(tf.ones(10))
        with lab.span("all_reduce", kind="communication"):
            total(x)


def test_spans_inside_the_loop(two: lab.Group) -> None:
    trace = two.run(timed_steps, 4).trace
    for rank in range(2):
        own = [span for span in trace.spans if span.rank == rank and not span.group]
        assert [s.name for s in own if s.kind == "communication"] == ["all_reduce"] * 4
        assert [s.name for s in own if s.name == "forward+backward"] == ["forward+backward"] * 4
        assert len([s for s in own if s.kind == "step"]) == 4


# The parameter server


def count_on_the_server(steps: int) -> tuple[float, str]:
    import tensorflow as tf

    strategy = tf.distribute.ParameterServerStrategy(tf.distribute.cluster_resolver.TFConfigClusterResolver())
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        counter = tf.Variable(0.0)

    @tf.function
    def step() -> None:
        strategy.run(lambda: counter.assign_add(1.0))

    for _ in range(steps):
        coordinator.schedule(step)
    coordinator.join()
    return float(counter.numpy()), counter.device


def test_workers_and_servers_serve_the_chief() -> None:
    with lab.Group({"chief": 1, "worker": 2, "ps": 1}, runtime="tensorflow", timeout_s=200) as group:
        assert group.names == ("chief", "worker0", "worker1", "ps")
        for steps in (6, 9):
            (counted,) = group["chief"].run(count_on_the_server, steps).results
            assert counted == (float(steps), "/job:ps/replica:0/task:0/device:CPU:0")


# Failures


def fail(how: str, victim: int) -> float:
    """All ranks compute a sum together five times; before the third, one of them fails in the given way."""
    total = adding_up()
    ends = {
        "raise": functools.partial(int, "no number"),
        "exit": functools.partial(os._exit, 3),
        "kill": functools.partial(os.kill, os.getpid(), signal.SIGKILL),
    }
    result = 0.0
    for i in range(5):
        if i == 3 and os.environ["RANK"] == str(victim):
            if how == "return":
                return result
            ends[how]()
        result = float(total())
    return result


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    ("how", "cause", "words"),
    [
        ("raise", Cause.RAISED, "ValueError: invalid literal for int"),
        ("exit", Cause.EXITED, ""),
        ("kill", Cause.KILLED, ""),
        ("return", Cause.DEADLOCK, ""),
    ],
)
def test_the_failed_rank_is_named(
    two: lab.Group, monkeypatch: pytest.MonkeyPatch, reported: Reported, how: str, cause: Cause, words: str, victim: int
) -> None:
    monkeypatch.setattr(TensorFlow, "certain_after_s", 1.0)
    with pytest.raises(lab.RankError) as caught:
        two.run(fail, how, victim)
    assert caught.value.failures[0].name == f"rank {victim}"
    assert caught.value.failures[0].cause is cause
    assert words in caught.value.failures[0].headline
    if how == "return":
        name = "TensorFlow's total"
        assert reported.deadlock() == (Reason.RETURNED, [(1 - victim, name)])
        (line,) = reported.lines()
        assert line.startswith("test_tensorflow.py, line")
        assert waiting(f"rank {1 - victim}", name, line).search(caught.value.report())
    assert two.run(sum_of_ranks).results == [2.0, 2.0]


def work_alone(seconds: float) -> float:
    """Rank 0 returns at once; rank 1 continues: it computes in one TensorFlow call, and sleeps."""
    import tensorflow as tf

    tf.distribute.MultiWorkerMirroredStrategy()

    @tf.function
    def compute(until_s: Any) -> Any:
        total = 0.0
        while tf.timestamp() < until_s:
            total += tf.reduce_sum(tf.ones((300, 300)) @ tf.ones((300, 300)))
        return total

    if os.environ["RANK"] == "1":
        compute(tf.timestamp() + seconds)
        time.sleep(seconds)
    return seconds


@pytest.mark.slow
def test_a_rank_that_keeps_working_alone_is_not_stopped(two: lab.Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorFlow, "certain_after_s", 0.5)
    assert two.run(work_alone, 1.5).results == [1.5, 1.5]


def end_the_server() -> None:
    """The chief kills the parameter server, and then waits for ever."""
    address = json.loads(os.environ["TF_CONFIG"])["cluster"]["ps"][0]
    pid = network_of_ranks().call(who_listens, int(address.split(":")[1]))
    os.kill(pid, signal.SIGKILL)
    signal.pause()


def test_a_server_that_dies_is_named_while_the_chief_waits() -> None:
    with lab.Group({"chief": 1, "worker": 1, "ps": 1}, runtime="tensorflow", timeout_s=200) as group:
        with pytest.raises(lab.RankError) as caught:
            group["chief"].run(end_the_server)
        assert caught.value.failures[0].name == "ps"
        assert caught.value.failures[0].cause is Cause.KILLED
        assert group["chief"].run(count_on_the_server, 3).results[0][0] == 3.0
