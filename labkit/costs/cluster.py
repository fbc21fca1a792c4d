"""`Cluster`: equal devices on nodes, and what communication along one axis of a mesh costs there."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from labkit.costs.device import Device
from labkit.costs.link import Link
from labkit.costs.network import Network, as_network
from labkit.costs.rounds import Round
from labkit.errors.wrong_calls import check_number, public_class


@public_class
@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A cluster: `lab.Cluster(ranks=16, device=lab.Device.h100, link=lab.Network(nodes=2, inside=..., between=...))`.

    Each rank has a device of its own. The arguments have the names that they have in `lab.Group` and `lab.simulate`.

    Args:
        ranks: the number of ranks on all nodes, equally many on each.
        device: the device of each rank, with its memory.
        link: the link between the ranks, or their network.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: the nodes do not divide the ranks, or the network is for another number of ranks.
    """

    ranks: int
    device: Device
    link: Link | Network

    def __post_init__(self) -> None:
        expected = f"Cluster(ranks={self.ranks!r}): expected a whole number from 1"
        check_number(self.ranks, expected, whole=True, at_least=1)
        if not isinstance(self.device, Device):
            raise TypeError(f"Cluster(device={self.device!r}): expected a lab.Device, as in device=lab.Device.h100")
        if not isinstance(self.link, Link | Network):
            raise TypeError(f"Cluster(link={self.link!r}): expected a lab.Link or a lab.Network")
        if self.ranks % self.network.nodes:
            raise ValueError(
                f"Cluster(ranks={self.ranks}) on {self.network.nodes} nodes: expected equally many ranks on each node"
            )

    @property
    def network(self) -> Network:
        """The network; a single link is a network of one node."""
        return as_network(self.link, self.ranks)

    @property
    def ranks_per_node(self) -> int:
        """The number of ranks on each node."""
        return self.ranks // self.network.nodes


@dataclass(frozen=True, slots=True)
class MeshAxis:
    """One axis of a mesh that covers the whole cluster: groups of ranks that communicate at the same time."""

    network: Network  # of the cluster, which knows its ranks
    size: int  # the number of ranks in each group
    stride: int  # the distance between neighbours of a group, in ranks

    @property
    def nodes(self) -> tuple[int, ...]:
        """The node of each rank, group after group."""
        assert self.network.ranks is not None
        return _nodes_of(self.network.nodes, self.network.ranks, self.size, self.stride)

    @property
    def level(self) -> str:
        """The level that its groups cross: "between" nodes, or "inside" a node."""
        return "between" if any(len(set(group)) > 1 for group in self._groups()) else "inside"

    def message_s(self, nbytes: float) -> float:
        """Return how long it takes until each rank has received a message from its neighbour, all at the same time."""
        pairs = [pair for group in self._groups() for pair in pairwise(group)]
        leaving = Counter(sender for sender, receiver in pairs if sender != receiver)
        inside = 1.0 if any(sender == receiver for sender, receiver in pairs) else None
        return self.network.rounds_s([Round(1, inside, max(leaving.values(), default=None))], nbytes)

    def _groups(self) -> list[tuple[int, ...]]:
        nodes = self.nodes
        return [nodes[first : first + self.size] for first in range(0, len(nodes), self.size)]


@lru_cache(maxsize=1 << 8)
def _nodes_of(nodes: int, ranks: int, size: int, stride: int) -> tuple[int, ...]:
    firsts = [rank for rank in range(ranks) if rank // stride % size == 0]
    return tuple((first + k * stride) * nodes // ranks for first in firsts for k in range(size))
