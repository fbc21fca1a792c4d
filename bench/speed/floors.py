"""What the machine itself needs: the time to copy memory, and the memory of torch."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

import numpy as np
import psutil

from bench.peers.work import ARRAY_BYTES, RANKS, seconds

__all__ = ["copies_s", "gigabytes_per_s", "import_pss"]

ROUNDS: Final = 7


def copies_s() -> float:
    """Seconds to copy an array into fresh memory as often as needed: once to the ranks, and back from each."""
    array = np.ones(ARRAY_BYTES, np.uint8)
    return statistics.median(seconds(lambda: [array.copy() for _ in range(1 + RANKS)]) for _ in range(ROUNDS))


def gigabytes_per_s() -> tuple[float, float]:
    """Speed of copying within one core, into fresh and into warm memory."""
    array = np.ones(ARRAY_BYTES, np.uint8)
    target = array.copy()
    fresh = statistics.median(seconds(array.copy) for _ in range(ROUNDS))
    warm = statistics.median(seconds(lambda: np.copyto(target, array)) for _ in range(ROUNDS))
    return ARRAY_BYTES / fresh / 1e9, ARRAY_BYTES / warm / 1e9


def import_pss(modules: Sequence[str] = ("torch",)) -> float:
    """Proportional set size in bytes of one process that has imported these modules and done nothing else.

    After a colon, a module may name a function, as in `Runtime.preload`; it is not called.
    """
    names = [module.partition(":")[0] for module in modules]
    code = f"import sys, {', '.join(names)}; print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError(f"the process that imports {', '.join(names)} has ended")
        return float(psutil.Process(process.pid).memory_full_info().pss)
