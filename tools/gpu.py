"""`make gpu`: everything that needs a GPU, in one command, and a page with the results.

    make gpu                           all stages; writes docs/gpu.md
    make gpu ARGS="--rehearse"         the same on the CPU, as far as possible, into build/gpu
    make gpu ARGS="--lessons 00 02"    of the lessons only these; into build/gpu

The stages are the doctor, a pre-flight of half a minute (tools/gpu_smoke.py), the tests marked `gpu`, the torch lessons
and a benchmark, in under eight minutes. They run in the Python that runs this, install nothing and need no network. A
stage that lacks a package, fails or takes too long does not keep the others from running; what failed stands
first on the page, and at the end in the terminal.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools import gpu_report
from tools.gpu_report import ROOT, Outcome

BUILD: Final = ROOT / "build" / "gpu"
LIMIT_S: Final = 480.0  # for everything
# In the order in which the stages run.
LIMITS_S: Final = {"doctor": 45.0, "smoke": 60.0, "tests": 165.0, "lessons": 120.0, "benchmark": 90.0}
REHEARSAL_FACTOR: Final = 8.0  # there is no hurry, and two busy cores without a GPU need ten minutes for the lessons alone


def main() -> int:
    """Run all stages and write the page; returns 0 if everything that could run passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="run on the CPU what a CPU can run")
    parser.add_argument("--stages", nargs="+", choices=[*LIMITS_S], default=[*LIMITS_S], help="only these")
    parser.add_argument("--lessons", nargs="+", default=[], metavar="NUMBER", help="of the lessons only these, such as 00 02b")
    parser.add_argument("--out", type=Path, help="copy the page and an archive of all figures and logs into this folder too")
    arguments = parser.parse_args()
    started = time.monotonic()
    shutil.rmtree(BUILD, ignore_errors=True)
    BUILD.mkdir(parents=True)
    factor = REHEARSAL_FACTOR if arguments.rehearse else 1.0
    outcomes = []
    for stage in (stage for stage in LIMITS_S if stage in arguments.stages):
        limit_s = min(factor * LIMITS_S[stage], factor * LIMIT_S - (time.monotonic() - started))
        command = _command(stage, arguments.lessons)
        outcomes.append(run_stage(stage, command, rehearsal=arguments.rehearse, limit_s=limit_s))
    partial = arguments.rehearse or arguments.lessons or len(outcomes) < len(LIMITS_S)
    page = BUILD / "gpu.md" if partial else ROOT / "docs" / "gpu.md"
    gpu_report.write(page, outcomes, BUILD, rehearsal=arguments.rehearse)
    for heading, lines in gpu_report.failures(outcomes).items():
        print(f"\n{heading}", *lines, sep="\n  ")
    print(f"\n{page.relative_to(ROOT)} says what ran; figures, lessons and logs are in {BUILD.relative_to(ROOT)}/")
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        shutil.copy(page, arguments.out)
        shutil.make_archive(str(arguments.out / "gpu"), "gztar", BUILD)
    return 0 if all(o.state == "ran" for o in outcomes) else 1


def run_stage(stage: str, command: list[str], *, rehearsal: bool, limit_s: float) -> Outcome:
    """Run one stage in a process group of its own, with its output in a log; end it when its time is over."""
    path = BUILD / f"{stage}.log"
    print(f"{stage} ...", end=" ", flush=True)
    started = time.monotonic()
    with path.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env=environment(rehearsal=rehearsal), stdin=subprocess.DEVNULL,
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            state = "ran" if process.wait(max(limit_s, 1.0)) == 0 else "failed"
        except subprocess.TimeoutExpired:
            state = "timed out"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # groups of ranks end by themselves when their notebook ends
            process.wait()
    seconds = time.monotonic() - started
    print(f"{state} after {seconds:.0f} s (build/gpu/{stage}.log)", flush=True)
    return Outcome(stage, path, state, seconds)


def environment(*, rehearsal: bool) -> dict[str, str]:
    """The environment of the stages, with this checkout's labkit, whatever else is installed."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    return os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "LABKIT_GPU_REHEARSAL": "1" if rehearsal else "0"}


def _command(stage: str, lessons: Sequence[str]) -> list[str]:
    """The arguments of Python that run a stage."""
    if stage == "doctor":
        return ["-c", "import labkit; print(labkit.doctor())"]
    if stage == "smoke":
        return ["-m", "tools.gpu_smoke"]
    if stage == "lessons":
        return ["-m", "tools.gpu_lessons", str(BUILD), *lessons]
    if stage == "benchmark":
        return ["-m", "bench.speed.gpu", str(BUILD)]
    files = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests" / "gpu").glob("test_*.py"))
        if "pytestmark = gpu" in path.read_text("utf-8")
    ]
    # The project's own options are for nbval, which may not be installed. One hanging test must not outlive its stage.
    options = ["-o", "addopts=", "-o", "faulthandler_timeout=45", "--timeout=60", "-m", "gpu", "-ra", "-v"]
    return ["-m", "pytest", *options, *files]


if __name__ == "__main__":
    sys.exit(main())
