"""A parameter-server cluster goes on without a worker that has ended, as long as another one is left."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import network_of_ranks, who_listens

import labkit as lab
from labkit.errors.exit_reasons import Cause
from labkit.plots.live.live import Live
from labkit.recording.schema import ENDED
from labkit.tracing.trace import Trace

pytestmark = [pytest.mark.processes, pytest.mark.tf]
if importlib.util.find_spec("tensorflow") is None:  # found, not imported: the notebook's process runs no TensorFlow
    pytest.skip("needs TensorFlow", allow_module_level=True)

COUNT = 8


@pytest.fixture(scope="module")
def cluster() -> Iterator[lab.Group]:
    with lab.Group({"chief": 1, "worker": 2, "ps": 1}, runtime="tensorflow", timeout_s=200) as group:
        yield group


def end(job: str, task: int) -> None:
    address = json.loads(os.environ["TF_CONFIG"])["cluster"][job][task]
    os.kill(network_of_ranks().call(who_listens, int(address.split(":")[1])), signal.SIGKILL)


def count(*victims: tuple[str, int], then: str = "", until: str = "") -> float:
    """Count on a parameter server, end ranks in the middle, and at the end wait for a file."""
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type != "chief":
        cluster_spec, task = resolver.cluster_spec(), resolver.task_id
        tf.distribute.Server(cluster_spec, job_name=resolver.task_type, task_index=task, protocol="grpc").join()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    with strategy.scope():
        total = tf.Variable(0.0)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

    @tf.function
    def add() -> None:
        total.assign_add(1.0)

    for half in (victims, ()):
        for _ in range(COUNT // 2):
            coordinator.schedule(add)
        coordinator.join()
        for victim in half:
            end(*victim)
    if then:
        raise ValueError(then)
    while until and not os.path.exists(until):
        time.sleep(0.01)
    return float(total.numpy())


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_run_goes_on_without_one_of_its_workers(
    cluster: lab.Group, everywhere: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    run = (cluster if everywhere else cluster["chief"]).run(count, ("worker", 1))
    assert run.results == ([COUNT, None, None, None] if everywhere else [COUNT])
    assert [s.rank for s in run.trace.scalars if s.name == ENDED] == [2]
    assert ENDED in lab.timeline(run).get_legend_handles_labels()[1]
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "The others went on without it" in line]
    assert line.startswith("labkit: worker1 ended ")
    assert cluster["chief"].run(count).results == [COUNT]  # with a new worker


def test_the_live_picture_is_told(cluster: lab.Group, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told: set[tuple[str, int]] = set()

    def update(_: Live, __: int, new: Trace, *___: object) -> None:
        told.update((s.name, s.rank) for s in new.scalars)
        if told:
            (tmp_path / "told").touch()

    monkeypatch.setattr(Live, "update", update)
    cluster["chief"].watch(count, ("worker", 1), until=str(tmp_path / "told"))
    assert told == {(ENDED, 2)}


def test_the_last_worker_is_needed(cluster: lab.Group) -> None:
    with pytest.raises(lab.RankError) as caught:
        cluster["chief"].run(count, ("worker", 0), ("worker", 1))
    assert {(f.name, f.cause) for f in caught.value.failures} == {("worker0", Cause.KILLED), ("worker1", Cause.KILLED)}


def test_a_lost_server_fails_the_run(cluster: lab.Group) -> None:
    with pytest.raises(lab.RankError) as caught:
        cluster["chief"].run(count, ("ps", 0))
    assert caught.value.failures[0].name == "ps"


def test_a_later_error_of_the_chief_is_its_own(cluster: lab.Group) -> None:
    with pytest.raises(lab.RankError, match="wrong") as caught:
        cluster["chief"].run(count, ("worker", 0), then="wrong")
    assert [f.name for f in caught.value.failures] == ["chief"]
    assert [line for line in caught.value.others if line.startswith("worker0 had ended before: killed by SIGKILL")]


def test_workers_that_only_serve_do_not_make_a_run_go_on(cluster: lab.Group) -> None:
    with pytest.raises(lab.RankError) as caught:
        cluster["worker0", "worker1"].run(die_as, "1")
    assert [(f.name, f.cause) for f in caught.value.failures] == [("worker1", Cause.KILLED)]


def die_as(task: str) -> None:
    if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == int(task):
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
