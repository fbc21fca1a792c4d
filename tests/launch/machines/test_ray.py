"""Groups on the nodes of Ray clusters: arguments without one, and real nodes on this computer."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from processes import left_after

import labkit as lab
from labkit.errors.exit_reasons import Cause
from labkit.group.open_groups import notebook
from labkit.launch.machines import ray as labkit_ray
from labkit.launch.machines.relay_starter import RelayStarter

# Importing Ray would set variables, which ranks would get.
pytestmark = [pytest.mark.processes, pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray")]

TOKEN = "RAY_AUTH_TOKEN"
NO_LABKIT = """import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "labkit":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
"""
PROGRAM = Path(__file__).resolve().parents[2] / "helpers" / "ray_cluster.py"


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
    for address in ("host", "ray://host:10001", ":6379", "host:port"):
        with pytest.raises(ValueError, match="expected the address of the head node"):
            lab.Ray(address)


def test_the_address_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "host:6379")
    assert lab.Ray() == lab.Ray("host:6379") != lab.Ray("other:6379")
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert repr(lab.Ray()) == "Ray()"
    monkeypatch.setenv("RAY_ADDRESS", "ray://host:10001")
    with pytest.raises(ValueError, match="RAY_ADDRESS='ray://host:10001'"):
        lab.Ray()


def test_an_address_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself would try for minutes."""
    monkeypatch.setattr(labkit_ray, "ANSWER_S", 0.3)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        port = server.getsockname()[1]
        waiting = [socket.socket() for _ in range(4)]  # with these, the system answers no more
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))
        began = time.monotonic()
        with pytest.raises(lab.LabError, match=r"no Ray cluster at .*nothing answers within"):
            asyncio.run(labkit_ray._check_answer(f"127.0.0.1:{port}"))
        assert time.monotonic() - began < 10
        for one in waiting:
            one.close()
    with pytest.raises(lab.LabError, match=r"no Ray cluster at .*refused"):
        asyncio.run(labkit_ray._check_answer(f"127.0.0.1:{port}"))


def test_a_relay_that_has_failed_gets_no_group() -> None:
    """It takes a moment to end; a group made at once would get its last words, not a new relay."""
    starter = RelayStarter(lab.Ray("127.0.0.1:1"), "bare")
    with pytest.raises(lab.LabError, match=r"no Ray cluster at 127.0.0.1:1: connection refused"):
        starter.wait_until_ready()
    assert not starter.alive()
    starter.close()


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


@contextmanager
def running(*further: str, **variables: str) -> Iterator[Nodes]:
    """Run a cluster; its files are in a folder with a short path, as Ray's sockets need.

    Args:
        further: for each node besides the head, what is put into its PYTHONPATH, or "-".
        variables: of its environment.
    """
    environment = {name: value for name, value in os.environ.items() if name != "LABKIT_TEST_SESSION"} | variables
    pipe = subprocess.PIPE
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
        command = [sys.executable, str(PROGRAM), folder, *further]
        with (
            (Path(folder) / "errors").open("w") as errors,
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


@pytest.fixture(scope="module")
def cluster() -> Iterator[Nodes]:
    with running("-") as nodes:
        yield nodes


def refusal(engine: lab.Ray) -> str:
    """Return why a group cannot be started."""
    group = lab.Group(1, runtime="bare", on=engine, timeout_s=200)
    with group, pytest.raises(lab.LabError) as caught:
        group.run(int)
    return str(caught.value)


def test_ranks_on_a_cluster(cluster: Nodes, capsys: pytest.CaptureFixture[str]) -> None:
    def f() -> tuple[str, list[str]]:
        print("hello")
        return os.environ["GROUP_RANK"], [name for name in os.environ if name.startswith(("RAY_", "CUDA_VISIBLE"))]

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
    assert "has 2 nodes" in refusal(lab.Ray(cluster.address, nodes=5))


def test_a_token_that_the_cluster_does_not_have(cluster: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv(TOKEN, "a" * 40)
    assert "has the cluster, on all nodes?" in refusal(lab.Ray(cluster.address, nodes=1))


@pytest.mark.slow  # it needs a cluster of its own
def test_a_cluster_with_a_token_and_a_node_without_labkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(NO_LABKIT)
    token = {"RAY_AUTH_MODE": "token", TOKEN: "a" * 40}
    with running(str(tmp_path), **token) as nodes:
        assert "has token authentication, set" in refusal(lab.Ray(nodes.address))
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        monkeypatch.setenv(TOKEN, "b" * 40)
        said = refusal(lab.Ray(nodes.address))  # on a busy machine, Ray may end the process, with words of its own
        assert "has token authentication, set" in said or "Authentication token" in said
        monkeypatch.setenv(TOKEN, "a" * 40)
        assert "labkit must be installed there" in refusal(lab.Ray(nodes.address))


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
