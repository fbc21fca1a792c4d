"""`lab.plan`: which strategies fit a model on a cluster, how long a step of each takes, and what limits it."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from labkit.costs.cluster import Cluster, strategies
from labkit.costs.estimate import PLANNED_KINDS, Estimate, best_estimate
from labkit.costs.link import Link
from labkit.costs.workload import Precision, Transformer, Workload, workload_of
from labkit.errors.lists import Table, counted
from labkit.errors.units import bytes_in_words, in_words
from labkit.errors.wrong_calls import WrongValueError, check_number, did_you_mean, public_api

if TYPE_CHECKING:
    from torch import nn

SHOWN: Final = 16  # rows of the table, enough for all strategies of four ranks; the others are in `Plan.rows`
FARTHEST: Final = 64.0  # a change by more than this factor is no answer to "what would have to change?"
# What decides comes first: in a narrow window, the kinds of memory are to the right of it.
HEADINGS: Final = ("strategy", "m", "memory", "step", "compute", "bubble", "exposed communication", *PLANNED_KINDS)
WORDS: Final = (HEADINGS.index("strategy"), HEADINGS.index("exposed communication"))  # columns of text, not of numbers


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the cluster or the batch that makes another strategy the fastest."""

    of: str  # what changes: "between", "inside" (bandwidths), "device" (its rates), "memory" or "batch"
    factor: float  # at least, if it is above 1, else at most

    def __str__(self) -> str:
        return f"{'at least' if self.factor > 1 else 'at most'} {self.factor:.3g} times {_CHANGES[self.of][0]}"


@dataclass(frozen=True, repr=False)
class Plan:
    """The strategies for a model, a batch and a cluster; a notebook shows a table, `print` the same as text.

    `plan["DDP 4"]` is one row. A row's numbers are in seconds and bytes.
    """

    rows: tuple[Estimate, ...]  # those that fit, the fastest first; then the others, the one that lacks least memory first
    undivided: tuple[str, ...]  # strategies for whose replicas, or micro-batches, the batch is too small or uneven
    work: Workload  # what a step asks for
    precision: Precision  # bytes per parameter
    cluster: Cluster

    @property
    def fitting(self) -> tuple[Estimate, ...]:
        """The strategies that fit, the fastest first."""
        return tuple(row for row in self.rows if row.fits)

    def __getitem__(self, name: str) -> Estimate:
        for row in self.rows:
            if row.name == name:
                return row
        raise WrongValueError(f"no strategy {name!r} in this plan; {did_you_mean(name, [row.name for row in self.rows])}")

    @public_api
    def break_even(self, winner: str | None = None) -> tuple[Change, ...]:
        """Return the smallest changes, one at a time, after which a strategy would be faster than the best.

        Both strategies choose their number of micro-batches again after a change. The changes are factors of the
        bandwidths, the device's rates and memory, and the batch, from 1/64 to 64; each but
        the batch is where both are equally fast.

        Args:
            winner: the name of the strategy that is to win; default: the second best that fits.

        Raises:
            ValueError: there is no such strategy, or nothing fits.
        """
        if not self.fitting:
            raise ValueError("break_even(): no strategy fits this cluster, so there is no best one")
        best = self.fitting[0]
        if winner is None and len(self.fitting) < 2:
            raise ValueError(f"break_even(): only {best.name} fits; name the strategy that is to win")
        other = self.fitting[1] if winner is None else self[winner]
        if other.name == best.name:
            raise ValueError(f"break_even({winner!r}): this is the best strategy already")
        found = []
        for of, (_, changed) in _CHANGES.items():
            for towards in (2.0, 0.5):
                factor = self._turning_point(best, other, changed, towards, whole=of == "batch")
                if factor is not None:
                    found.append(Change(of, factor))
        return tuple(sorted(found, key=lambda change: abs(math.log(change.factor))))

    def _turning_point(self, best: Estimate, other: Estimate, changed: Changed, towards: float, *, whole: bool) -> float | None:
        """Return the factor nearest to 1 from which another strategy wins; the batch changes in powers of two only."""

        def wins(factor: float) -> bool:
            work, cluster = changed(self.work, self.cluster, factor)
            one, two = (best_estimate(work, self.precision, each.strategy, cluster) for each in (other, best))
            return one is not None and one.fits and (two is None or not two.fits or one.step_s < two.step_s)

        loses, factor = 1.0, towards
        while not wins(factor):
            loses, factor = factor, factor * towards
            if not 1 / FARTHEST <= factor <= FARTHEST or (whole and self.work.samples * factor % 1):
                return None
        for _ in range(0 if whole else 12):
            middle = math.sqrt(loses * factor)
            loses, factor = (loses, middle) if wins(middle) else (middle, factor)
        return factor

    def cells(self) -> list[tuple[str, ...]]:
        """The texts of the table, row by row."""
        return [_texts(row) for row in self.rows[:SHOWN]]

    def _title(self) -> str:
        memory = self.cluster.device.memory_gb
        limit = "" if math.isinf(memory) else f" with {bytes_in_words(memory * 1e9)} each"
        return (
            f"{self.work.parameters:,.0f} parameters, {counted(self.work.samples, 'sample')} per step, "
            f"{counted(self.cluster.ranks, 'rank')}{limit}, {self.cluster.link}"
        )

    def _notes(self) -> list[str]:
        notes = ["m: micro-batches; r: activations are recomputed. The first axis of a strategy is the outermost."]
        if len(self.rows) > SHOWN:
            notes.append(f"More strategies, {len(self.rows) - SHOWN} of them, are in .rows.")
        if self.undivided:
            names = ", ".join(self.undivided[:3]) + (", ..." if len(self.undivided) > 3 else "")
            notes.append(f"The batch cannot be divided among the replicas, or into enough micro-batches, of {names}.")
        return notes

    def __repr__(self) -> str:
        return "\n".join([self._title(), *Table(HEADINGS, self.cells(), WORDS).lines(), *self._notes()])

    def _repr_html_(self) -> str:
        table = Table(HEADINGS, self.cells(), WORDS).html("padding:2px 4px;white-space:nowrap;text-align:{}")
        caption = f'<caption style="text-align:left">{html.escape(self._title())}</caption>'
        notes = "<br>".join(map(html.escape, self._notes()))
        return f"{table.replace(', ', ',<br>').replace('<table>', f'<table>{caption}')}<small>{notes}</small>"


@public_api
def plan(
    model: Transformer | nn.Module,
    batch: Any,
    cluster: Cluster,
    *,
    parameter_bytes: float | None = None,
    gradient_bytes: float | None = None,
    optimizer_bytes: float | None = None,
) -> Plan:
    """Compare all strategies for a model on a cluster: what fits, how long a step takes, and what limits it.

    The strategies are DDP, FSDP2 (ZeRO-3), FSDP2 that keeps gathered parameters (ZeRO-2), HSDP, tensor parallelism
    inside nodes, pipelines (1F1B), and all meshes of them. Each has the number of micro-batches, with or without
    recomputation, that is the fastest that fits. For example:

        model = lab.Transformer(layers=32, width=4096, sequence=8192, vocabulary=128256)
        network = lab.Network(nodes=8, inside=lab.Link.nvlink4, between=lab.Link.infiniband_ndr)
        lab.plan(model, batch=128, cluster=lab.Cluster(ranks=64, device=lab.Device.h100, link=network))

    Args:
        model: a transformer's shape; or a module, which computes shapes only, for which tensor parallelism and
            pipelines are not planned.
        batch: a step of all ranks together: for a transformer a number of sequences; for a module its inputs, a tensor
            or a tuple of tensors, whose first dimension is the batch.
        cluster: the ranks, their devices and their network.
        parameter_bytes: bytes per parameter, and of a transformer also per activation; default: 2 (mixed precision) for
            a transformer, those of its own type for a module.
        gradient_bytes: bytes per gradient; default: as many as a parameter's.
        optimizer_bytes: bytes of the optimizer's state per parameter; default: those of Adam, 12 in mixed precision
            with its 32-bit copy of the parameters, else two parameters'. SGD has 0, with momentum a parameter's.

    Returns:
        the plan, a table in a notebook: times as if each rank's kernels reached the device's rates.

    Raises:
        TypeError, ValueError: an invalid argument.

    Source: docs/planning.md has all formulas: S. Rajbhandari et al., "ZeRO", SC20; D. Narayanan et al., "Efficient
        Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC21; V. Korthikanti et al., "Reducing
        Activation Recomputation in Large Transformer Models", 2022.
    """
    given = {"parameter_bytes": parameter_bytes, "gradient_bytes": gradient_bytes, "optimizer_bytes": optimizer_bytes}
    for name, value in given.items():
        if value is not None:
            check_number(value, f"{name}={value!r}: expected a number of bytes, from 0", at_least=0, below=math.inf)
    if not isinstance(cluster, Cluster):
        raise TypeError(f"cluster={cluster!r}: expected a lab.Cluster")
    precision = None
    if parameter_bytes is not None:
        of_adam = 12 if parameter_bytes <= 2 else 2 * parameter_bytes
        precision = Precision(parameter_bytes, parameter_bytes, of_adam)
    work, precision = workload_of(model, batch, precision)
    if gradient_bytes is not None:
        precision = replace(precision, gradient_bytes=gradient_bytes)
    if optimizer_bytes is not None:
        precision = replace(precision, optimizer_bytes=optimizer_bytes)
    found, undivided = [], []
    for strategy in strategies(work, cluster):
        estimate = best_estimate(work, precision, strategy, cluster)
        if estimate is None:
            undivided.append(strategy.name)
        else:
            found.append(estimate)
    rows = sorted(found, key=lambda row: (row.missing_bytes, row.step_s))
    return Plan(tuple(rows), tuple(undivided), work, precision, cluster)


def _texts(row: Estimate) -> tuple[str, ...]:
    exposed = ", ".join(
        f"{axis} {in_words(seconds, 's')} {row.level[axis]}" for axis, seconds in row.exposed_s.items() if seconds
    )
    return (
        row.name,
        f"{row.micro_batches}{' r' if row.recompute else ''}",
        bytes_in_words(sum(row.memory_bytes.values())),
        in_words(row.step_s, "s") if row.fits else "too large",
        in_words(row.compute_s, "s"),
        in_words(row.bubble_s, "s") if row.bubble_s else "",
        exposed,
        *(bytes_in_words(row.memory_bytes[kind]) for kind in PLANNED_KINDS),
    )


Changed = Callable[[Workload, Cluster, float], tuple[Workload, Cluster]]


def _link(level: str) -> Changed:
    def changed(work: Workload, cluster: Cluster, factor: float) -> tuple[Workload, Cluster]:
        link: Link = getattr(cluster.network, level)
        faster: Any = {level: replace(link, gbit_per_s=link.gbit_per_s * factor, name="")}
        return work, replace(cluster, link=replace(cluster.network, **faster))

    return changed


def _device(*rates: str) -> Changed:
    def changed(work: Workload, cluster: Cluster, factor: float) -> tuple[Workload, Cluster]:
        better: Any = {rate: getattr(cluster.device, rate) * factor for rate in rates}
        return work, replace(cluster, device=replace(cluster.device, **better))

    return changed


def _batch(work: Workload, cluster: Cluster, factor: float) -> tuple[Workload, Cluster]:
    return replace(work, samples=round(work.samples * factor)), cluster


_CHANGES: Final[Mapping[str, tuple[str, Changed]]] = {  # what changes, in words, and how
    "between": ("the bandwidth between nodes", _link("between")),
    "inside": ("the bandwidth inside nodes", _link("inside")),
    "device": ("the device's rates", _device("tflop_per_s", "gbyte_per_s")),
    "memory": ("the device's memory", _device("memory_gb")),
    "batch": ("the batch", _batch),
}
