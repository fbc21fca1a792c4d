"""What each rank takes of the machine, memory and GPU: looked at now and then, so that looking costs next to nothing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import psutil

from labkit.worker.gpus import Gpus
from labkit.worker.launch import RankProcess
from labkit.worker.runtimes.registry import gpu_count, share_of_devices

__all__ = ["Cores", "Load", "ResourceMonitor", "followed", "gpus_of", "own_bytes"]

EVERY_NS: Final = 1_000_000_000
SHARE: Final = 1 / 300  # of one core
STARVED_S: Final = 3.0  # so long a process that lacks a core is waited for


@dataclass(frozen=True, slots=True)
class Load:
    """What one rank takes.

    Args:
        nbytes: memory that its process has for itself; on GPUs, what is in use of theirs, whoever uses it; 0 where
            unknown.
        busy: per cent of the time in which its GPUs compute; None without GPUs.
    """

    nbytes: int = 0
    busy: int | None = None


def own_bytes(pid: int) -> int:
    """Memory that would be free if the process ended: a forked rank shares what torch is with its server. 0 if it has ended."""
    with contextlib.suppress(psutil.Error, OSError):
        return int(psutil.Process(pid).memory_full_info().uss)
    return 0


def followed(pids: Sequence[int]) -> Callable[[int], int]:
    """What gives the memory that each of these processes has for itself from now on, cheaply.

    `own_bytes` has the system go through all pages of a process, which takes up to 13 ms for one that has loaded torch,
    and holds it up meanwhile. So that is done once, here; after that counts what the process has more or less than now.
    """
    apart = {pid: own_bytes(pid) - _unshared_bytes(pid) for pid in pids}

    def read(pid: int) -> int:
        unshared = _unshared_bytes(pid)
        return max(unshared + apart[pid], 0) if unshared else 0

    return read


def _unshared_bytes(pid: int) -> int:
    """Memory of no file and no segment, though perhaps of the process that it was forked from; 0 if it has ended."""
    with contextlib.suppress(psutil.Error, OSError):
        info = psutil.Process(pid).memory_info()
        return int(info.rss - getattr(info, "shared", 0))
    return 0


def gpus_of(ranks: int, devices: str) -> list[list[int]]:
    """The numbers of each rank's GPUs.

    Args:
        ranks: how many there are.
        devices: "auto", "cpu" or "cuda".
    """
    count = 0 if devices == "cpu" else gpu_count()
    shares = [share_of_devices(rank, ranks, count) for rank in range(ranks)]
    return [[int(name.removeprefix("cuda:")) for name in own if name != "cpu"] for own in shares]


class Cores:
    """Which of some processes have lacked a core from now on.

    Args:
        processes: all that will be asked about.
    """

    def __init__(self, processes: Sequence[RankProcess]) -> None:
        self._used_s = {p.pid: p.cpu_s for p in processes}
        self._until_s = time.monotonic() + STARVED_S

    def lacked(self, processes: Iterable[RankProcess], enough_s: float) -> bool:
        """Whether one of them needs a core at this moment and has had less than `enough_s` of one. Never, after a while."""
        if time.monotonic() > self._until_s:
            return False
        return any(p.wants_core and p.cpu_s - self._used_s[p.pid] < enough_s for p in processes)


class ResourceMonitor:
    """Looks at some ranks, one after the other.

    Args:
        pids: their processes, in rank order.
        devices: the numbers of each one's GPUs; default: none.
        read: gives the memory of a process in bytes; default: `followed` from now on.
        gpus: what to ask about GPUs; default: NVML.
        clock: the processor time of this thread in ns, to know what looking costs.
    """

    def __init__(
        self,
        pids: Sequence[int],
        devices: Sequence[Sequence[int]] = (),
        *,
        read: Callable[[int], int] | None = None,
        gpus: Any = None,
        clock: Callable[[], int] = time.thread_time_ns,
    ) -> None:
        self._pids, self._devices, self._gpus, self._clock = tuple(pids), devices, gpus, clock
        self._read = read or followed(pids)
        self._next_ns = 0
        self._loads: tuple[Load, ...] = ()
        if gpus is None and any(devices):
            with contextlib.suppress(OSError):  # without NVML, the memory of the processes is shown
                self._gpus = Gpus()

    def look(self, now_ns: int) -> tuple[Load, ...]:
        """What each rank takes, as it was when it was time to look; `now_ns` is on `time.perf_counter_ns`."""
        if now_ns >= self._next_ns:
            before = self._clock()
            self._loads = tuple(self._load(rank) for rank in range(len(self._pids)))
            self._next_ns = now_ns + max(EVERY_NS, int((self._clock() - before) / SHARE))
        return self._loads

    def _load(self, rank: int) -> Load:
        own = self._devices[rank] if self._gpus is not None and self._devices else ()
        seen = [found for number in own if (found := self._gpus.look(number)) is not None]
        if not seen:
            return Load(self._read(self._pids[rank]))
        return Load(sum(used for _, used in seen), round(sum(busy for busy, _ in seen) / len(seen)))
