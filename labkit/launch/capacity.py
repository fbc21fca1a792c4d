"""What this machine offers to ranks: memory and open files, and whether that is enough for a group."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Final

from labkit.errors.exceptions import LabError
from labkit.errors.units import in_words
from labkit.launch.server_requests import BATCH
from labkit.launch.usable_memory import usable_memory
from labkit.recording.ring_layout import RING_BYTES

ENOUGH: Final = 1 << 16  # a higher limit is not needed, and slows programs that close all descriptors up to it
UNLIMITED: Final = 1 << 62
FILES_PER_RANK: Final = 5  # open in this process: socket, output, process, recording memory and its mapping
STARTING_FILES: Final = 3  # more for each rank of a batch that is being started: the other ends
FILES_TO_SPARE: Final = 64  # for the arguments of a run, and the student
SHARED_BYTES: Final = 2 * RING_BYTES  # the largest file that a rank without large arguments needs: records and stacks
PROC: Final = "/proc/self/stat"


def raise_limit(needed: int = ENOUGH) -> int:
    """Raise this process's soft limit.

    Args:
        needed: the limit to reach, as far as the hard limit allows.

    Returns:
        the limit afterwards.
    """
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


def count_open_files() -> int:
    """Count this process's open files."""
    for folder in ("/proc/self/fd", "/dev/fd"):
        with contextlib.suppress(OSError):
            return len(os.listdir(folder))
    return 0


def processes_visible() -> bool:
    """Whether labkit can find its processes; on Linux it needs the file system /proc."""
    return sys.platform != "linux" or os.path.exists(PROC)


def check_capacity(ranks: int, rank_bytes: int) -> None:
    """Check that this machine has memory and files for so many ranks.

    Raises:
        LabError: it has not.
    """
    _check_memory(ranks, rank_bytes)
    _check_open_files(ranks)
    _check_file_size()


def _check_file_size() -> None:
    import resource

    largest = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if largest != resource.RLIM_INFINITY and largest < SHARED_BYTES:
        raise LabError(
            f"this process may create no file larger than {in_words(largest, 'iB')} (ulimit -f), and each rank records in "
            f"{in_words(RING_BYTES, 'iB')} of shared memory. Raise the limit before you start JupyterLab."
        )


def _check_memory(count: int, rank_bytes: int) -> None:
    available, needed = usable_memory().free_nbytes, count * rank_bytes
    if needed > available:
        raise LabError(
            f"{count} ranks need at least {in_words(needed, 'iB')} of memory ({in_words(rank_bytes, 'iB')} each), and "
            f"{in_words(available, 'iB')} are available. Use at most {max(1, available // rank_bytes)} ranks, or close other "
            f"groups and notebooks."
        )


def _check_open_files(count: int) -> None:
    spare = FILES_TO_SPARE + count_open_files()

    def files(ranks: int) -> int:
        return ranks * FILES_PER_RANK + min(ranks, BATCH) * STARTING_FILES + spare

    needed = files(count)
    limit = raise_limit(needed)
    if needed > limit:
        most = max((n for n in range(1, count) if files(n) <= limit), default=0)
        first = f"Use at most {most} ranks" if most else "Close some"
        raise LabError(
            f"{count} ranks need about {needed:,} open files, and the hard limit of this process is {limit:,}. "
            f"{first}, or raise the limit (ulimit -Hn {needed}) before you start JupyterLab."
        )
