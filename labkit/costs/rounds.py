"""The rounds of each operation's algorithms on the nodes of a network: which messages travel inside nodes or between.

The messages of a round travel at the same time, and the next round begins when the last of them has arrived. Those that
leave or enter the same node share its one connection to the other nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Final, NamedTuple

from labkit.errors.lists import listed
from labkit.errors.wrong_calls import check_number
from labkit.recording.operations import CHAN, DEPTH, OPERATION_TYPES, THAKUR, Algorithm, Cost, depth, type_of

Nodes = tuple[int, ...]  # the node of each participating rank, in rank order


class Round(NamedTuple):
    """Equal rounds of an algorithm; sizes are shares of n, the size of the operation, of all these rounds together."""

    times: int  # how many there are
    inside: float | None  # the largest message between ranks of one node; None if there is no such message
    between: float | None  # the most that leaves or enters one node; None if nothing does


def rounds(operation: str, nodes: Nodes, groups: int = 1, algorithm: str = "") -> tuple[Round, ...]:
    """Return the rounds of an operation, by its name in torch.distributed; on one node, those of its closed form.

    `nodes` has the ranks of one group after another if `groups` carry it out at the same time and share the connections
    of their nodes. The algorithm is one of the operation's `ALGORITHMS`; default: that of the table of operations. A
    `TypeError` or `ValueError` is one of `cost_of`, or says that the algorithm needs another number of ranks.
    """
    p = len(nodes) // groups
    cost = cost_of(operation, p, algorithm)
    if algorithm == "halving" and p & (p - 1):
        raise ValueError(f"algorithm='halving' with ranks={p}: this form holds for powers of two (2, 4, 8, ...)")
    if p == 1:
        return ()
    if len(set(nodes)) == 1:
        return (Round(cost.rounds(p), cost.share(p), None),)
    return _over_nodes(operation, nodes, groups, algorithm)


def possible_rounds(operation: str, nodes: Nodes, groups: int = 1, *, fastest: bool) -> list[tuple[Round, ...]]:
    """Return the rounds of an operation, as `rounds` does; of an all-reduce, if `fastest`, those of all its algorithms.

    NCCL chooses among rings, trees and others; emulated links have rings.
    """
    found = [rounds(operation, nodes, groups)]
    if fastest and operation == "all_reduce":
        for algorithm in ALGORITHMS[operation]:
            if groups == 1 or algorithm != "hierarchical":
                with suppress(ValueError):  # it needs another number of ranks
                    found.append(rounds(operation, nodes, groups, algorithm))
    return found


def cost_of(operation: str, ranks: int, algorithm: str = "") -> Cost:
    """Return the cost of an operation among ranks of one node, whose number is only checked, as are the names."""
    if not isinstance(operation, str):
        raise TypeError(f"operation={operation!r}: expected the name of one, such as 'all_reduce'")
    check_number(ranks, f"ranks={ranks!r}: expected a whole number from 1", whole=True, at_least=1)
    cost = type_of(operation).cost
    if cost is None:
        known = ", ".join(kind.name for kind in OPERATION_TYPES if kind.cost is not None)
        raise ValueError(f"{operation!r} is not an operation with a known cost; expected {known}")
    if not algorithm:
        return cost
    if algorithm not in ALGORITHMS[operation]:
        raise ValueError(f"algorithm={algorithm!r}: expected {listed(map(repr, ALGORITHMS[operation]), word='or')}")
    return ALGORITHMS[operation][algorithm] or cost


@lru_cache(maxsize=1 << 10)
def _over_nodes(operation: str, nodes: Nodes, groups: int, algorithm: str) -> tuple[Round, ...]:
    parts = _PARTS.get((operation, algorithm))
    if parts:
        return tuple(each for part in parts for each in rounds(part, nodes, groups))
    if algorithm == "hierarchical":
        return _hierarchical(nodes)
    p = len(nodes) // groups
    found = []
    for times, messages in _messages(cost_of(operation, p), p, algorithm):
        inside: list[float] = []
        crossing: dict[tuple[int, bool], float] = {}  # by node and direction
        for first in range(0, len(nodes), p):  # the first rank of each group
            for sender, receiver, share in messages:
                here, there = nodes[first + sender], nodes[first + receiver]
                if here == there:
                    inside.append(share)
                else:
                    for end in ((here, False), (there, True)):
                        crossing[end] = crossing.get(end, 0.0) + share
        found.append(Round(times, max(inside, default=None), max(crossing.values(), default=None)))
    return tuple(found)


def _hierarchical(nodes: Nodes) -> tuple[Round, ...]:
    """The rounds by level: a reduce-scatter inside, an all-reduce between, an all-gather inside; rings."""
    each = list(Counter(nodes).values())
    if len(set(each)) > 1:
        raise ValueError(f"algorithm='hierarchical' with {each} ranks on the nodes: expected equally many on each node")
    count, q = len(each), each[0]
    inside, between = Round(q - 1, (q - 1) / q, None), Round(2 * (count - 1), None, 2 * (count - 1) / count)
    return (inside, between, inside) if q > 1 else (between,)


def _messages(cost: Cost, p: int, algorithm: str) -> Iterator[tuple[int, list[tuple[int, int, float]]]]:
    """Yield the number of equal rounds, and the messages of one: sender and receiver in the group, and the share of n.

    The share is that of these rounds together.
    """
    share, distances = cost.share(p), [1 << k for k in reversed(range(depth(p)))]  # the powers of two below p
    if algorithm == "halving":  # vector halving and distance doubling, and the same backwards
        for d in (*reversed(distances), *distances):
            yield 1, [(i, i ^ d, 1 / (2 * d)) for i in range(p)]
    elif cost.algorithm is Algorithm.RING:
        yield cost.rounds(p), [(i, (i + 1) % p, share) for i in range(p)]
    elif cost.algorithm is Algorithm.PAIRWISE:
        for k in range(1, p):
            yield 1, [(i, (i + k) % p, 1 / p) for i in range(p)]
    elif cost.algorithm is Algorithm.TREE:
        for d in distances:
            yield 1, [(i, i + d, 1.0) for i in range(0, p - d, 2 * d)]
    elif cost.algorithm is Algorithm.TREE_OF_PARTS:
        for d in distances:
            yield 1, [(i, i + d, min(d, p - i - d) / p) for i in range(0, p - d, 2 * d)]
    elif cost.algorithm is Algorithm.DISSEMINATION:
        for d in distances:
            yield 1, [(i, (i + d) % p, 0.0) for i in range(p)]
    else:
        assert cost.algorithm is Algorithm.CENTRAL
        yield 1, [(i, 0, 0.0) for i in range(1, p)]
        yield 1, [(0, i, 0.0) for i in range(1, p)]


_TWICE: Final = r"\frac{2(p-1)}{p}\,\frac{n}{B}"
_CHO: Final = "Cho et al., BlueConnect, 2019"
# The algorithms by name; None is that of the table of operations, which emulated links use.
ALGORITHMS: Final[Mapping[str, Mapping[str, Cost | None]]] = {
    "all_reduce": {
        "ring": None,
        "tree": Cost(lambda p: 2 * depth(p), lambda p: 2.0 * depth(p), rf"2{DEPTH}\left(\alpha + \frac{{n}}{{B}}\right)", CHAN),
        "halving": Cost(lambda p: 2 * depth(p), lambda p: 2 * (p - 1) / p, rf"2{DEPTH}\,\alpha + {_TWICE}", THAKUR),
        "hierarchical": Cost(lambda p: 2 * (p - 1), lambda p: 2 * (p - 1) / p, rf"2(p-1)\,\alpha + {_TWICE}", _CHO),
    },
    "broadcast": {
        "tree": None,
        "scatter": Cost(
            lambda p: depth(p) + p - 1, lambda p: 2 * (p - 1) / p, rf"({DEPTH} + p - 1)\,\alpha + {_TWICE}", THAKUR
        ),
    },
}  # fmt: skip
_PARTS: Final = {  # algorithms that consist of other operations
    ("all_reduce", "tree"): ("reduce", "broadcast"),
    ("broadcast", "scatter"): ("scatter", "all_gather"),
}
