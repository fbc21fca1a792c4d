"""`lab.plan`: its rows, its table, and what would have to change."""

from __future__ import annotations

import itertools
import pickle
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import labkit as lab
from labkit.costs.plan import SHOWN, Change, Plan
from labkit.costs.transformer_parts import Cut, counted_parts

MODEL = lab.Transformer(layers=4, width=256, sequence=64, vocabulary=512)
NETWORK = lab.Network(nodes=2, inside=lab.Link(gbit_per_s=2, latency_us=200), between=lab.Link(gbit_per_s=0.2, latency_us=500))
DEVICE = lab.Device(tflop_per_s=0.05, gbyte_per_s=10, memory_gb=0.05, runs_ahead=False)
CLUSTER = lab.Cluster(ranks=4, device=DEVICE, link=NETWORK)


def planned(cluster: lab.Cluster = CLUSTER, batch: int = 8) -> Plan:
    return lab.plan(MODEL, batch, cluster, parameter_bytes=4)


def test_all_strategies_of_four_ranks_on_two_nodes() -> None:
    assert {row.name for row in planned().rows} == {
        "DDP 4", "ZeRO-1 4", "ZeRO-2 4", "FSDP2 4", "HSDP 2×2", "pipeline 4",
        "DDP 2 × TP 2", "ZeRO-1 2 × TP 2", "ZeRO-2 2 × TP 2", "FSDP2 2 × TP 2", "pipeline 2 × TP 2",
        "pipeline 2 × DDP 2", "pipeline 2 × ZeRO-1 2", "pipeline 2 × ZeRO-2 2", "pipeline 2 × FSDP2 2",
        "DDP 2 × pipeline 2", "ZeRO-1 2 × pipeline 2", "ZeRO-2 2 × pipeline 2", "FSDP2 2 × pipeline 2",
    }  # fmt: skip


def test_those_that_fit_come_first_the_fastest_at_the_top() -> None:
    found = planned()
    fits = [row.fits for row in found.rows]
    assert fits == sorted(fits, reverse=True)
    assert not fits[-1]
    times = [row.step_s for row in found.fitting]
    assert times == sorted(times)
    missing = [row.missing_bytes for row in found.rows]
    assert missing == sorted(missing)


def test_a_slow_connection_between_nodes_wants_the_pipeline_there() -> None:
    found = planned()
    assert found["pipeline 2 × DDP 2"].step_s < found["DDP 2 × pipeline 2"].step_s
    assert found["pipeline 2 × DDP 2"].level == {"pipeline": "between", "replicate": "inside"}


def test_a_large_model_does_not_fit_without_shards() -> None:
    model = lab.Transformer(layers=32, width=4096, sequence=8192, vocabulary=128256)
    network = lab.Network(nodes=2, inside=lab.Link.nvlink4, between=lab.Link.infiniband_ndr)
    found = lab.plan(model, 16, lab.Cluster(ranks=16, device=lab.Device.h100, link=network))
    ddp = found["DDP 16"]
    assert not ddp.fits
    state = 16 * model.parameters  # type: ignore[operator]  # the default is set
    assert ddp.missing_bytes > state - 80e9
    assert found["FSDP2 16"].fits


def test_tensor_parallelism_stays_inside_a_node_and_divides_the_heads() -> None:
    model = replace(MODEL, heads=2)
    network = lab.Network(nodes=2, inside=lab.Link.nvlink4, between=lab.Link.ethernet_10g)
    found = lab.plan(model, 8, lab.Cluster(ranks=8, device=DEVICE, link=network))
    assert {row.strategy.size("tensor") for row in found.rows} == {1, 2}


def test_a_batch_that_cannot_be_divided_is_named() -> None:
    found = planned(batch=2)
    assert "DDP 4" in found.undivided
    assert "DDP 4" in repr(found)
    with pytest.raises(ValueError, match=r"batch cannot be divided .* of 'DDP 4'"):
        found["DDP 4"]
    with pytest.raises(ValueError, match="no strategy 'DPD 4'"):
        found["DPD 4"]


def test_the_change_that_is_named_makes_the_other_win() -> None:
    found, name = planned(), "pipeline 4"
    changes = found.break_even(name)
    assert {change.winner for change in changes} == {name}
    inside = next(change for change in changes if change.of == "inside")

    def faster(factor: float) -> Plan:
        link = replace(NETWORK, inside=lab.Link(gbit_per_s=2 * factor, latency_us=200))
        return planned(replace(CLUSTER, link=link))

    best = found.rows[0].name
    before, after = (faster(inside.factor**power) for power in (0.98, 1.02))
    assert before[best].step_s < before[name].step_s
    assert after[name].step_s < after[best].step_s


def test_more_memory_lets_another_strategy_win() -> None:
    def with_memory(memory_gb: float) -> Plan:
        return planned(replace(CLUSTER, device=replace(DEVICE, memory_gb=memory_gb)))

    found, name = with_memory(0.022), "pipeline 2 × ZeRO-1 2"
    assert found.fitting[0].name == "pipeline 4"
    assert not found[name].fits
    (factor,) = [change.factor for change in found.break_even(name) if change.of == "memory"]
    assert factor > 1
    more, less = with_memory(0.022 * factor * 1.01), with_memory(0.022 * factor * 0.99)
    assert more[name].fits
    assert more[name].step_s < more["pipeline 4"].step_s
    assert not less[name].fits or less[name].step_s > less["pipeline 4"].step_s


def test_all_rates_of_a_device_change_together() -> None:
    device = replace(DEVICE, tflop_per_s_32=DEVICE.tflop_per_s / 4)
    found, name = planned(replace(CLUSTER, device=device)), "pipeline 4"
    (factor,) = [change.factor for change in found.break_even(name) if change.of == "device"]

    def faster(times: float) -> Plan:
        rates = {rate: getattr(device, rate) * times for rate in ("tflop_per_s", "tflop_per_s_32", "gbyte_per_s")}
        return planned(replace(CLUSTER, device=replace(device, **rates)))

    best = found[0].name
    assert faster(factor * 0.98)[name].step_s > faster(factor * 0.98)[best].step_s
    assert faster(factor * 1.02)[name].step_s < faster(factor * 1.02)[best].step_s


def test_break_even_needs_another_strategy() -> None:
    found = planned()
    with pytest.raises(ValueError, match="the best strategy already"):
        found.break_even(found.rows[0].name)
    with pytest.raises(ValueError, match="no strategy fits"):
        planned(replace(CLUSTER, device=replace(DEVICE, memory_gb=1e-6))).break_even()
    only = planned(lab.Cluster(ranks=1, device=replace(DEVICE, memory_gb=1), link=lab.Link.nvlink4))
    with pytest.raises(ValueError, match="only one rank fits"):
        only.break_even()


def test_the_table_has_a_line_for_each_row() -> None:
    found = planned()
    text, table = repr(found), found._repr_html_()
    assert len(text.splitlines()) == 1 + 1 + len(found.rows) + 3  # title, headings, rows, notes
    for row in found.rows:
        assert row.name in text
        assert f">{row.name}</td>" in table
    assert "too large" in repr(replace(found, rows=found.rows[-3:]))
    row = found["pipeline 2 × DDP 2"]
    table = replace(found, rows=(row,))._repr_html_()  # each axis has a line in the column of communication
    assert re.findall(r"(pipeline|replicate) [\d.]+ m?s (?:inside|between)(?:,<br>|</td>)", table) == list(row.exposed_s)


def test_a_long_table_is_cut_and_says_so() -> None:
    found = planned(lab.Cluster(ranks=16, device=DEVICE, link=replace(NETWORK, nodes=4)), batch=64)
    assert len(found.rows) > SHOWN
    assert found._repr_html_().count("<tr>") == 1 + SHOWN
    assert f"{SHOWN} of {len(found.rows)} strategies are shown" in repr(found)


def test_a_module_is_planned_for_data_parallelism() -> None:
    net = nn.Sequential(nn.Linear(100, 200), nn.ReLU(), nn.Linear(200, 10))
    found = lab.plan(net, torch.empty(16, 100), CLUSTER)
    assert {row.name for row in found.rows} == {"DDP 4", "ZeRO-1 4", "ZeRO-2 4", "FSDP2 4", "HSDP 2×2"}
    assert found["DDP 4"].memory_bytes["parameters"] == 4 * found.work.parameters
    assert {row.recompute for row in found.rows} == {"none"}


@pytest.mark.parametrize(
    ("cluster", "options", "error", "says"),
    [
        (CLUSTER, {"parameter_bytes": -1}, ValueError, "parameter_bytes"),
        (CLUSTER, {"gradient_bytes": "4"}, TypeError, "gradient_bytes"),
        (CLUSTER, {"sequence_parallel": "no"}, TypeError, "sequence_parallel='no': expected True or False"),
        (CLUSTER, {"offload": True}, TypeError, "offload=True: expected a lab.Device"),
        (4, {}, TypeError, r"cluster=4: expected a lab\.Cluster"),
    ],
)
def test_wrong_arguments_are_refused(cluster: Any, options: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        lab.plan(MODEL, 8, cluster, **options)


def test_bytes_of_the_optimizer_can_be_given() -> None:
    sgd = lab.plan(MODEL, 8, CLUSTER, parameter_bytes=4, optimizer_bytes=0)
    assert sgd["DDP 4"].memory_bytes["optimizer"] == 0
    assert planned()["DDP 4"].memory_bytes["optimizer"] == 8 * sgd.work.parameters  # Adam in 32 bits
    mixed = lab.plan(MODEL, 8, CLUSTER)
    assert mixed["DDP 4"].memory_bytes["optimizer"] == 12 * sgd.work.parameters


def test_a_change_reads_as_a_sentence_says_it() -> None:
    assert str(Change("A", "B", "inside", 1.284)) == "A is faster than B with 1.29 times the bandwidth inside nodes"
    no_more = Change("A", "B", "memory", 0.5214, best_fits=False)
    assert str(no_more) == "A is possible, and B is not, with 0.519 times the device's memory"
    assert str(Change("A", "B", "batch", 0.5)) == "A is faster than B with 0.5 times the batch"


def test_what_the_user_chooses_holds_for_all_rows() -> None:
    found = lab.plan(MODEL, 16, CLUSTER, micro_batch=2, recompute="layer")
    assert {row.recompute for row in found.rows} == {"layer"}
    assert all(16 // row.strategy.data_ranks // row.micro_batches == 2 for row in found.rows)
    (row,) = lab.plan(MODEL, 16, CLUSTER, strategy="DDP 4", accumulate=4).rows
    assert (row.name, row.micro_batches) == ("DDP 4", 4)
    assert lab.plan(MODEL, 16, CLUSTER, accumulate=32).rows == ()


def test_a_batch_can_be_given_in_tokens_or_follow_from_micro_batches() -> None:
    by_tokens = lab.plan(MODEL, tokens_per_batch=8 * 64, cluster=CLUSTER, strategy="DDP 4")
    assert by_tokens[0] == lab.plan(MODEL, 8, CLUSTER, strategy="DDP 4")[0]
    row = lab.plan(MODEL, cluster=CLUSTER, strategy="DDP 4", micro_batch=3, accumulate=2)[0]
    assert (row.samples, row.tokens, row.micro_batches) == (24, 24 * 64, 2)


def test_tokens_per_second_hours_and_mfu() -> None:
    row = planned()["DDP 4"]
    assert row.tokens_per_s == 8 * 64 / row.step_s / 4
    assert row.hours(3600 * 8 * 64) == pytest.approx(row.step_s)
    parameters, tokens = MODEL.parameters - 64 * 256, 8 * 64  # the table of positions computes nothing
    assert row.mfu == pytest.approx((6 * parameters + 12 * 4 * 256 * 64) * tokens / row.step_s / 4 / 0.05e12)
    module = lab.plan(nn.Linear(4, 4), torch.ones(8, 4), CLUSTER)[0]
    assert module.tokens_per_s == 8 / module.step_s / 4  # of samples


def test_several_numbers_of_ranks_each_have_their_best() -> None:
    found = lab.plan(MODEL, 16, CLUSTER, ranks=[1, 2, 4, 8])
    assert [row.cluster.ranks for row in found.rows] == [1, 2, 4, 8]
    best = lab.plan(MODEL, 16, CLUSTER)[0]
    assert "8 ranks: " in repr(found)
    assert (found[2].name, found[2].step_s, found[2].memory_bytes) == (best.name, best.step_s, best.memory_bytes)
    with pytest.raises(ValueError, match="several numbers of ranks"):
        found.break_even()


def test_meshes_with_equal_numbers_are_one_row() -> None:
    cluster = lab.Cluster(ranks=4, device=DEVICE, link=lab.Link(gbit_per_s=2, latency_us=200))
    names = {row.name for row in lab.plan(MODEL, 8, cluster).rows}
    assert "pipeline 2 × DDP 2" in names
    assert "DDP 2 × pipeline 2" not in names


def test_frozen_parameters_have_neither_gradients_nor_optimizer_state() -> None:
    options: dict[str, Any] = {"strategy": "DDP 4", "accumulate": 2}
    model = replace(MODEL, width=1024)
    all_of_them, few = (lab.plan(model, 8, CLUSTER, lora_rank=rank, **options)[0] for rank in (None, 1))
    adapters = model.lora_parameters(1)
    assert few.memory_bytes["optimizer"] == pytest.approx(12 * adapters)
    assert few.memory_bytes["gradients"] == pytest.approx(2 * adapters)
    assert few.memory_bytes["parameters"] == all_of_them.memory_bytes["parameters"] + 2 * adapters
    assert few.compute_s < 0.8 * all_of_them.compute_s  # no gradients of weights
    assert 0 < few.mfu < 1


def test_shards_in_32_bits_are_gathered_in_16() -> None:
    options: dict[str, Any] = {"strategy": "FSDP2 4", "micro_batch": 16}  # whose activations are larger than all else
    four, mixed, two = (
        lab.plan(MODEL, 64, CLUSTER, parameter_bytes=size, compute_bytes=compute, **options)[0]
        for size, compute in ((4, 4), (4, 2), (2, 2))
    )
    assert mixed.memory_bytes["parameters"] == four.memory_bytes["parameters"]
    assert mixed.memory_bytes["activations"] == two.memory_bytes["activations"]
    assert two.exposed_s["shard"] < mixed.exposed_s["shard"] < four.exposed_s["shard"]


def test_the_whole_model_as_one_unit_is_gathered_at_one_time() -> None:
    layer, model = (lab.plan(MODEL, 8, CLUSTER, strategy="FSDP2 4", fsdp_unit=unit)[0] for unit in ("layer", "model"))
    assert model.memory_bytes["buffers"] == pytest.approx(2 * 2 * MODEL.parameters, rel=0.1)  # parameters and gradients
    assert layer.memory_bytes["buffers"] < 0.8 * model.memory_bytes["buffers"]


HOST = lab.Device(tflop_per_s=1, gbyte_per_s=0.5, memory_gb=1)


@pytest.mark.parametrize("count", [1, 2])
def test_what_is_offloaded_is_on_the_host_and_moves(count: int) -> None:
    options: dict[str, Any] = {"strategy": "FSDP2 4", "fsdp_unit": "model", "accumulate": count, "recompute": "none"}
    here, there = (lab.plan(MODEL, 8, CLUSTER, offload=host, **options)[0] for host in (None, HOST))
    shard = MODEL.parameters / 4  # type: ignore[operator]  # the default is set
    assert [there.memory_bytes[kind] for kind in ("parameters", "gradients", "optimizer")] == [0, 0, 0]
    assert there.host_bytes == (2 + 2 + 12) * shard
    moved = {"parameters": 2 * count * 2, "gradients": 2 * count, "sums": 3 * 2 * (count - 1)}  # bytes, of each parameter
    assert there.exposed_s["shard"] - here.exposed_s["shard"] == pytest.approx(sum(moved.values()) * shard / 0.5e9)
    of_step = (2 + 2 + 2 * 12) * shard  # bytes
    assert there.compute_s - here.compute_s == pytest.approx(of_step / 0.5e9 - of_step / 10e9)


def test_what_is_offloaded_must_fit_into_the_host() -> None:
    small = replace(HOST, memory_gb=0.01)
    found = lab.plan(MODEL, 8, CLUSTER, offload=small)
    assert {row.strategy.stage for row in found.rows} == {2, 3}
    assert found["FSDP2 4"].missing_bytes == pytest.approx(16 * MODEL.parameters / 4 - 0.01e9)  # type: ignore[operator]
    assert "The host keeps parameters, gradients and optimizer state: 13.2 MB for each rank" in repr(found)


def test_a_model_larger_than_a_device_is_not_to_be_made_there() -> None:
    cluster = lab.Cluster(ranks=16, device=lab.Device.rtx_4090, link=lab.Link.pcie4)
    found = lab.plan(lab.Transformer.llama2_13b, 16, cluster, strategy="FSDP2 16")
    assert found[0].fits
    assert "The whole model has 26.0 GB, more than a device: create it on the meta device" in repr(found)
    assert "meta device" not in repr(planned())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"strategy": "DPP 4"}, "did you mean 'DDP 4'"),
        ({"recompute": "all"}, "'none', 'selective' or 'layer'"),
        ({"fsdp_unit": "block"}, "'layer' or 'model'"),
        ({"micro_batch": 0}, "micro_batch=0: expected a whole number from 1"),
        ({"parameter_bytes": 0}, "parameter_bytes=0: expected a number of bytes, above 0"),
        ({"tokens_per_batch": 512}, "either this or batch"),
        ({"lora_rank": 0}, "from 1 to the width, 256"),
        ({"strategy": "pipeline 4", "chunks": 2}, "no strategy of 4 ranks with 2 chunks has this name"),  # of four layers
        ({"strategy": "DDP 4", "ranks": [4, 8]}, "no strategy of 8 ranks has this name; did you mean 'DDP 8'"),
        ({"ranks": []}, "at least one number of ranks"),
        ({"ranks": [0]}, "ranks=0"),
        ({"ranks": [1], "offload": HOST}, "at least two data-parallel ranks"),
    ],
)
def test_a_wrong_choice_is_refused(options: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        lab.plan(MODEL, 8, CLUSTER, **options)


def test_numbers_of_numpy_are_numbers() -> None:
    of_numpy = lab.Transformer(**{name: np.int32(getattr(MODEL, name)) for name in ("layers", "width", "sequence", "vocabulary")})
    cluster = replace(CLUSTER, ranks=np.int32(4))
    found = lab.plan(of_numpy, np.int32(2**30), cluster, strategy="pipeline 4", accumulate=np.int32(2**10))
    assert found[0] == lab.plan(MODEL, 2**30, CLUSTER, strategy="pipeline 4", accumulate=2**10)[0]


def test_a_plan_without_rows_says_why() -> None:
    found = lab.plan(MODEL, 9, CLUSTER, strategy="DDP 4")
    with pytest.raises(IndexError, match=r"no rows. The batch cannot be divided .* of DDP 4"):
        found[0]
    with pytest.raises(ValueError, match=r"no rows. The batch cannot be divided .* of DDP 4"):
        found.break_even()
    assert found[:2] == ()


def test_a_plan_can_be_pickled() -> None:
    found = planned()
    again = pickle.loads(pickle.dumps(found))
    assert repr(again) == repr(found)
    assert again.break_even() == found.break_even()


def test_tokens_are_rounded_so_that_all_ranks_divide_them() -> None:
    found = lab.plan(MODEL, tokens_per_batch=30 * MODEL.sequence, cluster=CLUSTER, ranks=[4, 8])
    assert [row.samples for row in found.rows] == [32, 32]
    assert "32 samples per step, up to 8 ranks" in repr(found)
    either = lab.plan(MODEL, tokens_per_batch=30 * MODEL.sequence, cluster=CLUSTER, ranks=[2, 6])
    assert [row.samples for row in either.rows] == [30, 30]
    few = lab.plan(MODEL, tokens_per_batch=3 * MODEL.sequence, cluster=CLUSTER)
    assert few[0].samples == 4
    alone = lab.plan(MODEL, 8, CLUSTER, ranks=[2])
    assert "8 samples per step, 2 ranks" in repr(alone)


def test_heads_of_keys_divide_the_ranks_of_a_layer_or_are_divided() -> None:
    model = replace(MODEL, width=1280, heads=20, kv_heads=10)
    found = lab.plan(model, 8, replace(CLUSTER, link=lab.Link.nvlink4))
    assert {row.strategy.size("tensor") for row in found.rows} == {1, 2}


def most_under_way(schedule: lab.Trace, rank: int) -> int:
    """The most passes of a rank that have gone forward and not yet back."""
    passes = sorted((span for span in schedule if span.rank == rank and span.kind == "compute"), key=lambda span: span.start_ns)
    return max(itertools.accumulate(1 if span.name.startswith("forward") else -1 for span in passes))


def test_an_interleaved_schedule_keeps_what_its_simulation_keeps() -> None:
    stages, count = 4, 16
    model = replace(MODEL, layers=8, vocabulary=100_000, width=64)  # most memory on the last stage
    cluster = replace(CLUSTER, link=lab.Link.nvlink4)
    options: dict[str, Any] = {"strategy": "pipeline 4", "micro_batch": 1, "recompute": "none"}
    plain, found = (lab.plan(model, count, cluster, chunks=chunks, **options)[0] for chunks in (1, 2))
    schedule = lab.schedule("interleaved 1f1b", stages=2 * stages, micro_batches=count, ranks=stages)
    most = most_under_way(schedule, rank=stages - 1) / 2  # each is of half a stage
    of_stage = found.memory_bytes["activations"] - plain.memory_bytes["activations"]
    kept = counted_parts(model, Cut(1, sequence=False), torch.bfloat16)[1].at(1).saved_bytes * 2  # two layers
    assert of_stage == pytest.approx((most - 1) * kept)


def test_a_batch_too_large_to_be_divided_is_refused() -> None:
    with pytest.raises(ValueError, match=r"micro_batch=.*at most 10,000,000,000"):
        lab.plan(MODEL, cluster=CLUSTER, strategy="DDP 4", micro_batch=10**20, accumulate=1)
    with pytest.raises(ValueError, match="tokens_per_batch="):
        lab.plan(MODEL, tokens_per_batch=10**18, cluster=CLUSTER)


def test_a_module_computes_in_its_own_type_or_in_16_bits() -> None:
    half = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)).bfloat16()
    half[1].float()
    found = lab.plan(half[:1], torch.empty(8, 64, dtype=torch.bfloat16), CLUSTER)
    assert found.precision.optimizer_bytes == 12
    assert lab.plan(half[1], torch.empty(8, 64), CLUSTER).precision.optimizer_bytes == 8
    with pytest.raises(ValueError, match="compute_bytes=4: expected 2, or the 2 of the module's own"):
        lab.plan(half[:1], torch.empty(8, 64, dtype=torch.bfloat16), CLUSTER, compute_bytes=4)


def test_a_module_that_is_not_linear_is_refused() -> None:
    class Pairs(nn.Linear):  # each sample is compared with all others
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = super().forward(x)
            return found @ found.T

    with pytest.raises(ValueError, match="does not grow linearly"):
        lab.plan(Pairs(8, 8), torch.empty(16, 8), CLUSTER)
    with pytest.raises(ValueError, match="first dimensions are 16 and 4"):
        lab.plan(nn.Bilinear(8, 8, 8), (torch.empty(16, 8), torch.empty(4, 8)), CLUSTER)
    with pytest.raises(ValueError, match="recompute and chunks"):
        lab.plan(nn.Linear(8, 8), torch.empty(16, 8), CLUSTER, recompute="layer")
    assert "samples/s" in repr(lab.plan(nn.Linear(8, 8), torch.empty(16, 8), CLUSTER))


def test_the_search_does_not_grow_with_the_batch() -> None:
    found = lab.plan(MODEL, 10**9, CLUSTER)
    assert not any(row.fits and row.micro_batches == 1 for row in found.rows)
    assert found.fitting
