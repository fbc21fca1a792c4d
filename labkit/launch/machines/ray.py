"""`Ray`: the nodes of a Ray cluster. An actor on each runs the agent, and passes its stdin and stdout on.

Ray's driver lives in the relay, so that the notebook's process stays small and forks safely.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib.util
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from labkit.errors.exceptions import LabError, missing
from labkit.errors.lists import counted
from labkit.errors.wrong_calls import public_api
from labkit.launch.machines.engines import AGENT, Connection, Engine
from labkit.launch.machines.facts import ADDRESS
from labkit.launch.machines.line import READ_BYTES
from labkit.launch.new_process import PR_SET_PDEATHSIG

PIECE_BYTES: Final = 1 << 18  # of the stream, in one call
CALLS: Final = 8  # under way at once to an actor
HEAD: Final = "node:__internal_head__"  # a resource that Ray gives the head node only
ENDED_S: Final = 1.0  # for an actor to say why its agent has ended
ANSWER_S: Final = 5.0  # for the cluster's address to accept a connection
INIT_S: Final = 60.0  # for Ray to connect to the cluster; one attempt of its own takes up to 36 s
THREADS: Final = 1024
TOKEN_OFF: Final = (
    "this Ray cluster has no token authentication, so whoever can reach it can run programs on it "
    "(RAY_AUTH_MODE=token turns it on, on all nodes and here)."
)
TOKEN: Final = (
    "If the cluster has token authentication, set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to its token (or copy "
    "~/.ray/auth_token from its head node), before the notebook starts."
)
_HINTS: Final = {
    "No module named 'labkit'": "labkit must be installed there, in the Python that runs Ray.",
    "all references to the actor were removed": "This notebook has RAY_AUTH_MODE=token: has the cluster, on all nodes?",
}


class Host:
    """The actor on a node: it runs the agent. `folder` contains labkit on the notebook's machine, and perhaps here."""

    def __init__(self, address: str, folder: str) -> None:
        # With Ray's own variables, ranks would be a part of its job, and would see no GPUs, as the actor asks for none.
        hidden = ("RAY_", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
        environment |= {ADDRESS: address, "PYTHONPATH": os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))}
        pipe = subprocess.PIPE
        self._said: deque[str] = deque(maxlen=5)
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", AGENT], stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, env=environment,
            preexec_fn=_end_with_parent,  # noqa: PLW1509  # it makes one system call
        )  # fmt: skip
        threading.Thread(target=self._keep_errors, daemon=True).start()

    def _keep_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._said.append(line.decode(errors="replace").strip())

    def write(self, data: bytes) -> None:
        """Pass data on to the agent."""
        assert self._process.stdin is not None
        view = memoryview(data)
        with contextlib.suppress(OSError):  # the agent has ended, which its output tells
            while view:
                view = view[self._process.stdin.write(view) :]

    def read(self) -> Iterator[bytes]:
        """Yield what the agent writes, until it ends."""
        assert self._process.stdout is not None
        while data := os.read(self._process.stdout.fileno(), PIECE_BYTES):
            yield data

    def ended(self) -> str:
        """Return what the agent has said last, after its end."""
        code = self._process.wait()
        return self._said[-1] if self._said else f"the agent ended with exit code {code}"


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Ray(Engine):
    """The nodes of a Ray cluster.

    Args:
        address: "host:6379"; default: the environment variable RAY_ADDRESS, or the cluster of this node.
        nodes: how many nodes to use, the head node first; default: all.

    Raises:
        LabError: Ray is not installed.
        ValueError: the address, or that in RAY_ADDRESS, is none.
    """

    again_limit_s = 5.0  # Ray offers a dead node for a minute

    @public_api
    def __init__(self, address: str | None = None, *, nodes: int | None = None) -> None:
        if nodes is not None and (not isinstance(nodes, int) or nodes < 1):
            raise ValueError(f"Ray(nodes={nodes!r}): expected a number of nodes above 0")
        if address is not None and not isinstance(address, str):
            raise TypeError(f"Ray({address!r}): expected an address, as in lab.Ray('host:6379')")
        if importlib.util.find_spec("ray") is None:
            raise missing("Ray", "ray")
        given = f"Ray({address!r})" if address else f"RAY_ADDRESS={os.environ.get('RAY_ADDRESS', '')!r}"
        address = address or os.environ.get("RAY_ADDRESS", "")
        if address == "auto":
            address = ""
        host, _, port = address.rpartition(":")
        if address and not (host and port.isdecimal() and "/" not in host):  # ray://... is Ray's client: no driver
            raise ValueError(f"{given}: expected the address of the head node, as in lab.Ray('host:6379')")
        self.address, self.nodes = address, nodes or 0
        self._ids: dict[str, str] = {}  # of nodes, by the names that they have got

    @property
    def key(self) -> Hashable:
        """See `Engine`."""
        return self.address, self.nodes

    def __repr__(self) -> str:
        given = [repr(self.address)] * bool(self.address) + [f"nodes={self.nodes}"] * bool(self.nodes)
        return f"Ray({', '.join(given)})"

    async def machines(self, say: Callable[[str], None]) -> Sequence[str]:
        """See `Engine`."""
        say(f"connecting to Ray{f' at {self.address}' * bool(self.address)}")
        # Ray's calls block: with fewer threads than nodes, some nodes would be asked after their time limit.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS))
        if self.address:
            await _check_answer(self.address)
        try:
            found = await asyncio.wait_for(asyncio.to_thread(self._nodes), INIT_S)
        except TimeoutError:
            raise LabError(f"Ray{self._at} did not answer within {INIT_S:.0f} s. Does `ray status` answer there?") from None
        return found[: self.nodes or None]

    @property
    def _at(self) -> str:
        return f" at {self.address}" if self.address else " on this machine"

    def _nodes(self) -> list[str]:
        """Connect to the cluster, and return the names of its nodes."""
        os.environ["RAY_NUM_REDIS_GET_RETRIES"] = "1"  # read by the import; Ray's 20 attempts take 20 s to 12 min
        import ray

        logging.getLogger("ray").setLevel(logging.ERROR)  # its warnings would stand in the student's errors
        if not ray.is_initialized():
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    ray.init(address=self.address or "auto", log_to_driver=False, configure_logging=False, namespace="labkit")
            except Exception as error:  # noqa: BLE001  # of Ray, of many types
                raise LabError(self._explain(error)) from None
        found = _named()
        if self.nodes > len(found):
            raise LabError(f"this Ray cluster has {counted(len(found), 'node')}, and {self} asks for {self.nodes}")
        self._ids.update(found)
        return list(found)

    def _explain(self, error: Exception) -> str:
        if not self.address and type(error) is ConnectionError and str(error):
            return "no Ray cluster runs on this machine. Start one (ray start --head), or name its head: lab.Ray('host:6379')"
        said = str(error).strip().splitlines()
        return f"Ray{self._at} cannot be used: {said[0].rstrip('.') if said else type(error).__name__}. {TOKEN}"

    def notes(self) -> Sequence[str]:
        """See `Engine`."""
        return [] if os.environ.get("RAY_AUTH_MODE") == "token" else [TOKEN_OFF]

    async def connect(self, machine: str, limit_s: float) -> Connection:
        """See `Engine`."""
        actor = await asyncio.to_thread(_start, self._ids[machine], limit_s)
        near, far = socket.socketpair()
        stream = _ActorStream(actor, far)
        reader, writer = await asyncio.open_connection(sock=near, limit=READ_BYTES)

        async def ended() -> str:
            return stream.why

        return Connection(reader, writer, ended, stream.close)


async def _check_answer(address: str) -> None:
    """Raise LabError if nothing accepts connections at an address: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host.strip("[]"), int(port)), ANSWER_S)
    except (OSError, OverflowError, TimeoutError) as error:
        said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        if isinstance(error, TimeoutError):
            said = f"nothing answers within {ANSWER_S:.0f} s"
        elif isinstance(error, ConnectionRefusedError):
            said = "connection refused"
        raise LabError(f"no Ray cluster at {address}: {said}. `ray start --head` has printed the address.") from None
    writer.close()


def _named() -> dict[str, str]:
    """The ids of the living nodes by name; nodes with the same name, as on one computer, get numbers."""
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]]
    alive.sort(key=lambda node: (HEAD not in node["Resources"], node["NodeName"], node["NodeManagerPort"]))
    names = [node["NodeName"] for node in alive]
    return {
        name if names.count(name) == 1 else f"{name}-{names[:i].count(name) + 1}": node["NodeID"]
        for i, (name, node) in enumerate(zip(names, alive, strict=True))
    }


def _start(node_id: str, limit_s: float) -> Any:
    """Start the actor on a node; raise LabError if the node has gone, or does not start it in time."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    address = next((node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == node_id and node["Alive"]), None)
    if address is None:
        raise LabError("this node has left the Ray cluster")
    placed = NodeAffinitySchedulingStrategy(node_id, soft=False)
    # One thread for each direction: a call that reads lasts as long as the agent, and calls that write stay in order.
    groups = {"read": 1, "write": 1}
    options: Any = {"num_cpus": 0, "max_restarts": 0, "concurrency_groups": groups, "scheduling_strategy": placed}
    actor: Any = ray.remote(**options)(Host).remote(address, str(Path(__file__).parents[3]))
    wait_s = limit_s - min(ENDED_S, limit_s / 2)  # sooner than whoever waits for this, to say why
    try:
        ray.get(actor.__ray_ready__.remote(), timeout=wait_s)
    except Exception as error:  # noqa: BLE001  # of Ray, of many types
        ray.kill(actor)
        if isinstance(error, ray.exceptions.GetTimeoutError):
            raise LabError(
                f"Ray did not start its agent there within {wait_s:.0f} s. If the node is gone, Ray notices within a minute"
            ) from None
        lines = str(error).strip().splitlines() or [type(error).__name__]
        hint = next((text for sign, text in _HINTS.items() if sign in str(error)), "")
        raise LabError(f"Ray did not start its agent there: {hint or lines[-1].strip()}") from None
    return actor


class _ActorStream:
    """Passes bytes between a socket and an actor, on two threads."""

    def __init__(self, actor: Any, sock: socket.socket) -> None:
        self._actor, self._sock = actor, sock
        self.why = ""  # the agent has ended
        for work in (self._read, self._write):
            threading.Thread(target=work, daemon=True).start()

    def _read(self) -> None:
        import ray

        try:
            for piece in self._actor.read.options(num_returns="streaming", concurrency_group="read").remote():
                self._sock.sendall(ray.get(piece))
            self.why = ray.get(self._actor.ended.options(concurrency_group="write").remote(), timeout=ENDED_S)
        except OSError:  # this side has closed the connection
            pass
        except Exception:  # noqa: BLE001  # of Ray, of many types
            self.why = "Ray has lost the node, or its worker there"
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _write(self) -> None:
        import ray

        calls: deque[Any] = deque()
        with contextlib.suppress(Exception):  # reading notices it, too
            while data := self._sock.recv(PIECE_BYTES):
                calls.append(self._actor.write.options(concurrency_group="write").remote(data))
                if len(calls) > CALLS:
                    ray.get(calls.popleft())

    def close(self) -> None:
        import ray

        with contextlib.suppress(Exception):  # it may have ended
            ray.kill(self._actor)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
