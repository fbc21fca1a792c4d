"""`lab.predict`: closed-form predictions of communication, training steps, pipeline bubbles and memory.

    lab.predict.all_reduce(4e6, ranks=4, link=lab.Link.ethernet_1g)            # 48.3 ms
    lab.predict.all_reduce(4e6, ranks=4, link=lab.Link.ethernet_1g).working    # the derivation, in LaTeX

A prediction is a number of seconds or bytes, or a fraction. α is a link's latency, B its bandwidth, p the number of
ranks, n a size in bytes. An emulated `labkit.Link` follows the same formulas (`costs.link.rounds_and_share`).

Each formula accepts a `labkit.Network` in place of a link. Then `ranks` may also list some of its ranks,
`ranks=[0, 2]`, or equal groups that communicate at the same time and share the connections of their nodes, as those of
one dimension of a mesh do: `ranks=[[0, 2], [1, 3]]`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

from labkit.costs.link import Link
from labkit.costs.network import Network, as_network
from labkit.costs.prediction import (
    INTERLEAVED,
    Prediction,
    check_arguments,
    filled,
    in_seconds,
    latency_and_share,
    schedule_name,
    transfer_in_latex,
)
from labkit.costs.rounds import ALGORITHMS, Round, cost_of, rounds
from labkit.errors.wrong_calls import WrongNameError, check_number, did_you_mean, public_api
from labkit.recording.operations import HOCKNEY, OPERATION_TYPES, THAKUR, Traffic

__all__ = [
    "all_gather", "all_reduce", "all_reduce_crossover", "all_to_all", "barrier", "broadcast", "data_parallel_step", "gather",
    "message", "pipeline_bubble", "reduce", "reduce_scatter", "rpc", "scatter", "tensor_parallel_layer", "zero_memory",
    "zero_traffic",
]  # fmt: skip

Ranks = int | Sequence[int] | Sequence[Sequence[int]]
LARGEST_BYTES: Final = 1e18  # of a crossover
RAJBHANDARI: Final = "Rajbhandari et al., ZeRO, 2020"
HALVINGS: Final = 200  # of the interval that holds the crossover: enough for every digit of a float
_BY_LEVEL: Final = r"2(COUNT-1)\left(\alpha + \frac{n}{COUNT\,B}\right)"


def __dir__() -> list[str]:
    return list(__all__)


def __getattr__(name: str) -> Any:
    """Make the formula of a collective that has an entry in the table of operations only, or suggest a name."""
    if name.startswith("__"):  # asked for by Python and its tools
        raise AttributeError(name)
    for kind in OPERATION_TYPES:
        if kind.name == name and kind.collective and kind.traffic is not Traffic.TOGETHER and kind.cost is not None:
            return _of_table(name, name)
    raise WrongNameError(f"lab.predict has no {name!r}; {did_you_mean(name, __all__)}")


@public_api
def message(nbytes: float, link: Link | Network, *, ranks: Sequence[int] | None = None) -> Prediction:
    """Seconds of a message of `nbytes` bytes, once both sender and receiver have arrived: α + n/B.

    Args:
        nbytes: n, the size.
        link: the link, or the network.
        ranks: of a network, the two ranks; default: ranks of different nodes, whose messages take `between`.

    Raises:
        TypeError, ValueError: an invalid argument.

    Source: R. W. Hockney, "The communication challenge for MPP", 1994.
    """
    return _collective("send", nbytes, 2, _of_pair(link, ranks))


@public_api
def all_reduce(nbytes: float, ranks: Ranks, link: Link | Network, *, algorithm: str = "ring") -> Prediction:
    """Seconds of an all-reduce of a tensor of `nbytes` bytes.

    Args:
        nbytes: size of each rank's tensor.
        ranks: p, the number of ranks; of a network, also a list of some of its ranks, or with the ring a list of groups
            that communicate at the same time.
        link: the link between them, or their network.
        algorithm: "ring": 2(p−1)·α + 2(p−1)/p·n/B, best for large tensors, used by emulated links; "tree": a reduce and
            a broadcast, 2⌈log₂ p⌉·(α + n/B); "halving": Rabenseifner's, for p a power of two, 2⌈log₂ p⌉·α +
            2(p−1)/p·n/B; "hierarchical", over a network of N nodes with q ranks each: a reduce-scatter inside the
            nodes, an all-reduce of each part between them, an all-gather inside; rings, 2(q−1)·(α + n/(q·B)) inside and
            2(N−1)·(α + n/(N·B)) between.

    Over several nodes of a network, a ring runs at the pace of the slower level. A tree begins and ends inside the
    nodes: 2⌈log₂ q⌉·(α + n/B) inside and 2⌈log₂ N⌉·(α + n/B) between, for q and N powers of two.

    Raises:
        TypeError, ValueError: an invalid argument.

    Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH", 2005;
        hierarchical: M. Cho et al., "BlueConnect: Decomposing all-reduce for deep learning on heterogeneous network
        hierarchy", 2019.
    """
    return _collective("all_reduce", nbytes, ranks, link, algorithm)


@public_api
def all_reduce_crossover(
    ranks: int | Sequence[int], link: Link | Network, *, small: str = "tree", large: str = "ring"
) -> Prediction:
    """Bytes at which two algorithms of an all-reduce take the same time: below, `small` is faster, above, `large`.

    The time of an algorithm is T = a + s·n, with a the sum of its latencies and s its time per byte; the sizes of equal
    time solve a₁ + s₁·n = a₂ + s₂·n. Over one link, ring and tree take the same time at
    n = (p − 1 − L)/(L − (p−1)/p)·α·B with L = ⌈log₂ p⌉.

    Args:
        ranks: p, the number of ranks; of a network, also a list of some of its ranks.
        link: the link between them, or their network.
        small: the algorithm for small tensors, as for `lab.predict.all_reduce`.
        large: the algorithm for large tensors.

    Returns:
        the size; 0 if `large` is at least as fast at every size, as a ring of two or three ranks is.

    Raises:
        TypeError, ValueError: an invalid argument; or `small` is faster at every size.

    Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH", 2005.
    """
    network, _, of_large = _rounds("all_reduce", ranks, link, large)
    _, _, of_small = _rounds("all_reduce", ranks, link, small)

    def later_s(nbytes: float) -> float:
        """How much later `small` ends."""
        return network.rounds_s(of_small, nbytes) - network.rounds_s(of_large, nbytes)

    below, above = 0.0, 1.0
    while later_s(above) <= 0:
        below, above = above, 2 * above
        if above > LARGEST_BYTES:
            raise ValueError(f"small={small!r} takes at most as long as large={large!r} at every size; there is no crossover")
    for _ in range(HALVINGS if later_s(0) < 0 else 0):
        middle = (below + above) / 2
        below, above = (middle, above) if later_s(middle) < 0 else (below, middle)
    if later_s(0) >= 0:
        above = 0.0
    figures = {}
    for name, of_name in ((large, of_large), (small, of_small)):
        latency_s = per_byte_s = 0.0
        for level, (times, share) in latency_and_share(of_name, network, above).items():
            latency_s += times * getattr(network, level).latency_s
            per_byte_s += share / getattr(network, level).bytes_per_s
        figures[rf"a_\text{{{name}}}"] = in_seconds(latency_s)
        figures[rf"s_\text{{{name}}}"] = in_seconds(per_byte_s)
    fraction = rf"\frac{{<a_\text{{{large}}}> - <a_\text{{{small}}}>}}{{<s_\text{{{small}}}> - <s_\text{{{large}}}>}}"
    formula, inserted = filled(rf"\max\left(0,\ {fraction}\right)", figures)
    return Prediction(above, "B", "n", rf"{formula},\quad T = a + s\,n", rf"{inserted}\,\text{{B}}", THAKUR)


@public_api
def broadcast(nbytes: float, ranks: Ranks, link: Link | Network, *, algorithm: str = "tree") -> Prediction:
    """Seconds of a broadcast of `nbytes` bytes.

    Args:
        nbytes: size of the tensor.
        ranks: p, the number of ranks, including the root; of a network, also a list of some of its ranks.
        link: the link between them, or their network.
        algorithm: "tree": a binomial tree, ⌈log₂ p⌉·(α + n/B), used by emulated links; "scatter": a scatter and an
            all-gather, (⌈log₂ p⌉ + p − 1)·α + 2(p−1)/p·n/B, better for large tensors.

    Raises:
        TypeError, ValueError: an invalid argument.

    Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH", 2005.
    """
    return _collective("broadcast", nbytes, ranks, link, algorithm)


@public_api
def barrier(ranks: Ranks, link: Link | Network) -> Prediction:
    """Seconds of a dissemination barrier: ⌈log₂ p⌉·α.

    Source: D. Hensgen, R. Finkel, U. Manber, "Two algorithms for barrier synchronization", 1988.
    """
    return _collective("barrier", 0, ranks, link)


def _of_table(operation: str, words: str) -> Callable[[float, Ranks, Link | Network], Prediction]:
    """Make the function of a collective that the table of operations describes wholly."""

    def predicted(nbytes: float, ranks: Ranks, link: Link | Network) -> Prediction:
        return _collective(operation, nbytes, ranks, link)

    predicted.__name__ = predicted.__qualname__ = operation
    predicted.__doc__ = f"Seconds of a {words}."
    return public_api(predicted)


all_gather = _of_table("all_gather", "ring all-gather: (p−1)·α + (p−1)/p·n/B, with n the bytes of all ranks' parts together")
reduce_scatter = _of_table("reduce_scatter", "ring reduce-scatter: (p−1)·α + (p−1)/p·n/B, with n the bytes of each rank's input")
all_to_all = _of_table(
    "all_to_all", "pairwise all-to-all: (p−1)·α + (p−1)/p·n/B, with n the bytes of a rank's parts for all ranks"
)
reduce = _of_table("reduce", "binomial-tree reduce of tensors of `nbytes` bytes: ⌈log₂ p⌉·(α + n/B)")
gather = _of_table("gather", "binomial-tree gather: ⌈log₂ p⌉·α + (p−1)/p·n/B, with n the bytes of all parts together")
scatter = _of_table("scatter", "binomial-tree scatter: ⌈log₂ p⌉·α + (p−1)/p·n/B, with n the bytes of all parts together")


@public_api
def rpc(
    request_bytes: float,
    reply_bytes: float,
    link: Link | Network,
    *,
    compute_s: float = 0.0,
    calls: int = 1,
    asynchronous: bool = False,
    ranks: Sequence[int] | None = None,
) -> Prediction:
    """Seconds of k remote calls of one rank to another, with their replies.

    One after another they take k·(2α + (n₁ + n₂)/B + t). Asynchronous calls are all sent before the first wait: their
    latencies overlap, and messages of one direction follow one another, 2α + (k·max(n₁, n₂) + min(n₁, n₂))/B + t.

    Args:
        request_bytes: n₁, the size of the arguments.
        reply_bytes: n₂, the size of the result.
        link: the link between the two ranks, or their network.
        compute_s: t, the compute time of the callee; asynchronous calls compute at the same time, a thread each.
        calls: k, the number of calls.
        asynchronous: whether all calls are sent before the first wait, as with `rpc_async`.
        ranks: of a network, caller and callee; default: ranks of different nodes, whose messages take `between`.

    Raises:
        TypeError, ValueError: an invalid argument.

    Source: a message: R. W. Hockney, "The communication challenge for MPP", 1994; overlapping messages: labkit's own.
    """
    check_arguments(request_bytes=request_bytes, reply_bytes=reply_bytes, link=link, compute_s=compute_s, calls=calls)
    link = _of_pair(link, ranks)
    nbytes, share, times = request_bytes + reply_bytes, r"\frac{n_1 + n_2}{B}", 1 if asynchronous else calls
    if asynchronous and calls > 1:
        nbytes = calls * max(request_bytes, reply_bytes) + min(request_bytes, reply_bytes)
        share = r"\frac{k \max(n_1, n_2) + \min(n_1, n_2)}{B}"
    template = rf"2\,*<\alpha> + <{share}> + <t>"
    if times > 1:
        template = rf"<k> *\left({template}\right)"
    figures = {"k": str(calls), r"\alpha": in_seconds(link.latency_s), share: transfer_in_latex(nbytes, link)}
    value = times * (2 * link.latency_s + nbytes / link.bytes_per_s + compute_s)
    return Prediction.filled(value, "s", "T", template, figures | {"t": in_seconds(compute_s)}, HOCKNEY)


def _collective(operation: str, nbytes: float, ranks: Ranks, link: Link | Network, algorithm: str = "") -> Prediction:
    """Return the predicted time of an operation of the table, by default with the table's algorithm."""
    check_arguments(nbytes=nbytes, link=link)
    network, p, found = _rounds(operation, ranks, link, algorithm)
    cost = cost_of(operation, p, algorithm)
    on_one_level = [(cost.rounds(p), cost.share(p))]
    formulas: dict[str, str] = {}
    if network.nodes > 1 and algorithm == "hierarchical":
        formulas = {"inside": _BY_LEVEL.replace("COUNT", "q"), "between": _BY_LEVEL.replace("COUNT", "N")}
    elif network.nodes == 1 or [*latency_and_share(found, network, nbytes).values()] == on_one_level:
        formulas = {"inside": cost.formula, "between": cost.formula}
    return Prediction.of(found, nbytes, network, formulas, cost.source)


def _rounds(operation: str, ranks: Ranks, link: Link | Network, algorithm: str = "") -> tuple[Network, int, tuple[Round, ...]]:
    """Return the network, the number of ranks that carry out an operation together, and its rounds."""
    network, nodes, groups = _members(ranks, link)
    if groups > 1 and ALGORITHMS.get(operation, {}).get(algorithm) is not None:
        raise ValueError(f"ranks={ranks!r}: groups at the same time are predicted for the default algorithm only; expected one")
    if algorithm == "hierarchical" and isinstance(link, Link):
        raise ValueError(f"algorithm='hierarchical' with link={link}: a hierarchy needs nodes; expected a lab.Network")
    return network, len(nodes) // groups, rounds(operation, nodes, groups, algorithm)


def _members(ranks: Any, link: Link | Network) -> tuple[Network, tuple[int, ...], int]:
    """Return the network, the node of each participating rank, group after group, and the number of groups."""
    check_arguments(link=link)
    if isinstance(link, Link):
        check_arguments(ranks=ranks)
        return as_network(link, ranks), (0,) * ranks, 1
    if not isinstance(ranks, Sequence) or not any(isinstance(group, Sequence) for group in ranks):
        return link, link.nodes_among(ranks), 1
    equal = len({len(group) if isinstance(group, Sequence) else 0 for group in ranks}) == 1
    if not equal or len({rank for group in ranks for rank in group}) < len(ranks) * len(ranks[0]):
        raise ValueError(f"ranks={ranks!r}: expected groups of equally many different ranks, as in ranks=[[0, 2], [1, 3]]")
    return link, tuple(node for group in ranks for node in link.nodes_among(group)), len(ranks)


def _of_pair(link: Link | Network, ranks: Sequence[int] | None) -> Link:
    """Return the link between two ranks of a network."""
    check_arguments(link=link)
    if isinstance(link, Link):
        if ranks is not None:
            raise ValueError(f"ranks={ranks!r}: all ranks have the same link; give ranks with a lab.Network only")
        return link
    if ranks is None:
        return link.between
    if len(ranks) != 2:
        raise ValueError(f"ranks={ranks!r}: expected two ranks, as in ranks=(0, 1)")
    return link.link(*ranks)


@public_api
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
    each = float(_collective("all_reduce", gradient_bytes / buckets, ranks, link))
    source = "Li et al., PyTorch Distributed, 2020 (overlap); equal buckets at equal intervals"
    waits = ""
    if overhead_s:
        source += "; Culler et al., LogP, 1993 (overhead)"
        waits = r" + <(k - 1)>\,*<o>"
    if overlap:
        delay_s = (buckets - 1) * overhead_s
        value = forward_s + max(backward_s + delay_s + each, backward_s / buckets + buckets * each) + optimizer_s
        template = rf"<t_f> + \max\left(<t_b>{waits} + <t_a>,\ \frac{{<t_b>}}{{<k>}} + <k>\,*<t_a>\right) + <t_o>"
    else:
        value = forward_s + backward_s + buckets * each + optimizer_s
        template = r"<t_f> + <t_b> + <k>\,*<t_a> + <t_o>"
    times = {"t_f": forward_s, "t_b": backward_s, "t_a": each, "t_o": optimizer_s, "o": overhead_s}
    figures = {symbol: in_seconds(seconds) for symbol, seconds in times.items()}
    figures |= {"k": f"{buckets}", "(k - 1)": f"{buckets - 1}"}
    return Prediction.filled(value, "s", "T", template, figures, source, r",\quad t_a = T_\text{all-reduce}(n/k)")


@public_api
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
        Clusters Using Megatron-LM", 2021.
    """
    check_arguments(stages=stages, micro_batches=micro_batches, chunks=chunks)
    schedule = schedule_name(schedule, "schedule")
    if chunks != 1 and schedule != INTERLEAVED:
        raise ValueError(f"chunks={chunks} with schedule={schedule!r}: only schedule={INTERLEAVED!r} gives a rank several parts")
    work = chunks * micro_batches
    parts = r"v\,m" if schedule == INTERLEAVED else "m"
    template = rf"\frac{{<p-1>}}{{<{parts}> + <p - 1>}}"
    figures = {"p-1": f"{stages - 1}", "p - 1": f"{stages - 1}", parts: f"{work}"}
    source = "Huang et al., GPipe, 2019; Narayanan et al., Megatron-LM on GPU clusters, 2021"
    return Prediction.filled((stages - 1) / (work + stages - 1), "", r"\text{bubble}", template, figures, source)


@public_api
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
    _, nodes, groups = _members(ranks, link)
    count = len(nodes) // groups
    nbytes, times = batch * sequence * hidden * value_bytes, 4 if backward else 2
    each = float(_collective("all_reduce", nbytes, ranks, link))
    time = rf"T_\text{{all-reduce}}(b\,s\,h \cdot {value_bytes}\,\text{{B}})"
    figures = {"t": in_seconds(compute_s), "p": f"{count}", time: in_seconds(each)}
    template = rf"\frac{{<t>}}{{<p>}} + {times}\,*<{time}>"
    return Prediction.filled(compute_s / count + times * each, "s", "T", template, figures, "Shoeybi et al., Megatron-LM, 2019")


@public_api
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
    value, terms, figures = 0.0, [], {}
    for symbol, each, sharded_from in (("w", parameter_bytes, 3), ("g", gradient_bytes, 2), ("K", optimizer_bytes, 1)):
        sharded = stage >= sharded_from
        value += each * parameters / (ranks if sharded else 1)
        terms.append(rf"\frac{{<{symbol}>}}{{<p>}}" if sharded else f"<{symbol}>")
        figures[symbol] = f"{each:g}"
    template = rf"\left({' + '.join(terms)}\right)*<\Psi>"
    figures |= {"p": f"{ranks}", r"\Psi": _in_powers(parameters)}
    return Prediction.filled(value, "B", "M", template, figures, RAJBHANDARI)


@public_api
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
    template = rf"\frac{{{times}*<(p-1)>}}{{<p>}}\,*{value_bytes}\,\text{{B}}\cdot*<\Psi>"
    figures = {"(p-1)": f"{ranks - 1}", "p": f"{ranks}", r"\Psi": _in_powers(parameters)}
    nbytes = times * (ranks - 1) / ranks * value_bytes * parameters
    return Prediction.filled(nbytes, "B", "N", template, figures, RAJBHANDARI)


def _check_stage(stage: int) -> None:
    expected = "0 (nothing is sharded), 1 (optimizer state), 2 (and gradients) or 3 (and parameters)"
    check_number(stage, f"stage={stage!r}: expected {expected}", whole=True, at_least=0, below=4)


def _in_powers(count: float) -> str:
    """Return a large number in powers of ten, in LaTeX."""
    if count < 1e5:
        return f"{count:g}"
    power = math.floor(math.log10(count))
    return rf"{count / 10**power:g} \cdot 10^{{{power}}}"
