"""What an operation costs on an emulated link or network: how long it takes, and what it occupies meanwhile.

A rank has a link to the ranks of its node and, in a network of several nodes, issues its collectives over the node's
connection one after another. The connection itself is occupied only while bytes pass through it, so that the latencies
of operations of several ranks overlap.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from labkit.costs.link import Link
from labkit.costs.network import Network
from labkit.costs.rounds import Round, halving, hierarchical, rounds_of
from labkit.costs.shared_link import Cost, node_port, outer_port


def collective_cost(
    link: Link | Network, name: str, nbytes: int, ranks: Sequence[int], alike: float = 1, *, fastest: bool = False
) -> Cost:
    """Return the cost of a collective.

    A rank's collectives use its link one after another, as on one NCCL stream.

    Args:
        link: the link, or the network with its number of ranks.
        name: the collective's name in torch.distributed.
        nbytes: its size, the n of `costs.link.rounds_and_share`.
        ranks: the participating ranks.
        alike: how many equal collectives, this one included, share the connection of each node at the same time.
        fastest: whether an all-reduce takes the fastest of the algorithms that `lab.predict` knows, such as NCCL's
            rings and trees; otherwise a ring.
    """
    if isinstance(link, Link) and fastest:
        link = Network(nodes=1, inside=link, between=link, ranks=max(ranks) + 1)
    if isinstance(link, Link):
        cost_ns = round(link.seconds(name, nbytes, len(ranks)) * 1e9)
        return Cost(cost_ns, cost_ns, ranks, ranks, len(ranks))
    nodes = link.nodes_among(ranks)
    choices = [rounds_of(name, nodes)]
    if fastest and name == "all_reduce":
        choices += _other_algorithms(nodes)
    network = link

    def seconds(rounds: Iterable[Round]) -> float:
        return sum(network.round_s(each, nbytes) for each in rounds)

    rounds = min(([_shared(each, alike) for each in choice] for choice in choices), key=seconds)
    cost_ns = round(seconds(rounds) * 1e9)
    crossing = sum(each.times * each.between for each in rounds if each.between is not None)
    outer = any(each.between is not None for each in rounds)
    ports = [*(ranks if any(each.inside is not None for each in rounds) or not outer else ())]
    ports += map(outer_port, ranks if outer else ())
    shared = [node_port(node) for node in sorted(set(nodes))] if outer else []
    return Cost(cost_ns, cost_ns, ports, ports, len(ranks), round(crossing * nbytes / link.between.bytes_per_s * 1e9), shared)


def _other_algorithms(nodes: tuple[int, ...]) -> Iterator[tuple[Round, ...]]:
    """Yield the rounds of an all-reduce in each algorithm that these ranks allow, but the ring."""
    yield (*rounds_of("reduce", nodes), *rounds_of("broadcast", nodes))
    if not len(nodes) & (len(nodes) - 1):
        yield halving(nodes)
    if len(set(Counter(nodes).values())) == 1:
        yield hierarchical(nodes)


def _shared(each: Round, alike: float) -> Round:
    """Return rounds in which several equal collectives share the connections of their nodes."""
    return each if each.between is None else each._replace(between=alike * each.between)


def message_cost(link: Link | Network, source: int, destination: int, nbytes: int, ends: int, alike: float = 1) -> Cost:
    """Return the cost of a message. Latencies of consecutive messages overlap.

    Args:
        link: the link, or the network with its number of ranks.
        source: the sending rank.
        destination: the receiving rank.
        nbytes: its size.
        ends: 2 if it starts when both ranks have arrived; 1 if only its sender schedules it.
        alike: how many equal messages, this one included, leave the sender's node at the same time.
    """
    over, ports = link, (source, destination)
    if isinstance(link, Network):
        over = link.link(source, destination)
        nodes = link.node_of(source), link.node_of(destination)
        if nodes[0] != nodes[1]:
            ports = node_port(nodes[0]), node_port(nodes[1])
            nbytes = round(nbytes * alike)
    assert isinstance(over, Link)
    busy_ns = round(nbytes / over.bytes_per_s * 1e9)
    return Cost(round(over.latency_s * 1e9) + busy_ns, busy_ns, [ports[0]], [ports[1]], ends)
