"""Tools with the same tasks, each in a kernel of its own, in turns, so that all see the machine in the same state."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.kernel import Kernel

__all__ = ["FLOOR", "LABKIT", "TASKS", "TOOLS", "Results", "measure"]

TASKS: Final = ("ready", "call", "move", "memory")


@dataclass(frozen=True, slots=True)
class Entry:
    """A tool.

    Args:
        name: as the table calls it.
        file: the cell that defines its class.
        make: the expression that makes it.
        rounds: how often each task is measured; slow ones seldom, so that all takes minutes.
        needs: a package that it needs in addition to labkit's own.
    """

    name: str
    file: str
    make: str
    rounds: int
    needs: str = ""


LABKIT: Final = Entry("labkit", "with_labkit.py", "Labkit('fork')", 15)
FLOOR: Final = Entry("bare forkserver, pipes and shared memory", "with_forkserver.py", "Forkserver()", 15)
TOOLS: Final = (
    LABKIT,
    FLOOR,
    Entry("labkit, start='spawn', spare ranks warm", "with_labkit.py", "Labkit('spawn')", 3),
    Entry("torch.multiprocessing, fork (fails once CUDA is touched)", "with_multiprocessing.py", "Multiprocessing('fork')", 7),
    Entry("torch.multiprocessing, spawn (not from a cell)", "with_multiprocessing.py", "Multiprocessing('spawn')", 2),
    Entry("accelerate notebook_launcher (fork)", "with_accelerate.py", "Accelerate()", 7, "accelerate"),
    Entry("ipyparallel", "with_ipyparallel.py", "Ipyparallel()", 2, "ipyparallel"),
)

Results = dict[str, dict[str, float | str]]  # by the tool's name and the task: the median, or why there is none


def measure(tools: Sequence[Entry], python_of_peers: str) -> Results:
    """Give each tool each task, in turns.

    Args:
        tools: which.
        python_of_peers: the interpreter with the packages that labkit does not need.
    """
    results: Results = {tool.name: {} for tool in tools}
    with contextlib.ExitStack() as stack:
        kernels: dict[str, Kernel] = {}
        for tool in tools:
            python = python_of_peers if tool.needs else sys.executable
            if tool.needs and not _has(python, tool.needs):
                results[tool.name] = dict.fromkeys(TASKS, "not installed")
                continue
            kernel = kernels[tool.name] = stack.enter_context(Kernel(python))
            kernel.run(Path(__file__).with_name(tool.file).read_text())
            kernel.run(f"tool = {tool.make}")
        for task in TASKS:
            print(f"  {task}", file=sys.stderr, flush=True)
            fit = [tool for tool in tools if tool.name in kernels and "failed" not in results[tool.name].values()]
            for name, seconds in _in_turns(fit, kernels, task).items():
                results[name][task] = statistics.median(seconds) if seconds else "failed"
        for name, values in results.items():
            results[name] = {task: values.get(task, "failed") for task in TASKS}
            if name in kernels and "failed" not in values.values():
                kernels[name].run("tool.close()")
    return results


def _in_turns(tools: Sequence[Entry], kernels: dict[str, Kernel], task: str) -> dict[str, list[float]]:
    """The measurements of each tool; nothing for one that failed."""
    samples: dict[str, list[float]] = {tool.name: [] for tool in tools}
    for number in range(1 + max(tool.rounds for tool in tools)):  # the first is not counted: it warms up
        for tool in tools:
            if number > tool.rounds or tool.name not in samples:
                continue
            try:
                value = kernels[tool.name].run("", value=f"tool.{task}()")
            except RuntimeError as error:
                print(f"{tool.name} failed in {task!r}:\n{error}", file=sys.stderr, flush=True)
                del samples[tool.name]
                continue
            if number:
                samples[tool.name].append(value)
    return {tool.name: samples.get(tool.name, []) for tool in tools}


def _has(python: str, package: str) -> bool:
    return subprocess.run([python, "-c", f"import {package}"], capture_output=True, check=False).returncode == 0
