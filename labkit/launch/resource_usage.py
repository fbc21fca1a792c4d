"""Samples the memory and the GPU load of each rank, so rarely that it costs almost nothing.

GPUs are read by NVIDIA's management library (NVML), without initialising CUDA.

Source: "NVML API Reference Guide", NVIDIA: nvmlDeviceGetUtilizationRates, nvmlDeviceGetMemoryInfo.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import psutil

from labkit.launch.rank_process import RankProcess
from labkit.worker.runtimes.devices import gpu_count, share_of_devices


class Gpus:
    """The GPUs, in the order of their bus numbers, which is usually CUDA's; OSError if there is no NVML."""

    def __init__(self, nvml: Any = None) -> None:
        self._nvml = nvml if nvml is not None else _pynvml()
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            raise OSError(str(error)) from None
        self._handles: dict[int, Any] = {}

    def read(self, number: int) -> tuple[int, int] | None:
        """Return a GPU's utilization in per cent, over the last 1/6 to 1 second, and its memory in use in bytes."""
        try:
            handle = self._handle(number)
            busy, used = self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu, self._nvml.nvmlDeviceGetMemoryInfo(handle).used
        except self._nvml.NVMLError:
            return None
        return int(busy), int(used)

    def _handle(self, number: int) -> Any:
        """Return NVML's handle of a GPU, given its number among those in CUDA_VISIBLE_DEVICES."""
        if number not in self._handles:
            visible = [v.strip() for v in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if v.strip()]
            name = visible[number] if number < len(visible) else str(number)
            by_index, by_uuid = self._nvml.nvmlDeviceGetHandleByIndex, self._nvml.nvmlDeviceGetHandleByUUID
            self._handles[number] = by_index(int(name)) if name.isdecimal() else by_uuid(name)
        return self._handles[number]


def _pynvml() -> Any:
    try:
        import pynvml
    except ImportError as error:
        raise OSError(str(error)) from None
    return pynvml


EVERY_NS: Final = 1_000_000_000
SHARE: Final = 1 / 300  # of one core, at most, for sampling
STARVED_S: Final = 3.0  # longest wait for processes that lack a core


@dataclass(frozen=True, slots=True)
class Load:
    """The resources that one rank uses."""

    nbytes: int = 0  # its process's private memory in bytes, or the memory in use on its GPUs, also by others; 0 if unknown
    busy: int | None = None  # utilization of its GPUs in per cent; None without GPUs


def own_bytes(pid: int) -> int:
    """Return the memory in bytes that would be freed if a process ended; 0 if it has ended.

    Memory that a forked rank shares with its server, such as torch's code, does not count.
    """
    with contextlib.suppress(psutil.Error, OSError):
        return int(psutil.Process(pid).memory_full_info().uss)
    return 0


def followed(pids: Sequence[int]) -> Callable[[int], int]:
    """Return a function that reads the private memory of one of some processes at low cost.

    `own_bytes` makes the system walk all pages of a process, which takes up to 13 ms for one that has loaded torch, and
    blocks it meanwhile. So this is done once, here; later calls add the change since then.
    """
    differences = {pid: own_bytes(pid) - _unshared_bytes(pid) for pid in pids}

    def read(pid: int) -> int:
        unshared = _unshared_bytes(pid)
        return max(unshared + differences[pid], 0) if unshared else 0

    return read


def _unshared_bytes(pid: int) -> int:
    """Return a process's memory in bytes, without files and segments, with pages shared by a fork; 0 after its end."""
    with contextlib.suppress(psutil.Error, OSError):
        info = psutil.Process(pid).memory_info()
        return int(info.rss - getattr(info, "shared", 0))
    return 0


def gpus_of(ranks: int, devices: str) -> list[list[int]]:
    """Return the numbers of each rank's GPUs; `devices` is "auto", "cpu" or "cuda"."""
    count = 0 if devices == "cpu" else gpu_count()
    shares = [share_of_devices(rank, ranks, count) for rank in range(ranks)]
    return [[int(name.removeprefix("cuda:")) for name in own if name != "cpu"] for own in shares]


class Cores:
    """Finds out whether processes have lacked a core since this object was created."""

    def __init__(self, processes: Sequence[RankProcess]) -> None:
        self._used_s = {process.number: process.status().cpu_s for process in processes}
        self._until_s = time.monotonic() + STARVED_S

    def lacked(self, processes: Iterable[RankProcess], enough_s: float) -> bool:
        """Whether a process needs a core now and has had less than `enough_s` of CPU time; False after `STARVED_S`."""
        if time.monotonic() > self._until_s:
            return False
        now = ((process.status(), self._used_s[process.number]) for process in processes)
        return any(status.wants_core and status.cpu_s - used_s < enough_s for status, used_s in now)


class ResourceMonitor:
    """Samples the load of ranks on this machine; `devices` are the numbers of each rank's GPUs.

    `clock` returns the CPU time of this thread in ns, which measures the cost of sampling.
    """

    def __init__(
        self,
        processes: Sequence[RankProcess],
        devices: Sequence[Sequence[int]] = (),
        *,
        read: Callable[[int], int] | None = None,
        gpus: Any = None,
        clock: Callable[[], int] = time.thread_time_ns,
    ) -> None:
        self._pids = [process.pid for process in processes]
        self._devices, self._gpus, self._clock = devices, gpus, clock
        self._read = read or followed(self._pids)
        self._next_ns = 0
        self._loads: tuple[Load, ...] = ()
        if gpus is None and any(devices):
            with contextlib.suppress(OSError):  # without NVML, the memory of the processes is shown
                self._gpus = Gpus()

    def sample(self, now_ns: int) -> tuple[Load, ...]:
        """Return the latest load of each rank; take a new sample if it is time to, by `time.perf_counter_ns`."""
        if now_ns >= self._next_ns:
            before = self._clock()
            self._loads = tuple(self._load(rank) for rank in range(len(self._pids)))
            self._next_ns = now_ns + max(EVERY_NS, int((self._clock() - before) / SHARE))
        return self._loads

    def _load(self, rank: int) -> Load:
        own = self._devices[rank] if self._gpus is not None and self._devices else ()
        seen = [found for number in own if (found := self._gpus.read(number)) is not None]
        if not seen:
            return Load(self._read(self._pids[rank]))
        return Load(sum(used for _, used in seen), round(sum(busy for busy, _ in seen) / len(seen)))
