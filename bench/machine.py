"""The machine and the installed versions, in a few lines."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

import psutil

from labkit.recording.cores import usable_cores

__all__ = ["describe"]


def describe() -> list[str]:
    """One line each: processor, memory, system, versions, load."""
    memory_gib = psutil.virtual_memory().total / 2**30
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    return [
        f"{_processor()}, {usable_cores():g} cores for this process, {memory_gib:.0f} GiB of memory, {_gpus()}",
        f"{platform.system()} {platform.release()}, Python {platform.python_version()}, "
        + ", ".join(f"{name} {_version(name)}" for name in ("torch", "numpy", "ipykernel")),
        f"load before the start (1, 5, 15 min): {load}",
    ]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _gpus() -> str:
    from labkit.worker.runtimes.devices import gpu_count

    count = gpu_count()
    return f"{count} GPU{'s' * (count > 1)}" if count else "no GPU"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
