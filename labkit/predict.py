"""`lab.predict`: closed-form predictions of communication, training steps, pipeline bubbles and memory.

    lab.predict.all_reduce(4e6, ranks=4, link=lab.Link.ethernet_1g)            # 48.3 ms
    lab.predict.all_reduce(4e6, ranks=4, link=lab.Link.ethernet_1g).working    # the derivation, in LaTeX

A prediction is a number of seconds or bytes, or a fraction. α is a link's latency, B its bandwidth, p the number of
ranks, n a size in bytes. An emulated `labkit.Link` follows the same formulas (`costs.link.rounds_and_share`).
"""

from __future__ import annotations

import math
import numbers
from typing import Any, Final

from labkit.costs import collectives
from labkit.costs.collectives import (
    Ranks,
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    collective,
    count_of,
    gather,
    message,
    reduce,
    reduce_scatter,
    rpc,
    scatter,
)  # fmt: skip
from labkit.costs.crossover import all_reduce_crossover
from labkit.costs.link import Link
from labkit.costs.network import Network, link_of_pair
from labkit.costs.prediction import Prediction, check_arguments, in_seconds
from labkit.costs.schedule_names import INTERLEAVED, schedule_name
from labkit.errors.wrong_calls import WrongNameError, did_you_mean, public_api

__all__ = [
    "all_gather", "all_reduce", "all_reduce_crossover", "all_to_all", "barrier", "broadcast", "data_parallel_step", "gather",
    "message", "pipeline_bubble", "pipeline_step", "reduce", "reduce_scatter", "rpc", "scatter", "tensor_parallel_layer",
    "zero_memory", "zero_traffic",
]  # fmt: skip

_s: Final = in_seconds
_LOGP: Final = "Culler et al., LogP, 1993 (overhead)"


def __dir__() -> list[str]:
    return list(__all__)


def __getattr__(name: str) -> Any:
    """Raise an error that suggests the formula's name."""
    if name.startswith("__"):  # asked for by Python and its tools
        raise AttributeError(name)
    raise WrongNameError(f"lab.predict has no {name!r}; {did_you_mean(name, __all__)}")


def data_parallel_step(
    forward_s: float,
    backward_s: float,
    gradient_bytes: float,
    ranks: Ranks,
    link: Link | Network,
    *,
    overlap: bool = True,
    buckets: int = 1,
    optimizer_s: float = 0.0,
    overhead_s: float = 0.0,
) -> Prediction:
    """Seconds of one data-parallel training step: forward, backward, all-reduces of the gradients, optimizer.

    The gradients are reduced in k buckets of n/k bytes. One is complete after each k-th of the backward pass, and their
    ring all-reduces, of t_a each, run one after the other. An overlapped step takes t_f + max(t_b + (k−1)·o + t_a,
    t_b/k + k·t_a) + t_o: limited by the backward pass plus o per all-reduce but the last, or by the link. Without
    overlap it takes t_f + t_b + k·t_a + t_o. If ranks share cores, pass times measured while all of them compute.

    Args:
        forward_s: t_f, the forward pass on a rank's part of the batch.
        backward_s: t_b, the backward pass alone.
        gradient_bytes: n, the size of all gradients.
        ranks: p, the number of ranks; of a network, also a list of ranks, or of groups that communicate
            at the same time.
        link: the link between them, or their network.
        overlap: whether all-reduces overlap the backward pass, as in DistributedDataParallel.
        buckets: k, the number of buckets.
        optimizer_s: t_o, the optimizer step.
        overhead_s: o, the CPU time that an all-reduce takes from the backward pass: 0 if other cores do the all-reduce.

    Raises:
        TypeError, ValueError: an invalid argument.

    Source: overlap: S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020;
    overhead: D. Culler et al., "LogP: Towards a Realistic Model of Parallel Computation", 1993; formula: labkit's own.
    """
    check_arguments(forward_s=forward_s, backward_s=backward_s, gradient_bytes=gradient_bytes, link=link)
    check_arguments(buckets=buckets, optimizer_s=optimizer_s, overhead_s=overhead_s)
    each = float(collective("all_reduce", gradient_bytes / buckets, ranks, link))
    source = "Li et al., PyTorch Distributed, 2020 (overlap); equal buckets at equal intervals"
    source += f"; {_LOGP}" if overhead_s else ""
    begin, end = rf"{_s(forward_s)} + ", rf" + {_s(optimizer_s)}"
    if overlap:
        delay_s = (buckets - 1) * overhead_s
        value = forward_s + max(backward_s + delay_s + each, backward_s / buckets + buckets * each) + optimizer_s
        o_term = r" + (k - 1)\,o" if overhead_s else ""
        formula = (
            rf"t_f + \max\left(t_b{o_term} + t_a,\ \frac{{t_b}}{{k}} + k\,t_a\right) + t_o,"
            r"\quad t_a = T_\text{all-reduce}(n/k)"
        )
        last, link_bound = (
            _s(backward_s) + (rf" + {buckets - 1} \cdot {_s(overhead_s)}" if overhead_s else "") + rf" + {_s(each)}",
            rf"\frac{{{_s(backward_s)}}}{{{buckets}}} + {buckets} \cdot {_s(each)}",
        )
        inserted = rf"{begin}\max\left({last},\ {link_bound}\right){end}"
    else:
        value = forward_s + backward_s + buckets * each + optimizer_s
        formula = r"t_f + t_b + k\,t_a + t_o,\quad t_a = T_\text{all-reduce}(n/k)"
        inserted = rf"{begin}{_s(backward_s)} + {buckets} \cdot {_s(each)}{end}"
    return Prediction(value, "s", "T", formula, inserted, source)


def pipeline_bubble(stages: int, micro_batches: int, *, schedule: str = "gpipe", chunks: int = 1) -> Prediction:
    """The bubble, the share of a pipelined step in which a stage is idle: (p−1)/(v·m + p − 1).

    Narayanan et al. define it relative to the ideal time, (p−1)/(v·m). Stages are equally long, messages take no time.

    Args:
        stages: p, the number of ranks over which the model is split.
        micro_batches: m, the number of micro-batches.
        schedule: as for `lab.schedule`: "gpipe" or "1f1b", which have the same bubble, or "interleaved 1f1b".
        chunks: v, the number of model parts per rank, for "interleaved 1f1b".

    Raises:
        TypeError, ValueError: an invalid argument.

    Source: Y. Huang et al., "GPipe", 2019; D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
        Clusters
    Using Megatron-LM", 2021.
    """
    check_arguments(stages=stages, micro_batches=micro_batches, chunks=chunks)
    schedule = schedule_name(schedule, "schedule")
    if chunks != 1 and schedule != INTERLEAVED:
        raise ValueError(f"chunks={chunks} with schedule={schedule!r}: only schedule={INTERLEAVED!r} gives a rank several parts")
    work = chunks * micro_batches
    formula = r"\frac{p-1}{v\,m + p - 1}" if schedule == INTERLEAVED else r"\frac{p-1}{m + p - 1}"
    inserted = rf"\frac{{{stages - 1}}}{{{work} + {stages - 1}}}"
    source = "Huang et al., GPipe, 2019; Narayanan et al., Megatron-LM on GPU clusters, 2021"
    return Prediction((stages - 1) / (work + stages - 1), "", r"\text{bubble}", formula, inserted, source)


def pipeline_step(
    stages: int,
    micro_batches: int,
    forward_s: float,
    backward_s: float,
    *,
    link: Link | Network | None = None,
    nbytes: float = 0.0,
    overlap: bool = False,
) -> Prediction:
    """Seconds of one step of a GPipe pipeline with equal stages: all forward passes, then all backward passes.

    With t = α + n/B, the time of a message, the forward passes take p·t_f + (p−1)·t + (m−1)·(t_f + t): the first
    micro-batch passes through all stages, and the others follow at the pace of a stage, which receives and computes;
    the backward passes likewise. If a stage receives the next micro-batch while it computes, the pace is max(t_f, n/B).
    Without a link, the step takes (m + p − 1)·(t_f + t_b).

    Over a network, stage k is on rank k, and each message takes the link of its two ranks: the first micro-batch takes
    the sum of all their times, the others follow at the pace of the slowest.

    Args:
        stages: p, the number of ranks over which the model is split.
        micro_batches: m, the number of micro-batches.
        forward_s: t_f, the forward pass of one stage on one micro-batch.
        backward_s: t_b, the backward pass of one stage on one micro-batch.
        link: the link between stages, or the network of their ranks; None: messages take no time.
        nbytes: n, the size of a stage's output for one micro-batch, and of its gradient.
        overlap: whether a stage receives the next micro-batch while it computes; torch's `ScheduleGPipe` does not.

    Raises:
        TypeError, ValueError: an invalid argument.

    Source: schedule: Y. Huang et al., "GPipe", 2019; the terms of the link are labkit's own.
    """
    check_arguments(stages=stages, micro_batches=micro_batches, forward_s=forward_s, backward_s=backward_s, nbytes=nbytes)
    hops: list[Link] = []
    if link is not None:
        check_arguments(link=link)
        whole = link.of(stages) if isinstance(link, Network) else link
        hops = [link_of_pair(whole, stage, stage + 1) for stage in range(stages - 1)]
    times = [hop.seconds("send", nbytes) for hop in hops]
    hop_s, busy_s = max(times, default=0.0), max((nbytes / hop.bytes_per_s for hop in hops), default=0.0)
    paces = [max(compute_s, busy_s) if overlap else compute_s + hop_s for compute_s in (forward_s, backward_s)]
    value = stages * (forward_s + backward_s) + 2 * sum(times) + (micro_batches - 1) * sum(paces)
    several = isinstance(link, Network)
    n_over_b, t = (r"\max_k \tfrac{n}{B_k}", r"\max_k t_k") if several else (r"\tfrac{n}{B}", "t")
    pace = rf"\max\left(t_f, {n_over_b}\right) + \max\left(t_b, {n_over_b}\right)" if overlap else rf"t_f + t_b + 2\,{t}"
    first, one = r"2(p-1)\,t", r"t = \alpha + \tfrac{n}{B}"
    if several:
        first, one = r"2 \sum_k t_k", r"t_k = \alpha_k + \tfrac{n}{B_k}"
    formula = rf"p\,(t_f + t_b) + {first} + (m-1)\left({pace}\right),\quad {one}"
    messages = rf"2 \cdot {_s(sum(times))}" if several else rf"{2 * (stages - 1)} \cdot {_s(hop_s)}"
    inserted = (
        rf"{stages} \cdot \left({_s(forward_s)} + {_s(backward_s)}\right) + {messages} + "
        rf"{micro_batches - 1} \cdot \left({_s(paces[0])} + {_s(paces[1])}\right)"
    )
    return Prediction(value, "s", "T", formula, inserted, "Huang et al., GPipe, 2019")


def tensor_parallel_layer(
    batch: int,
    sequence: int,
    hidden: int,
    ranks: Ranks,
    link: Link | Network,
    *,
    value_bytes: int = 2,
    compute_s: float = 0.0,
    backward: bool = True,
) -> Prediction:
    """Seconds of one tensor-parallel transformer layer as in Megatron-LM: t/p + 4 all-reduces of b·s·h values.

    Attention and MLP are each split first by columns, then by rows: each needs one all-reduce of its output, and in the
    backward pass one of its input's gradient. Nothing overlaps.

    Args:
        batch: b, the number of sequences.
        sequence: s, tokens per sequence.
        hidden: h, the width of the model.
        ranks: p, the number of ranks over which the layer is split; of a network, also a list of ranks, or of groups
            that communicate at the same time.
        link: the link between them, or their network.
        value_bytes: bytes per activation: 2 for bfloat16, 4 for float32.
        compute_s: t, the compute time of the whole layer on one rank; 0 gives the communication alone.
        backward: whether to include the backward pass; without it, there are 2 all-reduces.

    Raises:
        TypeError, ValueError: an invalid argument.

    Source: M. Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism",
        2019.
    """
    check_arguments(batch=batch, sequence=sequence, hidden=hidden, link=link, value_bytes=value_bytes, compute_s=compute_s)
    count = count_of(ranks, link)
    nbytes, times = batch * sequence * hidden * value_bytes, 4 if backward else 2
    each = float(collective("all_reduce", nbytes, ranks, link))
    formula = rf"\frac{{t}}{{p}} + {times}\,T_\text{{all-reduce}}(b\,s\,h \cdot {value_bytes}\,\text{{B}})"
    inserted = rf"\frac{{{_s(compute_s)}}}{{{count}}} + {times} \cdot {_s(each)}"
    return Prediction(compute_s / count + times * each, "s", "T", formula, inserted, "Shoeybi et al., Megatron-LM, 2019")


def zero_memory(
    parameters: float,
    ranks: int,
    stage: int,
    *,
    parameter_bytes: float = 2,
    gradient_bytes: float = 2,
    optimizer_bytes: float = 12,
) -> Prediction:
    """Bytes of parameters, gradients and optimizer state on each rank, without activations.

    Args:
        parameters: Ψ, the number of parameters.
        ranks: p, the number of ranks over which ZeRO shards.
        stage: what is sharded: 0 nothing (data parallel), 1 optimizer state, 2 also gradients, 3 also parameters
            (FSDP).
        parameter_bytes: bytes per parameter; 2 in mixed precision, 4 in float32.
        gradient_bytes: bytes per gradient.
        optimizer_bytes: K, per parameter: 12 for Adam in mixed precision, 8 for Adam in float32, 4 for SGD with
            momentum.

    Raises:
        TypeError, ValueError: an invalid argument.

    Source: S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.
    """
    check_arguments(parameters=parameters, ranks=ranks, parameter_bytes=parameter_bytes, gradient_bytes=gradient_bytes)
    check_arguments(optimizer_bytes=optimizer_bytes)
    _check_stage(stage)
    sharded = [stage >= 3, stage >= 2, stage >= 1]
    each = [parameter_bytes, gradient_bytes, optimizer_bytes]
    value = sum(size * parameters / (ranks if is_sharded else 1) for size, is_sharded in zip(each, sharded, strict=True))
    letters = [rf"\frac{{{name}}}{{p}}" if is_sharded else name for name, is_sharded in zip("wgK", sharded, strict=True)]
    figures = [
        rf"\frac{{{size:g}}}{{{ranks}}}" if is_sharded else f"{size:g}" for size, is_sharded in zip(each, sharded, strict=True)
    ]
    formula, inserted = " + ".join(letters), " + ".join(figures)
    source = "Rajbhandari et al., ZeRO, 2020"
    return Prediction(
        value, "B", "M", rf"\left({formula}\right)\Psi", rf"\left({inserted}\right) \cdot {_times(parameters)}", source
    )


def zero_traffic(parameters: float, ranks: int, stage: int, *, value_bytes: int = 4) -> Prediction:
    """Bytes that each rank sends per step, if rings move them.

    Stages 0 to 2 send 2(p−1)/p·n: a reduce-scatter of the gradients and an all-gather, of the gradients in stage 0 and
    of the updated parameters in stages 1 and 2. Stage 3 gathers the parameters in the forward pass and again in the
    backward pass, and reduce-scatters the gradients: 3(p−1)/p·n.

    Args:
        parameters: Ψ, the number of parameters; n is Ψ times `value_bytes`.
        ranks: p, the number of ranks.
        stage: what is sharded, as for `zero_memory`.
        value_bytes: bytes of a gradient or parameter under way: 4 in float32, 2 in bfloat16.

    Raises:
        TypeError, ValueError: an invalid argument.

    Source: S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC20, 2020,
        section 7.
    """
    check_arguments(parameters=parameters, ranks=ranks, value_bytes=value_bytes)
    _check_stage(stage)
    times = 3 if stage == 3 else 2
    formula = rf"\frac{{{times}(p-1)}}{{p}}\,{value_bytes}\,\text{{B}}\cdot\Psi"
    inserted = rf"\frac{{{times} \cdot {ranks - 1}}}{{{ranks}}} \cdot {value_bytes}\,\text{{B}} \cdot {_times(parameters)}"
    nbytes = times * (ranks - 1) / ranks * value_bytes * parameters
    return Prediction(nbytes, "B", "N", formula, inserted, "Rajbhandari et al., ZeRO, 2020")


def _check_stage(stage: int) -> None:
    if isinstance(stage, bool) or not isinstance(stage, numbers.Integral) or stage not in (0, 1, 2, 3):
        raise ValueError(
            f"stage={stage!r}: expected 0 (nothing is sharded), 1 (optimizer state), 2 (and gradients) or 3 (and parameters)"
        )


def _times(count: float) -> str:
    if count < 1e5:
        return f"{count:g}"
    power = math.floor(math.log10(count))
    return rf"{count / 10**power:g} \cdot 10^{{{power}}}"


for _name in __all__:
    if _name not in collectives.__all__:
        globals()[_name] = public_api(globals()[_name])
for _name in collectives.__all__:
    if _name not in __all__:  # operations of the table that have no function of their own
        __all__.append(_name)
        globals()[_name] = getattr(collectives, _name)
