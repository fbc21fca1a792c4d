"""The memory per rank and the step time of one strategy, by formulas.

Notation: p ranks, Ψ parameters, l layers, m micro-batches, s stages, t ranks of tensor parallelism. All formulas are in
docs/planning.md, with their sources and what they leave out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from labkit.costs.cluster import PIPELINE, REPLICATE, SHARD, TENSOR, Cluster, Strategy
from labkit.costs.rounds import rounds
from labkit.costs.workload import Precision, Workload

PLANNED_KINDS: Final = ("parameters", "gradients", "optimizer", "activations", "buffers")
BUCKET_BYTES: Final = 25 << 20  # of DistributedDataParallel
GATHERED_LAYERS: Final = 2  # FSDP2 computes one layer and gathers the next


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a strategy needs: one row of a plan."""

    strategy: Strategy
    micro_batches: int  # m, in how many parts each rank computes its share of the batch
    recompute: bool  # whether the backward pass computes the activations of each layer again instead of keeping them
    memory_bytes: Mapping[str, float]  # of the rank that needs most, by kind (`PLANNED_KINDS`)
    limit_bytes: float  # the memory of a device
    compute_s: float  # of a step, including the optimizer, if nothing else took time
    bubble_s: float  # how long a rank waits because the pipeline fills and drains
    exposed_s: Mapping[str, float]  # communication during which nothing is computed, by axis
    level: Mapping[str, str]  # that the communication of each axis crosses, "inside" a node or "between" nodes

    @property
    def name(self) -> str:
        """The name of the strategy."""
        return self.strategy.name

    @property
    def step_s(self) -> float:
        """The time of a step, in seconds."""
        return self.compute_s + self.bubble_s + sum(self.exposed_s.values())

    @property
    def missing_bytes(self) -> float:
        """By how much the memory of a device is too small; 0 if the strategy fits."""
        return max(0.0, sum(self.memory_bytes.values()) - self.limit_bytes)

    @property
    def fits(self) -> bool:
        """Whether the memory of a device is enough."""
        return self.missing_bytes == 0


def best_estimate(work: Workload, precision: Precision, strategy: Strategy, cluster: Cluster) -> Estimate | None:
    """Return the fastest estimate of a strategy that fits, or else the one that needs the least memory.

    It tries all numbers of micro-batches, with and without recomputation. None: the ranks cannot divide the batch; 1F1B
    needs at least as many micro-batches as stages.
    """
    samples, rest = divmod(work.samples, strategy.data_ranks)
    if rest or samples < strategy.size(PIPELINE):
        return None
    found = []
    for recompute in (False, True) if work.hidden_bytes is not None else (False,):
        for count in range(strategy.size(PIPELINE), samples + 1):
            if samples % count == 0:
                found.append(_estimate(work, precision, strategy, cluster, count, recompute))
    return min(found, key=lambda each: (each.missing_bytes, each.step_s))


def _estimate(
    work: Workload, precision: Precision, strategy: Strategy, cluster: Cluster, micro_batches: int, recompute: bool
) -> Estimate:
    axes = {axis: strategy.axis(axis, cluster) for axis, _ in strategy.axes}
    step = _RankStep(work, precision, strategy, cluster, micro_batches, recompute)
    exposed_s = {axis: seconds for axis, seconds in step.exposed_s().items() if axis in axes}
    return Estimate(
        strategy=strategy, micro_batches=micro_batches, recompute=recompute, memory_bytes=step.memory_bytes(),
        limit_bytes=cluster.device.memory_gb * 1e9, compute_s=step.compute_s + step.optimizer_s, bubble_s=step.bubble_s(),
        exposed_s=exposed_s, level={name: axis.level for name, axis in axes.items()},
    )  # fmt: skip


class _RankStep:
    """One step of a rank. Times of a forward or backward pass are those of one micro-batch on one stage."""

    def __init__(
        self, work: Workload, precision: Precision, strategy: Strategy, cluster: Cluster, micro_batches: int, recompute: bool
    ) -> None:
        self.work, self.precision, self.strategy, self.cluster = work, precision, strategy, cluster
        self.micro_batches, self.recompute = micro_batches, recompute
        self.stages, self.tensor, self.shards = (strategy.size(axis) for axis in (PIPELINE, TENSOR, SHARD))
        self.layers = work.layers // self.stages
        self.samples = work.samples / strategy.data_ranks / micro_batches
        self.parameters = work.parameters / (self.stages * self.tensor)
        flops_per_s = cluster.device.tflop_per_s * 1e12
        one_forward_s = self.samples * work.forward_flops / (self.stages * self.tensor) / flops_per_s
        sum_s = self._seconds(TENSOR, "all_reduce", self.samples * (work.hidden_bytes or 0.0))
        passes = 2 + recompute
        self.tensor_s = self.layers * 2 * passes * sum_s  # two all-reduces of each pass through a layer
        self.forward_s = one_forward_s + self.layers * 2 * sum_s
        self.backward_s = (1 + recompute + 1) * one_forward_s + self.layers * 2 * (passes - 1) * sum_s
        self.compute_s = micro_batches * (3 + recompute) * one_forward_s
        self.owned = self.parameters / self.shards
        moved = precision.parameter_bytes + precision.gradient_bytes + 2 * precision.optimizer_bytes
        self.optimizer_s = self.owned * moved / (cluster.device.gbyte_per_s * 1e9)

    def _seconds(self, axis: str, operation: str, nbytes: float) -> float:
        """How long all groups along an axis take for a collective that each carries out at the same time."""
        along = self.strategy.axis(axis, self.cluster)
        return along.network.rounds_s(rounds(operation, along.nodes, len(along.nodes) // along.size), nbytes)

    def bubble_s(self) -> float:
        """(s−1)·(t_f + t_b): a stage waits for the first micro-batch to arrive and for the last to come back."""
        return (self.stages - 1) * (self.forward_s + self.backward_s)

    def exposed_s(self) -> dict[str, float]:
        """Communication that nothing hides, by axis."""
        nbytes = self.samples * (self.work.hidden_bytes or 0.0) / (1 if self.stages > 1 else math.inf)
        hop_s = self.strategy.axis(PIPELINE, self.cluster).message_s(nbytes) if self.stages > 1 else 0.0
        sharded, replicated = self._sharded_s() if self.shards > 1 else (0.0, self._replicated_s())
        return {
            TENSOR: self.micro_batches * self.tensor_s,
            PIPELINE: 2 * (self.stages - 1 + self.micro_batches - 1) * hop_s,
            SHARD: sharded,
            REPLICATE: replicated,
        }

    def _replicated_s(self) -> float:
        """Buckets of DDP: all-reduces during the last backward pass, as `lab.predict.data_parallel_step` has them."""
        nbytes = self.precision.gradient_bytes * self.parameters
        buckets = math.ceil(nbytes / BUCKET_BYTES)
        each_s = self._seconds(REPLICATE, "all_reduce", nbytes / buckets)
        return max(each_s, self.backward_s / buckets + buckets * each_s - self.backward_s)

    def _sharded_s(self) -> tuple[float, float]:
        """Layers of FSDP2: gathered before use, their gradients scattered; of HSDP also summed over the replicas.

        The first gather and the last scatter (and sum) are exposed; the others as far as they take longer than a layer.
        """
        others, of_layer = self.layers - 1, self.parameters / self.layers
        gather_s = self._seconds(SHARD, "all_gather", self.precision.parameter_bytes * of_layer)
        scatter_s = self._seconds(SHARD, "reduce_scatter", self.precision.gradient_bytes * of_layer)
        sum_s = self._seconds(REPLICATE, "all_reduce", self.precision.gradient_bytes * of_layer / self.shards)
        forward_s, backward_s = self.forward_s / self.layers, self.backward_s / self.layers
        forward = gather_s + others * max(0.0, gather_s - forward_s)
        again_s = gather_s if self.strategy.stage == 3 else 0.0
        backward = again_s + scatter_s + others * max(0.0, again_s + scatter_s - backward_s)
        summed = sum_s + others * max(0.0, sum_s - max(backward_s, again_s + scatter_s))
        gathered = self.micro_batches if self.strategy.stage == 3 else 1  # stage 2 keeps the parameters for the whole step
        return gathered * forward + self.micro_batches * backward, self.micro_batches * summed

    def memory_bytes(self) -> dict[str, float]:
        """Memory of the rank that needs most, by kind."""
        size, stage = self.precision, self.strategy.stage
        parameters, gradients = size.parameter_bytes * self.parameters, size.gradient_bytes * self.parameters
        if stage == 3:
            buffers = GATHERED_LAYERS * parameters / self.layers + gradients / self.layers
        else:  # gradients that are not yet scattered, or DDP's buckets, which hold all gradients once more
            buffers = gradients / self.layers if stage else gradients * (self.strategy.size(REPLICATE) > 1)
        return {
            "parameters": parameters / (self.shards if stage == 3 else 1),
            "gradients": gradients / self.shards,
            "optimizer": size.optimizer_bytes * self.owned,
            "activations": self._activation_bytes(),
            "buffers": buffers,
        }

    def _activation_bytes(self) -> float:
        """Activations of the micro-batches under way in 1F1B: s on the first stage, one and the outputs on the last."""
        layer = self.work.whole_bytes + self.work.divided_bytes / self.tensor
        kept = self.layers * ((self.work.hidden_bytes or 0.0) if self.recompute else layer)
        again = layer if self.recompute else 0.0  # the layer that is being computed again
        first = min(self.micro_batches, self.stages) * kept + again
        last = kept + again + self.work.output_bytes / self.tensor
        return self.samples * (last if self.stages == 1 else max(first, last))
