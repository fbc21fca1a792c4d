"""`EmulatedMachines`: machines for practice, on this computer: each has a network of its own, joined by slow cables."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

from labkit.costs.link import Link
from labkit.costs.network import Network
from labkit.errors.exceptions import LabError
from labkit.errors.wrong_calls import check_number, public_api
from labkit.launch.machines.emulated_network import READY, ask
from labkit.launch.machines.engines import Connection, Engine
from labkit.launch.machines.line import READ_BYTES

START_S: Final = 20.0  # for the network to be made, which takes 0.3 s
ANSWER_S: Final = 5.0  # for it to pull a cable
MOST_AFTER_S: Final = 1e6
MOST_MACHINES: Final = 64
NAME: Final = re.compile(r"\w[\w.-]{0,62}")


class EmulatedMachines(Engine):
    """Machines for practice: agents on this computer, in networks of their own that a slow network joins.

    They share this computer's memory, files and clock; its cores are divided among them if it has enough. Where the
    system does not allow network namespaces (macOS, Windows, most containers), the ranks of a group run on this
    machine, over the `labkit.Network` of as many nodes, and a line says so.

    Args:
        machines: their names.
        link: the network between them: latency, and bandwidth of each machine's cable, in each direction.

    Attributes:
        missing: why there are no namespaces here; "" if there are.

    Example:
        `lab.Group(4, on=lab.EmulatedMachines("pc1", "pc2", link=lab.Link(gbit_per_s=0.1, latency_us=2000)))`
    """

    again_limit_s = 3.0  # see `Engine`
    ends_machines = True

    @public_api
    def __init__(self, *machines: str, link: Link) -> None:
        right = bool(machines) and all(isinstance(m, str) and NAME.fullmatch(m) for m in machines)
        if not right or len(set(machines)) < len(machines):
            raise ValueError(
                f"EmulatedMachines{machines!r}: expected different names, as in lab.EmulatedMachines('pc1', 'pc2', ...), of at "
                "most 63 letters, digits, '.', '-' and '_'"
            )
        if len(machines) > MOST_MACHINES:
            raise ValueError(f"EmulatedMachines: {len(machines)} names, expected at most {MOST_MACHINES}")
        if not isinstance(link, Link):
            raise TypeError(f"EmulatedMachines(link={link!r}): expected a lab.Link")
        self._names, self.link = machines, link
        self._folder = tempfile.mkdtemp(prefix="labkit-machines-")
        self.missing = self._start()

    def __repr__(self) -> str:
        return f"EmulatedMachines({', '.join(map(repr, self._names))}, link={self.link})"

    def _start(self) -> str:
        """Start the network; return why there can be none, empty if there is one."""
        if sys.platform != "linux":
            shutil.rmtree(self._folder, ignore_errors=True)
            return "only Linux has network namespaces"
        command = [sys.executable, "-m", "labkit.launch.machines.emulated_network", self._folder]
        command += [str(self.link.latency_s), str(self.link.bytes_per_s), *self._names]
        network = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}, start_new_session=True
        )  # fmt: skip
        weakref.finalize(self, _end, network, self._folder, os.getpid())
        assert network.stdout is not None
        ready, _, _ = select.select([network.stdout], [], [], START_S)
        said = network.stdout.readline().decode().strip() if ready else "it takes too long"
        return "" if said == READY else f"this system does not allow network namespaces with an interface ({said or 'it ended'})"

    @property
    def key(self) -> str:
        """See `Engine`."""
        return self._folder

    def __reduce__(self) -> tuple[Any, ...]:
        return _another, (self._names, self.link, self._folder)

    @public_api
    def pull(self, machine: str, after_s: float = 0.0) -> None:
        """Pull a machine's cable: nothing arrives there or from there any more.

        Args:
            machine: its name.
            after_s: when, in seconds from now; the call returns at once.

        Raises:
            ValueError: there is no such machine.
            LabError: this system does not allow network namespaces, so there is no cable.
        """
        self._ask_later("pull", machine, after_s)

    @public_api
    def plug_in(self, machine: str, after_s: float = 0.0) -> None:
        """Plug a machine's cable in again; arguments and errors as for `pull`.

        A group that had lost the machine uses it again in its next run, on new ranks.
        """
        self._ask_later("plug_in", machine, after_s)

    def _ask_later(self, request: str, machine: str, after_s: float) -> None:
        if machine not in self._names:
            raise ValueError(f"{request}({machine!r}): expected one of {', '.join(self._names)}")
        if self.missing:
            raise LabError(f"there is no cable: {self.missing}")
        check_number(after_s, f"{request}(after_s={after_s!r}): expected seconds from 0", at_least=0, below=MOST_AFTER_S)

        def now() -> None:
            self._ask(request, machine)
            self.returns += request == "plug_in"

        def later() -> None:
            with contextlib.suppress(LabError):  # the network has ended meanwhile
                now()

        if after_s:
            timer = threading.Timer(after_s, later)
            timer.daemon = True
            timer.start()
        else:
            now()

    def _ask(self, request: str, machine: str, limit_s: float = ANSWER_S) -> list[int]:
        try:
            said, fds = ask(self._folder, request, machine, limit_s)
        except TimeoutError:
            said, fds = f"it did not answer within {limit_s:g} s", []
        except OSError as error:
            said, fds = f"the emulated network does not answer ({error.strerror or error})", []
        if said != "done":
            raise LabError(said)
        return fds

    def instead(self) -> tuple[Network, str] | None:
        """See `Engine`."""
        if not self.missing:
            return None
        network = Network(nodes=len(self._names), inside=Link.nvlink4, between=self.link)
        return network, f"no emulated machines: {self.missing}"

    async def machines(self, say: Callable[[str], None]) -> Sequence[str]:
        """See `Engine`."""
        say(f"connecting to {', '.join(self._names)}")
        return self._names

    async def connect(self, machine: str, limit_s: float) -> Connection:
        """See `Engine`."""
        ends = [socket.socket(fileno=fd) for fd in await asyncio.to_thread(self._ask, "connect", machine, limit_s)]
        (_, writer), (reader, other) = [await asyncio.open_connection(sock=end, limit=READ_BYTES) for end in ends]

        async def ended() -> str:
            return ""

        def close() -> None:
            writer.transport.abort()
            other.transport.abort()

        return Connection(reader, writer, ended, close)


def _another(names: tuple[str, ...], link: Link, folder: str) -> EmulatedMachines:
    """In the relay: the same machines, which belong to the notebook's process."""
    machines = EmulatedMachines.__new__(EmulatedMachines)
    machines._names, machines.link, machines._folder, machines.missing = names, link, folder, ""
    return machines


def _end(network: subprocess.Popen[bytes], folder: str, owner: int) -> None:
    if os.getpid() != owner:  # a fork of the notebook's process ends, and the machines are not its own
        return
    for stream in (network.stdin, network.stdout):
        assert stream is not None
        stream.close()
    try:
        network.wait(ANSWER_S)
    except subprocess.TimeoutExpired:  # it was stopped, say; the agents end by themselves when they hear nothing
        network.kill()
        network.wait()
    shutil.rmtree(folder, ignore_errors=True)
