"""What a group opens to others: nothing to other machines, and with LABKIT_NETWORK=private nothing to this one either."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import socket
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import labkit as lab
from labkit import private
from labkit.notebook import notebook

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
ROOT = Path(__file__).resolve().parent.parent


def listening() -> list[tuple[str, int, bytes]]:
    """The TCP sockets on which this process listens: address, port, and the interface that alone it hears."""
    found = []
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as one:  # most are none, one is the listing's own
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                device = one.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).rstrip(b"\0")
                found.append((*one.getsockname()[:2], device))
    return found


def heard_outside() -> list[tuple[str, int, bytes]]:
    """Those that hear what comes from another machine."""
    return [(address, port, device) for address, port, device in listening() if address != "127.0.0.1" and device != b"lo"]


@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.parametrize("runtime", ["bare", "torch", "rpc"])
def test_nothing_listens_outside_this_machine(runtime: str, start: str) -> None:
    if runtime != "bare":
        pytest.importorskip("torch")

    def look() -> list[Any]:
        if runtime == "torch":
            import torch.distributed as dist

            dist.barrier(dist.new_group())  # which opens a port of its own
        return heard_outside()

    with lab.Group(2, runtime=runtime, start=start, timeout_s=100) as group:
        assert group.run(look).results == [[], []]


def test_what_listens_outside_is_recognised() -> None:
    with socket.create_server(("", 0)) as server:
        assert (*server.getsockname(), b"") in heard_outside()


needs_tensorflow = pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="needs TensorFlow")


@needs_tensorflow
@pytest.mark.tf
@pytest.mark.slow
def test_tensorflows_workers_listen_on_loopback_alone() -> None:
    def look() -> tuple[list[Any], list[Any]]:
        import tensorflow as tf

        tf.distribute.MultiWorkerMirroredStrategy()
        return [device for *_, device in listening()], heard_outside()

    with lab.Group(2, runtime="tensorflow", timeout_s=100) as group:
        assert group.run(look).results == [([b"lo"], [])] * 2


@needs_tensorflow
@pytest.mark.tf
@pytest.mark.slow
def test_tensorflows_servers_and_their_chief_listen_on_loopback_alone() -> None:
    def look(chief: bool) -> tuple[list[Any], list[Any]]:
        import tensorflow as tf

        if chief:
            tf.distribute.ParameterServerStrategy(tf.distribute.cluster_resolver.TFConfigClusterResolver())
        return [device for *_, device in listening()], heard_outside()

    with lab.Group({"chief": 1, "worker": 1, "ps": 1}, runtime="tensorflow", timeout_s=100) as group:
        assert group["worker", "ps"].run(look, False).results == [([b"lo"], [])] * 2
        assert group["chief"].run(look, True).results == [([b"lo"], [])]


# A network of the ranks' own


@functools.cache
def allowed() -> bool:
    """Whether this system lets us make networks."""
    command = [sys.executable, "-c", "from labkit.private import enter; enter()"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60, check=False).returncode == 0


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Groups have a network of their own; the servers that make it so end with the test."""
    if not allowed():
        pytest.skip("this system lets us make no network")
    monkeypatch.setenv("LABKIT_NETWORK", "private")
    yield
    for key in [key for key in notebook.starters if key[2]]:
        notebook.starters.pop(key).close()


def ports() -> list[int]:
    return [port for _, port, _ in listening()]


def summed() -> float:
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():  # rpc
        dist.init_process_group("gloo")
    one = torch.ones(1)
    dist.all_reduce(one)
    return float(one)


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_nobody_else_reaches_a_port_of_a_private_group() -> None:
    pytest.importorskip("torch")
    for runtime in ("torch", "rpc"):  # one server forks them both
        with lab.Group(2, runtime=runtime, timeout_s=100) as group:
            opened = {port for of_rank in group.run(ports).results for port in of_rank}
            assert len(opened) >= 3  # the store's, and one for each rank
            for port in opened:
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection(("127.0.0.1", port), timeout=10)
            run = group.run(summed)
            assert (run.results, run.output) == ([2.0, 2.0], "")


@pytest.mark.usefixtures("alone")
def test_a_private_group_has_loopback_and_nothing_else() -> None:
    with lab.Group(2, runtime="bare") as group:
        for interfaces, namespace in group.run(
            lambda: (Path("/proc/net/dev").read_text(), os.readlink("/proc/self/ns/net"))
        ).results:
            assert namespace != os.readlink("/proc/self/ns/net")
            assert "lo:" in interfaces
            assert "eth0:" not in interfaces


def test_a_group_has_the_networks_of_this_machine_unless_it_is_asked_for() -> None:
    with lab.Group(1, runtime="bare") as group:
        assert group.run(lambda: os.readlink("/proc/self/ns/net")).results == [os.readlink("/proc/self/ns/net")]


def test_who_is_not_root_may_have_one_as_well() -> None:
    """Where the tests run as root, as another user."""
    if not allowed():
        pytest.skip("this system lets us make no network")
    source = """
import ctypes, encodings.idna, fcntl, os, socket
from labkit import private
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE: else /proc/self stays root's
who = os.getuid(), os.getgid()
private.enter()
with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
    print((os.getuid(), os.getgid()) == who)
"""
    ran = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (ran.stdout, ran.stderr) == ("True\n", "")


def test_another_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_NETWORK", "public")
    with pytest.raises(lab.LabError, match="LABKIT_NETWORK='public': expected 'private', or nothing"):
        lab.Group(2, runtime="bare")


def test_spawned_ranks_cannot_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_NETWORK", "private")
    with pytest.raises(lab.LabError, match="LABKIT_NETWORK=private needs start='fork'"):
        lab.Group(2, runtime="bare", start="spawn")


def test_a_system_that_does_not_allow_it_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: types.SimpleNamespace(unshare=lambda _: -1))
    monkeypatch.setattr(ctypes, "get_errno", lambda: 1)
    with pytest.raises(
        lab.LabError, match=r"lets no user make a private network \(Operation not permitted\). Remove the variable"
    ):
        private.enter()
