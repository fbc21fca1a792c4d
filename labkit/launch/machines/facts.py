"""What relay and agents tell each other: requests, the facts of a machine, and the states of its ranks.

Requests and replies are pickled, in blocks with the request's number. An agent also answers `Fork`, `Reap` and `Ask` of
`launch/server_requests.py`, for the ranks of its machine, without file descriptors. `Failed` may be the reply to each.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import pickle
import platform
import socket
import struct
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import psutil

from labkit.errors.exceptions import LabError
from labkit.ipc.options import LOOPBACK
from labkit.launch.capacity import usable_memory
from labkit.launch.rank_process import Status
from labkit.launch.resource_usage import Load
from labkit.launch.server_requests import Ask, Fork, Reap
from labkit.recording.cores import usable_cores
from labkit.recording.ring_buffer import PENDING_SLOTS, RECORD_FIELDS, RING_BYTES
from labkit.worker.runtimes.devices import gpu_count
from labkit.worker.runtimes.registry import FRAMEWORKS

HELLO: Final = 0  # the number of the agent's first reply, which answers no request: the `Facts`
ADDRESS: Final = "LABKIT_ADDRESS"  # the variable with the address at which the other machines reach this one
REPORT_BYTES: Final = 1 << 10
SILENT_S: Final = 10.0  # a machine that says nothing for so long is lost; it answers questions for the time meanwhile
_SUM: Final = struct.Struct("<II")  # of a report: a checksum, and the size in bytes
READ_TIMES: Final = 100


@dataclass(frozen=True, slots=True)
class Prepare:
    """Import what a runtime's ranks need. The reply is None."""

    runtime: str


@dataclass(frozen=True, slots=True)
class Listen:
    """Accept connections of other machines for a moment. The reply is the port, at the machine's address."""


@dataclass(frozen=True, slots=True)
class Connect:
    """Connect to other machines. The reply has those that cannot be reached: name, address, port, and why."""

    targets: Sequence[tuple[str, str, int]]  # name, address and port of each


AgentRequest = Prepare | Listen | Connect | Fork | Reap | Ask


@dataclass(frozen=True, slots=True)
class Facts:
    """What an agent says about its machine."""

    host: str  # the machine's own name
    address: str  # the address at which the other machines reach it
    interface: str  # the network interface with that address; "" if none has it
    addresses: tuple[str, ...]  # all its addresses, without those of the loopback
    python: str  # the path of Python
    versions: dict[str, str]  # by package, "Python" included, the version; none of a package that is not installed
    layout: str  # identifies the layout of rings, which both sides must have
    cores: float  # the cores that ranks may use
    memory_bytes: int  # the memory that is free
    gpus: int  # the number of GPUs

    @classmethod
    def here(cls) -> Facts:
        """Return the facts of this machine."""
        address = _address()
        versions = {"Python": ".".join(platform.python_version_tuple()[:2])}
        for package in ("labkit", *FRAMEWORKS):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                versions[package] = importlib.metadata.version(package).partition("+")[0]
        layout = hashlib.blake2b(repr((RECORD_FIELDS, PENDING_SLOTS, RING_BYTES)).encode()).hexdigest()[:8]
        return cls(
            socket.gethostname(), address, _interface(address), _addresses(), sys.executable, versions, layout,
            usable_cores(), usable_memory().free_nbytes, gpu_count()
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class KnownMachine:
    """What the relay knows of a machine."""

    name: str
    facts: Facts  # what its agent has said
    round_trip_ns: int  # the shortest round trip to its agent so far, in ns
    clock_error_ns: int  # a bound on the error of its clock, in ns


UNREPORTED: Final = Status("sleeping", exiting=False, cpu_s=0.0)


@dataclass(frozen=True, slots=True)
class RankReport:
    """What the relay knows of a rank now; it is in shared memory, behind the rank's ring."""

    status: Status = UNREPORTED  # the state of its process
    load: Load = field(default_factory=Load)  # the resources that it uses
    offset_ns: int = 0  # what must be added to a time of the rank's machine now
    error_ns: int = 0  # a bound on the error of that
    reported_ns: int = 0  # when its machine reported last, on this machine's clock; 0: not yet


def write_report(memory: Any, report: RankReport) -> None:
    """In the relay: store it in a rank's mapped memory, of `RING_BYTES` + `REPORT_BYTES` bytes."""
    data = pickle.dumps(report)
    memory[RING_BYTES : RING_BYTES + REPORT_BYTES] = (_SUM.pack(zlib.crc32(data), len(data)) + data).ljust(REPORT_BYTES, b"\0")


def read_report(memory: int) -> RankReport:
    """In the notebook: return the last one; an empty one if there is none yet, or the memory is closed."""
    for _ in range(READ_TIMES if memory >= 0 else 0):  # the relay may be writing
        data = os.pread(memory, REPORT_BYTES, RING_BYTES)
        if len(data) < REPORT_BYTES or not any(data[: _SUM.size]):
            break
        checksum, size = _SUM.unpack_from(data)
        if zlib.crc32(data := data[_SUM.size : _SUM.size + size]) == checksum:
            report: RankReport = pickle.loads(data)
            return report
    return RankReport()


def _address() -> str:
    """The address at which this machine was reached by ssh; else its first one that is no loopback."""
    if ADDRESS in os.environ:
        return os.environ[ADDRESS]
    connection = os.environ.get("SSH_CONNECTION", "").split()  # the client's address and port, and this machine's
    if len(connection) == 4:
        return connection[2].partition("%")[0]
    own = _addresses()
    with contextlib.suppress(OSError, KeyError):  # a name by which Slurm knows this node; it may have several networks
        if (address := socket.gethostbyname(os.environ["SLURMD_NODENAME"])) in own:
            return address
    return next(iter(own), LOOPBACK)


def _addresses() -> tuple[str, ...]:
    own = [a.address for found in psutil.net_if_addrs().values() for a in found if a.family == socket.AF_INET]
    return tuple(address for address in own if not address.startswith("127."))


def _interface(address: str) -> str:
    """The network interface with an address; that of the loopback has all that begin with 127."""
    wanted = LOOPBACK if address.startswith("127.") else address
    found = psutil.net_if_addrs().items()
    return next((name for name, own in found if any(a.address.partition("%")[0] == wanted for a in own)), "")


def check_versions(package: str, here: Facts, machines: Sequence[tuple[str, Facts]]) -> None:
    """Raise LabError if machines lack what ranks need, or have other versions than the notebook's machine has."""
    needed = list(filter(None, ("Python", "labkit", package)))
    found = [line for name, facts in machines for line in differences(needed, here, name, facts)]
    if found:
        raise LabError("\n".join(found))


def differences(packages: Sequence[str], here: Facts, name: str, facts: Facts) -> Iterator[str]:
    """Yield a line for each package that a machine lacks or has in another version; else as for `check_versions`."""
    for needed in packages:
        ours, theirs = here.versions.get(needed), facts.versions.get(needed)
        if ours == theirs and (needed != "labkit" or here.layout == facts.layout):
            continue
        other = f"{needed} {theirs}" if theirs else f"no {needed}"
        remedy = f"On {name}: {facts.python} -m pip install {needed}=={ours}"
        if needed == "Python":
            remedy = f"Name a Python {ours} there with python=..."
        elif ours == theirs:
            other, remedy = f"another state of labkit {theirs}", "Install the same one on both."
        yield f"{name} has {other}, and this notebook {needed} {ours}: they must be the same. {remedy}"
