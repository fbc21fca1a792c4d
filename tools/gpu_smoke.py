"""A pre-flight, the stage `smoke` of `make gpu`: one line for each thing that may differ from what was simulated.

    python -m tools.gpu_smoke

It takes half a minute. A line begins with "ok" or "FAILED". A check that fails does not keep the later ones from
running; one that hangs ends with its stage, and the lines before it stay. In a rehearsal the ranks compute on the CPU,
and the checks that need CUDA are left out.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

import labkit as lab
from labkit.launch.resource_usage import Gpus
from labkit.worker.comm.cuda_timing import NOTHING_NS, CudaEvents
from tools.gpu_report import in_one_line

REHEARSAL: Final = os.environ.get("LABKIT_GPU_REHEARSAL") == "1"
DEVICES: Final = "cpu" if REHEARSAL else "cuda"
RUN_LIMIT_S: Final = 20.0  # for one run of ranks, which takes seconds; the stage has a minute for everything
SENT: Final = 7.0
DRIVER: Final = Path("/proc/driver/nvidia/version")

# A process that counts the GPUs and then forks: torch must not refuse CUDA in the child. Where there is a driver, torch
# counts by NVML; elsewhere it initializes CUDA to count, and does refuse.
FORK: Final = """
import os, torch
n, pid = torch.cuda.device_count(), os.fork()
if pid == 0:
    print(f"{n} GPUs; in bad fork: {torch.cuda._is_in_bad_fork()}", flush=True)
    os._exit(0)
os.waitpid(pid, 0)
"""


def check(name: str, find: Callable[[], Any], expected: Callable[[Any], bool] = bool) -> bool:
    """Print in one line what was found, and whether it is as expected; returns the latter."""
    began = time.perf_counter()
    try:
        found = find()
        passed = expected(found)
    except Exception as error:  # noqa: BLE001  # whatever it is, the line shows it
        found, passed = f"{type(error).__name__}: {in_one_line(str(error))}", False
    seconds = time.perf_counter() - began
    print(f"{'ok' if passed else 'FAILED':<7} {name:<27} {seconds:6.2f} s  {str(found)[:400]}", flush=True)
    return passed


def system() -> str:
    """The driver and its device files, the system's kernel and the number of cores."""
    driver = DRIVER.read_text().partition("\n")[0] if DRIVER.exists() else "no NVIDIA driver"
    files = sorted(name for name in os.listdir("/dev") if name.startswith("nvidia"))
    return f"{driver}; {' '.join(files) or 'no /dev/nvidia*'}; {os.uname().release}; {os.cpu_count()} cores"


def pidfd() -> str:
    """Whether this system has the calls that labkit waits for processes with."""
    os.close(os.pidfd_open(os.getpid()))
    return "pidfd_open works"


def count_then_fork() -> str:
    """What a process that has counted the GPUs, and its child, say."""
    done = subprocess.run(
        [sys.executable, "-c", FORK], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=30, check=False
    )
    return done.stdout.strip()


def run(ranks: int, function: Callable[[], Any]) -> Any:
    """A run of a function in a group of its own."""
    with lab.Group(ranks, devices=DEVICES, timeout_s=RUN_LIMIT_S) as group:
        return group.run(function)


def total() -> tuple[str, list[float], float]:
    """In a rank: the backend, the sum of a one of each rank, and the seconds it took."""
    x = torch.ones(2, device=lab.device())
    began = time.perf_counter()
    dist.all_reduce(x)
    values: list[float] = x.tolist()
    return dist.get_backend(), values, round(time.perf_counter() - began, 3)


def is_total(found: list[tuple[str, list[float], float]]) -> bool:
    """Whether each rank has the sum, by NCCL if it has a GPU of its own."""
    ranks = len(found)
    backend = "nccl" if not REHEARSAL and ranks <= torch.cuda.device_count() else "gloo"
    return all(used == backend and values == [ranks, ranks] for used, values, _ in found)


def behind() -> None:
    """In a rank: an all-reduce that is queued behind half a second of kernels when this function returns."""
    width = 64 if REHEARSAL else 4096
    x = torch.ones(width, width, device=lab.device())
    for _ in range(200):
        x = x @ x / width
    dist.all_reduce(x[:1])


def message() -> list[float]:
    """In a rank: what rank 0 has sent, and rank 1 received."""
    x = torch.full((2,), SENT if dist.get_rank() == 0 else 0.0, device=lab.device())
    if dist.get_rank() == 0:
        dist.send(x, 1)
    else:
        dist.recv(x, 0)
    values: list[float] = x.tolist()
    return values


def nvml() -> tuple[int, int] | str | None:
    """The utilization in per cent and the bytes in use of the first GPU."""
    if importlib.util.find_spec("pynvml") is None:
        return "left out: there is no nvidia-ml-py"
    return Gpus().read(0)


def anchors() -> str:
    """How long the GPU takes to reach an event, and a time that is read backwards; for information."""
    torch.zeros(1, device="cuda")
    events, took_us = CudaEvents(), []
    first = events.here(0)
    last = first
    for _ in range(6):
        began_ns = time.perf_counter_ns()
        last = events.on_side_stream(0)
        while not last.query():
            pass
        took_us.append((time.perf_counter_ns() - began_ns) // 1000)
    return f"{took_us} us; backwards {last.elapsed_time(first):.3f} ms"


def between_events() -> tuple[float, float]:
    """The microseconds between two events behind long kernels: with nothing between them, and with a small kernel."""
    events, x = CudaEvents(), torch.ones(4096, 4096, device="cuda")
    small = torch.ones(8, device="cuda")
    x = x @ x / 4096  # CUDA loads each kernel at its first use, and may wait for the GPU then
    small.add_(1)
    torch.cuda.synchronize()
    for _ in range(20):
        x = x @ x / 4096
    marks = []
    for _ in range(21):
        marks.append(events.here(0))
        marks.append(events.here(0))
        small.add_(1)
    torch.cuda.synchronize()
    took_us = [1000 * a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
    return round(statistics.median(took_us[::2]), 2), round(statistics.median(took_us[1::2]), 2)


def main() -> int:
    """Make all checks; returns 1 if one failed."""
    passed = [
        check("torch", lambda: torch.__version__),
        check("system", system),
        check("pidfd", pidfd),
        check("Group(1) all_reduce", lambda: run(1, total).results, is_total),
        check(
            "all_reduce behind kernels",
            lambda: [(span.name, span.device) for span in run(1, behind).trace],
            lambda found: ("all_reduce", DEVICES) in found,
        ),
        check("Group(2) all_reduce", lambda: run(2, total).results, is_total),
        check("send between ranks", lambda: run(2, message).results, lambda found: found == [[SENT, SENT]] * 2),
    ]
    if REHEARSAL:
        print("left out, since they need CUDA: count, then fork; NVML; anchors; between events", flush=True)
    else:
        passed += [
            check("count, then fork", count_then_fork, lambda found: "in bad fork: False" in found),
            check("NVML", nvml),
            check("NCCL, compute capability", lambda: (torch.cuda.nccl.version(), torch.cuda.get_device_capability())),
            check("anchors", anchors),
            # So labkit tells a span that gives the GPU nothing to do from one with a small kernel.
            check("us between events", between_events, lambda us: 1000 * us[0] < NOTHING_NS < 1000 * us[1]),
        ]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
