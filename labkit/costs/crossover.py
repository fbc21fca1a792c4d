"""The size at which two algorithms of an all-reduce take the same time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from labkit.costs.collectives import count_of
from labkit.costs.link import Link
from labkit.costs.network import Network, latency_and_share
from labkit.costs.prediction import Prediction, check_arguments, in_seconds
from labkit.costs.two_levels import all_reduce_rounds
from labkit.errors.wrong_calls import public_api
from labkit.recording.operations import THAKUR

LARGEST_BYTES: Final = 1e18
HALVINGS: Final = 200  # of the interval that holds the size: enough for every digit of a float


@public_api
def all_reduce_crossover(
    ranks: int | Sequence[int], link: Link | Network, *, small: str = "tree", large: str = "ring"
) -> Prediction:
    """Bytes at which two algorithms of an all-reduce take the same time: below, `small` is faster, above, `large`.

    The time of an algorithm is T = a + s·n, with a the sum of its latencies and s its time per byte; the sizes of equal
    time solve a₁ + s₁·n = a₂ + s₂·n. Over one link, ring and tree take the same time at
    n = (p − 1 − L)/(L − (p−1)/p)·α·B with L = ⌈log₂ p⌉.

    Args:
        ranks: p, the number of ranks; of a network, also a list of some of its ranks.
        link: the link between them, or their network.
        small: the algorithm for small tensors, as for `lab.predict.all_reduce`.
        large: the algorithm for large tensors.

    Returns:
        the size; 0 if `large` is at least as fast at every size, as a ring of two or three ranks is.

    Raises:
        TypeError, ValueError: an invalid argument; or `small` is faster at every size.

    Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH", 2005.
    """
    check_arguments(link=link)
    if isinstance(link, Network):
        network, nodes = link, link.nodes_among(ranks)
    else:
        count = count_of(ranks, link)
        network, nodes = Network(nodes=1, inside=link, between=link), (0,) * count
        if "hierarchical" in (small, large):
            raise ValueError(f"algorithm='hierarchical' with link={link}: a hierarchy needs nodes; expected a lab.Network")
    rounds = {name: all_reduce_rounds(nodes, name) for name in (small, large)}

    def later_s(nbytes: float) -> float:
        """How much later `small` ends."""
        return sum(network.round_s(e, nbytes) for e in rounds[small]) - sum(network.round_s(e, nbytes) for e in rounds[large])

    below, above = 0.0, 1.0
    while later_s(above) <= 0 and above < LARGEST_BYTES:
        below, above = above, 2 * above
    if later_s(above) <= 0:
        raise ValueError(f"small={small!r} takes at most as long as large={large!r} at every size; there is no crossover")
    if later_s(0) < 0:
        for _ in range(HALVINGS):
            middle = (below + above) / 2
            below, above = (middle, above) if later_s(middle) < 0 else (below, middle)
    else:
        above = 0.0
    terms = []
    for name in (large, small):
        parts = latency_and_share(rounds[name], network, above)
        latency_s = sum(times * getattr(network, level).latency_s for level, (times, _) in parts.items())
        terms.append((latency_s, sum(share / getattr(network, level).bytes_per_s for level, (_, share) in parts.items())))
    (a_large, s_large), (a_small, s_small) = terms
    formula = rf"\frac{{a_\text{{{large}}} - a_\text{{{small}}}}}{{s_\text{{{small}}} - s_\text{{{large}}}}},\quad T = a + s\,n"
    per_byte = rf"{in_seconds(s_small)} - {in_seconds(s_large)}"
    inserted = rf"\frac{{{in_seconds(a_large)} - {in_seconds(a_small)}}}{{{per_byte}}}\,\text{{B}}"
    if not above and not math.isclose(a_large, a_small):
        inserted = r"0\quad(\text{faster at every size})"
    return Prediction(above, "B", "n", formula, inserted, THAKUR)
