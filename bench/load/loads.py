"""Heavy loads on groups, each at any size: full size in `python -m bench.load`, small in the tests."""

from __future__ import annotations

import contextlib
import glob
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil

import labkit as lab
from bench.load.footprint import Footprint, watch_growth

ROOT: Final = Path(__file__).resolve().parents[2]
NOTEBOOK: Final = "import sys; from bench.load.loads import live_as_notebook; live_as_notebook(int(sys.argv[1]))"
TOGETHER_LIMIT_S: Final = 300.0  # until all notebooks' processes have started: forty of them import torch on two cores
LINE: Final = b"x" * 99 + b"\n"


def many_runs(count: int, *, warm: int, runtime: str = "torch") -> Footprint:
    """The growth of resources per run on one group of two."""
    with lab.Group(2, runtime=runtime) as group:
        return watch_growth(lambda: group.run(_summed), count, warm=warm)


def many_groups(count: int, *, warm: int, runtime: str = "torch") -> Footprint:
    """The growth of resources per group that is opened, used and closed."""

    def one() -> None:
        with lab.Group(2, runtime=runtime) as group:
            group.run(_summed)

    return watch_growth(one, count, warm=warm)


def many_ranks(count: int) -> list[float]:
    """The result of one all_reduce of the ranks' numbers on every rank."""
    with lab.Group(count) as group:
        return group.run(_summed).results


def _summed() -> float:
    """The sum of all ranks' numbers; a rank's own without torch."""
    if "torch" not in sys.modules:
        return float(os.environ["RANK"])
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        return float(os.environ["RANK"])
    number = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(number)
    return float(number)


def move(nbytes: int, ranks: int = 4) -> tuple[bool, float, float]:
    """Send an array of half of `nbytes` to all ranks, and receive from each its share of as much.

    Returns:
        Whether the results equal what was sent; the seconds until they were there; the additional bytes of memory in
        this process after arguments and results were released.
    """
    with lab.Group(ranks, runtime="bare") as group:
        group.run(_share, np.zeros(ranks), ranks)
        before = psutil.Process().memory_info().rss
        given = np.arange(nbytes // 16, dtype=np.float64)
        start = time.perf_counter()
        results = group.run(_share, given, ranks).results
        seconds = time.perf_counter() - start
        right = bool((np.concatenate(results) == given[: len(given) // ranks * ranks]).all())
        del results, given
        group.run(_share, np.zeros(ranks), ranks)  # a group keeps its last run
        return right, seconds, psutil.Process().memory_info().rss - before


def _share(given: Any, ranks: int) -> Any:
    each, rank = len(given) // ranks, int(os.environ["RANK"])
    return given[rank * each : (rank + 1) * each]


def flood(nbytes: int) -> tuple[float, int, str, float]:
    """One rank of two prints `nbytes` in lines of 100 bytes; terminal output is discarded.

    Returns:
        Seconds until the run was over; characters that the notebook keeps; the line that reports the rest, "" if there
        is none; the largest additional memory of the notebook's process meanwhile, in bytes.
    """
    with lab.Group(2, runtime="bare") as group, contextlib.redirect_stdout(_Nowhere()) as nowhere:
        group.run(_print_much, 100 * len(LINE))
        before = nowhere.most = psutil.Process().memory_info().rss
        start = time.perf_counter()
        output = group[0].run(_print_much, nbytes).output
        seconds = time.perf_counter() - start
        said = next((line for line in output.splitlines() if "left out" in line), "")
        return seconds, len(output), said, max(nowhere.most, psutil.Process().memory_info().rss) - before


class _Nowhere(io.StringIO):
    """Discards text; samples this process's memory whenever it gets some."""

    most = 0

    def write(self, text: str) -> int:
        self.most = max(self.most, psutil.Process().memory_info().rss)
        return len(text)


def _print_much(nbytes: int) -> None:
    lines = LINE * 100
    for _ in range(nbytes // len(lines)):
        sys.stdout.write(lines.decode())


def many_spans(count: int, ranks: int = 2) -> tuple[int, int, dict[str, float]]:
    """`count` spans, divided among the ranks, as fast as a loop can.

    Returns:
        How many were received; how many were counted as dropped; seconds for the run, its trace, shares and picture.
    """
    from matplotlib import pyplot

    with lab.Group(ranks, runtime="bare") as group:
        clock = [time.perf_counter()]
        run = group.run(_record, count // ranks)
        clock.append(time.perf_counter())
        trace = run.trace
        clock.append(time.perf_counter())
        trace.shares()
        clock.append(time.perf_counter())
        figure: Any = lab.timeline(run).figure
        figure.savefig(io.BytesIO(), format="png")
        clock.append(time.perf_counter())
        pyplot.close(figure)
        seconds = dict(zip(("run", "trace", "shares", "timeline"), np.diff(clock).tolist(), strict=True))
        return len(trace.filter(name="tick")), sum(trace.dropped), seconds


def _record(count: int) -> None:
    for _ in range(count):
        with lab.span("tick"):
            pass


def many_notebooks(count: int) -> list[dict[str, Any]]:
    """Several notebook processes, which start a group of two at one signal and keep it until all have one.

    Returns:
        For each, its `number`; the `numbers` that its ranks gathered from each other: its own, once per rank; the
        `pids` of its ranks; the `place` where their store listens, as the networks of their threads and the port; and
        the `seconds` from the signal to start until the first result.
    """
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    started = [
        subprocess.Popen(
            [sys.executable, "-c", NOTEBOOK, str(i)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": paths},
        )
        for i in range(count)
    ]  # fmt: skip
    try:
        for process in started:
            assert _answer(process) == "here"
        for process in started:
            _tell(process)
        answers = [_answer(process) for process in started]
        for process in started:
            _tell(process)
        return answers
    finally:
        for process in started:
            process.communicate(timeout=TOGETHER_LIMIT_S)  # closes its input, so that it ends, whatever it waits for


def _tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go on\n")
    process.stdin.flush()


def _answer(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    if line := process.stdout.readline():
        return json.loads(line)
    raise AssertionError(f"a notebook's process has ended with exit code {process.wait()}")


def live_as_notebook(number: int) -> None:
    """One of many notebook processes: imports labkit, starts a group on request, and keeps it until the end."""
    print(json.dumps("here"), flush=True)
    sys.stdin.readline()
    start = time.perf_counter()
    with lab.Group(2) as group:
        results = group.run(_gathered, number).results
        seconds = time.perf_counter() - start
        numbers, pids, places = zip(*results, strict=True)
        answer = {"number": number, "numbers": numbers, "pids": pids, "place": places[0], "seconds": seconds}
        print(json.dumps(answer), flush=True)
        sys.stdin.readline()


def _gathered(number: int) -> tuple[list[int], int, str]:
    import torch.distributed as dist

    numbers = [-1] * dist.get_world_size()
    dist.all_gather_object(numbers, number)
    networks = {os.readlink(link) for link in glob.glob("/proc/self/task/*/ns/net")}  # of the student's thread, and of gloo's
    return numbers, os.getpid(), " ".join([*sorted(networks), os.environ["MASTER_PORT"]])
