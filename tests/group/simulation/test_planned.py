"""`lab.plan` and `lab.simulate` agree on the memory and the time of programs, which they know independently."""

from __future__ import annotations

from typing import Any, Final

import pytest

import labkit as lab
from bench.speed.transformers import Training, train

pytestmark = pytest.mark.processes
STEPS: Final = 2  # the second finds the optimizer's state
MEMORY: Final = 0.1  # how far the ratio of planned and simulated bytes may be from 1
TIME: Final = 0.15  # likewise of seconds
# What the plan leaves out: its attention scales, masks and normalizes scores in one kernel, as Megatron-LM does; its
# optimizer is one kernel, where torch's default has one for each operation. The latter counts where tokens are few.
KERNELS_OF_ATTENTION: Final = 0.25
KERNELS_OF_ADAM: Final = 0.6

BETWEEN: Final = lab.Link(gbit_per_s=3200, latency_us=5)
BFLOAT16: Final = {"parameter_bytes": 2, "gradient_bytes": 2, "optimizer_bytes": 4}
MIXED: Final = {"parameter_bytes": 4, "gradient_bytes": 4, "optimizer_bytes": 8, "compute_bytes": 2}

# What fills most of their memory: scores of words, activations, attention's matrices, or parameters and state.
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


def case(shape: lab.Transformer, *, ranks: int = 1, time: float = TIME, slow: bool = False, **how: Any) -> Any:
    """A model, its training, on how many ranks, and how far the times may be apart."""
    name = next(name for name, value in globals().items() if value is shape).lower()
    words = [name, how.get("strategy", "one rank"), *(["mixed"] if how.get("mixed") else []), how.get("recompute", "none")]
    return pytest.param(shape, Training(**how), ranks, time, id=", ".join(words), marks=pytest.mark.slow if slow else ())


@pytest.mark.parametrize(("shape", "how", "ranks", "time"), [
    case(GPT_WORDS, micro_batch=8),
    case(GPT_WORDS, micro_batch=8, accumulate=2, recompute="selective", strategy="DDP 8", ranks=8, slow=True),
    case(GPT_LONG, micro_batch=8, recompute="layer", strategy="DDP 8", ranks=8),
    case(GPT_MATH, micro_batch=8, time=KERNELS_OF_ATTENTION),
    case(GPT_MATH, micro_batch=8, recompute="selective", strategy="FSDP2 8", ranks=8, time=KERNELS_OF_ATTENTION, slow=True),
    case(GPT_SHORT, micro_batch=1, time=KERNELS_OF_ADAM),
    case(GPT_LONG, micro_batch=4, accumulate=2, recompute="layer", strategy="TP 4", ranks=4, slow=True),
    case(GPT_DEEP, micro_batch=4, accumulate=8, strategy="pipeline 4", ranks=4, slow=True),
    case(LLAMA_SMALL, micro_batch=4, strategy="FSDP2 8", ranks=8, slow=True),
    case(LLAMA_LONG, micro_batch=4, recompute="layer", mixed=True, strategy="FSDP2 64", ranks=64),
    case(LLAMA_WORDS, micro_batch=1, accumulate=2, recompute="selective", mixed=True, strategy="FSDP2 8", ranks=8),
    case(LLAMA_SHORT, micro_batch=1, accumulate=2, mixed=True, strategy="FSDP2 8", ranks=8, slow=True),
    case(LLAMA_LONG, micro_batch=2, accumulate=2, strategy="ZeRO-2 8", ranks=8),
    case(LLAMA_SMALL, micro_batch=4, recompute="selective", strategy="HSDP 2×8", ranks=16, slow=True),
    case(LLAMA_LONG, micro_batch=2, strategy="TP 4", ranks=4),
    case(LLAMA_LONG, micro_batch=2, accumulate=6, recompute="layer", strategy="pipeline 3", ranks=3),
])  # fmt: skip
def test_a_plan_and_a_simulation_agree(shape: lab.Transformer, how: Training, ranks: int, time: float) -> None:
    network = lab.Network(nodes=max(1, ranks // 8), inside=lab.Link.nvlink4, between=BETWEEN)
    row = lab.plan(
        shape, cluster=lab.Cluster(ranks=ranks, device=lab.Device.h100, link=network), strategy=how.strategy,
        micro_batch=how.micro_batch, accumulate=how.accumulate, recompute=how.recompute, sequence_parallel=False,
        **(MIXED if how.mixed else BFLOAT16),
    )[0]  # fmt: skip
    sim = lab.simulate(train, shape, how, STEPS, ranks=ranks, link=network, device=lab.Device.h100)
    ratios = row.needed_bytes / 1e6 / lab.memory_mb(sim), row.step_s * 1e3 / sim.step_ms
    print("planned ÷ simulated: memory {:.3f}, time {:.3f}".format(*ratios))  # pytest shows it if one is wrong
    assert ratios[0] == pytest.approx(1, abs=MEMORY)
    assert ratios[1] == pytest.approx(1, abs=time)
