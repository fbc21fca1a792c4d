"""What an operation costs on an emulated network: how long it takes, and what it occupies meanwhile.

A rank has a link to the ranks of its node and, in a network of several nodes, issues its collectives over the node's
connection one after another. The connection itself is occupied only while bytes pass through it, so that the latencies
of operations of several ranks overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from labkit.costs.network import Network
from labkit.costs.rounds import ALGORITHMS, rounds
from labkit.costs.shared_link import LinkCost, node_port, outer_port


def collective_cost(
    network: Network, name: str, nbytes: int, ranks: Sequence[int], alike: float = 1, *, fastest: bool = False
) -> LinkCost:
    """Return the cost of a collective. A rank's collectives use its link one after another, as on one NCCL stream.

    Args:
        network: the network, which knows its number of ranks.
        name: the collective's name in torch.distributed.
        nbytes: its size, the n of `costs.link.rounds_and_share`.
        ranks: the participating ranks.
        alike: how many equal collectives, this one included, share the connection of each node at the same time.
        fastest: whether an all-reduce takes the fastest of the algorithms that `lab.predict` knows, such as NCCL's
            rings and trees; otherwise a ring.
    """
    nodes = network.nodes_among(ranks)
    choices = [rounds(name, nodes)]
    if fastest and name == "all_reduce":
        for algorithm in ALGORITHMS[name]:
            with suppress(ValueError):  # it needs another number of ranks
                choices.append(rounds(name, nodes, algorithm=algorithm))
    found = []
    for choice in choices:
        shared = [each if each.between is None else each._replace(between=alike * each.between) for each in choice]
        found.append((network.rounds_s(shared, nbytes), shared))
    seconds, shortest = min(found, key=lambda each: each[0])
    cost_ns = round(seconds * 1e9)
    crossing = [each.between for each in shortest if each.between is not None]
    if not crossing:
        return LinkCost(cost_ns, cost_ns, ranks, ranks, len(ranks), 0, [])
    ports = [*ranks] if any(each.inside is not None for each in shortest) else []
    ports += map(outer_port, ranks)
    shared_ns = round(sum(crossing) * nbytes / network.between.bytes_per_s * 1e9)
    return LinkCost(cost_ns, cost_ns, ports, ports, len(ranks), shared_ns, [node_port(node) for node in sorted(set(nodes))])


def message_cost(network: Network, source: int, destination: int, nbytes: int, ends: int, alike: float = 1) -> LinkCost:
    """Return the cost of a message. Latencies of consecutive messages overlap.

    Args:
        network: the network, which knows its number of ranks.
        source: the sending rank.
        destination: the receiving rank.
        nbytes: its size.
        ends: 2 if it starts when both ranks have arrived; 1 if only its sender schedules it.
        alike: how many equal messages, this one included, leave the sender's node at the same time.
    """
    link, ports = network.inside, (source, destination)
    nodes = network.node_of(source), network.node_of(destination)
    if nodes[0] != nodes[1]:
        link, ports = network.between, (node_port(nodes[0]), node_port(nodes[1]))
        nbytes = round(nbytes * alike)
    busy_ns = round(nbytes / link.bytes_per_s * 1e9)
    return LinkCost(round(link.latency_s * 1e9) + busy_ns, busy_ns, [ports[0]], [ports[1]], ends)
