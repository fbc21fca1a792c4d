"""`lab.plan` and `lab.simulate` agree on the memory and the time of programs that they know independently."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from planned_programs import Training, train

import labkit as lab

pytestmark = pytest.mark.processes
MEMORY, TIME = 0.1, 0.15  # how far they may be apart, as a share
BETWEEN = lab.Link(gbit_per_s=3200, latency_us=5)
BFLOAT16 = {"parameter_bytes": 2, "gradient_bytes": 2, "optimizer_bytes": 4}
MIXED = {"parameter_bytes": 4, "gradient_bytes": 4, "optimizer_bytes": 8, "compute_bytes": 2}

# Their logits are what fills most memory; their activations; an s×s matrix of each head; parameters and state.
GPT_WORDS = lab.Transformer(layers=2, width=1024, sequence=1024, vocabulary=50304)
GPT_LONG = lab.Transformer(layers=3, width=1024, sequence=2048, vocabulary=4096)
GPT_MATH = lab.Transformer(layers=2, width=1024, sequence=1024, vocabulary=8192, attention="math")
GPT_SHORT = lab.Transformer(layers=3, width=2048, sequence=256, vocabulary=8192)
GPT_DEEP = lab.Transformer(layers=8, width=2048, sequence=1024, vocabulary=16384)
LLAMA: dict[str, Any] = {"style": "llama", "width": 4096, "heads": 32, "mlp_width": 11008}
LLAMA_WORDS = lab.Transformer(layers=2, sequence=4096, vocabulary=128256, kv_heads=8, **LLAMA)
LLAMA_LONG = lab.Transformer(layers=3, sequence=4096, vocabulary=8192, **LLAMA)
LLAMA_SHORT = lab.Transformer(layers=3, sequence=512, vocabulary=8192, **LLAMA)
LLAMA_SMALL = lab.Transformer(
    layers=3, width=2048, sequence=2048, vocabulary=32000, style="llama", heads=16, kv_heads=4, mlp_width=5632
)  # fmt: skip


class Case(NamedTuple):
    """A model, its training, on how many ranks, and how long a step may take longer or less long, as a share."""

    shape: lab.Transformer
    how: Training
    ranks: int = 1
    time: float = TIME


CASES = {
    "gpt": Case(GPT_WORDS, Training(micro_batch=8)),
    "gpt, DDP, selective": Case(
        GPT_WORDS, Training(strategy="DDP 8", micro_batch=8, accumulate=2, recompute="selective"), 8
    ),
    "gpt, DDP, layer": Case(GPT_LONG, Training(strategy="DDP 8", micro_batch=8, recompute="layer"), 8),
    "gpt, math": Case(GPT_MATH, Training(micro_batch=8)),
    "gpt, math, FSDP2, selective": Case(
        GPT_MATH, Training(strategy="FSDP2 8", micro_batch=8, recompute="selective"), 8
    ),
    "gpt, short": Case(GPT_SHORT, Training(micro_batch=1)),
    "gpt, TP, layer": Case(
        GPT_LONG, Training(strategy="TP 4", micro_batch=4, accumulate=2, recompute="layer"), 4
    ),
    "gpt, pipeline": Case(GPT_DEEP, Training(strategy="pipeline 4", micro_batch=4, accumulate=8), 4),
    "llama, FSDP2": Case(LLAMA_SMALL, Training(strategy="FSDP2 8", micro_batch=4), 8),
    "llama, FSDP2, mixed, layer": Case(
        LLAMA_LONG, Training(strategy="FSDP2 64", micro_batch=4, recompute="layer", mixed=True), 64
    ),
    "llama, FSDP2, mixed, selective": Case(
        LLAMA_WORDS,
        Training(strategy="FSDP2 8", micro_batch=1, accumulate=2, recompute="selective", mixed=True), 8
    ),
    "llama, FSDP2, mixed, short": Case(
        LLAMA_SHORT, Training(strategy="FSDP2 8", micro_batch=1, accumulate=2, mixed=True), 8
    ),
    "llama, ZeRO-2": Case(LLAMA_LONG, Training(strategy="ZeRO-2 8", micro_batch=2, accumulate=2), 8),
    "llama, HSDP, selective": Case(
        LLAMA_SMALL, Training(strategy="HSDP 2×8", micro_batch=4, recompute="selective"), 16
    ),
    "llama, TP": Case(LLAMA_LONG, Training(strategy="TP 4", micro_batch=2), 4),
    "llama, pipeline, layer": Case(
        LLAMA_LONG, Training(strategy="pipeline 3", micro_batch=2, accumulate=6, recompute="layer"), 3
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_plan_and_a_simulation_agree(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    shape, how, ranks, time = case
    network = lab.Network(nodes=max(1, ranks // 8), inside=lab.Link.nvlink4, between=BETWEEN)
    plan = lab.plan(
        shape, cluster=lab.Cluster(ranks=ranks, device=lab.Device.h100, link=network), strategy=how.strategy,
        micro_batch=how.micro_batch, accumulate=how.accumulate, recompute=how.recompute, sequence_parallel=False,
        **(MIXED if how.mixed else BFLOAT16),
    )  # fmt: skip
    sim = lab.simulate(train, shape, how, 2, ranks=ranks, link=network, device=lab.Device.h100)
    memory = plan[0].needed_bytes / 1e6 / lab.memory_mb(sim), plan[0].step_s * 1e3 / sim.step_ms
    print(f"RATIOS memory {memory[0]:.3f} time {memory[1]:.3f}", plan[0].needed_bytes / 1e9, plan[0].step_s * 1e3)
    assert memory[0] == pytest.approx(1, abs=MEMORY)
