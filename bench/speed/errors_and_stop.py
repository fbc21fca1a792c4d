"""Time until the student sees the error of a rank, or the prompt after Stop; in cells of a real kernel."""

from __future__ import annotations

import re
import statistics
import time
from typing import Any, Final

from bench.kernel import Kernel

ROUNDS: Final = 3

PREPARE: Final = """
import time
import labkit as lab
import torch
import torch.distributed as dist

def nothing():
    pass

def raise_alone():
    dist.barrier()
    if dist.get_rank() == 1:
        raise ValueError(f"raised at {time.perf_counter_ns()}")
    dist.all_reduce(torch.ones(1))  # nobody else will come

def die_alone():
    import os, signal
    dist.barrier()
    if dist.get_rank() == 1:
        print(f"raised at {time.perf_counter_ns()}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))

def wait_for_nobody():
    print("inside", flush=True)
    dist.recv(torch.zeros(1), src=(dist.get_rank() + 1) % dist.get_world_size())  # all receive, nobody sends

def compute_for_ever():
    print("inside", flush=True)
    while True:
        torch.ones(100, 100) @ torch.ones(100, 100)

group = lab.Group(4)
group.run(nothing)
"""
FIRST_CAUSE: Final = re.compile(r"raised at (\d+)")


def measure(kernel: Kernel) -> dict[str, float]:
    """Medians in seconds: "raise" and "kill" until the error, "blocked" and "computing" until the prompt after Stop."""
    kernel.run(PREPARE)
    errors, stops = {"raise": "raise_alone", "kill": "die_alone"}, {"blocked": "wait_for_nobody", "computing": "compute_for_ever"}
    found = {}
    for name, function in errors.items():
        found[name] = statistics.median(_until_error(kernel, f"group.run({function})") for _ in range(ROUNDS))
    for name, function in stops.items():
        found[name] = statistics.median(_until_prompt(kernel, f"group.run({function})") for _ in range(ROUNDS))
    kernel.run("group.close()")
    return found


def _until_error(kernel: Kernel, source: str) -> float:
    """From the time that rank 1 recorded to the arrival of the error's message."""
    kernel.run("group.run(nothing)")  # the ranks have started again
    found: list[int] = []

    def is_error(kind: str, content: dict[str, Any]) -> bool:
        found.extend(int(ns) for ns in FIRST_CAUSE.findall(str(content)))
        return kind == "error"

    cell = kernel.begin(source)
    seen_ns = kernel.until(cell, is_error)
    kernel.until(cell, _is_idle)
    assert found, "the message does not say what rank 1 said"
    return (seen_ns - found[0]) / 1e9


def _until_prompt(kernel: Kernel, source: str) -> float:
    """From Stop, pressed while all ranks are inside, until the kernel is idle; then the next run must work."""
    kernel.run("group.run(nothing)")
    cell = kernel.begin(source)
    kernel.until(cell, lambda kind, content: kind != "execute_input" and "inside" in str(content))
    time.sleep(0.2)  # a person's reaction time: by then all ranks are where they will stay
    start_ns = time.perf_counter_ns()
    kernel.interrupt()
    took_ns = kernel.until(cell, _is_idle) - start_ns
    kernel.run("group.run(nothing)")
    return took_ns / 1e9


def _is_idle(kind: str, content: dict[str, Any]) -> bool:
    return kind == "status" and content["execution_state"] == "idle"
