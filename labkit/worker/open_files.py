"""How many files a process may have open: raised as far as its user may, since many systems start with a low limit."""

from __future__ import annotations

import contextlib
import os
from typing import Final

__all__ = ["count_open_files", "raise_limit"]

ENOUGH: Final = 1 << 16  # a higher limit helps nobody, and programs that close all descriptors up to it become slow
UNLIMITED: Final = 1 << 62


def raise_limit(needed: int = ENOUGH) -> int:
    """Raise this process's soft limit to `needed` if the hard limit lets it, else as far as that goes; what the limit is then."""
    import resource  # which Windows lacks

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return UNLIMITED
    wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft >= wanted:
        return soft
    with contextlib.suppress(OSError, ValueError):  # macOS has a lower limit of its own
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def count_open_files() -> int:
    """How many this process has open now."""
    for folder in ("/proc/self/fd", "/dev/fd"):
        with contextlib.suppress(OSError):
            return len(os.listdir(folder))
    return 0
