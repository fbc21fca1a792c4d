"""`lab.plan`: which strategies fit a model on a cluster, how long a step of each takes, and what limits it."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from labkit.costs.cluster import PIPELINE, Cluster, Strategy, strategies
from labkit.costs.device import Device
from labkit.costs.estimate import PLANNED_KINDS, RECOMPUTE, UNITS, Choice, Estimate, best_estimate
from labkit.costs.link import Link
from labkit.costs.transformer import Transformer
from labkit.costs.workload import MOST_SAMPLES, Precision, Workload, module_bytes, workload_of
from labkit.errors.lists import Table, counted, listed
from labkit.errors.units import bytes_in_words, in_words
from labkit.errors.wrong_calls import WrongValueError, check_number, did_you_mean, public_api

if TYPE_CHECKING:
    from torch import nn

SHOWN: Final = 20  # rows of the table, enough for all strategies of four ranks; the others are in `Plan.rows`
FARTHEST: Final = 64.0  # a change by more than this factor is no answer to "what would have to change?"
STEP: Final = 2**0.25  # between factors that are tried: with more memory, say, another may win again
# What decides comes first: in a narrow window, the kinds of memory are to the right of it.
HEADINGS: Final = (
    "strategy", "m", "memory", "step", "tokens/s", "compute", "bubble", "exposed communication", *PLANNED_KINDS,
)  # fmt: skip
AGAIN: Final = {"none": "", "selective": " (s)", "layer": " (r)"}
WORDS: Final = (HEADINGS.index("strategy"), HEADINGS.index("exposed communication"))  # columns of text, not of numbers


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the cluster or the batch after which a strategy is better than the one that was the fastest."""

    winner: str  # the name of the strategy
    best: str  # that of the one that was the fastest
    of: str  # what changes: "between", "inside" (bandwidths), "device" (its rates), "memory" or "batch"
    factor: float
    best_fits: bool = True  # also then; else the memory is too small, or the batch cannot be divided

    def __str__(self) -> str:
        beyond = 1.005 if self.factor > 1 else 0.995
        factor = self.factor * (1 if self.of == "batch" else beyond)  # so that three digits are on the side where it holds
        outcome = f"is faster than {self.best}" if self.best_fits else f"is possible, and {self.best} is not,"
        return f"{self.winner} {outcome} with {factor:.3g} times {_CHANGES[self.of]}"


@dataclass(frozen=True, repr=False)
class Plan:
    """The strategies for a model, a batch and a cluster; a notebook shows a table, `print` the same as text.

    `plan["DDP 4"]` is one row, `plan[0]` the best. A row's numbers are in seconds and bytes.
    """

    rows: tuple[Estimate, ...]  # those that fit, the fastest first; then the others, the one that lacks least memory first
    undivided: tuple[str, ...]  # strategies for whose replicas, or micro-batches, the batch is too small or uneven
    work: Workload  # what a step asks for
    precision: Precision  # bytes per parameter
    cluster: Cluster
    choice: Choice

    @property
    def fitting(self) -> tuple[Estimate, ...]:
        """The strategies that fit, the fastest first."""
        return tuple(row for row in self.rows if row.fits)

    def __getitem__(self, name: str | int) -> Estimate:
        if not isinstance(name, str):
            if not self.rows and not isinstance(name, slice):
                raise IndexError(self._without_rows)
            return self.rows[name]
        for row in self.rows:
            if row.name == name:
                return row
        if name in self.undivided:
            raise WrongValueError(f"the batch cannot be divided as asked among the replicas and micro-batches of {name!r}")
        raise WrongValueError(f"no strategy {name!r} in this plan; {did_you_mean(name, [row.name for row in self.rows])}")

    @property
    def _without_rows(self) -> str:
        return f"this plan has no rows. {' '.join(self._notes()[3:])}"

    @public_api
    def break_even(self, winner: str | None = None) -> tuple[Change, ...]:
        """Return the smallest changes, one at a time, after which a strategy would be better than the best.

        It is faster, or the best is no longer possible. Both choose their number of micro-batches again after a change.
        The changes are factors of the bandwidths, the device's rates and memory, and the batch (powers of two), from
        1/64 to 64. A third strategy may then be faster than both, and with a larger change the winner slower again.

        Args:
            winner: the name of the strategy that is to win; default: the second best that fits.

        Raises:
            ValueError: there is no such strategy, or nothing fits.
        """
        if not self.rows:
            raise ValueError(f"break_even(): {self._without_rows}")
        if not self.fitting:
            raise ValueError("break_even(): no strategy fits this cluster and batch, so there is no best one")
        if self._several:
            raise ValueError("break_even(): this plan has several numbers of ranks; plan one of them")
        best = self.fitting[0]
        if winner is None and len(self.fitting) < 2:
            raise ValueError(f"break_even(): only {best.name} fits; name the strategy that is to win")
        other = self.fitting[1] if winner is None else self[winner]
        if other.name == best.name:
            raise ValueError(f"break_even({winner!r}): this is the best strategy already")
        changes = (self._turning_point(best, other, of, up=up) for of in _CHANGES for up in (True, False))
        return tuple(sorted(filter(None, changes), key=lambda change: abs(math.log(change.factor))))

    def _turning_point(self, best: Estimate, other: Estimate, of: str, *, up: bool) -> Change | None:
        """Return the change nearest to 1 with which another strategy wins; the batch changes in powers of two only."""

        def estimate(row: Estimate, factor: float) -> Estimate | None:
            work, cluster = _changed(of, self.work, self.cluster, factor)
            found = best_estimate(work, self.precision, row.strategy, cluster, self.choice)
            return found if found and found.fits else None

        def wins(factor: float) -> bool:
            one, two = estimate(other, factor), estimate(best, factor)
            return one is not None and (two is None or one.step_s < two.step_s)

        whole = of == "batch"
        step = 2.0 if whole else STEP
        towards = step if up else 1 / step
        loses, factor = 1.0, towards
        while not wins(factor):
            loses, factor = factor, factor * towards
            if not 1 / FARTHEST <= factor <= FARTHEST or (whole and self.work.samples * factor % 1):
                return None
        for _ in range(0 if whole else 12):
            middle = math.sqrt(loses * factor)
            loses, factor = (loses, middle) if wins(middle) else (middle, factor)
        return Change(other.name, best.name, of, factor, best_fits=estimate(best, factor) is not None)

    def cells(self) -> list[tuple[str, ...]]:
        """The texts of the table, row by row."""
        return [(self._name(row), *_texts(row)) for row in self.rows[:SHOWN]]

    def _name(self, row: Estimate) -> str:
        return f"{row.cluster.ranks} ranks: {row.name}" if self._several else row.name

    @property
    def _several(self) -> bool:
        """Whether it is for several numbers of ranks."""
        return any(row.cluster.ranks != self.cluster.ranks for row in self.rows)

    def _title(self) -> str:
        memory = self.cluster.device.memory_gb
        limit = "" if math.isinf(memory) else f" with {bytes_in_words(memory * 1e9)} each"
        samples = sorted({row.samples for row in self.rows} or {self.work.samples})
        of_step = counted(samples[0], "sample") if len(samples) == 1 else f"{samples[0]} to {samples[-1]} samples"
        return (
            f"{self.work.parameters:,.0f} parameters, {of_step} per step, {'up to ' if self._several else ''}"
            f"{counted(self.cluster.ranks, 'rank')}{limit}, {self.cluster.link}"
        )

    def _notes(self) -> list[str]:
        rate = "Tokens/s" if self.work.tokens else "Samples/s"
        buffers = "DDP's buckets, FSDP2's gathered layers, what stages receive, what Adam needs, or a module's own"
        notes = [
            "m: micro-batches of a replica; (r): layers are recomputed, (s): selectively. The first axis is the outermost.",
            f"{rate} are those of one rank, memory that of the rank and the moment that need most.",
            f"Buffers: {buffers}.",
        ]
        if len(self.rows) > SHOWN:
            notes.append(f"{SHOWN} of {len(self.rows)} strategies are shown; all are in .rows.")
        if self.choice.offload and self.rows:
            best, gb = self.rows[0], self.choice.offload.memory_gb
            limit = "" if math.isinf(gb) else f", of {bytes_in_words(gb * 1e9)} that it has there"
            notes.append(
                "The host keeps parameters, gradients and optimizer state: "
                f"{bytes_in_words(best.host_bytes)} for each rank of {self._name(best)}{limit}."
            )
        whole = self.precision.parameter_bytes * self.work.parameters
        if any(row.fits and whole > row.cluster.device.memory_gb * 1e9 for row in self.rows):
            notes.append(
                f"The whole model has {bytes_in_words(whole)}, more than a device: create it on the meta device, and save its "
                "parts."
            )
        if self.undivided:
            names = ", ".join(self.undivided[:3]) + (", ..." if len(self.undivided) > 3 else "")
            notes.append(f"The batch cannot be divided as asked among the replicas and micro-batches of {names}.")
        return notes

    def __repr__(self) -> str:
        return "\n".join([self._title(), *Table(self._headings(), self.cells(), WORDS).lines(), *self._notes()])

    def _headings(self) -> tuple[str, ...]:
        return HEADINGS if self.work.tokens else tuple(each.replace("tokens", "samples") for each in HEADINGS)

    def _repr_html_(self) -> str:
        table = Table(self._headings(), self.cells(), WORDS).html(
            "padding:2px 3px;font-size:95%;white-space:nowrap;text-align:{}"
        )
        caption = f'<caption style="text-align:left">{html.escape(self._title())}</caption>'
        notes = "<br>".join(map(html.escape, self._notes()))
        return f"{table.replace(', ', ',<br>').replace('<table>', f'<table>{caption}')}<small>{notes}</small>"


@public_api
def plan(
    model: Transformer | nn.Module,
    batch: Any = None,
    cluster: Cluster | None = None,
    *,
    tokens_per_batch: int | None = None,
    ranks: Sequence[int] | None = None,
    strategy: str | None = None,
    micro_batch: int | None = None,
    accumulate: int | None = None,
    recompute: str | None = None,
    chunks: int = 1,
    fsdp_unit: str = "layer",
    offload: Device | None = None,
    sequence_parallel: bool = True,
    parameter_bytes: float | None = None,
    gradient_bytes: float | None = None,
    optimizer_bytes: float | None = None,
    compute_bytes: float | None = None,
    lora_rank: int | None = None,
) -> Plan:
    """Compare all strategies for a model on a cluster: what fits, how long a step takes, and what limits it.

    The strategies are DDP, ZeRO-1, ZeRO-2 (FSDP2 that keeps gathered parameters), FSDP2 (ZeRO-3), HSDP, tensor
    parallelism inside nodes, pipelines (1F1B), and all meshes of them. What is not given is chosen for each: the number
    of micro-batches, and what is recomputed, so that it is the fastest that fits. For example:

        network = lab.Network(nodes=8, inside=lab.Link.nvlink4, between=lab.Link(gbit_per_s=3200, latency_us=5))
        cluster = lab.Cluster(ranks=64, device=lab.Device.h100, link=network)
        plan = lab.plan(lab.Transformer.llama3_8b, batch=128, cluster=cluster)
        plan[0].tokens_per_s, plan[0].mfu, 64 * plan[0].hours(15e12)  # of the fastest; GPU-hours

    Args:
        model: a transformer's shape; or a module, whose passes are counted on shapes only, for which tensor parallelism
            and pipelines are not planned.
        batch: a step of all ranks together: for a transformer a number of sequences; for a module its inputs, a tensor
            or a tuple of tensors, whose first dimension is the batch.
        cluster: the ranks, their devices and their network.
        tokens_per_batch: in place of `batch`, about the tokens of a step of a transformer: their number of sequences is
            rounded to a multiple of the ranks. Neither is needed if `strategy`, `micro_batch` and `accumulate` are
            given.
        ranks: several numbers of ranks; the plan has the best strategy for each. In a network, each node has as many as
            in `cluster`.
        strategy: the only one to plan, by its name, such as "FSDP2 8".
        micro_batch: the samples that a replica computes at one time.
        accumulate: the micro-batches of a replica in a step.
        recompute: what the backward pass computes again: "none", "layer" (everything but the inputs of layers), or
            "selective" (everything but the results of matrix products with weights, those of experts excepted, and of
            fused attention).
        chunks: the parts of the model on each rank of a pipeline; above 1, interleaved 1F1B.
        fsdp_unit: what FSDP gathers at one time: "layer", or the whole "model".
        offload: FSDP2's `CPUOffloadPolicy`: the share of the host's memory that each rank has, with its rate, at which
            parameters and gradients move and the optimizer steps there, as in
            `lab.Device(tflop_per_s=1, gbyte_per_s=20, memory_gb=64)`; default: nothing is offloaded.
        sequence_parallel: whether tensor parallelism also divides the tokens between the matrix products.
        parameter_bytes: bytes per parameter; default: 2 (mixed precision) for a transformer, those of its own type for
            a module.
        gradient_bytes: bytes per gradient; default: as many as a parameter's, but at least 2.
        optimizer_bytes: bytes of the optimizer's state per parameter; default: those of Adam, 12 in mixed precision
            with its 32-bit copy of the parameters, else two parameters'. SGD has 0, with momentum a parameter's.
        compute_bytes: bytes of what kernels compute with (at least 2) and FSDP gathers; default: `parameter_bytes`.
            FSDP2's mixed precision has `parameter_bytes=4, compute_bytes=2`.
        lora_rank: the rank of LoRA's adapters beside all linear layers of a transformer (those of experts excepted),
            whose own weights are frozen; default: no adapters. A module has its own.

    Returns:
        the plan, a table in a notebook.

    Raises:
        TypeError, ValueError: an invalid argument.

    Source: docs/planning.md has the formulas, their sources, and published runs beside them.
    """
    if not isinstance(cluster, Cluster):
        raise TypeError(f"cluster={cluster!r}: expected a lab.Cluster")
    _check(micro_batch, accumulate, recompute, chunks, fsdp_unit)
    if not isinstance(sequence_parallel, bool):
        raise TypeError(f"sequence_parallel={sequence_parallel!r}: expected True or False")
    if not isinstance(offload, Device | None):
        raise TypeError(f"offload={offload!r}: expected a lab.Device with the rate and the memory that each rank has on its host")
    precision = _precision(model, parameter_bytes, gradient_bytes, optimizer_bytes, compute_bytes)
    choice = Choice(
        micro_batch=micro_batch, accumulate=accumulate, recompute=recompute, chunks=chunks, fsdp_unit=fsdp_unit, offload=offload
    )  # fmt: skip
    is_module = not isinstance(model, Transformer)
    if is_module and (recompute not in (None, "none") or chunks > 1):
        raise ValueError("recompute and chunks: expected a lab.Transformer; which layers a module has is unknown")
    if ranks is not None and not ranks:
        raise ValueError("ranks=[]: expected at least one number of ranks")
    clusters = [cluster] if ranks is None else [cluster.of(count) for count in ranks]
    largest = max(clusters, key=lambda each: each.ranks)
    follows = batch is None and tokens_per_batch is None and None not in (strategy, micro_batch, accumulate) and not is_module
    given = batch if tokens_per_batch is None else _sequences(model, batch, tokens_per_batch, clusters)
    work = workload_of(model, 1 if follows else given, precision, sequence_parallel=sequence_parallel, lora_rank=lora_rank)
    rows: list[Estimate] = []
    undivided: list[str] = []
    for planned in clusters:
        possible = [
            each for each in strategies(work, planned) if _has_chunks(each, work, chunks) and (offload is None or each.stage > 1)
        ]
        if not possible:
            raise ValueError("offload: only what FSDP2 and ZeRO-2 shard is offloaded; expected at least two data-parallel ranks")
        names = [each.name for each in possible]
        if strategy is not None and strategy not in names:
            of = f"{'a module on ' if is_module else ''}{counted(planned.ranks, 'rank')}"
            where = f"no strategy of {of}{f' with {chunks} chunks' if chunks > 1 else ''} has this name"
            raise ValueError(f"strategy={strategy!r}: {where}; {did_you_mean(strategy, names)}")
        chosen = [each for each in possible if strategy in (None, each.name)]
        if follows and chosen:
            samples = int(micro_batch or 1) * int(accumulate or 1) * chosen[0].data_ranks
            check_number(
                samples, f"micro_batch={micro_batch!r}: expected at most {MOST_SAMPLES:,} samples", below=MOST_SAMPLES + 1
            )
            work = replace(work, samples=samples)
        found = {each.name: best_estimate(work, precision, each, planned, choice) for each in chosen}
        undivided += [name for name, row in found.items() if row is None]
        best = _sorted(row for row in found.values() if row is not None)
        rows += best if ranks is None else best[:1]
    return Plan(tuple(rows), tuple(undivided), work, precision, largest, choice)


def _has_chunks(strategy: Strategy, work: Workload, chunks: int) -> bool:
    """Whether a pipeline, if it is one, can have so many chunks of whole layers, the first and last with one less."""
    stages = strategy.size(PIPELINE)
    return stages == 1 or (-work.layers % (stages * chunks) in (0, 2) and stages * chunks <= work.layers + 2)


def _sorted(rows: Iterable[Estimate]) -> list[Estimate]:
    """Sort rows; of those that differ in nothing but the order of their mesh's axes, it has the first."""
    different: dict[Any, Estimate] = {}
    for row in rows:
        different.setdefault((frozenset(row.strategy.axes), row.strategy.stage, row.step_s, row.needed_bytes), row)
    return sorted(different.values(), key=lambda row: (row.missing_bytes, row.step_s))


def _check(micro_batch: Any, accumulate: Any, recompute: Any, chunks: Any, fsdp_unit: Any) -> None:
    for name, value in (("micro_batch", micro_batch), ("accumulate", accumulate), ("chunks", chunks)):
        if value is not None:
            check_number(value, f"{name}={value!r}: expected a whole number from 1", whole=True, at_least=1)
    for name, value, known in (("recompute", recompute, (None, *RECOMPUTE)), ("fsdp_unit", fsdp_unit, UNITS)):
        if value not in known:
            raise ValueError(f"{name}={value!r}: expected {listed([repr(each) for each in known if each], word='or')}")


def _precision(model: Any, parameter: Any, gradient: Any, optimizer: Any, compute: Any) -> Precision:
    given = {
        "parameter_bytes": parameter, "gradient_bytes": gradient, "optimizer_bytes": optimizer, "compute_bytes": compute
    }  # fmt: skip
    for name, value in given.items():
        if value is not None:
            zero = name in ("gradient_bytes", "optimizer_bytes")
            expected = f"{name}={value!r}: expected a number of bytes, {'from' if zero else 'above'} 0 and below 1,000"
            check_number(value, expected, at_least=0, above=-math.inf if zero else 0, below=1e3)
    size = trained = parameter
    if size is None:
        size, trained = (2, 2) if isinstance(model, Transformer) else module_bytes(model)
    defaults = {
        "parameter_bytes": size, "gradient_bytes": max(2, trained), "optimizer_bytes": 12 if trained < 3 else 2 * trained,
        "compute_bytes": size,
    }  # fmt: skip
    return Precision(**(defaults | {name: value for name, value in given.items() if value is not None}))


def _sequences(model: Any, batch: Any, tokens: Any, clusters: Sequence[Cluster]) -> int:
    """The number of sequences of a batch of about so many tokens: a multiple of the ranks, if it is not less."""
    if batch is not None or not isinstance(model, Transformer):
        raise ValueError("tokens_per_batch: expected either this or batch, and this for a lab.Transformer only")
    most = MOST_SAMPLES * model.sequence
    expected = (
        f"tokens_per_batch={tokens!r}: expected a whole number of tokens, from the {model.sequence} of a sequence to {most}"
    )
    check_number(tokens, expected, whole=True, at_least=model.sequence, below=most + 1)
    counts = [each.ranks for each in clusters]
    rounded = (round(int(tokens) / model.sequence / ranks) * ranks for ranks in (math.lcm(*counts), max(counts)))
    return next(filter(None, rounded), int(tokens) // model.sequence)


def _texts(row: Estimate) -> tuple[str, ...]:
    exposed = ", ".join(
        f"{axis} {in_words(seconds, 's')} {row.level[axis]}" for axis, seconds in row.exposed_s.items() if seconds
    )
    return (
        f"{row.micro_batches}{AGAIN[row.recompute]}",
        bytes_in_words(row.needed_bytes),
        in_words(row.step_s, "s") if row.fits else "too large",
        f"{row.tokens_per_s:,.{0 if row.tokens_per_s >= 100 else 1}f}" if row.fits else "",
        in_words(row.compute_s, "s"),
        in_words(row.bubble_s, "s") if row.bubble_s else "",
        exposed,
        *(bytes_in_words(row.memory_bytes[kind]) for kind in PLANNED_KINDS),
    )


_CHANGES: Final = {  # what changes, in words
    "between": "the bandwidth between nodes",
    "inside": "the bandwidth inside nodes",
    "device": "the device's rates",
    "memory": "the device's memory",
    "batch": "the batch",
}


def _changed(of: str, work: Workload, cluster: Cluster, factor: float) -> tuple[Workload, Cluster]:
    if of == "batch":
        return replace(work, samples=round(work.samples * factor)), cluster
    if of in ("device", "memory"):
        rates = ("memory_gb",) if of == "memory" else ("tflop_per_s", "tflop_per_s_32", "gbyte_per_s")
        better: Any = {rate: value * factor for rate in rates if (value := getattr(cluster.device, rate)) is not None}
        return work, replace(cluster, device=replace(cluster.device, **better))
    link: Link = getattr(cluster.network, of)
    faster: Any = {of: replace(link, gbit_per_s=link.gbit_per_s * factor, name="")}
    return work, replace(cluster, link=replace(cluster.network, **faster))
