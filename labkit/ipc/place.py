"""`Place`: where a rank is among the machines of its group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

LOOPBACK: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is among the machines of its group.

    Args:
        machine: the name of its machine; "" where all ranks are on the notebook's machine.
        node: the number of its machine among those of the group.
        nodes: the number of machines.
        local_rank: its number among the ranks of its machine.
        local_size: the number of ranks of its machine.
        address: the address at which the other machines reach this one.
        interface: the network interface with that address; "" leaves the choice to the frameworks.
        names: all names and addresses of the group's machines.
        cores: the cores that the ranks of its machine share; 0 where these are the notebook's.
    """

    machine: str = ""
    node: int = 0
    nodes: int = 1
    local_rank: int = 0
    local_size: int = 1
    address: str = LOOPBACK
    interface: str = ""
    names: frozenset[str] = frozenset()
    cores: float = 0.0

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
