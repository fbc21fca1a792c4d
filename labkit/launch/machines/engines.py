"""`Engine`: what `on=` takes: it connects the agents of machines, and decides how many ranks each machine gets."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Hashable, Sequence
from dataclasses import dataclass
from typing import Final

from labkit.costs.network import Network

# The module that `python -m` runs on each machine; its stdin and stdout are the line.
AGENT: Final = "labkit.launch.machines.agent"


@dataclass(slots=True)
class Connection:
    """A connection to an agent."""

    reader: asyncio.StreamReader  # from the agent
    writer: asyncio.StreamWriter  # to it
    ended: Callable[[], Coroutine[None, None, str]]  # says, after the end, why it ended, as far as the engine knows
    close: Callable[[], None]  # ends what connects them, and so the agent


class Engine(ABC):
    """Places agents on machines, and connects them. Equal engines share their agents; pickles go to the relay."""

    ready_limit_s: float = 180.0  # until the machines can be used: an engine with a queue takes long
    connect_limit_s: float = 30.0  # for one machine to answer
    again_limit_s: float = 10.0  # the same for a machine that was lost, before each start of ranks
    ends_machines: bool = False  # whether machines and agents end with this object; others wait for an equal one
    returns: int = 0  # how often a machine has come back, if that is known: a group then tries those that it has lost

    @property
    @abstractmethod
    def key(self) -> Hashable:
        """What equal engines have in common."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Engine) and type(self) is type(other) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    @abstractmethod
    async def machines(self, say: Callable[[str], None]) -> Sequence[str]:
        """Return the names of the machines, once they can be used; tell `say` what there is to wait for, in words."""

    @abstractmethod
    async def connect(self, machine: str, limit_s: float) -> Connection:
        """Start an agent on a machine, and connect it; nobody waits for longer than `limit_s`.

        Raises:
            LabError: that is not possible; the message says why, and what to do.
        """

    def instead(self) -> tuple[Network, str] | None:
        """Return what to emulate on this machine if the machines cannot be had, and why they cannot; else None."""
        return None

    def notes(self) -> Sequence[str]:
        """Return remarks for the student, once the machines are connected."""
        return ()

    def counts(self, ranks: int, machines: Sequence[str]) -> list[int]:
        """Return the number of ranks for each machine: by default, as even as possible.

        Raises:
            LabError: these machines do not suffice.
        """
        each, more = divmod(ranks, len(machines))
        return [each + (i < more) for i in range(len(machines))]

    def check(self, ranks: int) -> None:  # noqa: B027  # any number is right by default
        """Check the number of ranks of a group, when it is made.

        Raises:
            ValueError: the engine cannot place so many.
        """
