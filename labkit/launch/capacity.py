"""What this machine offers to ranks, memory within its container's limit and open files, and whether it is enough."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Final, NamedTuple

from labkit.errors.exceptions import LabError
from labkit.errors.exit_reasons import control_group_folders
from labkit.errors.units import in_words
from labkit.launch.server_requests import BATCH


class FreeMemory(NamedTuple):
    """The memory that this process may use."""

    nbytes: int  # its size
    free_nbytes: int  # the part that processes can still get
    limited: bool  # whether a container's limit decides, and not the machine


def usable_memory(root: Path = Path("/")) -> FreeMemory:
    """Return the memory that this process may use.

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
    return FreeMemory(nbytes, free_nbytes, limited)


ENOUGH: Final = 1 << 16  # a higher limit is not needed, and slows programs that close all descriptors up to it
UNLIMITED: Final = 1 << 62
FILES_PER_RANK: Final = 5  # open in this process: socket, output, process, recording memory and its mapping
STARTING_FILES: Final = 3  # more for each rank of a batch that is being started: the other ends
PROC: Final = "/proc/self/stat"
FILES_TO_SPARE: Final = 64  # for the arguments of a run, and the student


def raise_limit(needed: int = ENOUGH) -> int:
    """Raise this process's soft limit to `needed`, as far as its hard limit allows; return the limit afterwards."""
    import resource  # not available on Windows, where labkit can be imported

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return UNLIMITED
    wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft >= wanted:
        return soft
    with contextlib.suppress(OSError, ValueError):  # macOS has another, lower limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def processes_visible() -> bool:
    """Whether labkit can find its processes; on Linux it needs the file system /proc."""
    return sys.platform != "linux" or os.path.exists(PROC)


def check_capacity(ranks: int, rank_bytes: int) -> None:
    """Raise LabError if this machine lacks memory or files for so many ranks."""
    import psutil  # as in `usable_memory`

    free_nbytes = usable_memory().free_nbytes
    if ranks * rank_bytes > free_nbytes:
        raise LabError(
            f"{ranks} ranks need at least {in_words(ranks * rank_bytes, 'iB')} of memory ({in_words(rank_bytes, 'iB')} each), "
            f"and {in_words(free_nbytes, 'iB')} are available. Use at most {max(1, free_nbytes // rank_bytes)} ranks, or close "
            f"other groups and notebooks."
        )
    needed = ranks * FILES_PER_RANK + min(ranks, BATCH) * STARTING_FILES + FILES_TO_SPARE + psutil.Process().num_fds()
    limit = raise_limit(needed)
    if needed > limit:
        raise LabError(
            f"{ranks} ranks need about {needed:,} open files, and the hard limit of this process is {limit:,}. "
            f"Use fewer ranks, or raise the limit (ulimit -Hn {needed}) before you start JupyterLab."
        )
