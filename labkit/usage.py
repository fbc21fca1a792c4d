"""How much memory each rank's process has for itself: looked at now and then, so that looking costs next to nothing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Final

import psutil

__all__ = ["Usage", "own_bytes"]

EVERY_NS: Final = 1_000_000_000
SHARE: Final = 1 / 300  # of one core: the system goes through all pages of a process, 3 ms for one that has loaded torch


def own_bytes(pid: int) -> int:
    """Memory that would be free if the process ended: a forked rank shares what torch is with its server. 0 if it has ended."""
    with contextlib.suppress(psutil.Error, OSError):
        return int(psutil.Process(pid).memory_full_info().uss)
    return 0


class Usage:
    """Looks at some processes, one after the other.

    Args:
        pids: of the ranks, in rank order.
        read: gives the bytes of one.
        clock: the processor time of this thread in ns, to know what looking costs.
    """

    def __init__(
        self, pids: Sequence[int], read: Callable[[int], int] = own_bytes, clock: Callable[[], int] = time.thread_time_ns
    ) -> None:
        self._pids, self._read, self._clock = tuple(pids), read, clock
        self._next_ns = 0
        self._nbytes: tuple[int, ...] = ()

    def look(self, now_ns: int) -> tuple[int, ...]:
        """The bytes of each rank, as they were when it was time to look; "now" is on `time.perf_counter_ns`."""
        if now_ns >= self._next_ns:
            before = self._clock()
            self._nbytes = tuple(self._read(pid) for pid in self._pids)
            self._next_ns = now_ns + max(EVERY_NS, int((self._clock() - before) / SHARE))
        return self._nbytes
