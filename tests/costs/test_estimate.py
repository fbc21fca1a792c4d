"""Memory and step times of single strategies, computed by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest

import labkit as lab
from labkit.costs.cluster import PIPELINE, REPLICATE, SHARD, TENSOR, Strategy
from labkit.costs.estimate import Choice, Estimate, _RankStep, best_estimate
from labkit.costs.passes import PassCost
from labkit.costs.workload import Parts, Precision, Workload

# A link of 1 GB/s inside and one of 0.1 GB/s between the nodes; a device that computes 10¹² operations per second.
NETWORK = lab.Network(
    nodes=2, inside=lab.Link(gbit_per_s=8, latency_us=1000), between=lab.Link(gbit_per_s=0.8, latency_us=10_000)
)
DEVICE = lab.Device(tflop_per_s=1, gbyte_per_s=10, memory_gb=2, runs_ahead=False)
CLUSTER = lab.Cluster(ranks=4, device=DEVICE, link=NETWORK)
# 4 layers with 10 million parameters each. A sample takes 0.1 s forward and 0.2 s backward. Of a layer 1 MB and a share
# of 2 MB are kept; 0.1 MB of these are its output, 0.2 MB results of matrix products. The last layer's output: 0.5 MB.
SINGLE = Precision(4, 4, 8, 4)


@dataclass(frozen=True)
class Part:
    """Stands for a `Counted`; all numbers are for one sample."""

    forward_s: float
    again_s: float  # what selective recomputation computes again
    saved: float
    kept: float
    output: float
    peak: float

    def cost(self, samples: float, device: lab.Device, recompute: str) -> PassCost:
        forward_s = samples * self.forward_s / device.tflop_per_s
        again_s = {"none": 0.0, "selective": self.again_s / self.forward_s * forward_s, "layer": forward_s}[recompute]
        kept = {"none": self.saved, "selective": self.kept, "layer": self.output}[recompute]
        return PassCost(forward_s, 2 * forward_s + again_s, samples * kept, samples * self.peak)


def parts(ranks: int) -> Any:
    kept = 1e6 + 2e6 / ranks
    layer = Part(0.025 / ranks, 0.005 / ranks, kept, 2e5, 1e5, kept + 3e5)
    return Parts(None, layer, Part(1e-9, 0.0, 0.0, 0.0, 0.0, 5e5 / ranks))  # type: ignore[arg-type]


WORK = Workload(
    samples=8, tokens=10, parameters=40e6, trained=1.0, first_parameters=0, last_parameters=0, tied=False, layers=4,
    flops=3e11, buffer_bytes=0, hidden_bytes=1e5, heads=4, key_heads=4, parts=parts,
)  # fmt: skip
ADAM_S = 40e6 * (2 * 4 + 4 + 16) / 10e9  # gradients, and twice the parameters and the state, pass through the memory


def estimate(*axes: tuple[str, int], stage: int = 0, micro_batches: int = 1, recompute: str = "none", **chosen: Any) -> Estimate:
    return _RankStep(WORK, SINGLE, Strategy(axes, stage), CLUSTER, Choice(**chosen), micro_batches, recompute).estimate()


def best(work: Workload, strategy: Strategy, cluster: lab.Cluster) -> Estimate:
    found = best_estimate(work, SINGLE, strategy, cluster, Choice())
    assert found is not None
    return found


def test_ddp() -> None:
    row = estimate((REPLICATE, 4))
    assert row.compute_s == pytest.approx(2 * 0.3 + ADAM_S)
    # 160 MB in 7 buckets, each a ring of 6 rounds of a quarter: 6·10 ms + 1.5·(160/7) MB / 0.1 GB/s
    each_s = 0.060 + 1.5 * 160 / 7 / 100
    assert row.exposed_s == {REPLICATE: pytest.approx(7 * each_s + 0.4 / 7 - 0.4)}
    assert row.level == {REPLICATE: "between"}
    # It needs most in the first layer's backward pass: gradients have taken the place of the others' activations.
    assert row.memory_bytes == {
        "parameters": 160e6, "gradients": 160e6, "optimizer": 320e6, "activations": 2 * (3e6 + 3e5), "buffers": 160e6,
    }  # fmt: skip
    assert row.fits
    again = estimate((REPLICATE, 4), micro_batches=2)  # a sample at a time; gradients of the first are there
    assert again.memory_bytes == row.memory_bytes | {"activations": 4 * 3e6 + 5e5}


def test_adam_on_a_gpu_changes_all_parameters_at_one_time() -> None:
    gpu = replace(CLUSTER, device=replace(DEVICE, runs_ahead=True))
    row = _RankStep(WORK, SINGLE, Strategy(((REPLICATE, 4),), 0), gpu, Choice(), 1, "none").estimate()
    assert row.memory_bytes["activations"] == 0  # they are freed by then
    assert row.memory_bytes["buffers"] == 160e6 + 160e6  # buckets, and the roots of the second moments
    for optimizer_bytes, roots in ((0, 0), (4, 80e6)):  # SGD; moments of 16 bits
        size = replace(SINGLE, optimizer_bytes=optimizer_bytes)
        other = _RankStep(WORK, size, Strategy(((REPLICATE, 4),), 0), gpu, Choice(), 1, "none").estimate()
        assert other.memory_bytes["buffers"] == 160e6 + roots


def test_fsdp2_gathers_each_layer_twice_and_scatters_once() -> None:
    row = estimate((SHARD, 4), stage=3)
    half_s = 0.030 + 0.75 * 0.4  # a gather or a scatter of one layer of 40 MB
    forward_s, backward_s = 2 * 0.1 / 4, 2 * 0.2 / 4
    forward = half_s + 3 * (half_s - forward_s)
    backward = 2 * half_s + 3 * (2 * half_s - backward_s)
    assert row.exposed_s == {SHARD: pytest.approx(forward + backward)}
    assert row.compute_s == pytest.approx(0.6 + ADAM_S / 4)
    assert row.memory_bytes["parameters"] == row.memory_bytes["gradients"] == 40e6
    assert row.memory_bytes["optimizer"] == 80e6
    # In the first layer's backward pass: the parameters of two layers, and the gradients of one.
    assert row.memory_bytes["activations"] == 2 * (3e6 + 3e5)
    assert row.memory_bytes["buffers"] == 2 * 40e6 + 40e6


def test_zero_2_gathers_once_per_step_fsdp2_once_per_micro_batch() -> None:
    two, three = (estimate((SHARD, 4), stage=stage, micro_batches=2) for stage in (2, 3))
    half_s = 0.030 + 0.75 * 0.4
    forward = half_s + 3 * (half_s - 0.1 / 4)
    assert two.exposed_s[SHARD] == pytest.approx(forward + 2 * (half_s + 3 * (half_s - 0.2 / 4)))
    assert three.exposed_s[SHARD] == pytest.approx(2 * forward + 2 * (2 * half_s + 3 * (2 * half_s - 0.2 / 4)))
    assert two.memory_bytes["parameters"] == two.memory_bytes["gradients"] == 40e6
    assert two.memory_bytes["buffers"] == 160e6 + 40e6  # all gathered parameters, and the gradients of one layer
    assert three.memory_bytes["buffers"] == 2 * 40e6 + 40e6


def test_hsdp_sums_its_shards_between_the_nodes_at_the_same_time() -> None:
    row = estimate((REPLICATE, 2), (SHARD, 2), stage=3)
    inside_s = 0.001 + 0.5 * 0.04
    # Two groups sum 20 MB each over the node's one connection: 2 rounds, each with half of 20 MB of both groups.
    sum_s = 2 * (0.010 + 20e6 / 0.1e9)
    hidden_by = max(2 * 0.2 / 4, 2 * inside_s)
    assert row.exposed_s[REPLICATE] == pytest.approx(sum_s + 3 * (sum_s - hidden_by))
    assert row.exposed_s[SHARD] == pytest.approx(3 * inside_s)  # only the first gathers and the last scatter
    assert row.level == {REPLICATE: "between", SHARD: "inside"}
    assert row.memory_bytes["parameters"] == 80e6


def test_tensor_parallelism_sums_four_times_per_layer_and_six_with_recomputation() -> None:
    sum_s = 2 * 0.001 + 4 * 1e5 / 1e9  # 4 samples of 0.1 MB, between two ranks of a node
    mesh = (REPLICATE, 2), (TENSOR, 2)
    assert estimate(*mesh).exposed_s[TENSOR] == pytest.approx(4 * 4 * sum_s)
    again = estimate(*mesh, recompute="layer")
    assert again.exposed_s[TENSOR] == pytest.approx(4 * 6 * sum_s)
    assert again.compute_s == pytest.approx(4 * 0.4 / 2 + ADAM_S / 2)  # 4 samples, half of each layer, forward twice
    selective = estimate(*mesh, recompute="selective")
    assert selective.compute_s == pytest.approx(4 * (0.3 + 4 * 0.005) / 2 + ADAM_S / 2)


def test_recomputed_layers_keep_their_outputs_and_one_layer_is_whole() -> None:
    mesh = (REPLICATE, 2), (TENSOR, 2)
    none, layer, selective = (
        estimate(*mesh, recompute=kind, micro_batches=2).memory_bytes["activations"] for kind in ("none", "layer", "selective")
    )  # fmt: skip
    assert none == 2 * (4 * (1e6 + 2e6 / 2) + 3e5)  # the head needs 0.25 MB only
    assert layer == 2 * (4 * 1e5 + (1e6 + 2e6 / 2) + 3e5)
    assert selective == 2 * (4 * 2e5 + (1e6 + 2e6 / 2) + 3e5 - 2e5)


def test_a_pipeline_waits_while_it_fills_and_drains() -> None:
    row = estimate((PIPELINE, 4), micro_batches=8)
    assert row.compute_s == pytest.approx(8 * 0.3 / 4 + ADAM_S / 4)
    assert row.bubble_s == pytest.approx(3 * 0.3 / 4)
    hop_s = 0.010 + 1e5 / 1e8  # the slowest: from node to node
    assert row.exposed_s == {PIPELINE: pytest.approx(2 * (3 + 7) * hop_s)}
    assert row.memory_bytes["parameters"] == 40e6
    assert row.memory_bytes["activations"] == 4 * 3e6 + 3e5  # the first stage: four micro-batches under way, one layer each
    assert row.memory_bytes["buffers"] == 8 * 1e5  # gradients that it receives
    row = estimate((PIPELINE, 2), (REPLICATE, 2), micro_batches=1)
    assert row.memory_bytes["activations"] == 4 * (3e6 + 3e5)  # its gradients have taken the place of the other layer's
    row = estimate((PIPELINE, 2), (REPLICATE, 2), micro_batches=2)
    assert row.memory_bytes["activations"] == 2 * (2 * 2 * 3e6 + 3e5)  # the first stage, two micro-batches under way


def test_the_best_estimate_is_the_fastest_that_fits() -> None:
    pipeline = Strategy(((PIPELINE, 4),), 0)
    found = best(WORK, pipeline, CLUSTER)
    assert found.fits
    assert found.recompute == "none"
    others = [estimate((PIPELINE, 4), micro_batches=count) for count in (4, 8)]
    assert found.step_s == min(other.step_s for other in others)
    small = replace(CLUSTER, device=replace(DEVICE, memory_gb=0.1656))
    found = best(WORK, pipeline, small)
    assert found.recompute == "selective"  # state and messages leave 4 MB for activations, which need 12.3
    assert found.fits


def test_what_never_fits_says_by_how_much() -> None:
    tiny = replace(CLUSTER, device=replace(DEVICE, memory_gb=0.1))
    found = best(WORK, Strategy(((REPLICATE, 4),), 0), tiny)
    assert not found.fits
    assert found.missing_bytes == pytest.approx(sum(found.memory_bytes.values()) - 0.1e9)
    assert found.recompute == "layer"
    assert found.micro_batches == 2


def test_a_batch_that_cannot_be_divided_has_no_estimate() -> None:
    cluster = lab.Cluster(ranks=16, device=DEVICE, link=NETWORK)
    assert best_estimate(WORK, SINGLE, Strategy(((REPLICATE, 16),), 0), cluster, Choice()) is None
    deep = Strategy(((PIPELINE, 4),), 0)  # a pipeline has at least as many micro-batches as stages
    assert best(replace(WORK, samples=4), deep, CLUSTER).micro_batches == 4
    assert best_estimate(replace(WORK, samples=2), SINGLE, deep, CLUSTER, Choice()) is None


def test_one_rank_only_computes() -> None:
    alone = lab.Cluster(ranks=1, device=DEVICE, link=lab.Link.nvlink4)
    row = _RankStep(WORK, SINGLE, Strategy((), 0), alone, Choice(), 1, "none").estimate()
    assert row.step_s == pytest.approx(8 * 0.3 + ADAM_S)
    assert row.exposed_s == {}
    assert row.memory_bytes["buffers"] == 0
    assert math.isclose(row.step_s, row.compute_s)
