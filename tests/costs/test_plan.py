"""`lab.plan`: its rows, its table, and what would have to change."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import labkit as lab
from labkit.costs.plan import SHOWN, Change, Plan

MODEL = lab.Transformer(layers=4, width=256, sequence=64, vocabulary=512)
NETWORK = lab.Network(nodes=2, inside=lab.Link(gbit_per_s=2, latency_us=200), between=lab.Link(gbit_per_s=0.2, latency_us=500))
DEVICE = lab.Device(tflop_per_s=0.05, gbyte_per_s=10, memory_gb=0.05)
CLUSTER = lab.Cluster(ranks=4, device=DEVICE, link=NETWORK)


def planned(cluster: lab.Cluster = CLUSTER, batch: int = 8) -> Plan:
    return lab.plan(MODEL, batch, cluster, parameter_bytes=4)


def test_all_strategies_of_four_ranks_on_two_nodes() -> None:
    assert {row.name for row in planned().rows} == {
        "DDP 4", "ZeRO-2 4", "FSDP2 4", "HSDP 2×2", "pipeline 4",
        "DDP 2 × TP 2", "ZeRO-2 2 × TP 2", "FSDP2 2 × TP 2", "pipeline 2 × TP 2",
        "pipeline 2 × DDP 2", "pipeline 2 × ZeRO-2 2", "pipeline 2 × FSDP2 2",
        "DDP 2 × pipeline 2", "ZeRO-2 2 × pipeline 2", "FSDP2 2 × pipeline 2",
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
    with pytest.raises(ValueError, match="no strategy 'DDP 4'"):
        found["DDP 4"]


def test_the_change_that_is_named_makes_the_second_best_win() -> None:
    found = planned()
    best, second = found.fitting[:2]
    changes = found.break_even()
    assert changes
    inside = next(change for change in changes if change.of == "inside")

    def faster(factor: float) -> Plan:
        link = replace(NETWORK, inside=lab.Link(gbit_per_s=2 * factor, latency_us=200))
        return planned(replace(CLUSTER, link=link))

    before, after = faster(inside.factor**0.98), faster(inside.factor**1.02)
    assert before[best.name].step_s < before[second.name].step_s
    assert after[second.name].step_s < after[best.name].step_s


def test_more_memory_lets_another_strategy_win() -> None:
    network = replace(NETWORK, inside=lab.Link(gbit_per_s=20, latency_us=200))

    def with_memory(memory_gb: float) -> Plan:
        return planned(replace(CLUSTER, link=network, device=replace(DEVICE, memory_gb=memory_gb)))

    found, name = with_memory(0.0165), "pipeline 2 × DDP 2"
    assert found.fitting[0].name == "pipeline 4"
    assert not found[name].fits
    (factor,) = [change.factor for change in found.break_even(name) if change.of == "memory"]
    assert factor > 1
    more, less = with_memory(0.0165 * factor * 1.01), with_memory(0.0165 * factor * 0.99)
    assert more[name].fits
    assert more[name].step_s < more["pipeline 4"].step_s
    assert not less[name].fits or less[name].step_s > less["pipeline 4"].step_s


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
    assert len(text.splitlines()) == 1 + 1 + len(found.rows) + 1  # title, headings, rows, a note
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
    assert f"more strategies, {len(found.rows) - SHOWN}" in repr(found).lower()


def test_a_module_is_planned_for_data_parallelism() -> None:
    net = nn.Sequential(nn.Linear(100, 200), nn.ReLU(), nn.Linear(200, 10))
    found = lab.plan(net, torch.empty(16, 100), CLUSTER)
    assert {row.name for row in found.rows} == {"DDP 4", "ZeRO-2 4", "FSDP2 4", "HSDP 2×2"}
    assert found["DDP 4"].memory_bytes["parameters"] == 4 * found.work.parameters
    assert not any(row.recompute for row in found.rows)


@pytest.mark.parametrize(
    ("cluster", "options", "error", "says"),
    [
        (CLUSTER, {"parameter_bytes": -1}, ValueError, "parameter_bytes"),
        (CLUSTER, {"gradient_bytes": "4"}, TypeError, "gradient_bytes"),
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
    assert str(Change("inside", 1.284)) == "at least 1.28 times the bandwidth inside nodes"
    assert str(Change("batch", 0.5)) == "at most 0.5 times the batch"
