"""The rounds of each operation's algorithm on the nodes of a network: which messages travel inside nodes or between.

The messages of a round travel at the same time, and the next round begins when the last of them has arrived. Those that
leave or enter the same node share its one connection to the other nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from labkit.costs.link import cost_of
from labkit.recording.operations import Algorithm, Cost

Messages = Iterable[tuple[int, int, float]]  # sender and receiver, as places in the group; the share of n


class Round(NamedTuple):
    """Equal rounds of an algorithm; sizes are shares of n, the size of the operation.

    Args:
        times: how many there are.
        inside: the largest message between ranks of one node; None if there is no such message.
        between: the most that leaves or enters one node; None if nothing does.
    """

    times: int
    inside: float | None
    between: float | None


@lru_cache(maxsize=1 << 10)
def rounds_of(operation: str, nodes: tuple[int, ...], groups: int = 1) -> tuple[Round, ...]:
    """Return the rounds of an operation of the table.

    Args:
        operation: its name in torch.distributed.
        nodes: the node of each participating rank, in rank order; group after group if there are several.
        groups: the number of equal groups that carry it out at the same time and share the connections of their nodes.

    Raises:
        TypeError, ValueError: as for `costs.link.cost_of`.
    """
    p = len(nodes) // groups
    cost = cost_of(operation, p)
    if p == 1:
        return ()
    of_one = ((times, list(messages)) for times, messages in _MESSAGES[cost.algorithm](cost, p))  # p² messages in some
    return _on(nodes, ((n, [(i + k * p, j + k * p, x) for k in range(groups) for i, j, x in one]) for n, one in of_one))


def halving(nodes: Sequence[int]) -> tuple[Round, ...]:
    """Return the rounds of Rabenseifner's all-reduce: vector halving and distance doubling, and the same backwards.

    Args:
        nodes: the node of each rank, in rank order; a power of two of them.
    """
    p = len(nodes)
    distances = [1 << k for k in range((p - 1).bit_length())]
    there = _on(nodes, ((1, [(i, i ^ d, 1 / (2 * d)) for i in range(p)]) for d in distances))
    return (*there, *reversed(there))


def hierarchical(nodes: Sequence[int]) -> tuple[Round, ...]:
    """Return the rounds of an all-reduce by level: reduce-scatter inside, all-reduce between, all-gather inside; rings.

    Args:
        nodes: the node of each rank, in rank order; equally many ranks of each.
    """
    count = len(set(nodes))
    each = len(nodes) // count
    inside, between = Round(each - 1, 1 / each, None), Round(2 * (count - 1), None, 1 / count)
    return tuple(part for part in (inside, between, inside) if part.times)


def _on(nodes: Sequence[int], rounds: Iterable[tuple[int, Messages]]) -> tuple[Round, ...]:
    found = []
    for times, messages in rounds:
        inside: list[float] = []
        crossing: dict[tuple[int, bool], float] = {}  # by node and direction
        for sender, receiver, share in messages:
            if nodes[sender] == nodes[receiver]:
                inside.append(share)
            else:
                for end in ((nodes[sender], False), (nodes[receiver], True)):
                    crossing[end] = crossing.get(end, 0.0) + share
        found.append(Round(times, max(inside, default=None), max(crossing.values(), default=None)))
    return tuple(found)


def _ring(cost: Cost, p: int) -> Iterable[tuple[int, Messages]]:
    rounds = cost.rounds(p)
    return [(rounds, [(i, (i + 1) % p, cost.share(p) / rounds) for i in range(p)])]


def _pairwise(_: Cost, p: int) -> Iterable[tuple[int, Messages]]:
    return ((1, [(i, (i + k) % p, 1 / p) for i in range(p)]) for k in range(1, p))


def _tree(_: Cost, p: int) -> Iterable[tuple[int, Messages]]:
    return ((1, [(i, i + d, 1.0) for i in range(0, p - d, 2 * d)]) for d in _distances(p))


def _tree_of_parts(_: Cost, p: int) -> Iterable[tuple[int, Messages]]:
    return ((1, [(i, i + d, min(d, p - i - d) / p) for i in range(0, p - d, 2 * d)]) for d in _distances(p))


def _dissemination(_: Cost, p: int) -> Iterable[tuple[int, Messages]]:
    return ((1, [(i, (i + d) % p, 0.0) for i in range(p)]) for d in _distances(p))


def _central(_: Cost, p: int) -> Iterable[tuple[int, Messages]]:
    return [(1, [(i, 0, 0.0) for i in range(1, p)]), (1, [(0, i, 0.0) for i in range(1, p)])]


def _distances(p: int) -> list[int]:
    """The powers of two below p, largest first."""
    return [1 << k for k in reversed(range((p - 1).bit_length()))]


_MESSAGES: Final[dict[Algorithm, Callable[[Cost, int], Iterable[tuple[int, Messages]]]]] = {
    Algorithm.RING: _ring,
    Algorithm.PAIRWISE: _pairwise,
    Algorithm.TREE: _tree,
    Algorithm.TREE_OF_PARTS: _tree_of_parts,
    Algorithm.DISSEMINATION: _dissemination,
    Algorithm.CENTRAL: _central,
}
