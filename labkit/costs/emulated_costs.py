"""What an operation costs on an emulated link or network: how long it takes, and what it occupies meanwhile.

A rank has a link to the ranks of its node and, in a network of several nodes, issues its collectives over the node's
connection one after another. The connection itself is occupied only while bytes pass through it, so that the latencies
of operations of several ranks overlap.
"""

from __future__ import annotations

from collections.abc import Sequence

from labkit.costs.link import Link
from labkit.costs.network import Network
from labkit.costs.rounds import rounds_of
from labkit.costs.shared_link import Cost, node_port, outer_port

__all__ = ["collective_cost", "message_cost"]


def collective_cost(link: Link | Network, name: str, nbytes: int, ranks: Sequence[int]) -> Cost:
    """Return the cost of a collective.

    A rank's collectives use its link one after another, as on one NCCL stream.

    Args:
        link: the link, or the network with its number of ranks.
        name: the collective's name in torch.distributed.
        nbytes: its size, the n of `costs.link.rounds_and_share`.
        ranks: the participating ranks.
    """
    if isinstance(link, Link):
        cost_ns = round(link.seconds(name, nbytes, len(ranks)) * 1e9)
        return Cost(cost_ns, cost_ns, ranks, ranks, len(ranks))
    nodes = link.nodes_among(ranks)
    rounds = rounds_of(name, nodes)
    cost_ns = round(sum(link.round_s(each, nbytes) for each in rounds) * 1e9)
    crossing = sum(each.times * each.between for each in rounds if each.between is not None)
    outer = any(each.between is not None for each in rounds)
    ports = [*(ranks if any(each.inside is not None for each in rounds) or not outer else ())]
    ports += map(outer_port, ranks if outer else ())
    shared = [node_port(node) for node in sorted(set(nodes))] if outer else []
    return Cost(cost_ns, cost_ns, ports, ports, len(ranks), round(crossing * nbytes / link.between.bytes_per_s * 1e9), shared)


def message_cost(link: Link | Network, source: int, destination: int, nbytes: int, ends: int) -> Cost:
    """Return the cost of a message. Latencies of consecutive messages overlap.

    Args:
        link: the link, or the network with its number of ranks.
        source: the sending rank.
        destination: the receiving rank.
        nbytes: its size.
        ends: 2 if it starts when both ranks have arrived; 1 if only its sender schedules it.
    """
    over, ports = link, (source, destination)
    if isinstance(link, Network):
        over = link.link(source, destination)
        nodes = link.node_of(source), link.node_of(destination)
        if nodes[0] != nodes[1]:
            ports = node_port(nodes[0]), node_port(nodes[1])
    assert isinstance(over, Link)
    busy_ns = round(nbytes / over.bytes_per_s * 1e9)
    return Cost(round(over.latency_s * 1e9) + busy_ns, busy_ns, [ports[0]], [ports[1]], ends)
