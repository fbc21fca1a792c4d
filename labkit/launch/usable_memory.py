"""How much memory this process may use, by the machine's size and its container's limit, and how much of it is free."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from labkit.errors.control_groups import control_group_folders


class Memory(NamedTuple):
    """The memory that this process may use.

    Args:
        nbytes: its size.
        free_nbytes: the part that processes can still get.
        limited: whether a container's limit decides, and not the machine.
    """

    nbytes: int
    free_nbytes: int
    limited: bool


def usable_memory(root: Path = Path("/")) -> Memory:
    """Return the memory that this process may use.

    Args:
        root: the root of the file system; tests pass their own.

    Source: memory.max, memory.current and memory.stat in the kernel's Documentation/admin-guide/cgroup-v2.rst;
    Documentation/admin-guide/cgroup-v1/memory.rst for version 1.
    """
    import psutil  # ranks need not import it

    machine = psutil.virtual_memory()
    nbytes, free_nbytes, limited = machine.total, machine.available, False
    for folder in control_group_folders("memory", root):
        try:
            version_2 = (folder / "memory.max").exists()
            limit = int((folder / ("memory.max" if version_2 else "memory.limit_in_bytes")).read_text())
            used = int((folder / ("memory.current" if version_2 else "memory.usage_in_bytes")).read_text())
            lines = (folder / "memory.stat").read_text().splitlines()
        except (OSError, ValueError):  # no limit: no file, or "max"
            continue
        if limit >= machine.total:
            continue
        # The usage includes the disk cache, which the kernel gives back. Version 1 counts subgroups under "total_".
        counted = dict(line.rsplit(" ", 1) for line in lines)
        prefix = "" if version_2 else "total_"
        cache = sum(int(counted.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
        nbytes, limited = min(nbytes, limit), True
        free_nbytes = min(free_nbytes, max(0, limit - used + cache))
    return Memory(nbytes, free_nbytes, limited)
