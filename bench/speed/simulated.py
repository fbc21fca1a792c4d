"""What `lab.simulate` says beside real groups on this machine."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Final

import labkit as lab
from bench.page import about, load_afterwards, options, publish, say, table
from bench.speed import programs

LINK: Final = lab.Link(gbit_per_s=1, latency_us=50)
TRIES: Final = 5
KINDS: Final = [f"{size} ranks, {layers}" for size in (2, 4) for layers in ("sleeping", "computing")]
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


def main() -> None:
    """Measure and print all times; optionally keep a summary in a page."""
    arguments, machine = options("bench.speed.simulated", __doc__, TRIES), about()
    groups = list(real_groups(arguments.only, arguments.tries))
    print(table(ALL_HEADINGS, [cells for cells, _ in groups]), end="\n\n")
    load = load_afterwards()
    ratios = {cells[0]: ratio for cells, ratio in groups}
    errors = sorted(abs(ratio - 1) for ratio in ratios.values())
    lines = [INTRODUCTION, *machine, load, "", table(["simulated ÷ real", *KINDS], ratios_by_program(ratios)), ""]
    lines += [f"Median error: {statistics.median(errors):.0%}; the largest: {errors[-1]:.0%}.", "", RUNS]
    publish(lines, arguments.write)


ALL_HEADINGS: Final = ("program", "simulated [ms]", "real [ms]", "own cores [ms]", "real, all tries [ms]", "ratio")
INTRODUCTION: Final = f"""## Measured

`python -m bench.speed.simulated --write docs/simulate.md` writes this section and prints each program's times:
`measured=True` beside real groups over a link of {LINK}: {TRIES} of each in turns, medians of `step_ms`. Where
ranks outnumber cores, the real run is replayed as if each had its own (`lab.replay(run, own_cores=True)`). Layers that
sleep are not disturbed by other ranks; layers that compute are.
"""
RUNS: Final = "Simulations of GPUs stand beside [published runs](planning.md#published-runs)."


if __name__ == "__main__":
    main()
