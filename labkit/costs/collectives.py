"""Closed-form times of messages, collectives and remote calls, part of `lab.predict`.

Each accepts a `labkit.Network` in place of a link. Then `ranks` may also list some of its ranks, `ranks=[0, 2]`, or
equal groups that communicate at the same time and share the connections of their nodes, as those of one dimension of a
mesh do: `ranks=[[0, 2], [1, 3]]`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

from labkit.costs.link import Link, cost_of
from labkit.costs.network import Network
from labkit.costs.prediction import Prediction, check_arguments, in_seconds, transfer_in_latex
from labkit.costs.two_levels import all_reduce_over, operation_over
from labkit.errors.wrong_calls import public_api
from labkit.recording.operations import CHAN, HOCKNEY, OPERATION_TYPES, THAKUR, Traffic

__all__ = [
    "all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "gather", "message", "reduce", "reduce_scatter", "rpc",
    "scatter",
]  # fmt: skip

Ranks = int | Sequence[int] | Sequence[Sequence[int]]
_DEEP: Final = r"\lceil\log_2 p\rceil"


def message(nbytes: float, link: Link | Network, *, ranks: Sequence[int] | None = None) -> Prediction:
    """Seconds of a message of `nbytes` bytes, once both sender and receiver have arrived: α + n/B.

    Args:
        nbytes: n, the size.
        link: the link, or the network.
        ranks: of a network, the two ranks; default: ranks of different nodes, whose messages take `between`.

    Raises:
        TypeError, ValueError: an invalid argument.

    Source: R. W. Hockney, "The communication challenge for MPP", 1994.
    """
    return collective("send", nbytes, 2, _of_pair(link, ranks))


def all_reduce(nbytes: float, ranks: Ranks, link: Link | Network, *, algorithm: str = "ring") -> Prediction:
    """Seconds of an all-reduce of a tensor of `nbytes` bytes.

    Args:
        nbytes: size of each rank's tensor.
        ranks: p, the number of ranks; of a network, also a list of some of its ranks, or with the ring a list of groups
            that communicate at the same time.
        link: the link between them, or their network.
        algorithm: "ring": 2(p−1)·α + 2(p−1)/p·n/B, best for large tensors, used by emulated links; "tree": a reduce and
            a broadcast, 2⌈log₂ p⌉·(α + n/B); "halving": Rabenseifner's, for p a power of two, 2⌈log₂ p⌉·α +
            2(p−1)/p·n/B; "hierarchical", over a network of N nodes with q ranks each: a reduce-scatter inside the
            nodes, an all-reduce of each part between them, an all-gather inside; rings, 2(q−1)·(α + n/(q·B)) inside and
            2(N−1)·(α + n/(N·B)) between.

    Over several nodes of a network, a ring runs at the pace of the slower level. A tree begins and ends inside the
    nodes: 2⌈log₂ q⌉·(α + n/B) inside and 2⌈log₂ N⌉·(α + n/B) between, for q and N powers of two.

    Raises:
        TypeError, ValueError: an invalid argument.

    Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH", 2005;
        hierarchical: M. Cho et al., "BlueConnect: Decomposing all-reduce for deep learning on heterogeneous network
        hierarchy", 2019.
    """
    if algorithm == "ring":
        return collective("all_reduce", nbytes, ranks, link)
    check_arguments(nbytes=nbytes, link=link)
    if isinstance(link, Network):
        return all_reduce_over(nbytes, link.nodes_among(_one_group(ranks)), link, algorithm)
    p = count_of(ranks, link)
    deep, around = math.ceil(math.log2(p)), 2 * (p - 1) / p
    if algorithm == "tree":
        return _timed(2 * deep, 2 * deep, nbytes, link, rf"2{_DEEP}\left(\alpha + \frac{{n}}{{B}}\right)", CHAN)
    if algorithm == "halving":
        if p & (p - 1):
            raise ValueError(f"algorithm='halving' with ranks={p}: this form holds for powers of two (2, 4, 8, ...)")
        return _timed(2 * deep, around, nbytes, link, rf"2{_DEEP}\,\alpha + \frac{{2(p-1)}}{{p}}\,\frac{{n}}{{B}}", THAKUR)
    if algorithm == "hierarchical":
        raise ValueError(f"algorithm='hierarchical' with link={link}: a hierarchy needs nodes; expected a lab.Network")
    raise ValueError(f"algorithm={algorithm!r}: expected 'ring', 'tree', 'halving' or 'hierarchical'")


def all_gather(nbytes: float, ranks: Ranks, link: Link | Network) -> Prediction:
    """Seconds of a ring all-gather: (p−1)·α + (p−1)/p·n/B, with n the bytes of all ranks' parts together."""
    return collective("all_gather", nbytes, ranks, link)


def reduce_scatter(nbytes: float, ranks: Ranks, link: Link | Network) -> Prediction:
    """Seconds of a ring reduce-scatter: (p−1)·α + (p−1)/p·n/B, with n the bytes of each rank's input."""
    return collective("reduce_scatter", nbytes, ranks, link)


def all_to_all(nbytes: float, ranks: Ranks, link: Link | Network) -> Prediction:
    """Seconds of a pairwise all-to-all: (p−1)·α + (p−1)/p·n/B, with n the bytes of a rank's parts for all ranks."""
    return collective("all_to_all", nbytes, ranks, link)


def broadcast(nbytes: float, ranks: Ranks, link: Link | Network, *, algorithm: str = "tree") -> Prediction:
    """Seconds of a broadcast of `nbytes` bytes.

    Args:
        nbytes: size of the tensor.
        ranks: p, the number of ranks, including the root; of a network, also a list of some of its ranks.
        link: the link between them, or their network.
        algorithm: "tree": a binomial tree, ⌈log₂ p⌉·(α + n/B), used by emulated links; "scatter": a scatter and an
            all-gather, (⌈log₂ p⌉ + p − 1)·α + 2(p−1)/p·n/B, better for large tensors.

    Raises:
        TypeError, ValueError: an invalid argument.

    Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH", 2005.
    """
    if algorithm == "tree":
        return collective("broadcast", nbytes, ranks, link)
    if algorithm != "scatter":
        raise ValueError(f"algorithm={algorithm!r}: expected 'tree' or 'scatter'")
    check_arguments(nbytes=nbytes, link=link)
    if isinstance(link, Network):
        return operation_over(("scatter", "all_gather"), nbytes, link.nodes_among(_one_group(ranks)), link, THAKUR)
    p = count_of(ranks, link)
    rounds, share = math.ceil(math.log2(p)) + p - 1, 2 * (p - 1) / p
    return _timed(rounds, share, nbytes, link, rf"({_DEEP} + p - 1)\,\alpha + \frac{{2(p-1)}}{{p}}\,\frac{{n}}{{B}}", THAKUR)


def reduce(nbytes: float, ranks: Ranks, link: Link | Network) -> Prediction:
    """Seconds of a binomial-tree reduce of tensors of `nbytes` bytes: ⌈log₂ p⌉·(α + n/B)."""
    return collective("reduce", nbytes, ranks, link)


def gather(nbytes: float, ranks: Ranks, link: Link | Network) -> Prediction:
    """Seconds of a binomial-tree gather: ⌈log₂ p⌉·α + (p−1)/p·n/B, with n the bytes of all parts together."""
    return collective("gather", nbytes, ranks, link)


def scatter(nbytes: float, ranks: Ranks, link: Link | Network) -> Prediction:
    """Seconds of a binomial-tree scatter: ⌈log₂ p⌉·α + (p−1)/p·n/B, with n the bytes of all parts together."""
    return collective("scatter", nbytes, ranks, link)


def barrier(ranks: Ranks, link: Link | Network) -> Prediction:
    """Seconds of a dissemination barrier: ⌈log₂ p⌉·α.

    Source: D. Hensgen, R. Finkel, U. Manber, "Two algorithms for barrier synchronization", 1988.
    """
    return collective("barrier", 0, ranks, link)


def rpc(
    request_bytes: float,
    reply_bytes: float,
    link: Link | Network,
    *,
    compute_s: float = 0.0,
    calls: int = 1,
    asynchronous: bool = False,
    ranks: Sequence[int] | None = None,
) -> Prediction:
    """Seconds of k remote calls of one rank to another, with their replies.

    One after another they take k·(2α + (n₁ + n₂)/B + t). Asynchronous calls are all sent before the first wait: their
    latencies overlap, and messages of one direction follow one another, 2α + (k·max(n₁, n₂) + min(n₁, n₂))/B + t.

    Args:
        request_bytes: n₁, the size of the arguments.
        reply_bytes: n₂, the size of the result.
        link: the link between the two ranks, or their network.
        compute_s: t, the compute time of the callee; asynchronous calls compute at the same time, a thread each.
        calls: k, the number of calls.
        asynchronous: whether all calls are sent before the first wait, as with `rpc_async`.
        ranks: of a network, caller and callee; default: ranks of different nodes, whose messages take `between`.

    Raises:
        TypeError, ValueError: an invalid argument.

    Source: a message: R. W. Hockney, "The communication challenge for MPP", 1994; overlapping messages: labkit's own.
    """
    check_arguments(request_bytes=request_bytes, reply_bytes=reply_bytes, link=link, compute_s=compute_s, calls=calls)
    link = _of_pair(link, ranks)
    nbytes, times = request_bytes + reply_bytes, 1 if asynchronous else calls
    if asynchronous and calls > 1:
        nbytes = calls * max(request_bytes, reply_bytes) + min(request_bytes, reply_bytes)
        share = r"\frac{k \max(n_1, n_2) + \min(n_1, n_2)}{B}"
    else:
        share = r"\frac{n_1 + n_2}{B}"
    value = times * (2 * link.latency_s + nbytes / link.bytes_per_s + compute_s)
    formula = rf"2\,\alpha + {share} + t"
    inserted = rf"2 \cdot {in_seconds(link.latency_s)} + {transfer_in_latex(nbytes, link)} + {in_seconds(compute_s)}"
    if times > 1:
        formula, inserted = rf"k \left({formula}\right)", rf"{calls} \cdot \left({inserted}\right)"
    return Prediction(value, "s", "T", formula, inserted, HOCKNEY)


def collective(operation: str, nbytes: float, ranks: Ranks, link: Link | Network) -> Prediction:
    """Return the predicted time of an operation of the table."""
    check_arguments(nbytes=nbytes, link=link)
    p = count_of(ranks, link)
    cost = cost_of(operation, p)
    if isinstance(link, Network):
        groups = _groups(ranks)
        nodes = tuple(node for group in groups for node in link.nodes_among(group))
        return operation_over((operation,), nbytes, nodes, link, cost.source, len(groups))
    return _timed(cost.rounds(p), cost.share(p), nbytes, link, cost.formula, cost.source)


def count_of(ranks: Ranks, link: Link | Network) -> int:
    """Return the number of ranks that are given by their number or, for a network, listed.

    Raises:
        TypeError, ValueError: an invalid argument.
    """
    check_arguments(link=link)
    if isinstance(link, Network):
        return len(link.nodes_among(_groups(ranks)[0]))
    check_arguments(ranks=ranks)
    return int(ranks)  # type: ignore[arg-type]  # checked: a whole number


def _groups(ranks: Ranks) -> Sequence[int | Sequence[int]]:
    """Return the groups of ranks that communicate at the same time: one, unless `ranks` lists lists."""
    if isinstance(ranks, int) or not isinstance(ranks, Sequence) or not any(isinstance(group, Sequence) for group in ranks):
        return [ranks]  # type: ignore[list-item]  # `nodes_among` checks it
    if len({len(group) if isinstance(group, Sequence) else 0 for group in ranks}) > 1:
        raise ValueError(f"ranks={ranks!r}: expected groups of equally many ranks, as in ranks=[[0, 2], [1, 3]]")
    members = [rank for group in ranks for rank in group]  # type: ignore[union-attr]  # all are lists
    if len(set(members)) < len(members):
        raise ValueError(f"ranks={ranks!r}: expected groups without a common rank, as in ranks=[[0, 2], [1, 3]]")
    return ranks


def _one_group(ranks: Ranks) -> int | Sequence[int]:
    groups = _groups(ranks)
    if len(groups) > 1:
        raise ValueError(f"ranks={ranks!r}: groups at the same time are predicted for the default algorithm only; expected one")
    return groups[0]


def _of_pair(link: Link | Network, ranks: Sequence[int] | None) -> Link:
    """Return the link between two ranks of a network."""
    check_arguments(link=link)
    if isinstance(link, Link):
        if ranks is not None:
            raise ValueError(f"ranks={ranks!r}: all ranks have the same link; give ranks with a lab.Network only")
        return link
    if ranks is None:
        return link.between
    if len(ranks) != 2:
        raise ValueError(f"ranks={ranks!r}: expected two ranks, as in ranks=(0, 1)")
    return link.link(*ranks)


def _timed(rounds: int, share: float, nbytes: float, link: Link, formula: str, source: str) -> Prediction:
    value = rounds * link.latency_s + share * nbytes / link.bytes_per_s
    bytes_term = rf" + {share:.4g} \cdot {transfer_in_latex(nbytes, link)}" if r"{B}" in formula else ""
    inserted = rf"{rounds} \cdot {in_seconds(link.latency_s)}{bytes_term}"
    return Prediction(value, "s", "T", formula, inserted, source)


def _of_table(operation: str) -> Callable[[float, Ranks, Link | Network], Prediction]:
    """The function for a collective that has none of its own here."""

    def predicted(nbytes: float, ranks: Ranks, link: Link | Network) -> Prediction:
        return collective(operation, nbytes, ranks, link)

    predicted.__name__ = predicted.__qualname__ = operation
    return predicted


for _kind in OPERATION_TYPES:
    if _kind.collective and _kind.traffic is not Traffic.TOGETHER and _kind.cost is not None and _kind.name not in __all__:
        __all__.append(_kind.name)
        globals()[_kind.name] = _of_table(_kind.name)
globals().update({name: public_api(globals()[name]) for name in __all__})
