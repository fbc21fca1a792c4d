"""`make bench`: what labkit promises, beside a lower bound from the same kernels, and the same work by other tools."""

from __future__ import annotations

import argparse
import collections
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import psutil

from bench.kernel import Kernel
from bench.page import about, duration, mib, say, table
from bench.speed import errors_and_stop, live_picture
from bench.speed.promises import PROMISES
from labkit.worker.runtimes.registry import RUNTIMES

KERNELS: Final = 7
INTRODUCTION: Final = """# Benchmarks

`make bench` prints this page; `make bench ARGS="--write docs/benchmarks.md"` keeps it here. Each number is the median
of {kernels} fresh ipykernels, in which the tools take turns, so that all see the machine in the same state. No test asserts
them: a busy machine is not a defect. The goals are what a user feels, and they stand in `bench/speed/promises.py`.
"""
LABKIT: Final = "labkit"
PEERS: Final = Path(__file__).resolve().parents[1] / "peers"
# The other tools: the name, the cell that defines the tool, and the expression that makes it.
TOOLS: Final = (
    (LABKIT, (PEERS / "with_labkit.py").read_text(), "Labkit('fork')"),
    ("bare forkserver, pipes and shared memory", "from bench.peers.with_forkserver import Forkserver", "Forkserver()"),
    ("labkit, start='spawn', spare ranks warm", (PEERS / "with_labkit.py").read_text(), "Labkit('spawn')"),
    (
        "torch.multiprocessing, fork (fails once CUDA is touched)",
        "from bench.peers.with_multiprocessing import Multiprocessing",
        "Multiprocessing('fork')",
    ),
    (
        "torch.multiprocessing, spawn (not from a cell)",
        "from bench.peers.with_multiprocessing import Multiprocessing",
        "Multiprocessing('spawn')",
    ),
    ("Ray's actors", "from bench.peers.with_ray import Ray", "Ray()"),
)
TASKS: Final = {
    "first": "first 4 ranks of a kernel up, one sum seen",
    "later": "later ones",
    "call": "call of nothing",
    "move": "64 MiB to each of 4 and back",
    "memory": "memory, 4 idle ranks",
}
Measure = Callable[[Kernel], dict[str, float]]


def tool(cell: str, make: str) -> Measure:
    """The measurement of a tool."""

    def measure(kernel: Kernel) -> dict[str, float]:
        start = time.perf_counter()
        kernel.run(f"{cell}\ntool = {make}")
        kernel.run("tool.ready()")
        first_s = time.perf_counter() - start
        return {"first": first_s, **kernel.run("from bench.peers.work import measure", value="measure(tool)")}

    return measure


def called(function: str) -> Measure:
    """The measurement that a function of `recording_costs` makes inside the kernel."""
    return lambda kernel: kernel.run("from bench.speed import recording_costs", value=f"recording_costs.{function}()")


def imports(_: Kernel) -> dict[str, float]:
    """The memory of a process that has imported torch, and of one that has imported all that ranks find imported."""
    return {"torch": import_pss(["torch"]), "all": import_pss(RUNTIMES["torch"].preload)}


def import_pss(modules: Sequence[str]) -> float:
    """Proportional set size in bytes of one process that has imported these modules and done nothing else.

    After a colon, a module may name a function, as in `Runtime.preload`; it is not called.
    """
    names = [module.partition(":")[0] for module in modules]
    code = f"import sys, {', '.join(names)}; print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError(f"the process that imports {', '.join(names)} has ended")
        return float(psutil.Process(process.pid).memory_full_info().pss)


PARTS: Final[dict[str, dict[str, Measure]]] = {
    "tools": {name: tool(cell, make) for name, cell, make in TOOLS} | {"import": imports},
    "spans": {"span": called("spans")},
    "phases": {"step": called("training")},
    "collectives": {"all_reduce": called("collectives")},
    "trouble": {"until": errors_and_stop.measure},
    "picture": {"picture": live_picture.measure},
}


def medians(measurements: dict[str, Measure], kernels: int) -> dict[str, float]:
    """Medians over fresh kernels, in which the measurements take turns; by the names of measurement and number."""
    samples: dict[str, list[float]] = collections.defaultdict(list)
    for number in range(kernels):
        for name, measure in measurements.items():
            say(f"{name}, kernel {number + 1} of {kernels}")
            try:
                with Kernel() as kernel:
                    found = measure(kernel)
            except RuntimeError as error:
                say(f"{name} failed:\n{error}")
                continue
            for key, value in found.items():
                samples[f"{name}: {key}"].append(value)
    return {key: statistics.median(values) for key, values in samples.items()}


def report(machine: Sequence[str], measured: dict[str, float], kernels: int) -> Iterator[str]:
    """The lines of the page."""
    yield INTRODUCTION.format(kernels=kernels)
    yield from machine
    yield "\n## What labkit promises\n"
    yield table(
        ["what", "labkit", "beside it", "ratio", "goal", "reached"],
        [promise.cells(measured) for promise in PROMISES if promise.key in measured],
    )
    if "import: all" in measured:
        all_of_it = mib(measured["import: all"])
        yield f"\nOne process that has imported everything that ranks find imported, not only torch: {all_of_it}."
        yield "\n## The same work by other tools\n"
        yield table(["tool", *TASKS.values()], [[name, *_tasks(name, measured)] for name, *_ in TOOLS])


def _tasks(name: str, measured: dict[str, float]) -> list[str]:
    return [(mib if task == "memory" else duration)(measured.get(f"{name}: {task}")) for task in TASKS]


def main() -> None:
    """Measure, print, and optionally write."""
    parser = argparse.ArgumentParser("python -m bench.speed", description=__doc__)
    parser.add_argument("--write", metavar="FILE", type=Path, help="keep the page in this file as well")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="measure only these parts")
    parser.add_argument("--kernels", type=int, default=KERNELS, help="how many fresh kernels (default: %(default)s)")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that kernels and their processes end with this one
    machine = about()
    chosen = {name: measure for part in arguments.only for name, measure in PARTS[part].items()}
    text = "\n".join(report(machine, medians(chosen, arguments.kernels), arguments.kernels))
    print(text)
    if arguments.write:
        arguments.write.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
