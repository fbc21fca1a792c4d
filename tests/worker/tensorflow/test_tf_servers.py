"""TensorFlow's servers in ranks: parameter servers and tf.data's service, until the ranks that they serve have
returned."""

from __future__ import annotations

import importlib.util
import itertools
import os
import signal
import socket
from collections.abc import Iterator
from typing import Any

import pytest

import labkit as lab
from labkit.errors.exceptions import DeadlockError
from labkit.errors.exit_reasons import Cause
from labkit.group.deadlock_words import serving_for_ever
from labkit.worker.runtimes.tensorflow.runtime import threads_between

pytestmark = [pytest.mark.processes, pytest.mark.tf]
if importlib.util.find_spec("tensorflow") is None:  # found, not imported: the notebook's process runs no TensorFlow
    pytest.skip("needs TensorFlow", allow_module_level=True)

TIMEOUT_S = 200


@pytest.fixture(scope="module")
def cluster() -> Iterator[lab.Group]:
    """Four ranks with one thread each, as on a machine with few cores."""
    with lab.Group({"chief": 1, "worker": 2, "ps": 1}, runtime="tensorflow", threads=1, timeout_s=TIMEOUT_S) as group:
        yield group


@pytest.fixture(scope="module")
def four() -> Iterator[lab.Group]:
    with lab.Group(4, runtime="tensorflow", timeout_s=TIMEOUT_S) as group:
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
    for start in [tf.distribute.Server.create_local_server, tf.data.experimental.service.DispatchServer] * starts:
        servers.append(start())
        found.append(len(os.listdir("/proc/self/fd")))
    return found


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="reads /proc")
def test_a_server_that_starts_opens_one_descriptor_and_no_others() -> None:
    def opened() -> list[int]:
        with lab.Group(1, runtime="tensorflow", timeout_s=TIMEOUT_S) as group:
            (found,) = group.run(open_descriptors, 3).results
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


def read_from_the_service(address: str, how: str) -> list[int] | int:
    """Rank 0 dispatches, rank 1 works, and the others share the data."""
    import tensorflow as tf

    service = tf.data.experimental.service
    if os.environ["RANK"] == "0":
        service.DispatchServer(service.DispatcherConfig(port=int(address.split(":")[1]))).join()
    if os.environ["RANK"] == "1":
        service.WorkerServer(service.WorkerConfig(dispatcher_address=address)).join()
    data = tf.data.Dataset.range(12).map(lambda x: x * x)
    if how == "by id":
        dataset_id = service.register_dataset(f"grpc://{address}", data, dataset_id="squares")
        data = service.from_dataset_id("distributed_epoch", f"grpc://{address}", dataset_id, job_name="shared")
    else:
        data = data.apply(service.distribute("distributed_epoch", f"grpc://{address}", job_name="shared"))
    if how == "in a graph":
        return int(tf.function(lambda: data.reduce(tf.constant(0, tf.int64), lambda total, x: total + x))())
    return [int(x) for x in data]


@pytest.mark.parametrize("how", ["distribute", "by id", "in a graph"])
def test_ranks_read_from_a_data_service_of_others(four: lab.Group, how: str) -> None:
    *servers, one, other = four.run(read_from_the_service, f"localhost:{unused_port()}", how).results
    assert servers == [None, None]
    if how == "in a graph":
        assert one + other == sum(x * x for x in range(12))
    else:
        assert sorted(one + other) == [x * x for x in range(12)]


def read_late(address: str) -> int:
    """Rank 2 returns at once, and rank 3 waits until rank 1 begins to work."""
    import time

    import tensorflow as tf

    service = tf.data.experimental.service
    if os.environ["RANK"] == "0":
        service.DispatchServer(service.DispatcherConfig(port=int(address.split(":")[1]))).join()
    if os.environ["RANK"] == "1":
        time.sleep(6)
        service.WorkerServer(service.WorkerConfig(dispatcher_address=address)).join()
    if os.environ["RANK"] == "2":
        return 0
    data = tf.data.Dataset.range(12).apply(service.distribute("parallel_epochs", f"grpc://{address}"))
    return int(tf.function(lambda: data.reduce(tf.constant(0, tf.int64), lambda total, x: total + x))())


def test_a_reader_may_rest_after_another_has_returned(four: lab.Group) -> None:
    assert four.run(read_late, f"localhost:{unused_port()}").results == [None, None, 0, 66]


def unused_port() -> int:
    """A port of this machine, if the ranks have no network of their own."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port
