"""`Device`: how fast a device computes and how much memory it has, from its data sheet or measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from labkit.errors.wrong_calls import check_number, public_api, public_class
from labkit.recording.cores import usable_cores
from labkit.recording.record import clock

WIDTH: Final = 1024  # of the matrices whose product is timed: 2·1024³ operations, 12 MiB
COPIED_BYTES: Final = 64 << 20  # more than a cache holds
MEASURED_NS: Final = 700_000_000  # for each of the two rates
_UNITS: Final = {
    "tflop_per_s": "10¹² operations per second", "gbyte_per_s": "10⁹ bytes per second", "memory_gb": "10⁹ bytes",
}  # fmt: skip


@public_class
@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device that computes: `lab.Device(tflop_per_s=100, gbyte_per_s=1000, memory_gb=40)`.

    Args:
        tflop_per_s: the rate at which kernels compute, in 10¹² floating-point operations per second.
        gbyte_per_s: the rate at which they read and write memory, in 10⁹ bytes per second.
        memory_gb: the size of its memory, in 10⁹ bytes; default: no limit.
        runs_ahead: whether the host only issues kernels, which run on streams, as on a GPU; else it computes itself.
        name: the name to show.

    A predefined device, such as `Device.h100`, has 70 % of the maker's peak rate of computing and 85 % of that of
    memory, which large kernels reach.

    Raises:
        TypeError: a rate or the memory is not a number, or another argument is of the wrong type.
        ValueError: it is out of range.
    """

    tflop_per_s: float
    gbyte_per_s: float
    memory_gb: float = math.inf
    runs_ahead: bool = True
    name: str = field(default="", compare=False)

    h100: ClassVar[Device]

    def __post_init__(self) -> None:
        for name, unit in _UNITS.items():
            value = getattr(self, name)
            below = None if name == "memory_gb" else math.inf
            check_number(value, f"Device({name}={value!r}): expected a number above 0, in {unit}", above=0, below=below)
        if not isinstance(self.runs_ahead, bool):
            raise TypeError(f"Device(runs_ahead={self.runs_ahead!r}): expected True or False")
        if not isinstance(self.name, str):
            raise TypeError(f"Device(name={self.name!r}): expected a string")

    @classmethod
    @public_api
    def here(cls, threads: int = 1) -> Device:
        """Measure the CPU of this machine, in about 2 s: a product of large matrices, and copies of memory.

        Args:
            threads: the number of compute threads, at most the usable cores; a rank of a group has its share of these.

        Raises:
            TypeError, ValueError: `threads` is no such number.
        """
        import torch

        cores = math.ceil(usable_cores())
        expected = f"Device.here(threads={threads!r}): expected a whole number from 1 to {cores}, the cores that are usable here"
        check_number(threads, expected, whole=True, at_least=1, below=cores + 1)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            flops, nbytes = _measure()
        finally:
            torch.set_num_threads(before)
        return cls(tflop_per_s=flops / 1e12, gbyte_per_s=nbytes / 1e9, runs_ahead=False, name="this machine's CPU")

    def seconds(self, flops: float, nbytes: float) -> float:
        """Return the time of a kernel in seconds: that of its operations or of its memory, whichever is longer.

        Args:
            flops: its floating-point operations.
            nbytes: the bytes that it reads and writes.

        Source: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model", 2009.
        """
        return max(flops / (self.tflop_per_s * 1e12), nbytes / (self.gbyte_per_s * 1e9))


def _measure() -> tuple[float, float]:
    """Return the rates of this CPU in operations and in bytes per second."""
    import torch

    one, other, product = (torch.rand(WIDTH, WIDTH) for _ in range(3))
    source = torch.rand(COPIED_BYTES // 4)
    copy = torch.empty_like(source)
    flops_per_s = 2 * WIDTH**3 / _shortest_s(lambda: torch.mm(one, other, out=product))
    return flops_per_s, 2 * COPIED_BYTES / _shortest_s(lambda: copy.copy_(source))


def _shortest_s(work: Callable[[], Any]) -> float:
    """Return the shortest time of some work, in which other programs have disturbed it least."""
    shortest_ns, end_ns = math.inf, clock() + MEASURED_NS
    while (start_ns := clock()) < end_ns or shortest_ns == math.inf:
        work()
        shortest_ns = min(shortest_ns, clock() - start_ns)
    return shortest_ns / 1e9


# NVIDIA H100 (SXM) data sheet: 989 TFLOP/s in bfloat16 without sparsity, 3.35 TB/s, 80 GB.
Device.h100 = Device(tflop_per_s=0.70 * 989, gbyte_per_s=0.85 * 3350, memory_gb=80, name="h100")
