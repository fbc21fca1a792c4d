"""How many cores a process may use, how long its threads have waited for one, and how busy other programs keep them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final
from weakref import WeakSet

from labkit.errors.exit_reasons import control_group_folders

RUN_QUEUE: Final = "/proc/thread-self/schedstat"  # nanoseconds on a core, nanoseconds in the run queue, time slices
LONGEST: Final = 64  # bytes of such a line
CLOSED: Final = -1


def usable_cores(root: Path = Path("/")) -> float:
    """The number of cores that this process may use at once, by its affinity and its container's quota; may be 0.5.

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


def machine_load() -> float:
    """The load average of this machine over the last minute; 0 where the system does not count it."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def load_of_others(load: float, cores: float, own: int) -> float:
    """Return a load average if other programs than `own` processes and threads make cores scarce; else 0."""
    return load if load > cores + own else 0.0


class ThreadDelay:
    """How long the thread that creates this has waited for a core while it could have run. Any thread may ask.

    Source: "/proc/<pid>/schedstat" in the kernel's Documentation/scheduler/sched-stats.rst.
    """

    __slots__ = ("__weakref__", "_file")

    def __init__(self) -> None:
        try:
            self._file = os.open(RUN_QUEUE, os.O_RDONLY | os.O_CLOEXEC)  # a file of this thread, whoever reads it
        except OSError:  # the program has too many open files
            self._file = CLOSED

    def __call__(self) -> int:
        """Return this time in nanoseconds, since the thread began; 0 once it has ended, or if the time is unknown."""
        try:
            return int(os.pread(self._file, LONGEST, 0).split()[1])
        except OSError:
            return 0

    def close(self) -> None:
        """Close the file: from now on, the time is 0."""
        file, self._file = self._file, CLOSED
        if file != CLOSED:
            os.close(file)

    __del__ = close


def thread_delays() -> Callable[[], Callable[[], int]]:
    """Return a function that returns the `ThreadDelay` of the thread that calls it, always the same.

    Where the system does not count this time, as on macOS, this returns `no_delays`. Processes that are forked later
    close the files.
    """
    if not os.path.exists(RUN_QUEUE):
        return no_delays
    of_thread = threading.local()  # a thread that ends closes its file
    opened: WeakSet[ThreadDelay] = WeakSet()

    def close_all() -> None:
        for delay in list(opened):
            delay.close()

    def own() -> ThreadDelay:
        delay: ThreadDelay | None = getattr(of_thread, "delay", None)
        if delay is None:
            delay = of_thread.delay = ThreadDelay()
            opened.add(delay)
        return delay

    os.register_at_fork(after_in_child=close_all)
    return own


def no_delays() -> Callable[[], int]:
    """Stands for `thread_delays` where delays are not recorded: each is 0."""
    return int  # `int()` is 0
