"""TensorFlow's servers in ranks: parameter servers, until the ranks that they serve have returned; no others."""

from __future__ import annotations

import importlib.util
import itertools
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

import labkit as lab
from labkit.errors.exceptions import DeadlockError
from labkit.errors.exit_reasons import Cause
from labkit.group.deadlock_words import serving_for_ever
from labkit.worker.runtimes.tensorflow.runtime import threads_between
from labkit.worker.runtimes.tensorflow.servers import NO_DATA_SERVICE

pytestmark = [pytest.mark.processes, pytest.mark.tf]
if importlib.util.find_spec("tensorflow") is None:  # found, not imported: the notebook's process runs no TensorFlow
    pytest.skip("needs TensorFlow", allow_module_level=True)

TIMEOUT_S = 200


@pytest.fixture(scope="module")
def cluster() -> Iterator[lab.Group]:
    """Four ranks with one thread each, as on a machine with few cores."""
    with lab.Group({"chief": 1, "worker": 2, "ps": 1}, runtime="tensorflow", threads=1, timeout_s=TIMEOUT_S) as group:
        yield group


def train_with_datasets(steps: int) -> float:
    """Adds the batches that the workers read from datasets of their own; as TensorFlow's tutorial does."""
    import tensorflow as tf

    strategy = tf.distribute.ParameterServerStrategy(tf.distribute.cluster_resolver.TFConfigClusterResolver())
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        total = tf.Variable(0.0)

    def dataset() -> Any:
        return strategy.distribute_datasets_from_function(lambda _: tf.data.Dataset.from_tensors(tf.ones(4)).repeat())

    @tf.function
    def step(iterator: Any) -> None:
        strategy.run(lambda batch: total.assign_add(tf.reduce_sum(batch)), args=(next(iterator),))

    iterator = iter(coordinator.create_per_worker_dataset(dataset))
    for _ in range(steps):
        coordinator.schedule(step, args=(iterator,))
    coordinator.join()
    return float(total.numpy())


def test_a_parameter_server_trains_with_one_thread_per_rank(cluster: lab.Group) -> None:
    assert cluster["chief"].run(train_with_datasets, 6).results == [24.0]


@pytest.mark.parametrize(
    ("threads", "jobs", "between"),
    [(1, {"worker": 2}, 1), (1, {"chief": 1, "worker": 2, "ps": 1}, 3), (8, {"chief": 1, "worker": 2, "ps": 1}, 8)],
)
def test_only_a_cluster_with_servers_needs_more_threads(threads: int, jobs: dict[str, int], between: int) -> None:
    assert threads_between(threads, {job: [""] * count for job, count in jobs.items()}) == between


def open_descriptors(starts: int) -> list[int]:
    """The number of descriptors of this rank after each start of a server."""
    import tensorflow as tf

    servers, found = [], []
    for _ in range(starts):
        servers.append(tf.distribute.Server.create_local_server())
        found.append(len(os.listdir("/proc/self/fd")))
    return found


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="reads /proc")
def test_a_server_that_starts_opens_one_descriptor_and_no_others() -> None:
    def opened() -> list[int]:
        with lab.Group(1, runtime="tensorflow", timeout_s=TIMEOUT_S) as group:
            (found,) = group.run(open_descriptors, 6).results
        return [after - before for before, after in itertools.pairwise(found)]

    seen = list(itertools.islice(iter(opened, [1] * 5), 3))  # other TensorFlow threads may open one meanwhile
    assert len(seen) < 3, seen


# Ranks that serve until the others have returned


def same_program_everywhere(how: str = "") -> float:
    """TensorFlow's tutorial with one program for all ranks: workers and parameter servers join their servers."""
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        if how == "kill" and resolver.task_type == "ps":
            os.kill(os.getpid(), signal.SIGKILL)
        server = tf.distribute.Server(
            resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id, protocol="grpc"
        )
        server.join()
    return train_with_datasets(4)


def test_ranks_that_join_their_servers_end_with_the_chief(cluster: lab.Group) -> None:
    assert cluster.run(same_program_everywhere).results == [16.0, None, None, None]


def test_a_server_that_dies_is_explained(cluster: lab.Group) -> None:
    with pytest.raises(lab.RankError) as caught:
        cluster.run(same_program_everywhere, "kill")
    assert caught.value.failures[0].name == "ps"
    assert caught.value.failures[0].cause is Cause.KILLED


def test_ranks_that_serve_nobody_are_reported(cluster: lab.Group) -> None:
    with pytest.raises(DeadlockError) as caught:
        cluster["worker1", "ps"].run(same_program_everywhere)
    assert (caught.value.headline, caught.value.hint) == serving_for_ever(["worker1", "ps"])


# tf.data's service


def use_the_service(how: str) -> None:
    import tensorflow as tf

    service = tf.data.experimental.service
    {
        "dispatch": service.DispatchServer,
        "work": lambda: service.WorkerServer(service.WorkerConfig(dispatcher_address="localhost:5000")),
        "read": lambda: tf.data.Dataset.range(3).apply(service.distribute("parallel_epochs", "grpc://localhost:5000")),
        "register": lambda: service.register_dataset("grpc://localhost:5000", tf.data.Dataset.range(3)),
        "read by id": lambda: service.from_dataset_id("parallel_epochs", "grpc://localhost:5000", 1),
    }[how]()


@pytest.mark.parametrize("how", ["dispatch", "work", "read", "register", "read by id"])
def test_tf_datas_service_is_refused(how: str) -> None:
    with lab.Group(1, runtime="tensorflow", timeout_s=TIMEOUT_S) as group, pytest.raises(lab.RankError) as caught:
        group.run(use_the_service, how)
    assert NO_DATA_SERVICE in str(caught.value)
