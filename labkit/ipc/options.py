"""`Options`: the options of a group, each declared and checked here, and sent whole to every rank.

An option's check stands below the fields. What depends on more than the options stands in `group/arguments.py`: what
the runtime supports, and what the machine decides when ranks are placed on it (threads, devices, memory, open files).

`Place` says where a rank is among the machines of its group. Ranks on other machines get those of the notebook's
environment variables that have changed since `import labkit`, as the others describe the notebook's process and its
machine; of the changed ones, those that name something of a machine are not applied.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from labkit.costs.link import Link
from labkit.costs.network import Network
from labkit.errors.wrong_calls import check_number

LOOPBACK: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is among the machines of its group."""

    machine: str = ""  # the name of its machine; "" where all ranks are on the notebook's machine
    node: int = 0  # the number of its machine among those of the group
    nodes: int = 1  # the number of machines
    local_rank: int = 0  # its number among the ranks of its machine
    local_size: int = 1  # the number of ranks of its machine
    address: str = LOOPBACK  # the address at which the other machines reach this one
    interface: str = ""  # the network interface with that address; "" leaves the choice to the frameworks
    names: frozenset[str] = frozenset()  # all names and addresses of the group's machines
    cores: float = 0.0  # the cores that the ranks of its machine share; 0 where these are the notebook's

    @classmethod
    def here(cls, rank: int, size: int) -> Place:
        """Return the place of a rank where all ranks are on the notebook's machine."""
        return cls(local_rank=rank, local_size=size)

    @property
    def elsewhere(self) -> bool:
        """Whether the rank may be on another machine than the notebook."""
        return self.machine != "" or self.nodes > 1

    @property
    def listening(self) -> str:
        """The address at which a rank listens for the others: the loopback, unless some are on other machines."""
        return self.address if self.nodes > 1 else LOOPBACK


AT_IMPORT: Final[Mapping[str, str]] = dict(os.environ)  # `import labkit` imports this file

NAMES: Final = (
    "PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "CUDA_VISIBLE_DEVICES", "HOME", "USER", "LOGNAME", "SHELL", "HOSTNAME", "PWD",
    "OLDPWD", "TMPDIR", "PYTHONHOME", "VIRTUAL_ENV",
)  # fmt: skip
PREFIXES: Final = ("CONDA_", "SLURM_", "SSH_", "XDG_")


def belongs_to_machine(name: str) -> bool:
    """Whether a variable describes a machine or a login there, so that its value is wrong on others."""
    return name in NAMES or name.startswith(PREFIXES)


DEVICES: Final = ("auto", "cpu", "cuda")
STARTS: Final = ("fork", "spawn")


@dataclass(slots=True, kw_only=True)
class Options:
    """The options of a group; they never change. An invalid one is a `TypeError` or a `ValueError`."""

    names: tuple[str, ...]  # the names of the ranks, in rank order
    jobs: tuple[tuple[str, int], ...] = ()  # TensorFlow's job and task number of each rank, in rank order
    runtime: str  # one of `RUNTIMES`
    devices: str = "auto"  # "auto", "cpu" or "cuda"
    devices_per_rank: int = 1  # the number of logical devices of a TensorFlow rank
    threads: int | None = 1  # of a rank's framework; None: the cores of its machine, divided among the ranks there
    timeout_s: float | None = None  # the time limit of a run; None for no limit
    start: str = STARTS[0]  # "fork" or "spawn"
    link: Link | Network | None = None  # the link or network to emulate between ranks; None for none
    restarts: int = 0  # how many times a run may replace all ranks and call its function again

    def __post_init__(self) -> None:
        if self.devices not in DEVICES:
            raise ValueError(f"devices={self.devices!r}: expected None or 'auto' (GPUs where there are some), 'cpu' or 'cuda'")
        check_above_0("devices_per_rank", self.devices_per_rank, whole=True)
        self.devices_per_rank = int(self.devices_per_rank)  # perhaps numpy's
        if self.threads is not None:
            check_above_0("threads", self.threads, whole=True)
            self.threads = int(self.threads)
        if self.timeout_s is not None:
            check_above_0("timeout_s", self.timeout_s)
        expected = f"restarts={self.restarts!r}: expected a whole number, 0 or more"
        check_number(self.restarts, expected, whole=True, at_least=0)
        if self.start not in STARTS:
            raise ValueError(f"start={self.start!r}: expected 'fork' or 'spawn'")
        if self.link is not None:
            self.link = _link_among(self.link, len(self.names))


def check_above_0(option: str, value: Any, *, whole: bool = False) -> None:
    """Check that an option is a number above 0."""
    check_number(value, f"{option}={value!r}: expected a {'whole ' * whole}number above 0", whole=whole, above=0)


def _link_among(link: Any, ranks: int) -> Link | Network:
    """The link between so many ranks; a network knows their number."""
    if isinstance(link, Link):
        return link
    if not isinstance(link, Network):
        raise TypeError(
            f"link={link!r}: expected a Link, as in link=lab.Link(gbit_per_s=1, latency_us=50) or lab.Link.ethernet_1g, "
            "or a Network, as in link=lab.Network(nodes=2, inside=lab.Link.nvlink4, between=lab.Link.ethernet_10g)"
        )
    if link.ranks not in (None, ranks):
        raise ValueError(f"link={link}: this network has {link.ranks} ranks, and the group {ranks}; leave ranks= out of Network")
    return link.of(ranks)
