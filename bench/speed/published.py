"""What `lab.plan` and `lab.simulate` say beside what was published: tokens per second, and memory.

python -m bench.speed.published                            every run; a minute, and 15 for simulations
python -m bench.speed.published --only V02                 those whose key, model or source contains this
python -m bench.speed.published --write docs/planning.md   a part of them, and a summary, into the page
"""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import labkit as lab
from bench.page import options, publish, say, table
from bench.speed.published_rows import MEMORY_FACTS, MODELS, RUNS, SOURCES, PublishedRun, Setup, data_ranks
from bench.speed.transformers import Training, train
from labkit.costs.estimate import Estimate

DEVICES: Final = {
    "v100_16": replace(lab.Device.v100, memory_gb=16), "a100_40": lab.Device.a100_40, "a100_80": lab.Device.a100,
    "h100": lab.Device.h100, "h100_96": replace(lab.Device.h100, gbyte_per_s=0.85 * 2400, memory_gb=96),
    "rtx_3090": lab.Device(tflop_per_s=35, gbyte_per_s=0.85 * 936, memory_gb=24),
}  # fmt: skip
NVLINK2: Final = lab.Link(gbit_per_s=1200, latency_us=2)  # NVIDIA V100 data sheet: 300 GB/s for both directions together
INSIDE: Final = {"nvlink2": NVLINK2, "nvlink3": lab.Link.nvlink3, "nvlink4": lab.Link.nvlink4, "pcie4": lab.Link.pcie4}
UNKNOWN_GBIT_PER_S: Final = 3200  # between nodes, where a source does not say
LATENCY_US: Final = 5
SIMULATED: Final = (  # several devices, numbers of ranks, sizes and strategies, all with few micro-batches
    "V02", "V06", "G01", "K10", "F01", "F02", "M09", "M15", "M16", "M27", "M58", "T01", "T03", "T10", "T13",
)  # fmt: skip
STEPS: Final = 2
FAR: Final = 0.4  # an error that the page names


class Compared(NamedTuple):
    """A run, and what plan and simulation say."""

    run: PublishedRun
    row: Estimate
    simulated: tuple[float, float] | None = None  # tokens per second, and bytes, of each GPU; of those in SIMULATED

    @property
    def ratio(self) -> float:
        """Planned tokens per second, of the published ones."""
        return self.row.tokens_per_s / self.run.tokens_per_s


def network_of(setup: Setup) -> lab.Network:
    """Return the network of a setup."""
    per_node = min(setup.per_node, setup.ranks)
    between = lab.Link(gbit_per_s=setup.between_gbit_per_s or UNKNOWN_GBIT_PER_S, latency_us=LATENCY_US)
    return lab.Network(nodes=setup.ranks // per_node, inside=INSIDE[setup.inside], between=between)


def planned(setup: Setup) -> Estimate | None:
    """Return the plan's row for a setup; None if the plan has no such mesh or schedule."""
    kind, _, chunks = setup.schedule.partition(" ")
    if kind == "zero_bubble":
        return None
    try:
        plan = lab.plan(
            lab.Transformer(**MODELS[setup.model], sequence=setup.sequence), setup.sequences,
            lab.Cluster(ranks=setup.ranks, device=DEVICES[setup.device], link=network_of(setup)), strategy=setup.strategy,
            micro_batch=setup.micro_batch, recompute=setup.recompute, chunks=int(chunks or 1),
            sequence_parallel=setup.sequence_parallel, parameter_bytes=setup.parameter_bytes,
            gradient_bytes=setup.gradient_bytes, optimizer_bytes=setup.optimizer_bytes, compute_bytes=setup.compute_bytes,
        )  # fmt: skip
    except ValueError as error:
        if "no strategy" in str(error):
            return None
        raise
    return plan.rows[0] if plan.rows else None


def compared(runs: Iterable[PublishedRun] = RUNS) -> list[Compared]:
    """Return the runs that the plan can describe, with its rows."""
    return [Compared(run, row) for run in runs if (row := planned(run)) is not None]


def error(each: Compared) -> float:
    """How far the plan is off, as a share of what was published."""
    return abs(each.ratio - 1)


def cells(each: Compared) -> list[str]:
    """A row of the table of runs."""
    run, row, found = each

    def rate(tokens_per_s: float) -> str:
        return f"{tokens_per_s:,.0f} ({tokens_per_s / run.tokens_per_s:.2f})"

    return [
        f"{run.key} {run.model}", f"{run.ranks:,} {run.device}", run.strategy, f"{run.micro_batch} {run.recompute}",
        f"{run.tokens_per_s:,.0f}", rate(row.tokens_per_s), rate(found[0]) if found else "",
        f"{run.memory_gb:.0f}" if run.memory_gb else "", f"{row.needed_bytes / 1e9:.0f}",
        f"{found[1] / 1e9:.0f}" if found else "",
    ]  # fmt: skip


def simulated(run: PublishedRun) -> tuple[float, float] | None:
    """Return the tokens per second and the bytes of each GPU that `lab.simulate` finds for a run in SIMULATED."""
    if run.key not in SIMULATED:
        return None
    say(f"simulating {run.key}")
    how = Training(
        strategy=run.strategy, micro_batch=run.micro_batch, recompute=run.recompute, mixed=run.parameter_bytes == 4,
        accumulate=run.sequences // data_ranks(run.strategy) // run.micro_batch,
    )  # fmt: skip
    shape = lab.Transformer(**MODELS[run.model], sequence=run.sequence)
    sim = lab.simulate(train, shape, how, STEPS, ranks=run.ranks, link=network_of(run), device=DEVICES[run.device])
    return run.sequences * run.sequence / run.ranks / (sim.step_ms / 1e3), lab.memory_mb(sim) * 1e6


def by(name: str, found: Sequence[Compared]) -> list[list[str]]:
    """A row for each device or source: how many runs, the ratios' median, the lowest and the highest."""
    groups: dict[str, list[Compared]] = {}
    for each in found:
        groups.setdefault(getattr(each.run, name), []).append(each)
    lines = []
    for value, members in sorted(groups.items()):
        ratios = sorted(each.ratio for each in members)
        memory = sorted(each.row.needed_bytes / 1e9 / each.run.memory_gb for each in members if each.run.memory_gb)
        kept = f"{statistics.median(memory):.2f} ({memory[0]:.2f} to {memory[-1]:.2f})" if memory else ""
        lines.append([value, str(len(members)), f"{statistics.median(ratios):.2f}", f"{ratios[0]:.2f} to {ratios[-1]:.2f}", kept])
    return lines


def shown(found: Sequence[Compared]) -> list[Compared]:
    """The first run of each source and device, all that are far off, and all that were simulated."""
    chosen: dict[str, Compared] = {}
    seen: set[tuple[str, ...]] = set()
    for each in found:
        kind = each.run.source, each.run.device
        if kind not in seen or error(each) > FAR or each.simulated:
            seen.add(kind)
            chosen[each.run.key] = each
    return list(chosen.values())


def item(source: str) -> list[str]:
    """A source as an item of a list."""
    return textwrap.wrap(f"- {source}: {SOURCES[source]}", 120, subsequent_indent="  ", break_on_hyphens=False)


def main() -> None:
    """Compare all runs, print them, and optionally keep a part of them in a page."""
    arguments = options("bench.speed.published", __doc__)
    plans = compared(run for run in RUNS if arguments.only in run.key + run.model + run.source)
    found = [each._replace(simulated=simulated(each.run)) for each in plans]
    print(table(HEADINGS, list(map(cells, found))), end="\n\n")
    errors = [statistics.median(error(each) for each in found[half::2]) for half in (0, 1)]
    within = sum(error(each) <= FAR for each in found) / len(found)
    too_large = [(fact, planned(fact)) for fact in MEMORY_FACTS if not fact.fits]
    wrong = [f"{fact.key} ({fact.note})" for fact, row in too_large if row is not None and row.fits]
    summary = (
        f"{len(found)} of {len(RUNS)} runs; the others have meshes or schedules that a plan has not. The median error is "
        f"{statistics.median(map(error, found)):.0%}, and {within:.0%} are within {FAR:.0%}. Fitted is one number for each "
        f"generation of GPUs, the share of the data sheet's rate, so that the median of every second run is near 1. The median "
        f"error of these is {errors[0]:.0%}, that of the others {errors[1]:.0%}. Of {len(too_large)} setups that ran out of "
        f"memory, the plan says of {len(wrong)} that it fits: "
        f"{', '.join(wrong)}.{_simulations(found)}"
    )
    lines = [
        INTRODUCTION, *textwrap.wrap(summary, 120), "",
        table(("source", "runs", "planned ÷ published", "range", "memory"), by("source", found)), "", SHOWN,
        table(HEADINGS, list(map(cells, shown(found)))), "",
        *(line for name in dict.fromkeys(each.run.source for each in found) for line in item(name)),
    ]  # fmt: skip
    publish(lines, arguments.write)


def _simulations(found: Sequence[Compared]) -> str:
    errors = [abs(each.simulated[0] / each.run.tokens_per_s - 1) for each in found if each.simulated]
    if not errors:
        return ""
    return f" The median error of {len(errors)} simulations is {statistics.median(errors):.0%}, the largest {max(errors):.0%}."


HEADINGS: Final = (
    "run", "GPUs", "strategy", "micro-batch", "tokens/s", "planned", "simulated", "GB", "planned", "simulated",
)  # fmt: skip
INTRODUCTION: Final = """## Published runs

`python -m bench.speed.published --write docs/planning.md` writes this section, and prints all runs; what each source
leaves open, and what was presumed, is in `bench/speed/published_rows.py`.
"""
SHOWN: Final = """The first run of each source and device, all that are more than 40 % off, and fifteen that
`lab.simulate` executed, too, in a program of our own, `bench/speed/transformers.py`; tokens per second, beside the
published ones, and GB of one GPU. Published peaks are what the allocator had reserved, or what `nvidia-smi` showed.
BigScience: widths of 14,400 are no multiples of 128, and large runs may have waited for each kernel
(`CUDA_LAUNCH_BLOCKING`). DLPerf: 100 Gbit/s for eight GPUs, and a V100 has no NVLink to three others of its node. Our
program has a kernel each for mask, softmax and dropout, which Megatron-LM and OneFlow fuse (G01, K10, V02, V06), and no
copy of the parameters in 32 bits (G01, K10). MosaicML's loss is fused (M15: less memory).
"""


if __name__ == "__main__":
    main()
