"""What `lab.simulate` says beside what was measured: real groups on this machine, and published runs on GPUs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

import labkit as lab
from bench.page import about, load_afterwards, options, publish, say, table
from bench.speed import llama, programs

LINK: Final = lab.Link(gbit_per_s=1, latency_us=50)
TRIES: Final = 5
KINDS: Final = [f"{size} ranks, {layers}" for size in (2, 4) for layers in ("sleeping", "computing")]

# torchtitan, llama3_h100_202412_torchtitan.md: ranks; tokens/s of a GPU, eager and compiled; GiB, eager.
PUBLISHED: Final = ((8, 5762, 6667, 82.4), (128, 5605, 6514, 67.0))
THEIR_CARD: Final = replace(lab.Device.h100, gbyte_per_s=0.85 * 2400, name="with 2.4 TB/s")
PER_NODE: Final = 8
BATCH: Final = 2  # sequences of a GPU
PROGRAMS: Final[dict[str, Callable[..., None]]] = {
    "data parallel": programs.data_parallel, "shards": programs.shards, "tensor parallel": programs.tensor_parallel,
    "pipeline": programs.pipeline,
}  # fmt: skip


def real_groups(only: str, tries: int) -> Iterator[tuple[list[str], float]]:
    """For each program: a row of the times of real groups and simulations in turns, medians; and the ratio."""
    for size in (2, 4):
        with lab.Group(size, devices="cpu", threads=1, link=LINK) as group:
            for sleeps in (True, False):
                work = programs.Work(sleeps=sleeps)
                for title, program in PROGRAMS.items():
                    if only not in title:
                        continue
                    name = f"{title}, {size} ranks, {'sleeping' if sleeps else 'computing'}"
                    say(name)
                    runs, simulated = [], []
                    for _ in range(tries):
                        runs.append(group.run(program, work))
                        simulated.append(lab.simulate(program, work, ranks=size, link=LINK, measured=True).step_ms)
                    real = [lab.step_ms(run) for run in runs]
                    alone = [lab.step_ms(lab.replay(run, own_cores=True)) for run in runs]
                    medians = [statistics.median(times) for times in (simulated, real, alone)]
                    spread, ratio = f"{min(real):.1f} to {max(real):.1f}", medians[0] / medians[2]
                    yield [name, *(f"{ms:.1f}" for ms in medians), spread, f"{ratio:.2f}"], ratio


def ratios_by_program(ratio_by_name: dict[str, float]) -> list[list[str]]:
    """A row of the page for each program: its ratios, with columns for the number of ranks and what layers do."""
    cells: dict[str, list[str]] = {}
    for name, ratio in ratio_by_name.items():
        cells.setdefault(name.partition(", ")[0], []).append(f"{ratio:.2f}")
    return [[program, *ratios] for program, ratios in cells.items()]


def published() -> Iterator[list[str]]:
    """A row for each published run of Llama 3.1 8B with FSDP, and each device."""
    for ranks, eager, compiled, memory_gib in PUBLISHED:
        between = lab.Link(gbit_per_s=400 * PER_NODE, latency_us=5)
        network = lab.Network(nodes=ranks // PER_NODE, inside=lab.Link.nvlink4, between=between)
        for device in (lab.Device.h100, THEIR_CARD):
            began_s = time.monotonic()
            sim = lab.simulate(llama.train, llama.LLAMA_8B, BATCH, 2, ranks=ranks, link=network, device=device)
            tokens = BATCH * llama.LLAMA_8B.length / lab.step_ms(sim) * 1e3
            ratios = f"{tokens / eager - 1:+.0%} / {tokens / compiled - 1:+.0%}"
            found_gib = lab.memory_mb(sim) * 1e6 / 2**30
            yield [
                f"FSDP on {ranks} GPUs, {device.name}", f"{tokens:,.0f}", f"{eager:,} / {compiled:,}", ratios,
                f"{found_gib:.1f}", f"{memory_gib} ({found_gib / memory_gib - 1:+.0%})", f"{time.monotonic() - began_s:.0f}",
            ]  # fmt: skip


def main() -> None:
    """Measure and print all times; optionally keep a summary in a page."""
    arguments, machine = options("bench.speed.simulated", __doc__, TRIES), about()
    groups = list(real_groups(arguments.only, arguments.tries))
    print(table(ALL_HEADINGS, [cells for cells, _ in groups]), end="\n\n")
    load = load_afterwards()
    ratios = {cells[0]: ratio for cells, ratio in groups}
    errors = sorted(abs(ratio - 1) for ratio in ratios.values())
    lines = [INTRODUCTION, *machine, load, "", table(["simulated ÷ real", *KINDS], ratios_by_program(ratios)), ""]
    lines += [f"Median error: {statistics.median(errors):.0%}; the largest: {errors[-1]:.0%}.", "", RUNS.lstrip()]
    heads = ["run", "simulated tokens/s", "published, eager / compiled", "error", "simulated GiB", "published GiB", "took [s]"]
    publish([*lines, table(heads, list(published()))], arguments.write)


ALL_HEADINGS: Final = ("program", "simulated [ms]", "real [ms]", "own cores [ms]", "real, all tries [ms]", "ratio")
INTRODUCTION: Final = f"""## Measured

`python -m bench.speed.simulated --write docs/simulate.md` writes this section and prints each program's times. First,
`measured=True` beside real groups over a link of {LINK}: {TRIES} of each in turns, medians of `step_ms`. Where
ranks outnumber cores, the real run is replayed as if each had its own (`lab.replay(run, own_cores=True)`). Layers that
sleep are not disturbed by other ranks; layers that compute are.
"""
RUNS: Final = """
Then torchtitan's [published runs](https://github.com/pytorch/torchtitan/tree/main/benchmarks) of Llama 3.1 8B on H100,
December 2024: sequences of 8,192 tokens, two for each GPU, every second matrix product computed again, bfloat16, eight
GPUs in a node, 400 Gbit/s for each between nodes. The model is our own, of the same size. The simulation assumes 50 %
of 989 TFLOP/s and 85 % of the memory's rate, for both 3.35 TB/s (`Device.h100`) and the 2.4 TB/s of their cards; that
these were limited to 500 W is not considered. Memory is that of tensors, without what allocator and NCCL need.
"""


if __name__ == "__main__":
    main()
