"""The plan beside trainings that others have published, and its answers to questions that people asked."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

import pytest

import labkit as lab
from bench.speed.published import FAR, compared, error, planned
from bench.speed.published_rows import MEMORY_FACTS, RUNS, PublishedRun

# Explained in docs/planning.md.
FAR_OFF = {"B03", "B04", "B26r", "V04m", "V11", "V11m"}
TAKEN_TO_FIT = {"B30"}
MIXED: dict[str, Any] = {"parameter_bytes": 4, "compute_bytes": 2}
H100S = lab.Cluster(ranks=8, device=lab.Device.h100, link=lab.Link.nvlink4)


def check(runs: tuple[PublishedRun, ...], at_least: int) -> None:
    found = compared(runs)
    assert len(found) >= at_least
    assert statistics.median(map(error, found)) <= 0.2
    assert {each.run.key for each in found if error(each) > FAR} <= FAR_OFF


def test_every_fifth_published_run_is_met() -> None:
    check(RUNS[::5], 25)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_all_published_runs_are_met() -> None:
    check(RUNS, 130)


def test_what_ran_out_of_memory_does_not_fit() -> None:
    rows = {fact.key: planned(fact) for fact in MEMORY_FACTS if not fact.fits}
    assert len(rows) >= 12
    assert {key for key, row in rows.items() if row is not None and row.fits} <= TAKEN_TO_FIT


def test_gpt_2_on_eight_gpus() -> None:
    a100s = lab.Cluster(ranks=8, device=lab.Device.a100_40, link=lab.Link.nvlink3)
    row = lab.plan(lab.Transformer.gpt2, cluster=a100s, strategy="DDP 8", micro_batch=12, accumulate=5, **MIXED)[0]
    assert row.fits
    assert row.step_s == pytest.approx(0.45, rel=0.1)  # 563 ms, and 25 % less with a padded vocabulary
    at_once = lab.plan(lab.Transformer.gpt2, cluster=a100s, strategy="DDP 8", micro_batch=60, accumulate=1, **MIXED)[0]
    assert not at_once.fits


def test_seven_billion_parameters_on_cards_of_24_gb() -> None:
    cards = lab.Cluster(ranks=8, device=lab.Device.rtx_4090, link=lab.Link.pcie4)
    found = lab.plan(replace(lab.Transformer.llama2_7b, sequence=2048), 32, cards, ranks=[4, 8], **MIXED)
    assert [row.fits for row in found.rows] == [False, True]
    assert "create it on the meta device" in repr(found)


def test_70_billion_parameters_on_seven_gpus_with_their_host() -> None:
    """meta-llama/llama-cookbook, pull request 122: out of memory without FSDP's offloading, training with it."""
    a100s = lab.Cluster(ranks=7, device=lab.Device.a100, link=lab.Link.nvlink3)
    model = replace(lab.Transformer.llama2_70b, sequence=2048)
    host = lab.Device(tflop_per_s=1, gbyte_per_s=20)
    found = (lab.plan(model, 28, a100s, strategy="FSDP2 7", offload=each, **MIXED)[0].fits for each in (None, host))
    assert list(found) == [False, True]


def test_32_billion_parameters_on_sixteen_gpus() -> None:
    """simplescaling/s1: 20,000 tokens fit on 16 H100 (its README), 32,000 do not (issue 13), nor any on 8."""
    qwen = lab.Transformer(
        layers=64, width=5120, heads=40, kv_heads=8, mlp_width=27648, vocabulary=152064, sequence=20_000, style="llama"
    )
    assert qwen.parameters == pytest.approx(32.76e9, rel=1e-3)

    def fits(tokens: int, ranks: int) -> bool:
        network = lab.Network(nodes=ranks // 8, inside=lab.Link.nvlink4, between=lab.Link.infiniband_ndr)
        cluster = lab.Cluster(ranks=ranks, device=lab.Device.h100, link=network)
        model = replace(qwen, sequence=tokens)
        return lab.plan(model, 16, cluster, strategy=f"FSDP2 {ranks}", optimizer_bytes=4, micro_batch=1)[0].fits

    assert fits(20_000, 16)
    assert not fits(32_000, 16)
    assert not fits(20_000, 8)


def test_more_micro_batches_do_not_help_where_launches_take_the_time() -> None:
    """marin-community/marin, issue 6532: 8,077 tokens/s with 8 micro-batches on 8 stages, 7,987 with 16."""
    model = lab.Transformer(layers=24, width=2048, sequence=4096, vocabulary=32000, style="llama")

    def speed_up(device: lab.Device) -> float:
        cluster = replace(H100S, device=device)
        eight, sixteen = (
            lab.plan(model, 64, cluster, strategy="pipeline 8", accumulate=count, recompute="layer")[0] for count in (8, 16)
        )
        return eight.step_s / sixteen.step_s

    assert speed_up(lab.Device.h100) == pytest.approx((8 + 7) / 8 / ((16 + 7) / 16), rel=0.05)  # the bubble
    assert speed_up(replace(lab.Device.h100, launch_us=10_000)) < 0.7


def test_fsdp_as_one_unit_and_by_layers() -> None:
    layer, model = (
        lab.plan(lab.Transformer.llama3_8b, 16, H100S, strategy="FSDP2 8", fsdp_unit=unit, **MIXED)[0]
        for unit in ("layer", "model")
    )
    assert model.memory_bytes["buffers"] > 6 * layer.memory_bytes["buffers"]
    assert model.tokens_per_s < layer.tokens_per_s


def test_a_schedule_of_71_slots_is_impossible() -> None:
    """zxypro1/algolocal, pull request 95: 8 stages, 32 micro-batches."""
    for kind in ("gpipe", "1f1b"):
        ideal = lab.schedule(kind, stages=8, micro_batches=32, forward=1, backward=1)
        assert ideal.duration_ns == 78e9
    assert float(lab.predict.pipeline_bubble(8, 32, schedule="1f1b")) == pytest.approx(1 - 64 / 78)
