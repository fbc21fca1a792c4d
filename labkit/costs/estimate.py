"""The memory per rank and the step time of one strategy, by formulas.

Notation: p ranks, Ψ parameters, l layers, m micro-batches, s stages, t ranks of tensor parallelism. All formulas are in
docs/planning.md, with their sources and what they leave out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from labkit.costs.cluster import PIPELINE, REPLICATE, SHARD, TENSOR, Cluster, Strategy, divisors
from labkit.costs.device import Device
from labkit.costs.workload import Precision, Workload

RECOMPUTE: Final = ("none", "selective", "layer")
UNITS: Final = ("layer", "model")
PLANNED_KINDS: Final = ("parameters", "gradients", "optimizer", "activations", "buffers")
BUCKET_BYTES: Final = 25 << 20  # of DistributedDataParallel
GATHERED_LAYERS: Final = 2  # FSDP2 computes one layer and gathers the next
STEP_BYTES: Final = 4  # per parameter, at most: on GPUs, Adam takes the roots of all second moments at one time


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What the user has chosen for all strategies; None: the plan chooses for each."""

    micro_batch: int | None = None  # samples that a replica computes at one time
    accumulate: int | None = None  # micro-batches of a replica in a step
    recompute: str | None = None  # one of `RECOMPUTE`
    chunks: int = 1  # parts of the model on each rank of a pipeline; above 1, interleaved 1F1B
    fsdp_unit: str = "layer"  # what FSDP gathers at one time, one of `UNITS`
    offload: Device | None = None  # the share of its host that a rank has, if this keeps what FSDP2 shards, and steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a strategy needs: one row of a plan."""

    strategy: Strategy
    cluster: Cluster
    samples: int  # of a step, of all ranks together
    tokens: int | None  # of a step; None: unknown
    model_flops: float  # of a step, as MFU counts them: without recomputation and the embedding, attention without its mask
    micro_batches: int  # m, in how many parts each rank computes its share of the batch
    recompute: str  # what the backward pass computes again instead of keeping it, one of `RECOMPUTE`
    memory_bytes: Mapping[str, float]  # of the rank and the moment that need most, by kind (`PLANNED_KINDS`)
    compute_s: float  # of a step, including the optimizer, if nothing else took time
    bubble_s: float  # how long a rank waits because the pipeline fills and drains
    exposed_s: Mapping[str, float]  # communication during which nothing is computed, by axis
    level: Mapping[str, str]  # that the communication of each axis crosses, "inside" a node or "between" nodes
    offload: Device | None  # the rank's share of its host, if FSDP2 keeps there what it shards
    host_bytes: float  # of the rank there

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
        """By how much the memory of a device, and of its host, is too small; 0 if the strategy fits."""
        of_host = self.offload.memory_gb * 1e9 if self.offload else math.inf
        return max(0.0, self.needed_bytes - self.cluster.device.memory_gb * 1e9) + max(0.0, self.host_bytes - of_host)

    @property
    def needed_bytes(self) -> float:
        """The bytes that it needs in all."""
        return sum(self.memory_bytes.values())

    @property
    def fits(self) -> bool:
        """Whether the memory of a device is enough."""
        return self.missing_bytes == 0

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of each rank; samples where the tokens are unknown."""
        return (self.tokens or self.samples) / self.step_s / self.cluster.ranks

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: the model's operations per second, of the peak rate of all devices.

        Source: A. Chowdhery et al., "PaLM", 2022, appendix B.
        """
        device = self.cluster.device
        peak = (device.peak_tflop_per_s or device.tflop_per_s) * 1e12
        return self.model_flops / self.step_s / self.cluster.ranks / peak

    def hours(self, tokens: float) -> float:
        """Return how many hours so many tokens take on this cluster; times `cluster.ranks`, GPU-hours."""
        return tokens / (self.tokens_per_s * self.cluster.ranks) / 3600


def best_estimate(work: Workload, precision: Precision, strategy: Strategy, cluster: Cluster, choice: Choice) -> Estimate | None:
    """Return the fastest estimate of a strategy that fits, or else the one that needs the least memory.

    It tries all numbers of micro-batches, in a pipeline at least as many as stages, and all kinds of recomputation,
    unless `choice` has one. None: the ranks cannot divide the batch in this way.
    """
    samples, rest = divmod(work.samples, strategy.data_ranks)
    if rest:
        return None
    given = choice.accumulate is not None or choice.micro_batch is not None
    counts = [
        count
        for count in divisors(samples)
        if (given or count >= strategy.size(PIPELINE))
        and (choice.chunks == 1 or count % strategy.size(PIPELINE) == 0)
        and choice.accumulate in (None, count)
        and choice.micro_batch in (None, samples // count)
    ]
    kinds = ("none",) if work.hidden_bytes is None else (choice.recompute,) if choice.recompute else RECOMPUTE
    steps = [_RankStep(work, precision, strategy, cluster, choice, count, kind) for count in counts for kind in kinds]
    found = [step.estimate() for step in steps]
    return min(found, key=lambda each: (each.missing_bytes, each.step_s), default=None)


class _RankStep:
    """One step of a rank. Times of a forward or backward pass are those of one micro-batch on the slowest stage."""

    def __init__(
        self, work: Workload, precision: Precision, strategy: Strategy, cluster: Cluster, choice: Choice, micro_batches: int,
        recompute: str,
    ) -> None:  # fmt: skip
        self.work, self.precision, self.strategy, self.cluster, self.choice = work, precision, strategy, cluster, choice
        self.micro_batches, self.recompute = micro_batches, recompute
        self.stages, self.tensor, self.shards = (strategy.size(axis) for axis in (PIPELINE, TENSOR, SHARD))
        self.samples = work.samples / strategy.data_ranks / micro_batches
        self.parts = work.parts(self.tensor)
        whole = work.parameters - work.first_parameters - (0 if work.tied else work.last_parameters)
        self.layer_parameters = whole / work.layers / self.tensor
        self.stage_list = self._stages()
        self.parameters = max(stage.parameters for stage in self.stage_list)
        slowest = max(self.stage_list, key=lambda stage: stage.forward_s + stage.backward_s)
        sum_s = self._seconds(TENSOR, "all_reduce", self.samples * (work.hidden_bytes or 0.0))
        passes = 2 + (recompute != "none")
        self.tensor_s = slowest.layers * 2 * passes * sum_s  # two all-reduces of each pass through a layer
        self.forward_s = slowest.forward_s + slowest.layers * 2 * sum_s
        self.backward_s = slowest.backward_s + slowest.layers * 2 * (passes - 1) * sum_s
        self.compute_s = micro_batches * (slowest.forward_s + slowest.backward_s)
        self.owned = self.parameters / (self.shards if strategy.stage else 1)
        moved = precision.parameter_bytes + precision.gradient_bytes + 2 * precision.optimizer_bytes
        if precision.optimizer_bytes <= 2 * precision.parameter_bytes:  # no copy of the parameters, which it reads, then
            moved += precision.parameter_bytes
        self.optimizer_s = work.trained * self.owned * moved / ((choice.offload or cluster.device).gbyte_per_s * 1e9)

    def estimate(self) -> Estimate:
        """What the strategy needs."""
        work, axes = self.work, {axis: self.strategy.axis(axis, self.cluster) for axis, _ in self.strategy.axes}
        size = self.precision
        of_host = size.parameter_bytes + work.trained * (size.gradient_bytes + size.optimizer_bytes)
        exposed_s = {axis: seconds for axis, seconds in self.exposed_s().items() if axis in axes}
        return Estimate(
            strategy=self.strategy, cluster=self.cluster, samples=work.samples, tokens=work.tokens and work.tokens * work.samples,
            model_flops=work.flops * work.samples, micro_batches=self.micro_batches, recompute=self.recompute,
            memory_bytes=max(map(self._memory_of, self.stage_list), key=lambda kinds: sum(kinds.values())),
            compute_s=self.compute_s + self.optimizer_s, bubble_s=self.bubble_s(), exposed_s=exposed_s,
            level={name: axis.level for name, axis in axes.items()}, offload=self.choice.offload,
            host_bytes=of_host * self.owned if self.choice.offload else 0.0,
        )  # fmt: skip

    def _stages(self) -> list[_Stage]:
        """The first stage of a pipeline, one in the middle, and the last; or the only one."""
        work, tensor = self.work, self.tensor
        layers = math.ceil(work.layers / self.stages)
        at_ends = layers - (layers * self.stages - work.layers) // 2  # the first and the last stage may have one less
        first, last = work.first_parameters / tensor, work.last_parameters / tensor
        if self.stages == 1:
            return [self._stage(layers, work.parameters / tensor, 1, first=True, last=True)]
        own = self.layer_parameters
        found = [
            self._stage(at_ends, at_ends * own + first, self.stages, first=True),
            self._stage(at_ends, at_ends * own + last, 1, last=True),
        ]
        if self.stages > 2:
            found.append(self._stage(layers, layers * own, self.stages - 1))
        return found

    def _stage(self, layers: int, parameters: float, under_way: float, *, first: bool = False, last: bool = False) -> _Stage:
        device, samples = self.cluster.device, self.samples
        forward_s = backward_s = saved = of_layer = 0.0
        layer = self.parts.layer
        if layer is not None:
            cost = layer.cost(samples, device, self.recompute)
            forward_s, backward_s, saved = layers * cost.forward_s, layers * cost.backward_s, layers * cost.kept_bytes
            of_layer = cost.peak_bytes - (0.0 if self.recompute == "layer" else cost.kept_bytes)
        of_ends = 0.0
        for part in [self.parts.first] * first + [self.parts.last] * last:
            if part is not None:
                cost = part.cost(samples, device, "none")
                forward_s, backward_s = forward_s + cost.forward_s, backward_s + cost.backward_s
                of_ends = max(of_ends, cost.peak_bytes)
        if self.choice.chunks > 1:  # interleaved 1F1B, in which the last stage, too, has several under way
            under_way = self.stages + (2 * under_way - self.stages - 1) / self.choice.chunks
        under_way = min(self.micro_batches, under_way)
        received = self.micro_batches * (2 * self.choice.chunks - first - last) * self._message_bytes if self.stages > 1 else 0.0
        return _Stage(layers, parameters, forward_s, backward_s, saved, under_way, of_layer, of_ends, received)

    @property
    def _message_bytes(self) -> float:
        """The size of a message between two stages."""
        return self.samples * (self.work.hidden_bytes or 0.0) / self.tensor

    def _seconds(self, axis: str, operation: str, nbytes: float) -> float:
        """How long all groups along an axis take for a collective that each carries out at the same time."""
        along = self.strategy.axis(axis, self.cluster)
        return along.collective_s(operation, nbytes, fastest=self.cluster.device.runs_ahead)

    def bubble_s(self) -> float:
        """(s−1)·(t_f + t_b)/v: a stage waits for the first micro-batch to arrive and for the last to come back."""
        return (self.stages - 1) * (self.forward_s + self.backward_s) / self.choice.chunks

    def exposed_s(self) -> dict[str, float]:
        """Communication that nothing hides, by axis."""
        hop_s = self.strategy.axis(PIPELINE, self.cluster).message_s(self._message_bytes) if self.stages > 1 else 0.0
        sharded, replicated = self._sharded_s() if self.strategy.stage > 1 else (0.0, self._replicated_s(REPLICATE))
        if self.strategy.stage == 1:
            sharded = self._replicated_s(SHARD)
        return {
            TENSOR: self.micro_batches * self.tensor_s,
            PIPELINE: 2 * (self.stages - 1 + self.choice.chunks * self.micro_batches - 1) * hop_s,
            SHARD: sharded,
            REPLICATE: replicated,
        }

    def _replicated_s(self, axis: str) -> float:
        """Buckets of DDP: all-reduces during the last backward pass, as `lab.predict.data_parallel_step` has them.

        ZeRO-1 scatters the gradients and gathers the parameters, which is as much.
        """
        each = self.precision.gradient_bytes
        if self.strategy.stage == 1:
            each = (each + self.precision.compute_bytes) / 2
        nbytes = each * self.work.trained * self.parameters
        buckets = max(1, math.ceil(nbytes / BUCKET_BYTES))
        each_s = self._seconds(axis, "all_reduce", nbytes / buckets)
        return max(each_s, self.backward_s / buckets + buckets * each_s - self.backward_s)

    def _sharded_s(self) -> tuple[float, float]:
        """Layers of FSDP2: gathered before use, their gradients scattered; of HSDP also summed over the replicas.

        The first gather and the last scatter (and sum) are exposed; the others as far as they take longer than a layer.
        What is offloaded comes from the host before it is gathered; gradients go there, which adds them to those of
        earlier micro-batches: it reads two and writes one.
        """
        units = math.ceil(self.work.layers / self.stages) if self.choice.fsdp_unit == "layer" else 1
        others, of_unit = units - 1, self.parameters / units
        gather_s = self._seconds(SHARD, "all_gather", self.precision.compute_bytes * of_unit)
        gradient_bytes = self.precision.gradient_bytes * self.work.trained * of_unit
        scatter_s = self._seconds(SHARD, "reduce_scatter", gradient_bytes)
        if self.choice.offload is not None:
            host_bytes_per_s = self.choice.offload.gbyte_per_s * 1e9
            gather_s += self.precision.parameter_bytes * of_unit / self.shards / host_bytes_per_s
            moves = 1 + 3 * (1 - 1 / self.micro_batches)
            scatter_s += moves * gradient_bytes / self.shards / host_bytes_per_s
        sum_s = self._seconds(REPLICATE, "all_reduce", gradient_bytes / self.shards)
        forward_s, backward_s = self.forward_s / units, self.backward_s / units
        forward = gather_s + others * max(0.0, gather_s - forward_s)
        again_s = gather_s if self.strategy.stage == 3 else 0.0
        backward = again_s + scatter_s + others * max(0.0, again_s + scatter_s - backward_s)
        summed = sum_s + others * max(0.0, sum_s - max(backward_s, again_s + scatter_s))
        gathered = self.micro_batches if self.strategy.stage == 3 else 1  # stage 2 keeps the parameters for the whole step
        return gathered * forward + self.micro_batches * backward, self.micro_batches * summed

    def _memory_of(self, stage: _Stage) -> dict[str, float]:
        """Memory of a stage by kind, at the moment that needs most: in the backward pass or the optimizer's step."""
        size, zero, whole, trained = self.precision, self.strategy.stage, stage.parameters, self.work.trained
        owned = trained * whole / (self.shards if zero else 1)
        unit = self.layer_parameters
        around = whole - stage.layers * unit  # the embedding and the head, a unit of their own
        if self.choice.fsdp_unit == "model":
            unit, around = 0.0, whole
        if zero == 3:
            copies = size.compute_bytes * around
            of_layers = copies + min(GATHERED_LAYERS, stage.layers) * size.compute_bytes * unit
        else:  # all gathered parameters, or copies in 16 bits
            copies = size.compute_bytes * whole if zero == 2 or size.compute_bytes < size.parameter_bytes else 0.0
            of_layers = copies
        if zero > 1:  # gradients that are not yet scattered
            of_layers += trained * (size.gradient_bytes * unit + size.compute_bytes * around)
        here = 0.0 if self.choice.offload else 1.0  # the part of what is sharded that the device keeps
        gradients = here * size.gradient_bytes * (owned if zero > 1 else trained * whole)
        before = gradients if self.micro_batches > 1 else 0.0
        if self.parts.layer is None:  # of a module, nobody knows what exists when: its pass counts as the head's
            before, copies = gradients, of_layers
        saved = stage.under_way * stage.saved_bytes
        left = saved - stage.saved_bytes + stage.saved_bytes / stage.layers  # when only the first layer is left
        step_bytes = min(STEP_BYTES, size.optimizer_bytes / 2) if self.cluster.device.runs_ahead else 0.0
        gradients, activations, buffers = max(
            (before, saved + stage.end_bytes, copies),  # the backward pass of the head,
            (before, saved + stage.layer_bytes, of_layers),  # of the last layer,
            (gradients, left + stage.layer_bytes, of_layers),  # of the first;
            (gradients, 0.0, here * step_bytes * owned),  # the optimizer's step
            key=sum,
        )
        if zero == 0 and self.strategy.size(REPLICATE) > 1:
            buffers += size.gradient_bytes * trained * whole  # DDP's buckets
        buffers += self.work.buffer_bytes + stage.received_bytes
        return {
            "parameters": here * size.parameter_bytes * whole / (self.shards if zero > 1 else 1),
            "gradients": gradients,
            "optimizer": here * size.optimizer_bytes * owned,
            "activations": activations,
            "buffers": buffers,
        }


@dataclass(frozen=True, slots=True)
class _Stage:
    """A stage of a pipeline; bytes are those of activations of one micro-batch."""

    layers: int
    parameters: float  # of a rank
    forward_s: float  # of one micro-batch, computing only
    backward_s: float
    saved_bytes: float  # that layers keep for the backward pass
    under_way: float  # for how many micro-batches at one time
    layer_bytes: float  # more, in a layer's backward pass
    end_bytes: float  # more, in that of the embedding or the head
    received_bytes: float  # of the buffers for what a step's micro-batches receive, which torch's PipelineStage keeps
