"""Closed-form times of messages, collectives and remote calls, part of `lab.predict`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from labkit.costs.link import Link, cost_of
from labkit.costs.prediction import Prediction, check_arguments, in_latex
from labkit.errors.wrong_calls import public_api
from labkit.recording.operations import CHAN, HOCKNEY, OPERATION_TYPES, THAKUR, Traffic

__all__ = [
    "all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "gather", "message", "reduce", "reduce_scatter", "rpc",
    "scatter",
]  # fmt: skip

_DEEP: Final = r"\lceil\log_2 p\rceil"


def message(nbytes: float, link: Link) -> Prediction:
    """Seconds of a message of `nbytes` bytes, once both sender and receiver have arrived: α + n/B.

    Source: R. W. Hockney, "The communication challenge for MPP", 1994.
    """
    return collective("send", nbytes, 2, link)


def all_reduce(nbytes: float, ranks: int, link: Link, *, algorithm: str = "ring") -> Prediction:
    """Seconds of an all-reduce of a tensor of `nbytes` bytes.

    Args:
        nbytes: size of each rank's tensor.
        ranks: p, the number of ranks.
        link: the link between them.
        algorithm: "ring": 2(p−1)·α + 2(p−1)/p·n/B, best for large tensors, used by emulated links; "tree": a reduce and
            a broadcast, 2⌈log₂ p⌉·(α + n/B); "halving": Rabenseifner's, for p a power of two, 2⌈log₂ p⌉·α +
            2(p−1)/p·n/B.

    Raises:
        TypeError, ValueError: an invalid argument.

    Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH", 2005.
    """
    if algorithm == "ring":
        return collective("all_reduce", nbytes, ranks, link)
    check_arguments(nbytes=nbytes, ranks=ranks, link=link)
    deep, around = math.ceil(math.log2(ranks)), 2 * (ranks - 1) / ranks
    if algorithm == "tree":
        return _timed(2 * deep, 2 * deep, nbytes, link, rf"2{_DEEP}\left(\alpha + \frac{{n}}{{B}}\right)", CHAN)
    if algorithm == "halving":
        if ranks & (ranks - 1):
            raise ValueError(f"algorithm='halving' with ranks={ranks}: this form holds for powers of two (2, 4, 8, ...)")
        return _timed(2 * deep, around, nbytes, link, rf"2{_DEEP}\,\alpha + \frac{{2(p-1)}}{{p}}\,\frac{{n}}{{B}}", THAKUR)
    raise ValueError(f"algorithm={algorithm!r}: expected 'ring', 'tree' or 'halving'")


def all_gather(nbytes: float, ranks: int, link: Link) -> Prediction:
    """Seconds of a ring all-gather: (p−1)·α + (p−1)/p·n/B, with n the bytes of all ranks' parts together."""
    return collective("all_gather", nbytes, ranks, link)


def reduce_scatter(nbytes: float, ranks: int, link: Link) -> Prediction:
    """Seconds of a ring reduce-scatter: (p−1)·α + (p−1)/p·n/B, with n the bytes of each rank's input."""
    return collective("reduce_scatter", nbytes, ranks, link)


def all_to_all(nbytes: float, ranks: int, link: Link) -> Prediction:
    """Seconds of a pairwise all-to-all: (p−1)·α + (p−1)/p·n/B, with n the bytes of a rank's parts for all ranks."""
    return collective("all_to_all", nbytes, ranks, link)


def broadcast(nbytes: float, ranks: int, link: Link, *, algorithm: str = "tree") -> Prediction:
    """Seconds of a broadcast of `nbytes` bytes.

    Args:
        nbytes: size of the tensor.
        ranks: p, the number of ranks, including the root.
        link: the link between them.
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
    check_arguments(nbytes=nbytes, ranks=ranks, link=link)
    rounds, share = math.ceil(math.log2(ranks)) + ranks - 1, 2 * (ranks - 1) / ranks
    return _timed(rounds, share, nbytes, link, rf"({_DEEP} + p - 1)\,\alpha + \frac{{2(p-1)}}{{p}}\,\frac{{n}}{{B}}", THAKUR)


def reduce(nbytes: float, ranks: int, link: Link) -> Prediction:
    """Seconds of a binomial-tree reduce of tensors of `nbytes` bytes: ⌈log₂ p⌉·(α + n/B)."""
    return collective("reduce", nbytes, ranks, link)


def gather(nbytes: float, ranks: int, link: Link) -> Prediction:
    """Seconds of a binomial-tree gather: ⌈log₂ p⌉·α + (p−1)/p·n/B, with n the bytes of all parts together."""
    return collective("gather", nbytes, ranks, link)


def scatter(nbytes: float, ranks: int, link: Link) -> Prediction:
    """Seconds of a binomial-tree scatter: ⌈log₂ p⌉·α + (p−1)/p·n/B, with n the bytes of all parts together."""
    return collective("scatter", nbytes, ranks, link)


def barrier(ranks: int, link: Link) -> Prediction:
    """Seconds of a dissemination barrier: ⌈log₂ p⌉·α.

    Source: D. Hensgen, R. Finkel, U. Manber, "Two algorithms for barrier synchronization", 1988.
    """
    return collective("barrier", 0, ranks, link)


def rpc(
    request_bytes: float,
    reply_bytes: float,
    link: Link,
    *,
    compute_s: float = 0.0,
    calls: int = 1,
    asynchronous: bool = False,
) -> Prediction:
    """Seconds of k remote calls of one rank to another, with their replies.

    One after another they take k·(2α + (n₁ + n₂)/B + t). Asynchronous calls are all sent before the first wait: their
    latencies overlap, and messages of one direction follow one another, 2α + (k·max(n₁, n₂) + min(n₁, n₂))/B + t.

    Args:
        request_bytes: n₁, the size of the arguments.
        reply_bytes: n₂, the size of the result.
        link: the link between the two ranks.
        compute_s: t, the compute time of the callee; asynchronous calls compute at the same time, a thread each.
        calls: k, the number of calls.
        asynchronous: whether all calls are sent before the first wait, as with `rpc_async`.

    Raises:
        TypeError, ValueError: an invalid argument.

    Source: a message: R. W. Hockney, "The communication challenge for MPP", 1994; overlapping messages: labkit's own.
    """
    check_arguments(request_bytes=request_bytes, reply_bytes=reply_bytes, link=link, compute_s=compute_s, calls=calls)
    nbytes, times = request_bytes + reply_bytes, 1 if asynchronous else calls
    if asynchronous and calls > 1:
        nbytes = calls * max(request_bytes, reply_bytes) + min(request_bytes, reply_bytes)
        share = r"\frac{k \max(n_1, n_2) + \min(n_1, n_2)}{B}"
    else:
        share = r"\frac{n_1 + n_2}{B}"
    value = times * (2 * link.latency_s + nbytes / link.bytes_per_s + compute_s)
    formula = rf"2\,\alpha + {share} + t"
    inserted = rf"2 \cdot {in_seconds(link.latency_s)} + {_over(nbytes, link)} + {in_seconds(compute_s)}"
    if times > 1:
        formula, inserted = rf"k \left({formula}\right)", rf"{calls} \cdot \left({inserted}\right)"
    return Prediction(value, "s", "T", formula, inserted, HOCKNEY)


def collective(operation: str, nbytes: float, ranks: int, link: Link) -> Prediction:
    """Return the predicted time of an operation of the table."""
    check_arguments(nbytes=nbytes, ranks=ranks, link=link)
    cost = cost_of(operation, ranks)
    return _timed(cost.rounds(ranks), cost.share(ranks), nbytes, link, cost.formula, cost.source)


def _timed(rounds: int, share: float, nbytes: float, link: Link, formula: str, source: str) -> Prediction:
    value = rounds * link.latency_s + share * nbytes / link.bytes_per_s
    bytes_term = rf" + {share:.4g} \cdot {_over(nbytes, link)}" if r"{B}" in formula else ""
    inserted = rf"{rounds} \cdot {in_seconds(link.latency_s)}{bytes_term}"
    return Prediction(value, "s", "T", formula, inserted, source)


def _over(nbytes: float, link: Link) -> str:
    return rf"\frac{{8 \cdot {in_latex(nbytes, 'B')}}}{{{in_latex(link.gbit_per_s * 1e9, 'bit/s')}}}"


def in_seconds(seconds: float) -> str:
    """A time in LaTeX."""
    return in_latex(seconds, "s")


def _of_table(operation: str) -> Callable[[float, int, Link], Prediction]:
    """The function for a collective that has none of its own here."""

    def predicted(nbytes: float, ranks: int, link: Link) -> Prediction:
        return collective(operation, nbytes, ranks, link)

    predicted.__name__ = predicted.__qualname__ = operation
    return predicted


for _kind in OPERATION_TYPES:
    if _kind.collective and _kind.traffic is not Traffic.TOGETHER and _kind.cost is not None and _kind.name not in __all__:
        __all__.append(_kind.name)
        globals()[_kind.name] = _of_table(_kind.name)
globals().update({name: public_api(globals()[name]) for name in __all__})
