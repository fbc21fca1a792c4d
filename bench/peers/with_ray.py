"""Ray: an actor for each rank, on one machine, as Ray's users write it."""

from __future__ import annotations

from typing import Any, cast

import ray

from bench.peers.work import RANKS, Tool, free_port, summed


@ray.remote(num_cpus=0.25)
class Rank:
    """An actor."""

    def add_up(self, rank: int, port: int) -> float:
        """Return the sum of a one from each rank."""
        return summed(rank, port)

    def nothing(self) -> None:
        """Do nothing."""

    def same(self, array: Any) -> Any:
        """Return the argument."""
        return array


class Ray(Tool):
    """`ray.remote`; Ray itself runs until the kernel ends."""

    times = 1

    def ready(self) -> list[float]:
        """See `Tool`; the rest likewise."""
        if not ray.is_initialized():
            ray.init("local", num_cpus=RANKS, include_dashboard=False, log_to_driver=False)
        port, make = free_port(), cast(Any, Rank)
        self._ranks: list[Any] = [make.remote() for _ in range(RANKS)]
        sums: list[float] = ray.get([one.add_up.remote(rank, port) for rank, one in enumerate(self._ranks)])
        return sums

    def call(self) -> object:
        """See `Tool`."""
        return ray.get([one.nothing.remote() for one in self._ranks])

    def move(self) -> object:
        """See `Tool`."""
        given = ray.put(self.array)
        return ray.get([one.same.remote(given) for one in self._ranks])

    def close(self) -> None:
        """See `Tool`."""
        for one in self._ranks:
            ray.kill(one)
