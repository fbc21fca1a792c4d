"""`Cluster`: equal devices on nodes; the strategies that a plan compares there, and what an axis of a mesh costs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Final, NamedTuple

from labkit.costs.device import Device
from labkit.costs.link import Link
from labkit.costs.network import Network, as_network
from labkit.costs.rounds import Round, possible_rounds
from labkit.costs.workload import Workload
from labkit.errors.wrong_calls import check_number, public_class

# The axes of a mesh: replicas of a model, shards of it, its stages, parts of its layers.
REPLICATE: Final = "replicate"
SHARD: Final = "shard"
PIPELINE: Final = "pipeline"
TENSOR: Final = "tensor"
REMEMBERED: Final = 1 << 10  # groups of ranks whose rounds are
MOST_RANKS: Final = 1 << 17  # for which a plan takes half a minute


@public_class
@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A cluster: `lab.Cluster(ranks=16, device=lab.Device.h100, link=lab.Network(nodes=2, inside=..., between=...))`.

    Each rank has a device of its own. The arguments have the names that they have in `lab.Group` and `lab.simulate`.

    Args:
        ranks: the number of ranks on all nodes, equally many on each.
        device: the device of each rank, with its memory.
        link: the link between the ranks, or their network.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: the nodes do not divide the ranks, or the network is for another number of ranks.
    """

    ranks: int
    device: Device
    link: Link | Network

    def __post_init__(self) -> None:
        expected = f"Cluster(ranks={self.ranks!r}): expected a whole number from 1 to {MOST_RANKS:,}"
        check_number(self.ranks, expected, whole=True, at_least=1, below=MOST_RANKS + 1)
        object.__setattr__(self, "ranks", int(self.ranks))  # numpy's whole numbers may overflow
        if not isinstance(self.device, Device):
            raise TypeError(f"Cluster(device={self.device!r}): expected a lab.Device, as in device=lab.Device.h100")
        if self.ranks % self.network.nodes:
            raise ValueError(
                f"Cluster(ranks={self.ranks}) on {self.network.nodes} nodes: expected equally many ranks on each node"
            )

    @cached_property
    def network(self) -> Network:
        """The network; a single link is a network of one node."""
        return as_network(self.link, self.ranks)

    @property
    def ranks_per_node(self) -> int:
        """The number of ranks on each node."""
        return self.ranks // self.network.nodes

    def of(self, ranks: int) -> Cluster:
        """Return a cluster with another number of ranks, over the same link, or with as many on each node."""
        flat, each = isinstance(self.link, Link), self.ranks_per_node
        more = "" if flat else f", above the {each} ranks of a node multiples of it"
        expected = f"ranks={ranks!r}: expected whole numbers from 1{more}"
        check_number(ranks, expected, whole=True, at_least=1)
        if flat:
            return replace(self, ranks=ranks)
        if ranks > each and ranks % each:
            raise ValueError(expected)
        nodes = max(1, ranks // each)
        return replace(self, ranks=ranks, link=replace(self.network, nodes=nodes, ranks=ranks))


@dataclass(frozen=True, slots=True)
class MeshAxis:
    """One axis of a mesh that covers the whole cluster: groups of ranks that communicate at the same time."""

    network: Network  # of the cluster, which knows its ranks
    size: int  # the number of ranks in each group
    stride: int  # the distance between neighbours of a group, in ranks

    @property
    def groups(self) -> _AxisGroups:
        """Where its groups are."""
        assert self.network.ranks is not None
        each, block = self.network.ranks // self.network.nodes, self.size * self.stride
        alike = max(each, block) if max(each, block) % min(each, block) == 0 else self.network.ranks
        return _AxisGroups(each, alike, self.size, self.stride)

    @property
    def level(self) -> str:
        """The level that its groups cross: "between" nodes, or "inside" a node."""
        return "inside" if _hop(self.groups).between is None else "between"

    def message_s(self, nbytes: float) -> float:
        """Return how long it takes until each rank has received a message from its neighbour, all at the same time."""
        return self.network.rounds_s([_hop(self.groups)], nbytes)

    def collective_s(self, operation: str, nbytes: float, *, fastest: bool) -> float:
        """Return how long all groups take for a collective at the same time, if `fastest` with its best algorithm."""
        return min(self.network.rounds_s(each, nbytes) for each in _collective(self.groups, operation, fastest))


class _AxisGroups(NamedTuple):
    """The groups of an axis that can meet on a node; all others do the same."""

    ranks_per_node: int
    ranks: int
    size: int
    stride: int

    def nodes(self) -> tuple[int, ...]:
        """The node of each rank, group after group."""
        firsts = [rank for rank in range(self.ranks) if rank // self.stride % self.size == 0]
        return tuple((first + k * self.stride) // self.ranks_per_node for first in firsts for k in range(self.size))


@lru_cache(maxsize=REMEMBERED)
def _hop(groups: _AxisGroups) -> Round:
    """A message of each rank to its neighbour."""
    nodes = groups.nodes()
    pairs = [pair for first in range(0, len(nodes), groups.size) for pair in pairwise(nodes[first : first + groups.size])]
    leaving = Counter(sender for sender, receiver in pairs if sender != receiver)
    inside = 1.0 if any(sender == receiver for sender, receiver in pairs) else None
    return Round(1, inside, max(leaving.values(), default=None))


@lru_cache(maxsize=REMEMBERED)
def _collective(groups: _AxisGroups, operation: str, fastest: bool) -> list[tuple[Round, ...]]:
    nodes = groups.nodes()
    return possible_rounds(operation, nodes, len(nodes) // groups.size, fastest=fastest)


@dataclass(frozen=True, slots=True)
class Strategy:
    """A mesh, and what its data-parallel ranks shard."""

    axes: tuple[tuple[str, int], ...]  # their sizes, none 1, the outermost first; neighbours along the last are consecutive
    stage: int  # of ZeRO: 0 (nothing is sharded), 1 (optimizer state), 2 (also gradients) or 3 (also parameters)

    @property
    def name(self) -> str:
        """Its name with all sizes, as in "pipeline 2 × HSDP 2×4 × TP 8"; the outermost axis comes first."""
        if not self.axes:
            return "one rank"
        words, sizes = [], dict(self.axes)
        for axis, size in self.axes:
            if axis == SHARD and REPLICATE in sizes:
                words.append(f"HSDP {sizes[REPLICATE]}×{size}")
            elif axis != REPLICATE or SHARD not in sizes:
                of_shard = "FSDP2" if self.stage == 3 else f"ZeRO-{self.stage}"
                word = {REPLICATE: "DDP", SHARD: of_shard, PIPELINE: "pipeline", TENSOR: "TP"}[axis]
                words.append(f"{word} {size}")
        return " × ".join(words)

    def size(self, axis: str) -> int:
        """The number of ranks along an axis."""
        return dict(self.axes).get(axis, 1)

    @property
    def data_ranks(self) -> int:
        """The number of parts into which a batch is cut."""
        return self.size(REPLICATE) * self.size(SHARD)

    def axis(self, name: str, cluster: Cluster) -> MeshAxis:
        """Return an axis on a cluster, of size 1 if the mesh does not have it."""
        stride = 1
        for axis, size in reversed(self.axes):
            if axis == name:
                return MeshAxis(cluster.network, size, stride)
            stride *= size
        return MeshAxis(cluster.network, 1, 1)


def strategies(work: Workload, cluster: Cluster) -> Iterator[Strategy]:
    """Yield all strategies for a cluster.

    Tensor parallelism is the innermost axis and stays inside a node. A pipeline's stages are the outermost axis, or,
    where they fit into a node, the next to innermost, with the replicas outside. Stages have whole layers. The heads
    and layers of a step limit the sizes.
    """
    found: dict[Strategy, None] = {}
    splits = work.hidden_bytes is not None
    for tensor in divisors(cluster.ranks_per_node if splits else 1):
        for stages in divisors(cluster.ranks // tensor if splits else 1):
            whole_stages = -work.layers % stages in (0, 2) and stages <= work.layers  # the ends may have one layer less
            whole_heads = work.heads % tensor == 0 and max(tensor, work.key_heads) % min(tensor, work.key_heads) == 0
            if whole_heads and whole_stages:
                found |= dict.fromkeys(_with_data(cluster, stages, tensor))
    yield from found


def _with_data(cluster: Cluster, stages: int, tensor: int) -> Iterator[Strategy]:
    data = cluster.ranks // (stages * tensor)
    for stages_outside in (True, False) if stages * tensor <= cluster.ranks_per_node else (True,):
        inside = cluster.ranks_per_node // (tensor if stages_outside else stages * tensor)
        shard = min(data, inside)
        choices: list[tuple[int, tuple[tuple[str, int], ...]]] = [(0, ((REPLICATE, data),))]
        choices += [(stage, ((SHARD, data),)) for stage in (1, 2, 3)]
        if 1 < shard < data and data % shard == 0:
            choices.append((3, ((REPLICATE, data // shard), (SHARD, shard))))
        for stage, of_data in choices:
            pipeline = (PIPELINE, stages)
            axes = (pipeline, *of_data) if stages_outside else (*of_data, pipeline)
            kept = tuple((axis, size) for axis, size in (*axes, (TENSOR, tensor)) if size > 1)
            yield Strategy(kept, stage if data > 1 else 0)


@lru_cache(maxsize=1 << 8)
def divisors(number: int) -> list[int]:
    """Return the divisors of a number, the smallest first."""
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})
