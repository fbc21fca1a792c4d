"""`make bench`: every number that labkit promises, beside a lower bound from the same run, and other tools' times."""

from __future__ import annotations

import argparse
import datetime
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from bench import machine
from bench.peers.comparison import FLOOR, LABKIT, TASKS, TOOLS, Results, measure
from bench.speed import collectives, errors_and_stop, floors, live_picture, phases, spans
from bench.table import Goal, duration, goal_rows, mib, table
from labkit.worker.runtimes.registry import RUNTIMES

ROOT: Final = Path(__file__).resolve().parents[2]
PARTS: Final = ("spans", "phases", "collectives", "tools", "trouble", "picture")
INTRODUCTION: Final = """# Benchmarks

`make bench` prints this page; `make bench ARGS="--write docs/benchmarks.md"` keeps it here. Every tool runs in a real
ipykernel of its own. The tools take turns, so that all see the machine in the same state. Numbers are medians. No test
asserts them: a busy machine is not a defect.
"""


def main() -> None:
    """Measure, print, and optionally write."""
    parser = argparse.ArgumentParser("python -m bench.speed", description=__doc__)
    parser.add_argument("--write", metavar="FILE", type=Path, help="keep the tables in this file as well")
    parser.add_argument(
        "--peers", metavar="PYTHON", default=sys.executable, help="the interpreter that has ipyparallel, accelerate"
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="measure only these parts")
    parser.add_argument("--notebooks", action="store_true", help="also time all notebooks under nbval, which takes minutes")
    arguments = parser.parse_args()

    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that kernels and their processes end with this one
    text = "\n".join(_report(arguments.only, arguments.peers, notebooks=arguments.notebooks))
    print(text)
    if arguments.write:
        arguments.write.write_text(f"{INTRODUCTION}\n{text}\n", encoding="utf-8")


def _report(parts: list[str], python_of_peers: str, *, notebooks: bool) -> list[str]:
    lines = [f"- {line}" for line in [*machine.describe(), f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"]]
    goals: list[Goal] = []
    results: Results = {}
    if "tools" in parts:
        _say("the same work by several tools")
        results = measure(TOOLS, python_of_peers)
        goals += _tool_goals(results)
    if "spans" in parts:
        _say("spans")
        ns = spans.measure()
        beside = ns["clock"] * 1e-9, "two clock reads"
        goals += [
            Goal("one `span`, recording", ns["recording"] * 1e-9, *beside, 5),
            Goal("one `span` outside a group", ns["outside"] * 1e-9, *beside, 1),
        ]
    if "phases" in parts:
        _say("phases of training")
        plain, ratio = phases.measure()
        beside = plain, "without, in turns"
        goals.append(Goal("a small model's step, its phases recorded", plain * ratio, *beside, 0.02, "slower"))
    if "collectives" in parts:
        _say("collectives")
        s = collectives.measure()
        beside = s["unrecorded"], "torch's own group, in turns"
        goals.append(Goal("one all_reduce of a number, 2 ranks, recorded", s["recorded"], *beside, 1.5))
    if "picture" in parts:
        _say("watch beside run")
        cost = live_picture.measure()
        fast = f"the kernel's processor per second, 2 × 10⁶ spans as fast as can be ({cost.dropped:.0%} lost)"
        goals += [
            Goal("training with `watch`, 2 ranks", cost.run_s * cost.ratio, cost.run_s, "`run`, in turns", 0.03, "slower"),
            Goal(
                "the kernel's processor per second of `watch`, 2 ranks train",
                cost.watch_share,
                cost.run_share,
                "`run`",
                0.05,
                "seconds",
            ),
            Goal(fast, cost.spans_share, None, "", 0.2, "seconds"),
            Goal("a million spans drawn as a timeline", cost.draw_s, None, "", 3, "seconds"),
        ]
    if "trouble" in parts:
        _say("errors and Stop")
        s = errors_and_stop.measure()
        goals += [
            Goal("a rank raises → error visible", s["raise"], None, "", 0.5, "seconds"),
            Goal("a rank is killed → error visible", s["kill"], None, "", 0.5, "seconds"),
            Goal("Stop → prompt, ranks blocked in C++", s["stop blocked"], None, "", 0.5, "seconds"),
            Goal("Stop → prompt, ranks computing", s["stop computing"], None, "", 0.5, "seconds"),
        ]
    if notebooks:
        _say("all notebooks under nbval")
        goals.append(Goal("all notebooks under nbval", _notebooks_s(), None, "", 300, "seconds"))
    lines += ["", "## What labkit promises", "", goal_rows(goals)]
    if results:
        fresh, warm = floors.gigabytes_per_s()
        lines += ["", f"Copying on one core: {fresh:.1f} GB/s into fresh memory, {warm:.1f} GB/s into warm memory."]
        preloaded = mib(floors.import_pss(RUNTIMES["torch"].preload))
        lines += [f"One process that has imported everything that ranks find imported, not only torch: {preloaded}."]
        lines += ["", "## The same work by other tools", "", _tool_table(results)]
    return lines


def _tool_goals(results: Results) -> list[Goal]:
    mine, floor = ({k: v if isinstance(v, float) else None for k, v in results[t.name].items()} for t in (LABKIT, FLOOR))
    return [
        Goal("`Group(4)` ready and one all_reduce done", mine["ready"], floor["ready"], "bare forkserver", 1.2),
        Goal("`run` of nothing on four ranks", mine["call"], floor["call"], "bare pipes", 3),
        Goal("64 MiB to each of four ranks and back", mine["move"], floors.copies_s(), "copying 5 × 64 MiB", 0.1, "seconds"),
        Goal(
            "memory of four idle ranks and their server",
            mine["memory"],
            floors.import_pss(),
            "one `import torch`",
            1.5,
            is_size=True,
        ),
    ]


def _tool_table(results: Results) -> str:
    def cell(task: str, value: float | str) -> str:
        return value if isinstance(value, str) else mib(value) if task == "memory" else duration(value)

    head = ["tool", "4 ranks up, one sum seen", "call of nothing", "64 MiB to each of 4 and back", "memory, 4 idle ranks"]
    return table(head, [[name, *(cell(task, values[task]) for task in TASKS)] for name, values in results.items()])


def _notebooks_s() -> float | None:
    """Duration of the notebooks in seconds; None if one of them fails."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "pytest", "-q", "--nbval-lax", "notebooks"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode:
        print(result.stdout[-3000:], file=sys.stderr)
        return None
    return time.perf_counter() - start


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
