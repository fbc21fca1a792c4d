"""`Network`: ranks on several nodes, with one kind of link inside each node and another between nodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from labkit.costs.link import Link
from labkit.costs.rounds import Round, rounds_of
from labkit.errors.wrong_calls import check_number, public_api


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
        _check_count("nodes", self.nodes)
        for level in ("inside", "between"):
            if not isinstance(given := getattr(self, level), Link):
                raise TypeError(f"Network({level}={given!r}): expected a Link, as in {level}=lab.Link.ethernet_10g")
        if self.ranks is not None:
            _check_count("ranks", self.ranks)
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
            TypeError: `rank` is not a whole number.
            ValueError: there is no such rank, or the number of ranks is unknown.
        """
        ranks = self._known()
        _check_number("rank", rank, ranks)
        return int(rank) * self.nodes // ranks

    @public_api
    def ranks_of(self, node: int) -> list[int]:
        """Return the ranks of a node, as for `dist.new_group`.

        Raises:
            TypeError: `node` is not a whole number.
            ValueError: there is no such node, or the number of ranks is unknown.
        """
        ranks = self._known()
        _check_number("node", node, self.nodes)
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
            _check_count("ranks", ranks, "")
            whole = self.of(ranks)
            return tuple(whole.node_of(rank) for rank in range(ranks))
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
        rounds = rounds_of(operation, nodes)
        return sum(self.round_s(each, nbytes) for each in rounds)

    @public_api
    def round_s(self, each: Round, nbytes: float) -> float:
        """Return how long equal rounds of an algorithm take, in seconds.

        Args:
            each: the rounds.
            nbytes: n, the size of the operation in bytes.
        """
        return each.times * max(
            self._level_s(self.inside, each.inside, nbytes), self._level_s(self.between, each.between, nbytes)
        )

    @public_api
    def slower(self, each: Round, nbytes: float) -> str:
        """Return the level, "inside" or "between", that determines how long a round takes."""
        inside_s = self._level_s(self.inside, each.inside, nbytes)
        return (
            "between" if each.between is not None and self._level_s(self.between, each.between, nbytes) >= inside_s else "inside"
        )

    @staticmethod
    def _level_s(link: Link, share: float | None, nbytes: float) -> float:
        return 0.0 if share is None else link.latency_s + share * nbytes / link.bytes_per_s

    def _known(self) -> int:
        if self.ranks is None:
            raise ValueError("the number of ranks is unknown: expected lab.Network(..., ranks=4), or the `link` of a group")
        return self.ranks


Network.__init__ = public_api(Network.__init__)  # type: ignore[method-assign]  # generated by `dataclass`


def link_of_pair(link: Link | Network, i: int, j: int) -> Link:
    """Return the link between two ranks of a link or a network."""
    return link if isinstance(link, Link) else link.link(i, j)


def latency_and_share(rounds: Iterable[Round], network: Network, nbytes: float) -> dict[str, tuple[int, float]]:
    """Return for each level the rounds that last as long as it does, and the share of n that it carries in them.

    Args:
        rounds: the rounds of an algorithm.
        network: the network.
        nbytes: n, on which it depends which level is the slower.
    """
    sums = {"between": (0, 0.0), "inside": (0, 0.0)}
    for each in rounds:
        level = network.slower(each, nbytes)
        share = each.between if level == "between" else each.inside
        count, total = sums[level]
        sums[level] = count + each.times, total + each.times * (share or 0.0)
    return {level: found for level, found in sums.items() if found[0]}


def _check_count(name: str, value: Any, of: str = "Network") -> None:
    given = f"{of}({name}={value!r})" if of else f"{name}={value!r}"
    check_number(value, f"{given}: expected a whole number from 1", whole=True, at_least=1)


def _check_number(name: str, value: Any, count: int) -> None:
    expected = f"{name}={value!r}: expected a whole number from 0 to {count - 1}"
    check_number(value, expected, whole=True, at_least=0, below=count)
