"""Groups on the nodes of a Ray cluster: arguments without one, and two real nodes on this computer."""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from processes import left_after

import labkit as lab
from labkit.errors.causes import Cause
from labkit.group.open_groups import notebook
from labkit.machines.relay_starter import RelayStarter

# Importing Ray would set variables, which ranks would get.
pytestmark = [pytest.mark.processes, pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray")]

PROGRAM = Path(__file__).resolve().parents[1] / "helpers" / "ray_cluster.py"


def test_what_it_says() -> None:
    assert repr(lab.Ray()) == "Ray()"
    assert repr(lab.Ray("host:6379", nodes=2)) == "Ray('host:6379', nodes=2)"
    assert pickle.loads(pickle.dumps(lab.Ray(nodes=2))) == lab.Ray(nodes=2) != lab.Ray()
    assert hash(lab.Ray()) == hash(lab.Ray())


def test_arguments_that_it_cannot_have() -> None:
    with pytest.raises(ValueError, match="nodes=0"):
        lab.Ray(nodes=0)
    with pytest.raises(TypeError, match="expected an address"):
        lab.Ray(2)  # type: ignore[arg-type]


class Nodes:
    """A cluster of two nodes.

    Args:
        process: the program that runs it.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        assert process.stdin is not None
        self.process, self._stdin, self._stdout = process, process.stdin, process.stdout
        self.address = self._stdout.readline().strip()

    def remove(self) -> None:
        """End the second node."""
        self._stdin.write("remove\n")
        self._stdin.flush()
        assert self._stdout.readline() == "removed\n"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    environment = {name: value for name, value in os.environ.items() if name != "LABKIT_TEST_SESSION"}
    command, pipe = [sys.executable, str(PROGRAM)], subprocess.PIPE
    said = tmp_path_factory.mktemp("ray") / "errors"
    with (
        said.open("w") as errors,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True, env=environment) as process,
    ):
        yield Nodes(process)
        for key, starter in list(notebook.starters.items()):
            if isinstance(starter, RelayStarter):
                starter.close()
                del notebook.starters[key]
        assert process.stdin is not None
        process.stdin.close()
        process.wait(60)


def test_ranks_on_a_cluster(cluster: Nodes, capsys: pytest.CaptureFixture[str]) -> None:
    def f() -> tuple[str, list[str]]:
        print("hello")
        return os.environ["GROUP_RANK"], [name for name in os.environ if name.startswith("RAY_")]

    memory = psutil.Process().memory_info().rss
    with lab.Group(4, runtime="bare", on=lab.Ray(cluster.address), timeout_s=200) as group:
        run = group.run(f)
        assert run.results == [("0", []), ("0", []), ("1", []), ("1", [])]
        assert run.output.splitlines() == [f"[rank {i}] hello" for i in range(4)]
        array = bytearray(os.urandom(5_000_000))
        assert group.run(lambda a: bytes(a)[::-1], array).results == [bytes(array)[::-1]] * 4
        pids = group.run(os.getpid).results
        with pytest.raises(lab.RankError) as caught:
            group.run(lambda: os.kill(os.getpid(), 9))
        assert {f.cause for f in caught.value.failures} == {Cause.KILLED}
    assert not left_after(60, pids)
    assert psutil.Process().memory_info().rss - memory < 60e6  # Ray's driver is in the relay
    assert "ray" not in sys.modules
    assert "has no token authentication" in capsys.readouterr().out


def test_nothing_is_left_while_a_cluster_does_not_answer() -> None:
    """Ray looks for a cluster on a thread, for a long time; the relay ends with the notebook nevertheless."""
    program = "import labkit as lab; lab.Group(2, runtime='bare', on=lab.Ray('127.0.0.1:1')); print(1, flush=True); input()"
    environment = os.environ | {"PYTHONPATH": str(PROGRAM.parents[2])}
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, env=environment) as notebook:
        assert notebook.stdout is not None
        assert notebook.stdout.readline() == b"1\n"
        time.sleep(2)
        started = [p.pid for p in psutil.Process(notebook.pid).children(recursive=True)]
        assert started
        notebook.kill()
    assert not left_after(60, started)


def test_more_nodes_than_there_are(cluster: Nodes) -> None:
    group = lab.Group(2, runtime="bare", on=lab.Ray(cluster.address, nodes=5), timeout_s=200)
    with group, pytest.raises(lab.LabError, match="has 2 nodes"):
        group.run(int)


def test_collectives_and_a_node_that_is_lost(cluster: Nodes) -> None:
    """Last, as the cluster has one node less afterwards."""
    pytest.importorskip("torch")

    def f() -> float:
        import torch
        import torch.distributed as dist

        x = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(x)
        return x.item()

    with lab.Group(4, on=lab.Ray(cluster.address), timeout_s=200) as group:
        assert group.run(f).results == [6.0] * 4
        threading.Timer(0.5, cluster.remove).start()
        with pytest.raises(lab.RankError) as caught:
            group.run(time.sleep, 100)
        assert [(f.rank, f.cause) for f in caught.value.failures] == [(2, Cause.LOST_MACHINE), (3, Cause.LOST_MACHINE)]
        run = group.run(f)  # on the node that is left
        assert run.results == [6.0] * 4
        assert run.trace.nodes == ()
