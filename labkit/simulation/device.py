"""`Device`: how fast a device computes, from its peak rates or measured; the roofline model of a kernel's time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from labkit.errors.number_checks import check_number
from labkit.errors.wrong_calls import public_api
from labkit.group.group import Group
from labkit.recording.record import clock
from labkit.simulation.program import Kernel

__all__ = ["Device"]

WIDTH: Final = 1024  # of the matrices whose product is timed: 2·1024³ operations, 12 MiB
COPIED_BYTES: Final = 64 << 20  # more than a cache holds
MEASURED_NS: Final = 700_000_000  # for each of the two rates


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device that computes: `lab.Device(tflop_per_s=100, gbyte_per_s=1000)`.

    Args:
        tflop_per_s: the rate at which kernels compute, in 10¹² floating-point operations per second.
        gbyte_per_s: the rate at which they read and write memory, in 10⁹ bytes per second.
        runs_ahead: whether the host only issues kernels, which run on streams, as on a GPU; else it computes itself.
        name: the name to show.
        source: where the numbers come from.

    A predefined device, such as `Device.h100`, has 70 % of the maker's peak rate of computing and 85 % of that of
    memory (`.source`), which large kernels reach.

    Raises:
        TypeError: a rate is not a number.
        ValueError: a rate is out of range.
    """

    tflop_per_s: float
    gbyte_per_s: float
    runs_ahead: bool = True
    name: str = field(default="", compare=False)
    source: str = field(default="", repr=False, compare=False)

    h100: ClassVar[Device]

    def __post_init__(self) -> None:
        for name, unit in (("tflop_per_s", "10¹² operations per second"), ("gbyte_per_s", "10⁹ bytes per second")):
            value = getattr(self, name)
            check_number(value, f"Device({name}={value!r}): expected a number above 0, in {unit}", above=0, below=math.inf)

    @classmethod
    @public_api
    def here(cls, threads: int = 1) -> Device:
        """Measure a rank's CPU on this machine, in about 2 s: a product of large matrices, and copies of memory.

        Args:
            threads: the number of compute threads of the rank.
        """
        with Group(1, devices="cpu", threads=threads) as group:
            flops, nbytes = group.run(_measure).results[0]
        return cls(
            tflop_per_s=flops / 1e12, gbyte_per_s=nbytes / 1e9, runs_ahead=False, name="this machine's CPU",
            source=f"measured, {threads} threads",
        )  # fmt: skip

    @public_api
    def seconds(self, kernel: Kernel) -> float:
        """Return the time of a kernel in seconds: that of its operations or of its memory, whichever is longer.

        Source: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model", 2009.
        """
        moved = kernel.read_bytes + kernel.written_bytes
        return max(kernel.flops / (self.tflop_per_s * 1e12), moved / (self.gbyte_per_s * 1e9))


def _measure() -> tuple[float, float]:
    """Return the rates of this rank's CPU in operations and in bytes per second."""
    import torch

    one, other, product = (torch.rand(WIDTH, WIDTH) for _ in range(3))
    source = torch.rand(COPIED_BYTES // 4)
    copy = torch.empty_like(source)
    return (
        2 * WIDTH**3 / _shortest_s(lambda: torch.mm(one, other, out=product)),
        2 * COPIED_BYTES / _shortest_s(lambda: copy.copy_(source)),
    )


def _shortest_s(work: Callable[[], Any]) -> float:
    """Return the shortest time of some work in seconds, in which other programs have disturbed it least."""
    shortest_ns, end_ns = math.inf, clock() + MEASURED_NS
    while (start_ns := clock()) < end_ns or shortest_ns == math.inf:
        work()
        shortest_ns = min(shortest_ns, clock() - start_ns)
    return shortest_ns / 1e9


Device.h100 = Device(
    tflop_per_s=0.70 * 989, gbyte_per_s=0.85 * 3350, name="h100",
    source="NVIDIA H100 (SXM) data sheet: 989 TFLOP/s in bfloat16 without sparsity, 3.35 TB/s; 70 % and 85 % of these",
)  # fmt: skip
