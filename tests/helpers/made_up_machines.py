"""Groups with ranks on machines that are made up: each is another address of this machine's loopback interface."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import pytest

from labkit.ipc.options import Place
from labkit.launch.rank_process import RankProcess
from labkit.launch.starters import ForkStarter

ADDRESSES = {"pc1": "127.0.0.2", "pc2": "127.0.0.3"}


def places(on: Sequence[str], interface: str = "lo") -> list[Place]:
    """Return the places of ranks.

    Args:
        on: the machine of each rank.
        interface: the interface of all machines.
    """
    machines = list(dict.fromkeys(on))
    names = frozenset({*machines, *(ADDRESSES[machine] for machine in machines)})
    return [
        Place(
            machine, machines.index(machine), len(machines), on[:rank].count(machine), on.count(machine), ADDRESSES[machine],
            interface, names,
        )
        for rank, machine in enumerate(on)
    ]  # fmt: skip


@contextlib.contextmanager
def started_on(*on: str, interface: str = "lo") -> Iterator[None]:
    """Have ranks that start inside the `with` block in groups of this size believe that they are on these machines."""
    start = ForkStarter.start

    def start_there(self: ForkStarter, count: int) -> list[RankProcess]:
        ranks = start(self, count)
        if count == len(on):
            for rank, place in zip(ranks, places(on, interface), strict=True):
                rank.place = place
        return ranks

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ForkStarter, "start", start_there)
        yield
