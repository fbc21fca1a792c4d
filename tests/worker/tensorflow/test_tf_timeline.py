"""TensorFlow's work is on the timeline automatically: collectives with sizes, phases, devices, servers, spans in
graphs."""

from __future__ import annotations

import importlib.util
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from time_limits import some_limit_does

import labkit as lab
from labkit.plots.flows import flows_of
from labkit.plots.view import rows_of
from labkit.recording.events import Columns
from labkit.recording.schema import OPEN, READING, Span
from labkit.tracing.intervals import intersection
from labkit.tracing.trace import Trace
from labkit.worker.runtimes.tensorflow import profiler_events
from labkit.worker.runtimes.tensorflow.profiler_events import Event, Role, scope_of, spans_of
from labkit.worker.runtimes.tensorflow.profiler_timeline import SESSION_LIMIT_S, next_reading

pytestmark = [pytest.mark.processes, pytest.mark.tf]
if importlib.util.find_spec("tensorflow") is None:  # found, not imported: the notebook's process runs no TensorFlow
    pytest.skip("needs TensorFlow", allow_module_level=True)

STEPS = 4
IN, OUT = 6, 5  # of the layer
GRADIENT_BYTES = 4 * (IN * OUT + OUT)


@pytest.fixture(scope="module")
def two() -> Iterator[lab.Group]:
    with lab.Group(2, runtime="tensorflow", timeout_s=200) as group:
        yield group


@pytest.fixture(scope="module")
def one() -> Iterator[lab.Group]:
    with lab.Group(1, runtime="tensorflow", devices_per_rank=2, timeout_s=200) as group:
        yield group


def train(strategy_name: str, steps: int) -> float:
    """A layer, trained for some steps with batches of ones, without spans of the program."""
    import tensorflow as tf

    strategy = getattr(tf.distribute, strategy_name)(*([["/cpu:0", "/cpu:1"]] if strategy_name == "MirroredStrategy" else []))
    with strategy.scope():
        weight, bias = tf.Variable(tf.ones((IN, OUT))), tf.Variable(tf.zeros(OUT))

    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.ones((3, IN)) @ weight + bias) ** 2)
        gradients = tape.gradient(loss, [weight, bias])
        context = tf.distribute.get_replica_context()
        for variable, gradient in zip((weight, bias), context.all_reduce("SUM", gradients), strict=True):
            variable.assign_sub(0.01 * gradient)
        return loss

    @tf.function
    def one_step() -> Any:
        return strategy.reduce("SUM", strategy.run(step), axis=None)

    return [float(one_step()) for _ in range(steps)][-1]


def reductions(trace: Trace, rank: int) -> list[Span]:
    return [s for s in trace if s.rank == rank and s.name == "all_reduce"]


# Between processes


@pytest.fixture(scope="module")
def trained(two: lab.Group) -> Trace:
    return two.run(train, "MultiWorkerMirroredStrategy", STEPS).trace


def test_each_steps_collectives_are_recorded_with_bytes_and_matched(trained: Trace) -> None:
    of_gradients = [[s for s in reductions(trained, rank) if s.nbytes == GRADIENT_BYTES] for rank in (0, 1)]
    of_losses = [[s for s in reductions(trained, rank) if s.nbytes == 4] for rank in (0, 1)]
    assert [len(s) for s in of_gradients + of_losses] == [STEPS] * 4
    assert all(s.nbytes and s.sized for rank in (0, 1) for s in reductions(trained, rank))
    assert flows_of(trained).unsized == ()
    matches = [[s.match for s in of_rank] for of_rank in of_gradients]
    assert matches[0] == matches[1]
    assert len(set(matches[0])) == STEPS


def test_the_broadcast_of_a_variables_first_value_has_its_size(trained: Trace) -> None:
    for rank in (0, 1):
        assert [s.nbytes for s in trained if s.rank == rank and s.name == "broadcast"] == [4 * IN * OUT, 4 * OUT]


def meeting() -> Any:
    """A TensorFlow function in which the workers reduce 4000 bytes."""
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    return tf.function(lambda: strategy.reduce("SUM", strategy.run(lambda: tf.ones(1000)), axis=None))


def exchange_under_an_own_span() -> None:
    meet = meeting()
    with lab.span("exchange", kind="communication"):
        meet()


def test_a_communication_span_around_a_collective_does_not_count_twice(two: lab.Group) -> None:
    trace = two.run(exchange_under_an_own_span).trace
    for rank in (0, 1):
        (own,) = trace.filter(rank=rank, name="exchange")
        (collective,) = reductions(trace, rank)
        share = trace.between(own.start_ns, own.end_ns).shares()[rank]
        assert own.start_ns < collective.start_ns
        assert share.communication_ns <= collective.duration_ns < own.duration_ns  # tracing the function is not communication
        assert flows_of(trace).nbytes.sum() == 2 * 4000  # each rank sends this much, once


def test_phases_are_recognised_automatically(trained: Trace) -> None:
    for rank in (0, 1):
        names = Counter(s.name for s in trained if s.rank == rank and s.measured)
        assert {"forward", "backward", "optimizer"} <= names.keys()
        assert [s.name for s in trained if s.rank == rank].count("one_step") == STEPS
        assert "tracing one_step" in {s.name for s in trained if s.rank == rank}


def test_an_update_written_by_hand_runs_while_gradients_are_computed() -> None:
    """`w.assign_sub(0.05 * gradient)`: no optimizer's name tells these operations from the forward pass."""
    expected = {
        "MatMul:MatMul": "forward",
        "mul:Mul": "forward",
        "gradient_tape/MatMul_1:MatMul": "backward",
        "Mean:Mean": "forward",
        "mul_1:Mul": "optimizer",
        "AssignSubVariableOp:AssignSubVariableOp": "optimizer",
        "gradient_tape/MatMul_2:MatMul": "backward",
        "mul_2:Mul": "optimizer",
        "AssignSubVariableOp_1:AssignSubVariableOp": "optimizer",
        "Identity:Identity": "compute",
    }
    assert profiler_events._labels([Event(1, name, i, i + 1, {}) for i, name in enumerate(expected)]) == list(expected.values())


def test_parts_of_the_time_sum_to_the_whole(trained: Trace) -> None:
    for rank, share in enumerate(trained.shares()):
        blocked = trained.blocked(rank)
        assert len(blocked)
        assert not len(intersection(trained.activity(rank)["compute"], blocked))
        assert share.compute_ns + share.exposed_ns + share.idle_ns == share.window_ns
        assert 0 < share.communication_ns < share.window_ns
        assert share.compute_ns < share.window_ns
        assert share.waiting_ns <= share.idle_ns


def wait_for_rank_1(late_s: float) -> None:
    meet = meeting()
    meet()
    with lab.span("step"):
        if os.environ["RANK"] == "1":
            time.sleep(late_s)
        meet()


def test_a_span_around_a_collective_contains_no_waiting(two: lab.Group) -> None:
    def waits(late_s: float) -> bool:
        """So late that delays of rank 0 on a busy machine are small in comparison."""
        trace = two.run(wait_for_rank_1, late_s).trace
        waited = reductions(trace, 0)[-1]
        step = next(s for s in trace if s.rank == 0 and s.name == "step")
        assert waited.nbytes == 4000
        within = trace.between(step.start_ns, step.end_ns)
        share, of_the_late = within.shares()
        assert share.compute_ns + share.exposed_ns + share.idle_ns == share.window_ns
        half_ns = 0.5 * share.window_ns
        return waited.duration_ns > 0.25e9 * late_s and share.waiting_ns > half_ns > of_the_late.waiting_ns

    assert some_limit_does(waits, (1.0, 10.0, 30.0))


# Devices of one process


def test_replicas_have_a_row_each(one: lab.Group) -> None:
    trace = one.run(train, "MirroredStrategy", STEPS).trace
    of_gradients = [s for s in reductions(trace, 0) if s.nbytes == GRADIENT_BYTES]
    assert Counter(s.device for s in of_gradients) == {"CPU:0": STEPS, "CPU:1": STEPS}
    assert Counter(Counter(s.match for s in of_gradients).values()) == {2: STEPS}
    assert {s.device for s in trace if s.name == "backward"} == {"CPU:0", "CPU:1"}
    flows = flows_of(trace)
    assert flows.ends == ("CPU:0", "CPU:1")
    reduced = flows.by_operation()[flows.name.index("all_reduce")]
    assert reduced == STEPS * 2 * GRADIENT_BYTES  # on a ring of two, each sends all of it once
    rows = rows_of(trace)
    assert [row.name for row in rows] == ["rank 0", "CPU:0", "CPU:1"]
    names = trace.columns.names
    for row in rows[1:]:
        compute, communication = row.lanes(trace)
        assert "all_reduce" in {names[i] for i in trace.columns.data["name"][communication.span]}
        assert "backward" in {names[i] for i in trace.columns.data["name"][compute.span]}


def reduce_one_gradient(steps: int) -> None:
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])
    with strategy.scope():
        weight = tf.Variable(tf.ones((300, 200)))

    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.ones((64, 300)) @ weight) ** 2)
        gradient = tf.distribute.get_replica_context().all_reduce("SUM", tape.gradient(loss, weight))
        weight.assign_sub(0.001 * gradient)
        return loss

    one_step = tf.function(lambda: strategy.reduce("SUM", strategy.run(step), axis=None))
    for _ in range(steps):
        one_step()


def test_completion_signals_between_devices_have_no_bytes(one: lab.Group) -> None:
    """A replica reports its assignment: no tensor is sent."""
    trace = one.run(reduce_one_gradient, STEPS).trace
    assert {s.nbytes for s in trace if s.name == "send" and s.sized} == {0, 4}  # and each loss


def train_on_two_devices(steps: int) -> None:
    import tensorflow as tf

    with tf.device("CPU:0"):
        first = [tf.Variable(tf.ones((8, 8))) for _ in range(2)]
    with tf.device("CPU:1"):
        last = [tf.Variable(tf.ones((8, 8))) for _ in range(2)]

    @tf.function
    def one_step() -> Any:
        with tf.device("CPU:1"):
            h = tf.ones((3, 8)) @ last[0] @ last[1]
            for w in last:
                w.assign_sub(0.1 * tf.ones((8, 8)))
        with tf.device("CPU:0"):
            for w in first:
                w.assign_sub(0.1 * tf.ones((8, 8)))
            return tf.reduce_sum(h @ first[0] @ first[1])

    for _ in range(steps):
        one_step()


def test_signals_that_the_graph_optimizer_combines_have_no_bytes(one: lab.Group) -> None:
    trace = one.run(train_on_two_devices, STEPS).trace
    sent = [s for s in trace if s.name == "send"]
    assert all(s.sized for s in sent)
    assert {s.nbytes for s in sent} == {0, 4 * 3 * 8}


def in_a_loop(steps: int) -> None:
    """In each call, three iterations of a loop in the graph, and in each a tensor to the other device and back."""
    import tensorflow as tf

    x = tf.ones([10, 10]) / 10

    @tf.function
    def back_and_forth(times: Any) -> Any:
        y = x
        for _ in tf.range(times):
            with tf.device("CPU:1"):
                y = tf.tanh(y @ x)
            with tf.device("CPU:0"):
                y = tf.tanh(y @ x)
        return y

    for _ in range(steps):
        back_and_forth(tf.constant(3))


def test_each_iteration_of_a_loop_has_messages_of_its_own(one: lab.Group) -> None:
    trace = one.run(in_a_loop, STEPS).trace
    ends = Counter((s.name, s.match) for s in trace if s.name in ("send", "recv"))
    assert set(ends.values()) == {1}
    assert {match for name, match in ends if name == "send"} == {match for name, match in ends if name == "recv"}
    back = [s for s in trace if s.name == "send" and s.device == "CPU:1" and s.nbytes == 4 * 10 * 10]
    assert len(back) >= 3 * STEPS


def fit_on_two_devices() -> None:
    import keras
    import tensorflow as tf

    with tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"]).scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(tf.data.Dataset.from_tensors(([1.0], [1.0])).repeat(40).batch(10), epochs=1, verbose=0)


def test_small_values_for_the_host_come_from_a_device_that_exists(one: lab.Group) -> None:
    """Keras sends the conditions of its branches from device to device with operations of their own."""
    assert flows_of(one.run(fit_on_two_devices).trace).ends == ("CPU:0", "CPU:1")


def test_ranks_that_reduce_on_their_own_devices_do_not_wait_for_each_other() -> None:
    with lab.Group(2, runtime="tensorflow", devices_per_rank=2, timeout_s=60) as group:
        trace = group.run(train, "MirroredStrategy", STEPS).trace
    groups = [{s.group for s in reductions(trace, rank)} for rank in (0, 1)]
    assert all(len(of_rank) == 1 for of_rank in groups)
    assert groups[0].isdisjoint(groups[1])
    assert flows_of(trace).between_ranks() == 0


def multiply_on_a_mesh(steps: int, scale: int = 1) -> None:
    import tensorflow as tf
    from tensorflow.experimental import dtensor

    mesh = dtensor.create_mesh([("x", 2)], devices=["CPU:0", "CPU:1"])
    ones = dtensor.copy_to_mesh(tf.ones((4 * scale, 8 * scale)), dtensor.Layout.replicated(mesh, 2))
    left = dtensor.relayout(ones, dtensor.Layout([dtensor.UNSHARDED, "x"], mesh))
    right = dtensor.relayout(
        dtensor.copy_to_mesh(tf.ones((8 * scale, 2 * scale)), dtensor.Layout.replicated(mesh, 2)),
        dtensor.Layout(["x", dtensor.UNSHARDED], mesh),
    )

    @tf.function
    def product(a: Any, b: Any) -> Any:
        return dtensor.relayout(a @ b, dtensor.Layout.replicated(mesh, 2))

    for _ in range(steps):
        product(left, right)  # nobody reads the result: TensorFlow may still be computing at the end


def test_dtensors_collectives_are_numbered_although_their_keys_repeat(one: lab.Group) -> None:
    trace = one.run(multiply_on_a_mesh, STEPS).trace
    found = reductions(trace, 0)
    assert Counter((s.device, s.nbytes) for s in found) == {("CPU:0", 4 * 4 * 2): STEPS, ("CPU:1", 4 * 4 * 2): STEPS}
    assert Counter(Counter(s.match for s in found).values()) == {2: STEPS}


def multiply_on_devices_of_its_own(steps: int) -> None:
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    multiply_on_a_mesh(steps)


def test_devices_that_the_program_configures_are_distinguished() -> None:
    with lab.Group(1, runtime="tensorflow", timeout_s=200) as group:
        trace = group.run(multiply_on_devices_of_its_own, STEPS).trace
    assert Counter((s.device, s.nbytes) for s in reductions(trace, 0)) == {("CPU:0", 32): STEPS, ("CPU:1", 32): STEPS}
    assert flows_of(trace).matrix()[:2, :2].tolist() == [[0, 32 * STEPS], [32 * STEPS, 0]]


def compute_on_two_devices(steps: int) -> float:
    import tensorflow as tf

    with tf.device("/cpu:0"):
        first = tf.Variable(tf.ones((8, 7)))
    with tf.device("/cpu:1"):
        second = tf.Variable(tf.ones((7, 2)))

    @tf.function
    def forward(x: Any) -> Any:
        with tf.device("/cpu:0"):
            x = tf.nn.relu(x @ first)
        with tf.device("/cpu:1"):
            return tf.reduce_sum(x @ second)

    last = [float(forward(tf.ones((3, 8)))) for _ in range(steps)][-1]
    with tf.device("/cpu:1"):
        first @ second  # copied to this device outside of the tf.function
    return last


def test_copies_between_devices_of_a_rank_are_recorded_with_bytes(one: lab.Group) -> None:
    run = one.run(compute_on_two_devices, STEPS)
    assert run.results == [3 * 8 * 7 * 2]
    activations = [s for s in run.trace if s.name in ("send", "recv") and s.nbytes == 4 * 3 * 7]
    assert Counter((s.name, s.device, s.peer) for s in activations) == {("send", "CPU:0", 0): STEPS, ("recv", "CPU:1", 0): STEPS}
    assert Counter(Counter(s.match for s in activations).values()) == {2: STEPS}
    assert "CPU:0" in {s.device for s in run.trace if s.name == "copy"}
    flows = flows_of(run.trace)
    assert flows.ends == ("CPU:0", "CPU:1")
    assert flows.matrix()[0, 1] == STEPS * 4 * 3 * 7
    assert flows.between_ranks() == 0
    (share,) = run.trace.shares()
    assert share.compute_ns + share.exposed_ns + share.idle_ns == share.window_ns


def multiply_on_a_mesh_while_it_is_read(steps: int) -> None:
    from labkit.worker.runtimes.tensorflow import profiler_timeline as tf_timeline

    tf_timeline.next_reading = lambda now_ns, _: now_ns + 1  # before each call
    multiply_on_a_mesh(steps, scale=200)  # long enough to be under way when the call has returned


def test_reading_between_two_calls_loses_nothing_of_dtensors(one: lab.Group) -> None:
    found = reductions(one.run(multiply_on_a_mesh_while_it_is_read, 3 * STEPS).trace, 0)
    assert Counter(s.device for s in found) == {"CPU:0": 3 * STEPS, "CPU:1": 3 * STEPS}
    assert Counter(Counter(s.match for s in found).values()) == {2: 3 * STEPS}


# A parameter server


def coordinate() -> float:
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        weight = tf.Variable(tf.ones((20, 3)))

    @tf.function
    def worker_step() -> Any:
        def replica() -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((tf.ones((4, 20)) @ weight) ** 2)
            weight.assign_sub(1e-3 * tape.gradient(loss, weight))
            return loss

        return strategy.run(replica)

    for _ in range(STEPS):
        last = coordinator.schedule(worker_step)
    coordinator.join()
    return float(last.fetch())


def coordinate_or_serve() -> None:
    """Let the session of a serving rank be read at its end only: operations during an earlier reading are lost."""
    import tensorflow as tf

    from labkit.worker.runtimes.tensorflow import profiler_timeline as tf_timeline

    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type == "chief":
        coordinate()
    else:
        tf_timeline.ProfilerTimeline.read = lambda _: None  # type: ignore[method-assign]
        tf.distribute.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id, protocol="grpc").join()


def test_a_parameter_servers_workers_show_what_they_do_for_the_chief() -> None:
    with lab.Group({"chief": 1, "worker": 1, "ps": 1}, runtime="tensorflow", timeout_s=200) as group:
        trace = group.run(coordinate_or_serve).trace
    of_worker, of_server = ([s for s in trace if s.rank == rank] for rank in (1, 2))
    assert {"forward", "backward"} <= {s.name for s in of_worker if s.measured}
    assert sum(s.name == "backward" for s in of_worker) >= STEPS
    # In each step the variable goes to the worker and the gradient back; a control edge says that it was applied.
    sent = [s.match for s in of_worker if s.name == "send" and s.peer == 2]
    assert len(sent) == STEPS
    assert set(sent) <= {s.match for s in of_server if s.name == "recv"}
    assert not any(s.name == "worker_step" for s in trace if s.rank == 0)  # it waits for the worker meanwhile
    # The chief's functions have no graph in the worker's process, so the sizes are unknown there.
    assert not any(s.sized for s in of_worker if s.name == "send" and s.peer == 2)
    assert dict(flows_of(trace).unsized)["send"] >= STEPS


def rest_as_a_server_does() -> tuple[bool, bool]:
    """Whether the session of a rank with an idle main thread is read, and whether another one has begun."""
    from labkit.recording.record import here
    from labkit.worker.runtimes.tensorflow import profiler_timeline as tf_timeline

    del os.environ["LABKIT_TENSORFLOW_TIMELINE"]
    tf_timeline.next_reading = lambda now_ns, _: now_ns + 10_000_000
    assert here.recorder is not None
    timeline = tf_timeline.ProfilerTimeline(here.recorder, Role(0, {}, 1, serves=True))
    timeline.install()
    timeline.begin()
    first, end_s = timeline._session, time.monotonic() + 100
    while timeline._session is first and time.monotonic() < end_s:
        threading.Event().wait(0.02)
    with timeline._lock:
        found = timeline._session is not first, timeline._session is not None
    timeline.end()
    return found


def test_the_session_of_a_serving_rank_is_read_while_its_main_thread_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_TENSORFLOW_TIMELINE", "0")
    with lab.Group(1, runtime="tensorflow", timeout_s=200) as group:
        run = group.run(rest_as_a_server_does)
    assert run.results == [(True, True)]
    assert READING in {s.name for s in run.trace}  # the picture says why it shows nothing else


# Spans in graphs, the student's own profiler, and off


def attend(times: int) -> None:
    import tensorflow as tf

    @tf.function
    def layer(x: Any) -> Any:
        with lab.span("attention"):
            x = x @ x
        with lab.span("mixing"):
            return tf.nn.relu(x)

    for _ in range(times):
        layer(tf.ones((64, 64)))


def test_a_span_in_a_tf_function_is_recorded_each_time_it_runs(one: lab.Group) -> None:
    trace = one.run(attend, 5).trace
    spans = Counter(s.name for s in trace if s.kind == "compute" and not s.measured)
    assert (spans["attention"], spans["mixing"], spans["layer"]) == (5, 5, 5)
    assert all(s.line == "" and s.duration_ns < 60 * 10**9 for s in trace if s.name == "attention")


def profile_it_oneself(folder: str) -> list[str]:
    import tensorflow as tf

    tf.profiler.experimental.start(folder)
    tf.reduce_sum(tf.ones(3))
    tf.profiler.experimental.stop()

    @tf.function
    def after() -> Any:
        return tf.ones(3) + 1

    after()
    return [name for _, _, names in os.walk(folder) for name in names]


def test_the_students_own_profiler_works_and_is_noted(one: lab.Group, tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run = one.run(profile_it_oneself, str(tmp_path))
    assert any(name.endswith(".xplane.pb") for name in run.results[0])
    assert "after" in {s.name for s in run.trace}
    assert "used TensorFlow's profiler itself" in capsys.readouterr().out


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_TENSORFLOW_TIMELINE", "0")
    with lab.Group(1, runtime="tensorflow", timeout_s=200) as group:
        trace = group.run(attend, 2).trace
    assert not any(s.measured for s in trace)


def fail_after(steps: int) -> None:
    train("MirroredStrategy", steps)
    raise ValueError("enough")


def test_work_before_an_error_is_in_the_picture(one: lab.Group, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Trace] = []

    class Watcher:
        interval_s = 0.05

        def begin(self, *_: Any) -> None: ...
        def update(self, *_: Any) -> None: ...
        def end(self, trace: Trace, _: str) -> None:
            seen.append(trace)

    monkeypatch.setattr(lab.Group, "picture", Watcher)
    with pytest.raises(lab.RankError, match="enough"):
        one.watch(fail_after, 2)
    assert len([s for s in reductions(seen[0], 0) if s.nbytes == GRADIENT_BYTES]) == 4


# Without processes

MS = 1_000_000


def test_ranks_read_at_the_same_moments_and_never_too_late() -> None:
    second = 1_000_000_000
    assert next_reading(10 * second + 100 * MS, 0) == 11 * second
    assert next_reading(10 * second + 900 * MS, 0) == 12 * second
    assert {next_reading(40 * second + late, 400 * MS + late) for late in (0, 20 * MS)} == {42 * second}
    for reading_ns in (0, 50 * MS, 100 * MS, second, 60 * second):
        now_ns = 1234 * second + 567 * MS
        assert second // 2 <= next_reading(now_ns, reading_ns) - now_ns < SESSION_LIMIT_S * second // 2


ROLE = Role(0, {("worker", 0): 0, ("ps", 0): 1}, 1)


def ran(name: str, start_ms: float, end_ms: float, thread: int = 1, **stats: Any) -> Event:
    return Event(thread, name, int(start_ms * MS), int(end_ms * MS), stats)


def within_executor(*operations: Event) -> list[Event]:
    """The operations, inside the event of an executor on each of their threads."""
    process = "ExecutorState::Process"
    around = [ran(process, 0, 1000, thread, id=7, _c=99) for thread in {o.thread for o in operations}]
    return [*around, *operations]


def test_phases_follow_from_names() -> None:
    events = within_executor(
        ran("dense/MatMul:MatMul", 1, 2), ran("gradient_tape/dense/MatMul:MatMul", 3, 5), ran("sgd/update_0/Mul:Mul", 6, 7),
        ran("Sub:Sub", 8, 9), ran("AssignVariableOp:AssignVariableOp", 9, 10),
    )  # fmt: skip
    found = [(s.name, s.start_ns // MS, s.end_ns // MS) for s in spans_of(events, ROLE)]
    assert found == [("forward", 1, 2), ("backward", 3, 5), ("optimizer", 6, 7), ("optimizer", 8, 10)]


def test_the_students_span_replaces_a_phase_and_may_contain_several() -> None:
    inner, outer = scope_of(0), scope_of(1)
    events = within_executor(
        ran(f"{outer}/{inner}/MatMul:MatMul", 1, 2), ran(f"{outer}/Relu:Relu", 3, 4),
        ran(f"{outer}/gradient_tape/{outer}/{inner}/MatMul:MatMul", 5, 6),
    )  # fmt: skip
    found = {(s.name, s.start_ns // MS, s.end_ns // MS, s.measured) for s in spans_of(events, ROLE, ["attention", "step"])}
    assert found == {
        ("step", 1, 6, False), ("attention", 1, 2, False), ("attention", 1, 2, True), ("forward", 3, 4, True),
        ("backward", 5, 6, True),
    }  # fmt: skip


def test_measured_operations_compute_while_a_collective_is_under_way() -> None:
    spans = [
        Span(0, "train", "compute", 0, 100),
        Span(0, "backward", "compute", 0, 60, measured=True, device="CPU:1"),
        Span(0, "all_reduce", "communication", 40, 90, 40, 90, 8, group="g", match=1, device="CPU:0"),
        Span(0, "all_reduce", "communication", 60, 90, 60, 90, 8, group="g", match=1, device="CPU:1"),
    ]
    trace = Trace(spans, ranks=["rank 0"], start_ns=0, end_ns=100)
    assert sorted(trace, key=lambda s: s.start_ns) == sorted(trace.spans, key=lambda s: s.start_ns)
    assert set(trace) == set(spans)  # no device information is lost in columns
    (share,) = trace.shares()
    assert (share.compute_ns, share.exposed_ns, share.overlap_ns, share.waiting_ns) == (70, 30, 0, 0)
    columns = Columns.of(spans)
    assert not np.any(columns.data["flags"] & OPEN)
