"""Waiting for the batches of a dataset is on the timeline as such; what tf.data does beside the program is not."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import labkit as lab
from labkit.recording.schema import DATA
from labkit.tracing.intervals import Intervals, difference, length, union
from labkit.tracing.silent_faults import FaultKind
from labkit.worker.runtimes.tensorflow.profiler_events import Event, Role, spans_of

pytestmark = pytest.mark.tf
if importlib.util.find_spec("tensorflow") is None:  # found, not imported: the notebook's process runs no TensorFlow
    pytest.skip("needs TensorFlow", allow_module_level=True)

MS = 1_000_000
BATCHES = 4
PAUSE_S = 0.02  # to prepare a batch


@pytest.fixture(scope="module")
def one() -> Iterator[lab.Group]:
    with lab.Group(1, runtime="tensorflow", timeout_s=200) as group:
        yield group


# Real datasets, which prepare a batch only when the program asks for it: the program waits in each pause.


def slow_dataset(pauses: list[tuple[int, int]], how: str) -> Any:
    import tensorflow as tf

    def pause(batch: Any) -> Any:
        start_ns = time.perf_counter_ns()
        time.sleep(PAUSE_S)
        pauses.append((start_ns, time.perf_counter_ns()))
        return batch

    x, y = np.ones((BATCHES, 8, 4), np.float32), np.ones((BATCHES, 8, 1), np.float32)
    if how == "generator":
        shapes = tf.TensorSpec((8, 4)), tf.TensorSpec((8, 1))
        dataset = tf.data.Dataset.from_generator(lambda: map(pause, zip(x, y, strict=True)), output_signature=shapes)
    else:
        dataset = tf.data.Dataset.from_tensor_slices((x, y))
        dataset = dataset.map(lambda a, b: (tf.ensure_shape(tf.numpy_function(pause, [a], tf.float32), (8, 4)), b))
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    return dataset.with_options(options)


def fit(how: str) -> list[tuple[int, int]]:
    import keras

    pauses: list[tuple[int, int]] = []
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(slow_dataset(pauses, how), verbose=0)
    return pauses


def loop(how: str) -> list[tuple[int, int]]:
    import tensorflow as tf

    pauses: list[tuple[int, int]] = []
    weight = tf.Variable(tf.ones((4, 1)))
    for x, y in slow_dataset(pauses, how):
        weight.assign_sub(0.1 * tf.reduce_mean(x @ weight - y) * tf.ones((4, 1)))
    return pauses


def loop_in_a_graph(how: str) -> list[tuple[int, int]]:
    import tensorflow as tf

    pauses: list[tuple[int, int]] = []
    weight, dataset = tf.Variable(tf.ones((4, 1))), slow_dataset(pauses, how)

    @tf.function
    def epoch() -> None:
        for x, y in dataset:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((x @ weight - y) ** 2)
            weight.assign_sub(0.1 * tape.gradient(loss, weight))

    epoch()
    return pauses


@pytest.mark.parametrize("how", ["generator", "map"])
@pytest.mark.parametrize("program", [fit, loop, loop_in_a_graph])
@pytest.mark.processes
def test_each_pause_of_a_dataset_is_waiting_for_data(
    one: lab.Group, program: Callable[[str], list[tuple[int, int]]], how: str
) -> None:
    run = one.run(program, how)
    pauses: Intervals = union(*np.array(run.results[0]).T)
    assert len(pauses) == BATCHES
    missed = difference(pauses, run.trace.activity(0)["data"])
    assert length(missed) < 0.1 * length(pauses)  # the profiler's clock is exact to some microseconds


def fit_from_keras_generator() -> None:
    import keras

    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(((np.ones((8, 4)), np.ones((8, 1))) for _ in range(BATCHES)), verbose=0)


@pytest.mark.processes
def test_keras_waits_for_each_batch_of_a_generator(one: lab.Group) -> None:
    trace = one.run(fit_from_keras_generator).trace
    assert len([s for s in trace if s.name == DATA]) >= BATCHES


# The profiler's events.

ROLE = Role(0, {("worker", 0): 0}, 1)


def ran(name: str, /, start_ms: float, end_ms: float, thread: int = 1, **stats: Any) -> Event:
    return Event(thread, name, int(start_ms * MS), int(end_ms * MS), stats)


def found(events: list[Event]) -> list[tuple[str, int, int]]:
    return sorted((s.name, s.start_ns // MS, s.end_ns // MS) for s in spans_of(events, ROLE))


def executor(number: int, *operations: Event) -> list[Event]:
    thread = operations[0].thread
    return [ran("ExecutorState::Process", 0, 100, thread, id=number, _c=number), *operations]


def test_an_operation_waits_for_a_batch_until_it_is_done() -> None:
    start = ran("ExecutorState::ProcessAsync::Start", 1, 2, name="IteratorGetNext", kernel_type="IteratorGetNext", _p=5)
    done = ran("ExecutorState::ProcessAsync::Done", 40, 41, 2, _c=5)
    events = [*executor(7, start, ran("MatMul:MatMul", 50, 60)), done]
    assert found(events) == [("compute", 50, 60), (DATA, 1, 40)]


def test_functions_of_a_dataset_run_beside_the_program() -> None:
    calls = ran("InstantiatedCapturedFunction::Run", 0, 90, 2, id=8)
    events = [*executor(7, ran("MatMul:MatMul", 1, 2)), calls, *executor(8, ran("PyFunc:PyFunc", 3, 80, 3))]
    assert found(events) == [("compute", 1, 2)]


@pytest.mark.parametrize(
    ("around", "is_loop"),
    [
        ("ReduceIterator::Root::Scan", True),
        ("ReduceIterator::Root::Prefetch::Scan", True),
        ("ReduceIterator::Root::Prefetch::Scan::FlatMap", False),
        ("ReduceIterator::Root::Prefetch::Scan::FlatMap[0]::Scan", False),  # the program's own
        ("ReduceDatasetOp::DoCompute", True),
    ],
)
def test_the_body_of_a_loop_over_a_dataset_is_the_programs(around: str, is_loop: bool) -> None:
    events = [ran(around, 0, 95, 2), ran("InstantiatedCapturedFunction::Run", 1, 90, 2, id=8)]
    events += executor(8, ran("MatMul:MatMul", 3, 80, 3))
    assert (("compute", 3, 80) in found(events)) is is_loop
    assert ((DATA, 0, 95) in found(events)) is around.endswith("Scan::FlatMap")


def test_operations_of_a_generator_are_not_the_programs() -> None:
    events = [*executor(7, ran("PyFunc:PyFunc", 1, 50)), ran("EagerExecute", 2, 40, eager_op="AddV2")]
    assert found(events) == [("compute", 1, 50)]


# A replica without samples


def train_on_distributed(samples: int) -> None:
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy()
    data = tf.data.Dataset.from_tensor_slices((tf.ones((samples, 1)), tf.ones(samples))).batch(8)
    for _ in range(2):
        for batch in strategy.experimental_distribute_dataset(data):
            strategy.run(lambda x, y: tf.reduce_sum(x) + tf.reduce_sum(y), args=batch)


@pytest.mark.processes
def test_a_replica_without_samples_is_noted() -> None:
    with lab.Group(1, runtime="tensorflow", devices_per_rank=2, timeout_s=200) as one:
        assert lab.verdict(one.run(train_on_distributed, 10)).faults == ()
        (fault,) = lab.verdict(one.run(train_on_distributed, 9)).faults
    assert (fault.kind, fault.ranks) == (FaultKind.EMPTY_REPLICAS, (0,))
    line = train_on_distributed.__code__.co_firstlineno + 6
    said = f"In batch 2 of a distributed dataset (test_tf_data.py, line {line}), replica 1 of rank 0 got no samples."
    assert fault.sentence == said
