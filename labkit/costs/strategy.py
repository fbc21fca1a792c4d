"""The strategies that a plan compares: meshes of data, pipeline and tensor parallelism over a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from labkit.costs.cluster import Cluster, MeshAxis
from labkit.costs.workload import Workload

# The axes of a mesh: replicas of a model, shards of it, its stages, parts of its layers.
REPLICATE: Final = "replicate"
SHARD: Final = "shard"
PIPELINE: Final = "pipeline"
TENSOR: Final = "tensor"


@dataclass(frozen=True, slots=True)
class Strategy:
    """A mesh, and what its data-parallel ranks shard."""

    axes: tuple[tuple[str, int], ...]  # their sizes, none 1, the outermost first; neighbours along the last are consecutive
    stage: int  # of ZeRO: 0 (nothing is sharded), 2 (gradients and optimizer state) or 3 (also parameters)

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
                of_shard = "FSDP2" if self.stage == 3 else "ZeRO-2"
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
    for tensor in _divisors(cluster.ranks_per_node if splits else 1):
        for stages in _divisors(cluster.ranks // tensor if splits else 1):
            if work.heads % tensor == 0 and work.layers % stages == 0:
                found |= dict.fromkeys(_with_data(cluster, stages, tensor))
    yield from found


def _with_data(cluster: Cluster, stages: int, tensor: int) -> Iterator[Strategy]:
    data = cluster.ranks // (stages * tensor)
    for stages_outside in (True, False) if stages * tensor <= cluster.ranks_per_node else (True,):
        inside = cluster.ranks_per_node // (tensor if stages_outside else stages * tensor)
        shard = min(data, inside)
        choices: list[tuple[int, tuple[tuple[str, int], ...]]] = [(0, ((REPLICATE, data),)), (2, ((SHARD, data),))]
        choices.append((3, ((SHARD, data),)))
        if 1 < shard < data and data % shard == 0:
            choices.append((3, ((REPLICATE, data // shard), (SHARD, shard))))
        for stage, of_data in choices:
            pipeline = (PIPELINE, stages)
            axes = (pipeline, *of_data) if stages_outside else (*of_data, pipeline)
            kept = tuple((axis, size) for axis, size in (*axes, (TENSOR, tensor)) if size > 1)
            yield Strategy(kept, stage if data > 1 else 0)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
