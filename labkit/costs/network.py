"""`Network`: ranks on several nodes, with one kind of link inside each node and another between nodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from labkit.costs.link import Link
from labkit.costs.rounds import Round, rounds
from labkit.errors.wrong_calls import check_number, public_api, public_class


@public_class
@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Links of two levels: `lab.Network(nodes=2, inside=lab.Link.nvlink4, between=lab.Link.ethernet_10g)`.

    Consecutive ranks share a node: with four ranks on two nodes, ranks 0 and 1 are on node 0, ranks 2 and 3 on node 1.
    If the nodes do not divide the ranks, the first nodes have one rank more.

    A message between ranks of one node takes `inside`. Each rank has such a link of its own to the ranks of its node,
    as in `lab.Link`. A message between nodes takes `between`. Each node has one connection of this kind, like a server
    with one network card, and its ranks share it: two messages of n bytes that leave a node at the same time take
    α + 2n/B. The two levels work independently of each other.

    A collective takes the time of its algorithm's rounds (the table in docs/networks.md), each of which lasts as long
    as its slowest message: a ring over several nodes runs at the pace of `between`, and a collective among ranks of one
    node, such as a group of `dist.new_group`, takes `inside` only.

    Args:
        nodes: the number of nodes.
        inside: the link between ranks of one node.
        between: the connection of each node to the other nodes.
        ranks: the number of ranks on all nodes; a group sets it, so that `group.link.node_of(3)` works.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: `nodes` or `ranks` is less than 1, or there are fewer ranks than nodes.
    """

    nodes: int
    inside: Link
    between: Link
    ranks: int | None = None

    def __post_init__(self) -> None:
        _check_count(f"Network(nodes={self.nodes!r})", self.nodes)
        for level in ("inside", "between"):
            if not isinstance(given := getattr(self, level), Link):
                raise TypeError(f"Network({level}={given!r}): expected a Link, as in {level}=lab.Link.ethernet_10g")
        if self.ranks is not None:
            _check_count(f"Network(ranks={self.ranks!r})", self.ranks)
            if self.ranks < self.nodes:
                raise ValueError(f"Network(nodes={self.nodes}) for {self.ranks} ranks: expected at least one rank for each node")

    def __str__(self) -> str:
        nodes = f"{self.nodes} node{'' if self.nodes == 1 else 's'}"
        return f"{nodes}, {self.inside} inside, {self.between} between"

    @public_api
    def of(self, ranks: int) -> Network:
        """Return this network for a number of ranks.

        Args:
            ranks: the number of ranks on all nodes.

        Raises:
            TypeError: `ranks` is not a whole number.
            ValueError: there are fewer ranks than nodes, or this network has another number of ranks.
        """
        if self.ranks is not None and self.ranks != ranks:
            raise ValueError(
                f"ranks={ranks!r}: this network has {self.ranks} ranks; expected {self.ranks}, or a list of some of its ranks "
                "such as ranks=[0, 1]"
            )
        return self if self.ranks == ranks else replace(self, ranks=ranks)

    @public_api
    def node_of(self, rank: int) -> int:
        """Return the number of a rank's node.

        Raises:
            TypeError, ValueError: there is no such rank, or the number of ranks is unknown.
        """
        ranks = self._known()
        _check_below(f"rank={rank!r}", rank, ranks)
        return int(rank) * self.nodes // ranks

    @public_api
    def ranks_of(self, node: int) -> list[int]:
        """Return the ranks of a node, as for `dist.new_group`.

        Raises:
            TypeError, ValueError: there is no such node, or the number of ranks is unknown.
        """
        ranks = self._known()
        _check_below(f"node={node!r}", node, self.nodes)
        return [rank for rank in range(ranks) if self.node_of(rank) == node]

    @public_api
    def link(self, i: int, j: int) -> Link:
        """Return the link over which ranks i and j exchange messages: `inside` or `between`.

        Raises:
            TypeError, ValueError: as for `node_of`.
        """
        return self.inside if self.node_of(i) == self.node_of(j) else self.between

    @public_api
    def nodes_among(self, ranks: int | Sequence[int]) -> tuple[int, ...]:
        """Return the node of each of some ranks.

        Args:
            ranks: the number of all ranks, or the numbers of some of them.

        Raises:
            TypeError, ValueError: as for `of` and `node_of`; ranks are named twice, or none is.
        """
        if not isinstance(ranks, Iterable) or isinstance(ranks, str):
            _check_count(f"ranks={ranks!r}", ranks)
            count = int(self.of(ranks)._known())  # perhaps numpy's
            return tuple(rank * self.nodes // count for rank in range(count))
        if not len(ranks) or len(set(ranks)) < len(ranks):
            raise ValueError(f"ranks={list(ranks)}: expected different ranks, at least one")
        return tuple(map(self.node_of, sorted(ranks)))

    @public_api
    def seconds(self, operation: str, nbytes: float, ranks: int | Sequence[int] | None = None) -> float:
        """Return how long an operation takes, in seconds, once all its ranks have arrived.

        Args:
            operation: its name in torch.distributed: "all_reduce", "broadcast", "send", ...
            nbytes: its size in bytes, the n of `costs.link.rounds_and_share`.
            ranks: the participating ranks: their number if it is all of them, or a list; default: all.

        Raises:
            TypeError, ValueError: as for `Link.seconds` and `nodes_among`.
        """
        self.inside.seconds(operation, nbytes)  # checks these arguments
        nodes = self.nodes_among(self._known() if ranks is None else ranks)
        return self.rounds_s(rounds(operation, nodes), nbytes)

    def rounds_s(self, rounds: Iterable[Round], nbytes: float) -> float:
        """Return how long the rounds of an algorithm take for n bytes, one after another, in seconds."""
        return sum((max(self._levels_s(each, nbytes)) for each in rounds), 0.0)

    def slower(self, each: Round, nbytes: float) -> str:
        """Return the level, "inside" or "between", that determines how long a round takes."""
        inside_s, between_s = self._levels_s(each, nbytes)
        return "between" if each.between is not None and between_s >= inside_s else "inside"

    def _levels_s(self, each: Round, nbytes: float) -> tuple[float, float]:
        inside_s = between_s = 0.0
        if each.inside is not None:
            inside_s = each.times * self.inside.latency_s + each.inside * nbytes / self.inside.bytes_per_s
        if each.between is not None:
            between_s = each.times * self.between.latency_s + each.between * nbytes / self.between.bytes_per_s
        return inside_s, between_s

    def _known(self) -> int:
        if self.ranks is None:
            raise ValueError("the number of ranks is unknown: expected lab.Network(..., ranks=4), or the `link` of a group")
        return self.ranks


def as_network(link: Link | Network, ranks: int) -> Network:
    """Return the network of so many ranks; a link is a network of one node."""
    if isinstance(link, Link):
        return Network(nodes=1, inside=link, between=link, ranks=ranks)
    return link.of(ranks)


def nodes_over(link: Link | Network | None, ranks: int) -> tuple[int, ...]:
    """Return the node of each rank if the ranks were given nodes; over a link, they have none."""
    return link.nodes_among(ranks) if isinstance(link, Network) else ()


def _check_count(given: str, value: Any) -> None:
    check_number(value, f"{given}: expected a whole number from 1", whole=True, at_least=1)


def _check_below(given: str, value: Any, count: int) -> None:
    check_number(value, f"{given}: expected a whole number from 0 to {count - 1}", whole=True, at_least=0, below=count)
