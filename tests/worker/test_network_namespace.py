"""What a group exposes: nothing to other machines, and, where the system allows it, nothing to other users of this
one."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from processes import GONE_LIMIT_S, left_after
from python_programs import ROOT, environment, python

import labkit as lab
from labkit.worker import network_namespace
from labkit.worker.runtimes.tensorflow.servers import duplicate

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
ASKS = "from labkit.worker.network_namespace import PRIVATE, make; make(PRIVATE)"
NOBODY = 65534

needs_tensorflow = pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="needs TensorFlow")


class Open(NamedTuple):
    """A TCP socket on which a process listens."""

    address: str
    port: int
    device: bytes  # the only interface on which it listens
    inode: int


def listening() -> list[Open]:
    """Those of this process."""
    found = []
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError), duplicate(fd) as one:  # most are not sockets, one belongs to the listing
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                device = one.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).rstrip(b"\0")
                found.append(Open(*one.getsockname()[:2], device, os.fstat(one.fileno()).st_ino))
    return found


def heard_outside() -> list[Open]:
    """Sockets of this process that accept connections from another machine."""
    return [one for one in listening() if one.address != "127.0.0.1" and one.device != b"lo"]


def of_this_machine() -> dict[int, int]:
    """All TCP sockets in the network of this process, of any owner: ports by inode."""
    rows = [row.split() for table in ("tcp", "tcp6") for row in Path("/proc/self/net", table).read_text().splitlines()[1:]]
    return {int(row[9]): int(row[1].rpartition(":")[2], 16) for row in rows}


def assert_out_of_reach(opened: list[Open], at_least: int) -> None:
    """Nobody in the network of the machine sees or reaches these ports."""
    assert len(opened) >= at_least
    assert not of_this_machine().keys() & {one.inode for one in opened}
    for one in opened:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", one.port), timeout=60):
            assert one.port in of_this_machine().values(), (
                "reached, but not seen"
            )  # otherwise it is another socket with that number


def fetch(address: tuple[str, int]) -> bytes:
    """The answer of a service on this machine."""
    with socket.create_connection(address, timeout=60) as connection:
        return connection.recv(100)


@pytest.fixture
def service() -> Iterator[tuple[str, int]]:
    """The address of one."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with server.accept()[0] as connection:
                        connection.send(b"hello")

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()
        server.shutdown(socket.SHUT_RDWR)  # which ends `accept`
        thread.join()


# Other machines


@pytest.mark.parametrize(
    ("runtime", "start"),
    [
        *[(runtime, "fork") for runtime in ("bare", "torch", "rpc")],
        *[("bare", "spawn"), ("torch", "spawn"), pytest.param("rpc", "spawn", marks=pytest.mark.slow)],
    ],
)
@pytest.mark.processes
def test_nothing_listens_outside_this_machine(runtime: str, start: str) -> None:
    if runtime != "bare":
        pytest.importorskip("torch")

    def look() -> list[Any]:
        if runtime == "torch":
            import torch.distributed as dist

            dist.barrier(dist.new_group())  # which opens a port of its own
        return heard_outside()

    with lab.Group(2, runtime=runtime, start=start, timeout_s=200) as group:
        assert group.run(look).results == [[], []]


def test_outside_listeners_are_recognised() -> None:
    with socket.create_server(("", 0)) as server:
        (found,) = [one for one in heard_outside() if one.port == server.getsockname()[1]]
        assert found.inode in of_this_machine()
        assert found.device == b""


# Other users of this machine


@functools.cache
def why_not() -> str:
    """Why this system does not allow a new network; "" if it does."""
    ran = python("-c", ASKS)
    return "" if ran.returncode == 0 else ran.stderr.splitlines()[-1]


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system allows new networks, and groups ask for one."""
    if why_not():
        pytest.skip(why_not())
    monkeypatch.setenv(network_namespace.VARIABLE, network_namespace.PRIVATE)
    for variable in network_namespace.INTERFACES:
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def where_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups ask for a new network if the system allows it."""
    if not why_not():
        monkeypatch.setenv(network_namespace.VARIABLE, network_namespace.PRIVATE)


@pytest.mark.usefixtures("allowed")
@pytest.mark.processes
def test_nobody_reaches_torchs_ports_and_the_students_code_reaches_the_machine(service: tuple[str, int]) -> None:
    pytest.importorskip("torch")

    def use() -> tuple[float, list[Open], bytes]:
        """Opens ports in every way."""
        import torch
        import torch.distributed as dist

        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method="env://")
        part, own = dist.new_group(), dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        one = torch.ones(1)
        for group in (None, part):
            dist.all_reduce(one, group=group)
        own.clone().set("key", "value")
        assert own.get("key") == b"value"
        return float(one), listening(), fetch(service)

    with lab.Group(2, timeout_s=200) as group:
        for rank, (total, opened, said) in enumerate(group.run(use).results):
            assert (total, said) == (4.0, b"hello")
            assert_out_of_reach(opened, 4 - rank)  # of two gloo groups, the student's own store, and rank 0's store for all


@pytest.mark.usefixtures("allowed")
@pytest.mark.processes
def test_nobody_reaches_rpcs_ports_and_served_functions_reach_the_machine(service: tuple[str, int]) -> None:
    pytest.importorskip("torch")

    def use() -> tuple[list[Open], bytes]:
        from torch.distributed import rpc

        other = 1 - rpc.get_worker_info().id
        return listening(), rpc.rpc_sync(f"worker{other}", fetch, args=(service,))

    with lab.Group(["worker0", "worker1"], runtime="rpc", timeout_s=200) as group:
        for opened, said in group.run(use).results:
            assert said == b"hello"
            assert_out_of_reach(opened, 1)


def reads_a_store(port: int, limit_s: float) -> tuple[bytes, bytes, float] | str:
    """Reads it, and a clone of it; the ranks still communicate in their own network."""
    import torch
    import torch.distributed as dist

    one = torch.ones(1)
    try:
        store = dist.TCPStore("localhost", port, 2, False, timeout=timedelta(seconds=limit_s))
    except dist.DistNetworkError as error:
        return str(error)
    dist.init_process_group("gloo", store=dist.PrefixStore("of the ranks", store), rank=int(os.environ["RANK"]), world_size=2)
    dist.all_reduce(one)
    return store.get("key"), dist.PrefixStore("part", store).clone().get("key"), float(one)


@pytest.mark.usefixtures("allowed")
@pytest.mark.processes
def test_ranks_reach_a_store_that_the_notebook_serves() -> None:
    dist = pytest.importorskip("torch.distributed")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("key", "value")
    dist.PrefixStore("part", store).set("key", "of a part")
    with lab.Group(2, timeout_s=200) as group:
        assert group.run(reads_a_store, store.port, 100.0).results == [(b"value", b"of a part", 2.0)] * 2


SERVES = """
import socket, sys
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may start a program of another user")
@pytest.mark.usefixtures("allowed")
@pytest.mark.processes
def test_the_groups_own_store_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("LABKIT_NETWORK", "private")

    def values() -> list[bytes]:
        import torch.distributed as dist

        from labkit.worker.runtimes import torch_sockets

        torch_sockets._listens = lambda _: 1 / 0  # type: ignore[assignment]
        store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
        store.set("key", "value")
        return [store.get("key"), store.clone().get("key")]

    with lab.Group(2) as group:
        assert group.run(values).results == [[b"value"] * 2] * 2


@pytest.mark.usefixtures("allowed")
@pytest.mark.processes
def test_ranks_do_not_take_another_users_program_for_their_store() -> None:
    pytest.importorskip("torch")
    command = [shutil.which("python3", path=os.defpath) or sys.executable, "-c", SERVES]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        lab.Group(1, timeout_s=200) as group,
        subprocess.Popen(command, user=NOBODY, group=NOBODY, extra_groups=[], cwd="/", **pipes) as server,
    ):
        port = int(server.stdout.readline())  # type: ignore[union-attr]  # it is a pipe
        (said,) = group.run(reads_a_store, port, 0.1).results
        server.communicate()
    assert said == f"The client socket has timed out after 100ms while trying to connect to (localhost, {port})."


@needs_tensorflow
@pytest.mark.tf
@pytest.mark.slow
@pytest.mark.usefixtures("where_allowed")
@pytest.mark.processes
def test_tensorflows_workers_listen_only_on_loopback(service: tuple[str, int]) -> None:
    def use() -> tuple[list[Open], list[Open], int, bytes]:
        import tensorflow as tf

        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        total = strategy.reduce("SUM", strategy.run(lambda: tf.constant(1.0)), axis=None)
        return listening(), heard_outside(), int(total), fetch(service)

    with lab.Group(2, runtime="tensorflow", timeout_s=200) as group:
        for opened, outside, total, said in group.run(use).results:
            assert (outside, total, said) == ([], 2, b"hello")
            assert {one.device for one in opened} == {b"lo"}
            if not why_not():
                assert_out_of_reach(opened, 1)


@needs_tensorflow
@pytest.mark.tf
@pytest.mark.slow
@pytest.mark.usefixtures("where_allowed")
@pytest.mark.processes
def test_tensorflows_servers_and_their_chief_listen_only_on_loopback() -> None:
    def look(chief: bool) -> tuple[list[Open], list[Open]]:
        import tensorflow as tf

        if chief:
            tf.distribute.ParameterServerStrategy(tf.distribute.cluster_resolver.TFConfigClusterResolver())
        return listening(), heard_outside()

    with lab.Group({"chief": 1, "worker": 1, "ps": 1}, runtime="tensorflow", timeout_s=200) as group:
        for opened, outside in [*group["worker", "ps"].run(look, False).results, *group["chief"].run(look, True).results]:
            assert ([one.device for one in opened], outside) == ([b"lo"], [])
            if not why_not():
                assert_out_of_reach(opened, 1)


# Where it is requested, or not available


@pytest.mark.usefixtures("allowed")
@pytest.mark.processes
def test_calls_in_a_private_network() -> None:
    ran = python(
        "-c",
        """
import os
from labkit.worker.network_namespace import PRIVATE, make

def where():
    return os.readlink("/proc/thread-self/ns/net")

def fails():
    raise KeyError("raised there")

here, network = where(), make(PRIVATE)
there = network.call(where)
assert network.call(lambda *given, **named: (given, named), 1, two=2) == ((1,), {"two": 2})
try:
    network.call(fails)
except KeyError as error:
    print(error)
print(here == where(), there != here, network.call(where) == there, network.call(network.call, where) == there)
print(network.call(lambda: [line.split(":")[0].strip() for line in open("/proc/thread-self/net/dev")][2:]))
""",
    )
    assert (ran.stdout, ran.stderr) == ("'raised there'\nTrue True True True\n['lo']\n", "")


ON_A_SYSTEM_WITHOUT = """
import ctypes, os, sys
user, group = os.getuid(), os.getgid()
assert ctypes.CDLL(None).unshare(0x10000000) == 0
for name, text in ("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1"):
    open(f"/proc/self/{name}", "w").write(text)
open("/proc/sys/user/max_net_namespaces", "w").write("0")  # of this user namespace
os.environ["LABKIT_NETWORK"] = ""
import labkit as lab
from labkit.worker import network_namespace
from labkit.worker.network_namespace import PRIVATE, WHERE_ALLOWED, make
network_namespace.other_users = lambda me: True
from labkit.worker.runtimes.tensorflow.servers import duplicate

def opened():
    import torch, torch.distributed as dist
    dist.all_reduce(torch.ones(1))
    return os.readlink("/proc/thread-self/ns/net")

if sys.argv[1:]:
    with lab.Group(2, timeout_s=200) as group:
        print(set(group.run(opened).results) == {os.readlink("/proc/self/ns/net")})
print(make(WHERE_ALLOWED).why)
try:
    make(PRIVATE)
except lab.LabError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("allowed")
@pytest.mark.processes
def test_a_system_that_allows_no_namespaces() -> None:
    pytest.importorskip("torch")
    ran = python("-c", ON_A_SYSTEM_WITHOUT, "and a group")
    refused = (
        "LABKIT_NETWORK=private: this system does not allow private networks (No space left on device). Remove the variable, "
        "or ask an administrator to allow unprivileged user namespaces."
    )
    assert ran.stdout.splitlines() == ["True", "this system does not allow a private one: No space left on device", refused], (
        ran.stderr
    )


def test_the_machines_network_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_NETWORK", "shared")
    network = network_namespace.make(network_namespace.wanted(os.environ))
    assert (network.private, network.why) == (False, "LABKIT_NETWORK=shared")
    assert network.call(os.readlink, "/proc/thread-self/ns/net") == os.readlink("/proc/self/ns/net")


def test_where_nobody_else_has_an_account_the_machines_network_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_namespace, "other_users", lambda me: me != os.geteuid())
    network = network_namespace.make(network_namespace.WHERE_ALLOWED)
    assert (network.private, network.why) == (False, "LABKIT_NETWORK=private hides them")


def test_naming_another_interface_requests_the_machines_network() -> None:
    own = network_namespace.PrivateNetwork(fd=1000)  # which nothing enters
    assert own.unless_asked_outside({"GLOO_SOCKET_IFNAME": "lo"}) is own
    assert own.unless_asked_outside({"GLOO_SOCKET_IFNAME": "eth0"}).why == "GLOO_SOCKET_IFNAME=eth0 asks for it"
    with pytest.raises(lab.LabError, match=r"LABKIT_NETWORK=private and TP_SOCKET_IFNAME=eth0: .* only the interface 'lo'"):
        own.unless_asked_outside({"TP_SOCKET_IFNAME": "eth0", "LABKIT_NETWORK": "private"})


@pytest.mark.processes
def test_another_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_NETWORK", "public")
    with pytest.raises(lab.LabError, match="LABKIT_NETWORK='public': expected 'private', 'shared', or nothing"):
        lab.Group(2, runtime="bare")


@pytest.mark.processes
def test_spawned_ranks_cannot_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_NETWORK", "private")
    with pytest.raises(lab.LabError, match="LABKIT_NETWORK=private needs start='fork'"):
        lab.Group(2, runtime="bare", start="spawn")


# Users other than root


AS_ANOTHER_USER = """
import json, os, signal, sys, tempfile
os.environ["LABKIT_NETWORK"] = "private"
import labkit as lab, numpy as np
from labkit.ipc import process_memory
from labkit.group.open_groups import notebook
sys.path[:0] = ["tests/helpers", "tests/worker"]
from test_network_namespace import listening, of_this_machine

def use(folder):
    import torch, torch.distributed as dist
    one = torch.ones(1)
    dist.all_reduce(one)
    protected = os.path.join(folder, str(dist.get_rank()))
    os.close(os.open(protected, os.O_CREAT, 0o444))
    try:
        os.close(os.open(protected, os.O_WRONLY))
        wrote = True
    except PermissionError:
        wrote = False
    can = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("CapEff"))
    return float(one), listening(), os.getuid(), can, wrote

group = lab.Group(2, timeout_s=200)
with tempfile.TemporaryDirectory() as folder:
    results = group.run(use, folder).results
large = group.run(lambda: np.ones(1 << 21)).results
pids = [member.process.pid for member in group._pool.members]
opened = {one.inode for result in results for one in result[1]}
print(json.dumps({
    "totals": [result[0] for result in results],
    "hidden": len(opened) >= 3 and not opened & of_this_machine().keys(),
    "users": sorted({result[2] for result in results} | {os.getuid()}),
    "rights": [int(result[3], 16) for result in results],
    "writes where it must not": [result[4] for result in results],
    "read from memory": [process_memory.may_read(pid) for pid in pids],
    "large": [float(array.sum()) for array in large],
    "processes": pids + [starter._process.pid for starter in notebook.starters.values()],
}), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@functools.cache
def of_another_user() -> dict[str, Any]:
    """How to start a Python as another user: one that may run it; {} if there is none."""
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    started = {"cwd": ROOT, "env": environment(PYTHONPATH=path, PYTHONDONTWRITEBYTECODE="1")}
    if os.getuid():
        return started
    probe = f"import sys, labkit, torch; assert sys.version_info[:2] == {sys.version_info[:2]}"
    for command in (sys.executable, shutil.which("python3", path=os.defpath) or sys.executable):
        as_nobody = started | {"command": command, "user": NOBODY, "group": NOBODY, "extra_groups": []}
        with contextlib.suppress(OSError):
            if python("-c", probe, **as_nobody).returncode == 0:
                return as_nobody
    return {}


@pytest.mark.slow
@pytest.mark.processes
def test_a_group_of_a_user_other_than_root() -> None:
    """If the tests run as root, as another user. Then the notebook is killed."""
    pytest.importorskip("torch")
    as_user = of_another_user()
    if not as_user:
        pytest.skip("no other user may run this Python, or read what is installed")
    may = python("-c", ASKS, **as_user)
    if may.returncode:
        pytest.skip(may.stderr.splitlines()[-1])
    ran = python("-c", AS_ANOTHER_USER, **as_user)
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    reported = json.loads(ran.stdout)
    assert left_after(GONE_LIMIT_S, reported.pop("processes")) == []
    user = as_user.get("user", os.getuid())
    assert reported == {
        "totals": [2.0, 2.0],
        "hidden": True,
        "users": [user],
        "rights": [1 << network_namespace.CAP_SYS_ADMIN] * 2,
        "writes where it must not": [False, False],
        "read from memory": [True, True],
        "large": [float(1 << 21)] * 2,
    }
