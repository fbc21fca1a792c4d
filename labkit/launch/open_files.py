"""The limit on a process's open files: raises it as far as allowed, since many systems have a low default."""

from __future__ import annotations

import contextlib
import os
from typing import Final

__all__ = ["count_open_files", "raise_limit"]

ENOUGH: Final = 1 << 16  # a higher limit is not needed, and slows programs that close all descriptors up to it
UNLIMITED: Final = 1 << 62


def raise_limit(needed: int = ENOUGH) -> int:
    """Raise this process's soft limit.

    Args:
        needed: the limit to reach, as far as the hard limit allows.

    Returns:
        the limit afterwards.
    """
    import resource  # not available on Windows

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
