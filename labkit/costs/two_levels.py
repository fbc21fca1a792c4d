"""Predicted times of collectives over a network of several nodes, with their derivations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from labkit.costs.network import Network, latency_and_share
from labkit.costs.prediction import Prediction, in_seconds, transfer_in_latex
from labkit.costs.rounds import Round, halving, hierarchical, rounds_of
from labkit.recording.operations import CHAN, THAKUR, Algorithm, type_of

_CHO: Final = "Cho et al., BlueConnect, 2019"
_SOURCES: Final = {"ring": THAKUR, "tree": CHAN, "halving": THAKUR, "hierarchical": _CHO}
_LEVEL: Final = {"inside": r"\text{inside}", "between": r"\text{between}"}  # indices of α and B


def operation_over(
    operations: Sequence[str], nbytes: float, nodes: tuple[int, ...], network: Network, source: str, groups: int = 1
) -> Prediction:
    """Return the predicted time of operations, one after the other.

    Args:
        operations: their names in torch.distributed.
        nbytes: n, their size in bytes.
        nodes: the node of each participating rank, in rank order.
        network: the network.
        source: the source of the formula.
        groups: as for `rounds_of`.
    """
    rounds = [each for operation in operations for each in rounds_of(operation, nodes, groups)]
    formula = ""
    cost = type_of(operations[0]).cost
    if groups == 1 and len(operations) == 1 and cost is not None and cost.algorithm is Algorithm.RING and rounds:
        level = _LEVEL[network.slower(rounds[0], nbytes)]
        formula = cost.formula.replace(r"\alpha", rf"\alpha_{level}").replace("{B}", f"{{B_{level}}}")
    return _predicted(rounds, nbytes, network, formula, source)


def all_reduce_rounds(nodes: tuple[int, ...], algorithm: str) -> list[Round]:
    """Return the rounds of an all-reduce.

    Args:
        nodes: the node of each participating rank, in rank order.
        algorithm: "ring", "tree", "halving" or "hierarchical".

    Raises:
        ValueError: another algorithm; or there are not as many ranks as it needs.
    """
    if algorithm == "ring":
        return [*rounds_of("all_reduce", nodes)]
    if algorithm == "tree":
        return [*rounds_of("reduce", nodes), *rounds_of("broadcast", nodes)]
    if algorithm == "halving":
        if len(nodes) & (len(nodes) - 1):
            raise ValueError(f"algorithm='halving' with {len(nodes)} ranks: this form holds for powers of two (2, 4, 8, ...)")
        return [*halving(nodes)]
    if algorithm == "hierarchical":
        each = [nodes.count(node) for node in sorted(set(nodes))]
        if len(set(each)) > 1:
            raise ValueError(f"algorithm='hierarchical' with {each} ranks on the nodes: expected equally many on each node")
        return [*hierarchical(nodes)]
    raise ValueError(f"algorithm={algorithm!r}: expected 'ring', 'tree', 'halving' or 'hierarchical'")


def all_reduce_over(nbytes: float, nodes: tuple[int, ...], network: Network, algorithm: str) -> Prediction:
    """Return the predicted time of an all-reduce.

    Args:
        nbytes: n, the size of each rank's tensor in bytes.
        nodes: the node of each participating rank, in rank order.
        network: the network.
        algorithm: as for `all_reduce_rounds`.

    Raises:
        ValueError: as for `all_reduce_rounds`.
    """
    rounds = all_reduce_rounds(nodes, algorithm)
    formula = ""
    if algorithm == "hierarchical" and len(set(nodes)) > 1 and len(set(nodes)) < len(nodes):
        terms = [
            rf"2({count}-1)\left(\alpha_{_LEVEL[level]} + \frac{{n}}{{{count}\,B_{_LEVEL[level]}}}\right)"
            for count, level in (("N", "between"), ("q", "inside"))
        ]
        formula = " + ".join(terms)
    return _predicted(rounds, nbytes, network, formula, _SOURCES[algorithm])


def _predicted(rounds: Iterable[Round], nbytes: float, network: Network, formula: str, source: str) -> Prediction:
    """Return the sum of the rounds' times; without a formula, with its coefficients in place of one."""
    rounds = list(rounds)
    levels = latency_and_share(rounds, network, nbytes)
    general, inserted = [], []
    for level, (times, share) in levels.items():
        link, index = getattr(network, level), _LEVEL[level]
        general.append(rf"{times}\,\alpha_{index}" + (rf" + {share:.4g}\,\frac{{n}}{{B_{index}}}" if share else ""))
        transfer = rf" + {share:.4g} \cdot {transfer_in_latex(nbytes, link)}" if share else ""
        inserted.append(rf"{times} \cdot {in_seconds(link.latency_s)}{transfer}")
    value = sum(network.round_s(each, nbytes) for each in rounds)
    return Prediction(value, "s", "T", formula or " + ".join(general) or "0", " + ".join(inserted) or "0", source)
