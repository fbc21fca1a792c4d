"""How many cores a process may use."""

from __future__ import annotations

import os
from pathlib import Path

from labkit.errors.control_groups import control_group_folders

__all__ = ["usable_cores"]


def usable_cores(root: Path = Path("/")) -> float:
    """The number of cores that this process may use at once, by its affinity and its container's quota; may be 0.5.

    Args:
        root: the root of the file system; tests pass their own.

    Source: "cpu.max" in the kernel's Documentation/admin-guide/cgroup-v2.rst; scheduler/sched-bwc.rst for version 1.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([cores, *(quota for folder in control_group_folders("cpu", root) if (quota := _quota(folder)) is not None)])


def _quota(folder: Path) -> float | None:
    """How many cores the processes of a control group may use together; None without a limit."""
    try:
        if (folder / "cpu.max").exists():
            quota_us, period_us = (folder / "cpu.max").read_text().split()
        else:
            quota_us, period_us = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
    except OSError:
        return None
    return None if quota_us in ("max", "-1") else round(int(quota_us) / int(period_us), 2)
