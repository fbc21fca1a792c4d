"""Published training runs of transformers: what ran where, how fast, with how much memory.

Rows have the words and units of `lab.plan`. Where a source gives TFLOP/s or seconds, tokens per second follow from its
own formula, in `_run`. `note` says what a source leaves open and had to be presumed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Final

import labkit as lab

GIB: Final = 2**30 / 1e9  # in 10⁹ bytes
DEVICES: Final = {  # memory in 10⁹ bytes, and the links inside a node
    "v100_16": (16 * GIB, "nvlink2"), "a100_40": (40 * GIB, "nvlink3"), "a100_80": (80 * GIB, "nvlink3"),
    "h100": (80 * GIB, "nvlink4"), "h100_96": (96 * GIB, "nvlink4"),  # torchtitan's: 2.4 TB/s and a limit of 500 W
    "rtx_3090": (24 * GIB, "pcie4"),
}  # fmt: skip
SOURCES: Final[dict[str, str]] = {
    "mosaic": "MosaicML, llm-foundry, scripts/train/benchmarking/README.md; shapes: scripts/train/yamls/pretrain, 2023. "
    "https://github.com/mosaicml/llm-foundry",
    "titan_2024": "PyTorch, torchtitan, docs/performance.md, 2024. https://github.com/pytorch/torchtitan",
    "titan_2412": "PyTorch, torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, 2024. https://github.com/pytorch/torchtitan",
    "titan_async": "PyTorch, torchtitan, benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md, 2025. "
    "https://github.com/pytorch/torchtitan",
    "ibm": "IBM and Meta, 'Maximizing training throughput using PyTorch FSDP', PyTorch blog, 13 March 2024, table 1 "
    "(pytorch/pytorch.github.io, _posts/2024-03-13-maximizing-training.md).",
    "fms_fsdp": "IBM, fms-fsdp, README.md and scripts/*.sh, 2024. https://github.com/foundation-model-stack/fms-fsdp",
    "sc21": "D. Narayanan et al., 'Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM', SC21, 2021, "
    "table 1, as transcribed in SotaroKaneda/MLCarbon, data/megatron_table.csv; micro-batches and chunks: NVIDIA/Megatron-LM, "
    "examples/sc21/run_table_1.sh. https://arxiv.org/abs/2104.04473",
    "flash": "T. Dao, flash-attention, training/README.md; micro-batches and ZeRO: training/configs/experiment/pile, 2023. "
    "https://github.com/Dao-AILab/flash-attention",
    "tinyllama": "P. Zhang et al., TinyLlama, README.md and pretrain/tinyllama.py, 2023. https://github.com/jzhang38/TinyLlama",
    "bigscience": "BigScience, train/tr11-176B-ml/chronicles-prequel.md and README.md, 2022. "
    "https://github.com/bigscience-workshop/bigscience",
    "nanogpt_110": "karpathy/nanoGPT, issue 110, 2023. https://github.com/karpathy/nanoGPT/issues/110",
    "korthikanti": "V. Korthikanti et al., 'Reducing Activation Recomputation in Large Transformer Models', 2022, tables 3, 5, "
    "as transcribed in a summary. https://arxiv.org/abs/2205.05198",
    "zero_bubble": "P. Qi et al., 'Zero Bubble Pipeline Parallelism', 2023, tables 3 and 4. https://arxiv.org/abs/2401.10241",
    "megascale": "Z. Jiang et al., 'MegaScale: Scaling Large Language Model Training to More Than 10,000 GPUs', NSDI 2024, "
    "tables 1 and 2, rows of Megatron-LM. https://arxiv.org/abs/2402.15627",
    "nanotron": "Hugging Face, Nanotron, docs/benchmark_summary.svg and scripts/scaling_benchmarks.py, 2025; tokens per second: "
    "its bench_final2_mfu2.csv, as stored in eyao600/Rapid-LLM. https://github.com/huggingface/nanotron",
    "dlperf": "OneFlow, DLPerf, OneFlow/LanguageModeling/GPT/README.md and Megatron-LM/README.md, 2021. "
    "https://github.com/Oneflow-Inc/DLPerf",
    "llama3": "Llama Team, 'The Llama 3 Herd of Models', 2024, section 3.3.2. https://arxiv.org/abs/2407.21783",
    "cookbook": "llama-cookbook, issue 100, 2023. https://github.com/meta-llama/llama-cookbook/issues/100",
}


def _gpt(layers: int, width: int, heads: int, vocabulary: int, attention: str = "math") -> dict[str, Any]:
    shape = {"layers": layers, "width": width, "heads": heads, "vocabulary": vocabulary}
    return {"style": "gpt", **shape, "attention": attention, "dropout": attention == "math"}  # Megatron-LM's default


def _fused(layers: int, width: int, heads: int, vocabulary: int) -> dict[str, Any]:
    return _gpt(layers, width, heads, vocabulary, "flash")


def _llama(layers: int, width: int, heads: int, kv_heads: int, mlp_width: int, vocabulary: int, **other: Any) -> dict[str, Any]:
    grouped = {"kv_heads": kv_heads} if kv_heads < heads else {}
    return _fused(layers, width, heads, vocabulary) | {"style": "llama", "mlp_width": mlp_width} | grouped | other


# 10⁹ parameters as sources print them, MPT's with 2,048 positions ("": not printed), and arguments of lab.Transformer.
_SHAPES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "mpt_125m": ("0.125311488", _fused(12, 768, 12, 50368)), "mpt_350m": ("0.355985408", _fused(24, 1024, 16, 50368)),
    "mpt_760m": ("0.760470528", _fused(24, 1536, 12, 50368)), "mpt_1b": ("1.315950592", _fused(24, 2048, 16, 50368)),
    "mpt_3b": ("2.651837440", _fused(32, 2560, 20, 50368)), "mpt_7b": ("6.658859008", _fused(32, 4096, 32, 50368)),
    "mpt_13b": ("12.853954560", _fused(40, 5120, 40, 50368)), "mpt_30b": ("29.975214080", _fused(48, 7168, 56, 50368)),
    "mpt_70b": ("64.862437376", _fused(80, 8192, 64, 50368)), "gpt2_124m": ("0.124", _fused(12, 768, 12, 50257)),
    "gpt3_125m": ("0.125", _fused(12, 768, 12, 50264)), "gpt3_355m": ("0.355", _fused(24, 1024, 16, 50264)),
    "gpt3_760m": ("0.760", _fused(24, 1536, 16, 50264)), "gpt3_1.3b": ("1.3", _fused(24, 2048, 16, 50264)),
    "gpt3_2.7b": ("2.7", _fused(32, 2560, 20, 50264)), "tinyllama": ("1.100048384", _llama(22, 2048, 32, 4, 5632, 32000)),
    "llama2_7b": ("6.738415616", _llama(32, 4096, 32, 32, 11008, 32000)),
    "llama2_13b": ("13.015864320", _llama(40, 5120, 40, 40, 13824, 32000)),
    "llama2_34b": ("34", _llama(48, 8192, 64, 8, 22016, 32000)),
    "llama2_70b": ("68.976648192", _llama(80, 8192, 64, 8, 28672, 32000)),
    "llama3_8b": ("8.030261248", _llama(32, 4096, 32, 8, 14336, 128256)),
    "llama3_70b": ("70.553706496", _llama(80, 8192, 64, 8, 28672, 128256)),
    "llama3_405b": ("405.853388800", _llama(126, 16384, 128, 8, 53248, 128256)),
    "nanotron_1.34b": ("1.34", _llama(16, 2048, 32, 32, 8192, 131072, tied=True)),
    "nanotron_3.57b": ("3.57", _llama(28, 3072, 32, 32, 8192, 131072, tied=True)),
    "nanotron_8.86b": ("8.86", _llama(32, 4096, 32, 32, 14336, 131072)),
    "nanotron_80b": ("80.0", _llama(80, 8192, 64, 64, 28672, 131072)),
    "gpt_1.7b": ("1.7", _gpt(24, 2304, 24, 51200)), "gpt_3.6b": ("3.6", _gpt(30, 3072, 32, 51200)),
    "gpt_7.5b": ("7.5", _gpt(36, 4096, 32, 51200)), "gpt_18b": ("18.4", _gpt(40, 6144, 48, 51200)),
    "gpt_22b": ("22", _gpt(48, 6144, 64, 51200)), "gpt_39b": ("39.1", _gpt(48, 8192, 64, 51200)),
    "gpt_76b": ("76.1", _gpt(60, 10240, 80, 51200)), "gpt_146b": ("145.6", _gpt(80, 12288, 96, 51200)),
    "gpt_175b": ("175", _gpt(96, 12288, 96, 51200)), "gpt_310b": ("310.1", _gpt(96, 16384, 128, 51200)),
    "gpt_530b": ("530", _gpt(105, 20480, 128, 51200)), "gpt_1t": ("1000", _gpt(128, 25600, 160, 51200)),
    "megascale_175b": ("175", _gpt(96, 12288, 128, 64000)), "bloom": ("176.247271424", _gpt(70, 14336, 112, 250880)),
    "bloom_64_heads": ("176", _gpt(70, 14336, 64, 250880)), "bs_181b": ("181", _gpt(72, 14336, 64, 250880)),
    "bs_200b": ("200", _gpt(80, 14400, 96, 250880)), "bs_206b": ("206", _gpt(82, 14336, 128, 250880)),
    "zb_1.5b": ("1.5", _gpt(22, 2304, 24, 51200)), "zb_6.2b": ("6.2", _gpt(30, 4096, 32, 51200)),
    "zb_14.6b": ("14.6", _gpt(46, 5120, 40, 51200)), "zb_28.3b": ("28.3", _gpt(62, 6144, 48, 51200)),
    "768x12": ("", _gpt(12, 768, 12, 51200)), "1536x16": ("", _gpt(16, 1536, 16, 51200)),
    "2304x24": ("", _gpt(24, 2304, 24, 51200)),
}  # fmt: skip
MODELS: Final = {name: shape for name, (_, shape) in _SHAPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A model, a cluster, and how the one trains on the other."""

    key: str
    source: str  # of SOURCES
    model: str  # of MODELS
    sequence: int  # tokens
    device: str  # of DEVICES
    ranks: int
    per_node: int
    between_gbit_per_s: float | None  # of a whole node, in each direction; None: the source does not say
    inside: str
    strategy: str  # the outermost axis first, sizes of 1 left out
    sequences: int  # of a step, of all ranks and micro-batches together
    micro_batch: int  # sequences of a replica
    recompute: str  # "none", "layer" or "selective"
    parameter_bytes: float  # per parameter, as the next three
    gradient_bytes: float
    optimizer_bytes: float
    compute_bytes: float  # what kernels compute with, and what FSDP gathers
    schedule: str = "1f1b"  # or "interleaved N", with N chunks per rank, or "zero_bubble"
    sequence_parallel: bool = False  # with tensor parallelism
    compiled: bool = False  # with torch.compile
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun(Setup):
    """A setup and its published throughput."""

    tokens_per_s: float  # per GPU
    memory_gb: float | None = None  # the peak per GPU in 10⁹ bytes; None: not published


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFact(Setup):
    """A setup of which is published whether it fits, but no throughput of 16-bit kernels."""

    fits: bool
    memory_gb: float | None = None


def axes(strategy: str) -> dict[str, int]:
    """Return the sizes of the axes: `axes("pipeline 2 × HSDP 4×8")` is `{"pipeline": 2, "HSDP": 32}`."""
    words = [] if strategy == "one rank" else [each.split() for each in strategy.split(" × ")]
    return {word: math.prod(map(int, size.split("×"))) for word, size in words}


def data_ranks(strategy: str) -> int:
    """Return the number of parts into which a strategy cuts the sequences of a step."""
    return math.prod(size for axis, size in axes(strategy).items() if axis not in ("pipeline", "TP"))


def _run(*, nbytes: tuple[float, ...], note: str = "", also: str = "", **given: Any) -> PublishedRun:
    """Return a row of a table; `nbytes`: of parameters, gradients, optimizer and computation."""
    names = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "compute_bytes")
    given |= dict(zip(names, nbytes, strict=True)) | {"note": "; ".join(filter(None, (also, note)))}
    given |= {"per_node": 8, "inside": DEVICES[given["device"]][1]}
    if "strategy" not in given:
        stages, tensor = given.pop("stages", 1), given.pop("tensor", 1)
        replicas = given.pop("replicas", 0) or given.get("ranks", stages * tensor) // (stages * tensor)
        mesh = (("pipeline", stages), (given.pop("data", "DDP"), replicas), ("TP", tensor))
        given["strategy"] = " × ".join(f"{axis} {size}" for axis, size in mesh if size > 1) or "one rank"
    sizes = axes(given["strategy"])
    ranks = given.setdefault("ranks", math.prod(sizes.values()))
    given.setdefault("sequences", data_ranks(given["strategy"]) * given["micro_batch"])
    given["sequence_parallel"] = given.get("sequence_parallel", False) and "TP" in sizes
    if (chunks := given.pop("chunks", 1)) > 1:
        given["schedule"] = f"interleaved {chunks}"
    if gib := given.pop("gib", None) or given.pop("mib", 0) / 1024:
        given["memory_gb"] = gib * GIB
    s, shape = given["sequence"], MODELS[given["model"]]
    layers, width, vocabulary = shape["layers"], shape["width"], shape["vocabulary"]
    if samples := given.pop("samples", None):  # of a GPU in a second
        given["tokens_per_s"] = samples * s
    elif step_s := given.pop("step_s", None):
        given["tokens_per_s"] = given["sequences"] * s / (step_s * ranks)
    elif tflops := given.pop("hardware_tflops", None):  # Narayanan et al., equation 3: two forward passes, full attention
        flops = 96 * layers * width**2 * (1 + s / (6 * width) + vocabulary / (16 * layers * width))
        given["tokens_per_s"] = tflops * 1e12 / flops
    elif tflops := given.pop("model_tflops", None):  # Chowdhery et al., "PaLM", 2022, appendix B: full attention
        given["tokens_per_s"] = tflops * 1e12 / (6 * lab.Transformer(**shape, sequence=s).parameters + 12 * layers * width * s)
    return PublishedRun(**given)


def _table(columns: str, *rows: tuple[Any, ...], **common: Any) -> list[PublishedRun]:
    return [_run(**common | dict(zip(columns.split(), row, strict=True))) for row in rows]


MIXED: Final = (4, 4, 8, 2)
HALF: Final = (2, 2, 12, 2)
SUMMED: Final = (2, 4, 12, 2)  # gradients are summed in 32 bits
BLOOM: Final = (2, 6, 12, 2)  # also, in 4 bytes more, as the source says
A100: Final[dict[str, Any]] = {"device": "a100_80", "between_gbit_per_s": None}
A100_1600: Final[dict[str, Any]] = {"device": "a100_80", "between_gbit_per_s": 1600}
JEAN_ZAY: Final[dict[str, Any]] = {
    "source": "bigscience", "sequence": 2048, "device": "a100_80", "between_gbit_per_s": 400, "recompute": "layer",
}  # fmt: skip
META: Final[dict[str, Any]] = {"device": "h100_96", "between_gbit_per_s": 3200, "sequence": 8192}
OPERATORS: Final = "selective: attention and every second matrix product are kept"
LAYERS: Final = "selective: every second layer recomputed, presumed"
NTH: Final = "selective: every n-th layer recomputed, n not stated"
FEWER: Final = "the published MFU implies 5 to 8 % fewer operations"
EAGER: Final = "network and torch.compile not stated: eager presumed; 32-bit reduction: torchtitan's default"
TITAN: Final = "sequence presumed: torchtitan's configuration"
SHARDED: Final = "FSDP1, full shard; NVLink presumed"
NSMI: Final = "CUDA_LAUNCH_BLOCKING=1 presumed from 40 nodes on; memory: nvidia-smi's GB, with the CUDA context"
FUSED: Final = "many kernels fused by hand"
# fmt: off
# Llama 2's model card (meta-llama/llama, MODEL_CARD.md, 2023) has hours of A100 80 GB for 2.0·10¹² tokens: 184,320
# (7 B), 368,640 (13 B), 1,720,320 (70 B): 3,014, 1,507, 323 tokens/s per GPU. No row: how they were sharded is unknown.
RUNS: Final[tuple[PublishedRun, ...]] = (
    *_table(  # the mode DEFAULT
        "key model ranks sequence micro_batch sequences recompute tokens_per_s",
        ("M04", "mpt_30b", 8, 2048, 3, 504, "layer", 916), ("M06", "mpt_13b", 8, 2048, 2, 48, "none", 2262),
        ("M09", "mpt_7b", 8, 2048, 6, 96, "none", 4641), ("M10", "mpt_7b", 8, 8192, 8, 128, "layer", 3206),
        ("M11", "mpt_7b", 8, 65536, 1, 16, "layer", 1013), ("M12", "mpt_3b", 8, 2048, 10, 160, "none", 10811),
        ("M13", "mpt_1b", 8, 2048, 14, 448, "none", 20513), ("M14", "mpt_760m", 8, 2048, 24, 384, "none", 32434),
        ("M15", "mpt_350m", 8, 2048, 32, 512, "none", 58782), ("M16", "mpt_125m", 8, 2048, 32, 512, "none", 141737),
        ("M18", "mpt_125m", 8, 65536, 1, 16, "none", 20368),
        source="mosaic", **A100_1600, data="FSDP2", nbytes=MIXED, note=SHARDED,
    ),
    *_table(  # the mode PURE, which reduces in 16 bits
        "key model ranks sequence micro_batch sequences recompute tokens_per_s",
        ("M20", "mpt_70b", 128, 2048, 4, 512, "layer", 376), ("M21", "mpt_70b", 64, 2048, 2, 128, "layer", 276),
        ("M22", "mpt_30b", 128, 2048, 6, 768, "layer", 865), ("M24", "mpt_13b", 128, 2048, 16, 2048, "layer", 1972),
        ("M27", "mpt_7b", 128, 2048, 18, 2304, "layer", 3623), ("M31", "mpt_7b", 8, 2048, 12, 384, "layer", 3679),
        ("M33", "mpt_3b", 8, 2048, 5, 320, "none", 10065), ("M35", "mpt_1b", 8, 2048, 8, 512, "none", 19271),
        ("M37", "mpt_350m", 128, 2048, 18, 2304, "none", 51934), ("M39", "mpt_125m", 128, 2048, 26, 3328, "none", 123936),
        source="mosaic", device="a100_40", between_gbit_per_s=1600, data="FSDP2", nbytes=MIXED, note=SHARDED,
    ),
    *_table(
        "key model ranks sequence micro_batch sequences recompute tokens_per_s",
        ("M50", "mpt_70b", 64, 2048, 8, 2048, "layer", 1039), ("M52", "mpt_30b", 32, 2048, 14, 1344, "layer", 2308),
        ("M53", "mpt_30b", 8, 2048, 3, 504, "layer", 2002), ("M54", "mpt_13b", 64, 2048, 2, 128, "none", 4800),
        ("M57", "mpt_13b", 8, 2048, 2, 16, "none", 4792), ("M58", "mpt_7b", 8, 2048, 6, 48, "none", 10643),
        ("M59", "mpt_7b", 8, 8192, 8, 128, "layer", 6935), ("M60", "mpt_3b", 64, 2048, 6, 1152, "none", 22525),
        ("M62", "mpt_1b", 8, 2048, 14, 112, "none", 45455), ("M64", "mpt_760m", 8, 2048, 24, 384, "none", 63147),
        ("M66", "mpt_13b", 8, 32768, 1, 24, "layer", 1976),
        source="mosaic", device="h100", between_gbit_per_s=None, data="FSDP2", nbytes=MIXED,
        note=f"{SHARDED}; network not stated",
    ),
    *_table(
        "key ranks sequences compiled tokens_per_s gib",
        ("T01", 8, 16, False, 5762, 82.4), ("T02", 8, 16, True, 6667, 77.0),
        ("T03", 128, 256, False, 5605, 67.0), ("T04", 128, 256, True, 6514, 62.0),
        source="titan_2412", **META, model="llama3_8b", data="FSDP2", micro_batch=2, recompute="selective", nbytes=MIXED,
        note=f"{OPERATORS}; {TITAN}",
    ),
    *_table(
        "key model sequence micro_batch recompute tokens_per_s also",
        ("T10", "llama3_8b", 8192, 1, "selective", 2904, LAYERS), ("T11", "llama3_8b", 8192, 1, "selective", 2973, OPERATORS),
        ("T12", "llama3_70b", 8192, 1, "layer", 331, ""), ("T13", "llama2_13b", 4096, 2, "none", 2162, ""),
        ("T14", "llama2_13b", 4096, 2, "selective", 1914, LAYERS), ("T15", "llama2_13b", 4096, 2, "selective", 1904, OPERATORS),
        ("T16", "llama2_70b", 4096, 1, "selective", 355, OPERATORS), ("T17", "llama2_70b", 4096, 2, "layer", 353, ""),
        source="titan_2024", **A100, strategy="FSDP2 64", nbytes=MIXED, note=EAGER,
    ),
    _run(
        key="TT2", source="titan_2024", **META | {"between_gbit_per_s": None}, model="llama3_405b", strategy="FSDP2 16 × TP 8",
        sequences=32, micro_batch=2, recompute="layer", nbytes=MIXED, tokens_per_s=109, sequence_parallel=True,
        note=f"sequence presumed: the published MFU follows from it; {EAGER}",
    ),
    *_table(
        "key model strategy micro_batch recompute tokens_per_s also",
        ("AT1", "llama3_70b", "FSDP2 32 × TP 8", 16, "layer", 597.3, "with asynchronous TP 652.4"),
        ("AT2", "llama3_8b", "FSDP2 8 × TP 8", 12, "selective", 4378, f"with asynchronous TP 4,809.4; {OPERATORS}"),
        source="titan_async", **META, nbytes=MIXED, sequence_parallel=True, compiled=True, note=TITAN,
    ),
    *_table(
        "key device between_gbit_per_s model strategy recompute tokens_per_s also",
        ("I01", "a100_80", 400, "llama2_7b", "HSDP 16×8", "none", 3700, "HSDP: fms-fsdp's script"),
        ("I02", "a100_80", 400, "llama2_13b", "HSDP 16×8", "selective", 1800, f"HSDP: fms-fsdp's script; {NTH}"),
        ("I03", "a100_80", 400, "llama2_34b", "FSDP2 128", "layer", 700, f"full shard: fms-fsdp's script; {FEWER}"),
        ("I04", "a100_80", 400, "llama2_70b", "FSDP2 128", "layer", 370, f"full shard: fms-fsdp's script; {FEWER}"),
        ("I05", "h100", 800, "llama2_7b", "HSDP 12×8", "none", 7500, "HSDP presumed, as on A100"),
        ("I06", "h100", 800, "llama2_13b", "HSDP 12×8", "selective", 3800, f"HSDP presumed, as on A100; {NTH}"),
        ("I07", "h100", 800, "llama2_34b", "FSDP2 96", "layer", 1550, f"full shard presumed, as on A100; {FEWER}"),
        ("I08", "h100", 800, "llama2_70b", "FSDP2 96", "layer", 800, f"full shard presumed, as on A100; {FEWER}"),
        source="ibm", sequence=4096, micro_batch=2, nbytes=MIXED, note="FSDP1; NVLink and one micro-batch per step presumed",
    ),
    *_table(
        "key model strategy micro_batch recompute tokens_per_s",
        ("I11", "llama2_7b", "HSDP 16×8", 2, "none", 3760), ("I12", "llama2_13b", "HSDP 16×8", 1, "none", 1700),
        ("I13", "llama2_34b", "FSDP2 128", 8, "layer", 772), ("I14", "llama2_70b", "FSDP2 128", 6, "layer", 380),
        source="fms_fsdp", sequence=4096, device="a100_80", between_gbit_per_s=400, nbytes=MIXED,
        note="FSDP1; network of I01, NVLink and one micro-batch per step presumed",
    ),
    *_table(
        "key model tensor stages ranks sequences micro_batch chunks hardware_tflops",
        ("G01", "gpt_1.7b", 1, 1, 32, 512, 16, 1, 137), ("G02", "gpt_3.6b", 2, 1, 64, 512, 16, 1, 138),
        ("G03", "gpt_7.5b", 4, 1, 128, 512, 16, 1, 142), ("G04", "gpt_18b", 8, 1, 256, 1024, 8, 1, 135),
        ("G05", "gpt_39b", 8, 2, 512, 1536, 4, 1, 138), ("G06", "gpt_76b", 8, 4, 1024, 1792, 2, 3, 140),
        ("G07", "gpt_146b", 8, 8, 1536, 2304, 2, 2, 148), ("G08", "gpt_310b", 8, 16, 1920, 2160, 1, 2, 155),
        source="sc21", **A100_1600, sequence=2048, recompute="layer", nbytes=HALF, note="micro-batch and chunks presumed: the "
        "authors' script; with a pipeline, gradients are reduced after the backward pass",
    ),
    *_table(
        "key model data micro_batch sequences tokens_per_s",
        ("F01", "gpt3_125m", "DDP", 32, 256, 1310e3 / 8), ("F02", "gpt3_355m", "DDP", 16, 256, 503e3 / 8),
        ("F03", "gpt3_760m", "ZeRO-1", 16, 256, 245e3 / 8), ("F04", "gpt3_1.3b", "ZeRO-1", 8, 512, 169e3 / 8),
        ("F05", "gpt3_2.7b", "ZeRO-1", 4, 512, 85e3 / 8),
        source="flash", **A100, ranks=8, sequence=2048, recompute="none", nbytes=MIXED,
        note=f"micro-batch and ZeRO presumed from the configuration for 80 GB; {FUSED}",
    ),
    _run(
        key="TL01", source="tinyllama", model="tinyllama", sequence=2048, device="a100_40", between_gbit_per_s=None,
        strategy="FSDP2 16", sequences=1024, micro_batch=8, recompute="none", nbytes=MIXED, tokens_per_s=24e3,
        note=f"FSDP1; network not stated; NVLink, two nodes, 16-bit gathers and reductions presumed; {FUSED}",
    ),
    *_table(
        "key model data replicas tensor stages micro_batch sequences step_s memory_gb",
        ("B03", "bs_200b", "ZeRO-1", 1, 8, 10, 1, 2048, 844.81, 73), ("B04", "bs_200b", "ZeRO-1", 2, 8, 10, 1, 2048, 430.21, 51),
        ("B05", "bs_181b", "ZeRO-1", 4, 8, 12, 1, 2048, 143.31, 29), ("B06", "bs_181b", "ZeRO-1", 4, 8, 12, 2, 2048, 134.02, 37),
        ("B06z", "bs_181b", "DDP", 4, 8, 12, 2, 2048, 137.34, 72), ("B08", "bs_181b", "ZeRO-1", 4, 8, 12, 8, 2048, 129.26, 69),
        **JEAN_ZAY, nbytes=HALF, note=f"fp16; B06z: another branch of the code; one step timed; {NSMI}",
    ),
    *_table(  # another run of B19 took 113.54 s and 38 GB
        "key replicas tensor stages micro_batch sequences step_s memory_gb",
        ("B12", 8, 8, 6, 4, 2048, 114.11, 55), ("B16", 24, 8, 2, 2, 2016, 136.13, 76), ("B19", 8, 4, 12, 2, 2048, 110.48, 44),
        ("B22", 16, 2, 12, 2, 2048, 112.50, 63), ("B24", 8, 2, 24, 1, 2048, 119.53, 44),
        **JEAN_ZAY, model="bs_181b", data="ZeRO-1", nbytes=HALF, note=f"fp16; after a NUMA fix; one step timed; {NSMI}",
    ),
    *_table(
        "key model replicas tensor sequences step_s memory_gb",
        ("B26", "bloom", 8, 4, 2048, 104.50, 59), ("B26r", "bloom", 8, 4, 16, 15.23, None),
        ("B29", "bloom_64_heads", 4, 8, 2048, 121.63, 40),
        **JEAN_ZAY, data="ZeRO-1", stages=12, micro_batch=2, nbytes=BLOOM,
        note=f"bf16; embeddings count as layers of the pipeline; 16-bit reduction presumed; {NSMI}",
    ),
    _run(
        key="K01", source="nanogpt_110", step_s=0.56266, model="gpt2_124m", sequence=1024, device="a100_40",
        between_gbit_per_s=None, strategy="DDP 8", sequences=480, micro_batch=12, recompute="none", nbytes=MIXED, compiled=True,
        note="median of 11 steps; 40 GB, NVLink and flash attention (three days old then) presumed; 32-bit parameters, 16-bit "
        "autocast; a vocabulary of 50,257, which commit 77e7e04c padded two days later, for about 25 % faster steps",
    ),
    *_table(  # f: layers recomputed; else attention's core
        "key model stages sequences micro_batch chunks recompute sequence_parallel step_s",
        ("K10f", "gpt_22b", 1, 4, 4, 1, "layer", False, 1.42), ("K10", "gpt_22b", 1, 4, 4, 1, "selective", True, 1.10),
        ("K11f", "gpt_175b", 8, 64, 1, 3, "layer", False, 18.13), ("K11", "gpt_175b", 8, 64, 1, 3, "selective", True, 13.75),
        ("K12f", "gpt_530b", 35, 280, 1, 3, "layer", False, 49.05), ("K13f", "gpt_1t", 64, 512, 1, 1, "layer", False, 94.42),
        ("K12", "gpt_530b", 35, 280, 1, 3, "selective", True, 37.83), ("K13", "gpt_1t", 64, 512, 1, 1, "selective", True, 71.49),
        source="korthikanti", **A100_1600, sequence=2048, tensor=8, nbytes=HALF, note="network: Selene's, presumed",
    ),
    *_table(  # 1F1B, 1F1B-I and ZB-1p; samples per GPU and second
        "key model stages schedule sequences micro_batch samples memory_gb",
        ("Z01", "zb_1.5b", 8, "1f1b", 32 * 6, 6, 12.5, 30), ("Z01i", "zb_1.5b", 8, "interleaved 3", 32 * 6, 6, 13.4, 40),
        ("Z01z", "zb_1.5b", 8, "zero_bubble", 32 * 6, 6, 13.4, 32), ("Z02", "zb_6.2b", 8, "1f1b", 32 * 3, 3, 3.70, 39),
        ("Z02i", "zb_6.2b", 8, "interleaved 4", 32 * 3, 3, 4.08, 48), ("Z02z", "zb_6.2b", 8, "zero_bubble", 32 * 3, 3, 4.00, 42),
        ("Z03", "zb_14.6b", 16, "1f1b", 64, 1, 1.49, 32), ("Z03i", "zb_14.6b", 16, "interleaved 3", 64, 1, 1.59, 39),
        ("Z03z", "zb_14.6b", 16, "zero_bubble", 64, 1, 1.67, 33), ("Z04", "zb_28.3b", 32, "1f1b", 128, 1, 0.80, 43),
        ("Z04i", "zb_28.3b", 32, "interleaved 2", 128, 1, 0.85, 58), ("Z04z", "zb_28.3b", 32, "zero_bubble", 128, 1, 0.90, 44),
        source="zero_bubble", **A100, sequence=1024, recompute="none", nbytes=HALF, note="vocabulary of 51,200, math attention "
        "(it explains the memory), fp16, no recomputation presumed; network not stated; first and last stage: one layer less",
    ),
    *_table(
        "key model data replicas tensor stages micro_batch tokens_per_s gib also",
        ("NT01", "nanotron_1.34b", "ZeRO-1", 4, 1, 2, 4, 38894.51, 41.76, "428 GB/s"),
        ("NT02", "nanotron_3.57b", "ZeRO-1", 4, 1, 2, 2, 16426.09, 56.87, "428 GB/s"),
        ("NT03", "nanotron_8.86b", "ZeRO-1", 2, 1, 4, 1, 7503.28, 63.07, "before a fix of its pipeline; 427 GB/s"),
        ("NT05", "nanotron_3.57b", "ZeRO-1", 8, 1, 2, 2, 15402.13, 54.31, "335 GB/s"),
        ("NT06", "nanotron_8.86b", "ZeRO-1", 4, 4, 1, 4, 7290.47, 58.34, "433 GB/s"),
        ("NT09", "nanotron_8.86b", "ZeRO-1", 16, 1, 2, 1, 7186.04, 61.10, "162 GB/s"),
        ("NT13", "nanotron_8.86b", "ZeRO-1", 32, 1, 2, 1, 6555.04, 59.09, "94 GB/s"),
        ("NT16", "nanotron_3.57b", "DDP", 32, 4, 1, 8, 13336.73, 66.20, "167 GB/s"),
        ("NT17", "nanotron_8.86b", "DDP", 16, 8, 1, 8, 6028.26, 66.88, "181 GB/s"),
        ("NT20", "nanotron_3.57b", "DDP", 64, 4, 1, 4, 10322.55, 38.98, "186 GB/s"),
        ("NT21", "nanotron_8.86b", "DDP", 32, 8, 1, 8, 5427.93, 63.39, "183 GB/s"),
        ("NT22", "nanotron_80b", "ZeRO-1", 4, 4, 16, 1, 593.73, 64.21, "28 GB/s"),
        ("NT26", "nanotron_80b", "ZeRO-1", 32, 16, 1, 2, 343.45, 53.46, "183 GB/s"),
        source="nanotron", device="h100", between_gbit_per_s=None, sequence=4096, sequences=256, recompute="none", nbytes=SUMMED,
        sequence_parallel=True, note="reached by an all-reduce over all ranks, as the source measured it; network not stated; "
        "H100 80 GB presumed; memory: reserved by the allocator",
    ),
    *_table(
        "key model replicas tensor stages sequences micro_batch step_s mib",
        ("V01", "1536x16", 1, 1, 1, 2, 2, 0.40616, 11066), ("V02", "1536x16", 8, 1, 1, 16, 2, 0.41795, 12404),
        ("V04", "1536x16", 32, 1, 1, 64, 2, 0.51864, 12208), ("V05", "768x12", 1, 1, 1, 8, 8, 0.52521, 7416),
        ("V06", "1536x16", 1, 8, 1, 16, 16, 0.64213, 6264), ("V09", "1536x16", 2, 4, 1, 16, 8, 0.53969, 6366),
        ("V11", "2304x24", 2, 8, 1, 16, 8, 1.26853, 6998), ("V13", "1536x16", 8, 1, 4, 512, 2, 4.00631, 8712),
        ("V15", "2304x24", 2, 4, 4, 512, 8, 13.11718, 11958),
        source="dlperf", device="v100_16", between_gbit_per_s=100, sequence=2048, recompute="layer", nbytes=MIXED,
        note="OneFlow, not PyTorch; all bytes per parameter presumed",
    ),
    *_table(
        "key model replicas tensor stages sequences micro_batch step_s mib",
        ("V01m", "1536x16", 1, 1, 1, 2, 2, 0.46412, 14362), ("V02m", "1536x16", 8, 1, 1, 16, 2, 0.48096, 14938),
        ("V04m", "1536x16", 32, 1, 1, 64, 2, 0.68351, 14508), ("V05m", "768x12", 1, 1, 1, 8, 8, 0.6112, 9810),
        ("V06m", "1536x16", 1, 8, 1, 16, 16, 0.69244, 12684), ("V09m", "1536x16", 2, 4, 1, 16, 8, 0.57648, 9104),
        ("V11m", "2304x24", 2, 8, 1, 16, 8, 1.31352, 14928), ("V13m", "1536x16", 8, 1, 4, 512, 2, 4.89355, 7130),
        ("V15m", "2304x24", 2, 4, 4, 512, 8, 15.33123, 10018),
        source="dlperf", device="v100_16", between_gbit_per_s=100, sequence=2048, recompute="layer", nbytes=HALF,
        note="Megatron-LM; no NVLink between a V100 and three others of its node; memory: an earlier version of the page",
    ),
    *_table(
        "key ranks tokens_per_s",
        ("S01", 256, 39.3e3 / 256), ("S04", 1024, 132.7e3 / 1024),
        source="megascale", **A100, model="megascale_175b", sequence=2048, tensor=8, stages=8, data="ZeRO-1", sequences=768,
        micro_batch=1, recompute="selective", nbytes=SUMMED, chunks=6, sequence_parallel=True, note="network not stated; A100 of "
        "80 GB, micro-batch, ZeRO-1, sequence parallelism, recomputation, math attention and precision presumed",
    ),
    *_table(
        "key ranks strategy model_tflops",
        ("L01", 8192, "ZeRO-2 64 × pipeline 16 × TP 8", 430), ("L02", 16384, "ZeRO-2 128 × pipeline 16 × TP 8", 400),
        source="llama3", device="h100", between_gbit_per_s=3200, model="llama3_405b", sequence=8192, sequences=2048,
        micro_batch=1, recompute="none", nbytes=SUMMED, chunks=8, sequence_parallel=True, note="micro-batch, sequence "
        "parallelism, bytes of parameters and optimizer, chunks of one layer, PaLM's count of operations presumed; first and "
        "last stage: one layer less; pods of 3,072 GPUs, between them a seventh of the bandwidth",
    ),
)


def _fact(like: str, key: str, fits: bool, note: str, **other: Any) -> MemoryFact:
    """Return a fact about a setup which differs from a run's in some fields."""
    run = next(run for run in RUNS if run.key == like)
    same = {field.name: getattr(run, field.name) for field in fields(Setup)}
    return MemoryFact(**same | {"key": key, "note": note} | other, fits=fits)


_FP8: Final = "linear layers computed in 8 bits, with torch.compile"
_SWEEP: Final = "out of memory in the sweep that NT01 is from; H100 80 GB presumed"
MEMORY_FACTS: Final[tuple[MemoryFact, ...]] = (
    _fact("T16", "T16x", False, f"out of memory; {OPERATORS}", sequences=128, micro_batch=2),
    _fact("TT2", "TT2x", False, "out of memory; sequence, micro-batch 1 and recomputation presumed", strategy="FSDP2 128",
          sequences=128, micro_batch=1, sequence_parallel=False),
    _fact("AT1", "T05", True, f"{_FP8}; {TITAN}", source="titan_2412", memory_gb=71.9 * GIB),
    _fact("T02", "T08", True, _FP8, sequence=32768, sequences=8, micro_batch=1, recompute="layer", memory_gb=83.9 * GIB),
    _fact("B12", "B17", False, "out of memory", strategy="ZeRO-1 48 × TP 8", sequences=2016, micro_batch=1),
    _fact("B12", "B23", False, "out of memory, with micro-batch 2, too", strategy="pipeline 6 × ZeRO-1 32 × TP 2", micro_batch=1),
    _fact("B26", "B30", False, "out of memory; embeddings count as layers of the pipeline", model="bs_206b"),
    _fact("NT02", "NT31", False, _SWEEP, strategy="DDP 8", micro_batch=1),
    _fact("NT03", "NT32", False, _SWEEP, strategy="ZeRO-1 8", micro_batch=1),
    _fact("NT06", "NT33", False, _SWEEP, strategy="DDP 4 × TP 4"),
    _fact("NT06", "NT34", False, _SWEEP, micro_batch=8),
    _fact("NT17", "NT35", False, _SWEEP, micro_batch=16),
    _fact("NT22", "NT36", False, _SWEEP, ranks=32, strategy="pipeline 8 × TP 4"),
    _fact("T13", "LC1", False, "before a step, where FSDP1 wraps the model, whole on each GPU until then; all but model, device, "
          "ranks and strategy presumed", source="cookbook", model="llama2_7b", device="rtx_3090", ranks=8, inside="pcie4",
          strategy="FSDP2 8", sequences=8, micro_batch=1),
)
# fmt: on
ROWS: Final[tuple[PublishedRun | MemoryFact, ...]] = (*RUNS, *MEMORY_FACTS)
