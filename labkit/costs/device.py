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
ATTENTION: Final = "_scaled_dot_product"  # prefix of the names of attention's kernels
ATTENTION_SHARE: Final = 0.6  # the rate that they reach, of that of large matrix products
_UNITS: Final = {
    "tflop_per_s": "10¹² operations per second", "gbyte_per_s": "10⁹ bytes per second", "memory_gb": "10⁹ bytes",
    "tflop_per_s_32": "10¹² operations per second", "peak_tflop_per_s": "10¹² operations per second",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Kernel:
    """One operator of torch on a rank's tensors."""

    name: str  # torch's name of the operator: "mm", "convolution_backward"
    flops: float  # floating-point operations; 0 if it only moves data, or `torch.utils.flop_counter` does not know it
    read_bytes: float  # of the tensors that it reads
    written_bytes: float  # of the tensors that it writes
    wide: bool = False  # whether it computes with floating-point numbers of more than 16 bits

    def seconds(self, device: Device) -> float:
        """How long a device takes for it."""
        flops = self.flops / (ATTENTION_SHARE if self.name.startswith(ATTENTION) else 1.0)
        if self.wide and device.tflop_per_s_32 is not None:
            flops *= device.tflop_per_s / device.tflop_per_s_32
        return device.seconds(flops, self.read_bytes + self.written_bytes)


@public_class
@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device that computes: `lab.Device(tflop_per_s=100, gbyte_per_s=1000, memory_gb=40)`.

    Args:
        tflop_per_s: the rate at which kernels compute, in 10¹² floating-point operations per second.
        gbyte_per_s: the rate at which they read and write memory, in 10⁹ bytes per second.
        memory_gb: the size of its memory, in 10⁹ bytes; default: no limit.
        launch_us: what each kernel takes in addition, however small it is, in microseconds.
        tflop_per_s_32: the rate for numbers of 32 bits; default: `tflop_per_s`.
        peak_tflop_per_s: the rate of the data sheet, to which MFU refers; default: `tflop_per_s`.
        runs_ahead: whether the host only issues kernels, which run on streams, as on a GPU; else it computes itself.
        name: the name to show.

    Predefined are `t4`, `v100`, `a10`, `a100_40`, `a100` (80 GB), `l40s`, `rtx_4090`, `h100`, `h200` and `b200`. They
    have the memory of their data sheets, and those shares of its rates that kernels of trainings reach.

    Raises:
        TypeError: a rate or the memory is not a number, or another argument is of the wrong type.
        ValueError: it is out of range.
    """

    tflop_per_s: float
    gbyte_per_s: float
    memory_gb: float = math.inf
    launch_us: float = 0.0
    tflop_per_s_32: float | None = None
    peak_tflop_per_s: float | None = None
    runs_ahead: bool = True
    name: str = field(default="", compare=False)

    t4: ClassVar[Device]
    v100: ClassVar[Device]
    a10: ClassVar[Device]
    a100_40: ClassVar[Device]
    a100: ClassVar[Device]
    l40s: ClassVar[Device]
    rtx_4090: ClassVar[Device]
    h100: ClassVar[Device]
    h200: ClassVar[Device]
    b200: ClassVar[Device]

    def __post_init__(self) -> None:
        for name, unit in _UNITS.items():
            value = getattr(self, name)
            below = None if name == "memory_gb" else math.inf
            if value is not None or name in ("tflop_per_s", "gbyte_per_s", "memory_gb"):
                expected = f"Device({name}={value!r}): expected a number above 10⁻⁹, in {unit}"
                check_number(value, expected, above=1e-9, below=below)
        launch_us = f"Device(launch_us={self.launch_us!r}): expected a number of at least 0, in microseconds"
        check_number(self.launch_us, launch_us, at_least=0, below=math.inf)
        if not isinstance(self.runs_ahead, bool):
            raise TypeError(f"Device(runs_ahead={self.runs_ahead!r}): expected True or False")
        if not isinstance(self.name, str):
            raise TypeError(f"Device(name={self.name!r}): expected a string")

    @classmethod
    @public_api
    def here(cls, threads: int = 1) -> Device:
        """Measure the CPU of this machine, in about 2 s: a product of large matrices, copies of memory, a tiny kernel.

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
            flops, nbytes, launch_s = _measure()
        finally:
            torch.set_num_threads(before)
        rates = {"tflop_per_s": flops / 1e12, "gbyte_per_s": nbytes / 1e9, "launch_us": launch_s * 1e6}
        return cls(**rates, runs_ahead=False, name="this machine's CPU")

    def seconds(self, flops: float, nbytes: float) -> float:
        """Return the time of a kernel in seconds: its launch, and its operations or its memory, whichever takes longer.

        Args:
            flops: its floating-point operations.
            nbytes: the bytes that it reads and writes.

        Source: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model", 2009.
        """
        return self.launch_us * 1e-6 + max(flops / (self.tflop_per_s * 1e12), nbytes / (self.gbyte_per_s * 1e9))


def _measure() -> tuple[float, float, float]:
    """Return the rates of this CPU in operations and bytes per second, and the seconds of a kernel with no work."""
    import torch

    one, other, product = (torch.rand(WIDTH, WIDTH) for _ in range(3))
    source = torch.rand(COPIED_BYTES // 4)
    copy = torch.empty_like(source)
    flops_per_s = 2 * WIDTH**3 / _shortest_s(lambda: torch.mm(one, other, out=product))
    bytes_per_s = 2 * COPIED_BYTES / _shortest_s(lambda: copy.copy_(source))
    tiny = torch.zeros(1)
    return flops_per_s, bytes_per_s, _shortest_s(lambda: tiny.add_(tiny))


def _shortest_s(work: Callable[[], Any]) -> float:
    """Return the shortest time of some work, in which other programs have disturbed it least."""
    shortest_ns, end_ns = math.inf, clock() + MEASURED_NS
    while (start_ns := clock()) < end_ns or shortest_ns == math.inf:
        work()
        shortest_ns = min(shortest_ns, clock() - start_ns)
    return shortest_ns / 1e9


LAUNCH_US: Final = 5.0
MEMORY_SHARE: Final = 0.85


def _named(name: str, peak: float, peak_32: float, gbyte_per_s: float, memory_gb: float, share: float) -> None:
    """Predefine a device: its rates in 16 bits, without sparsity, and in 32; its memory; the share of the rates."""
    device = Device(
        tflop_per_s=share * peak, tflop_per_s_32=share * peak_32, peak_tflop_per_s=peak, memory_gb=memory_gb,
        gbyte_per_s=MEMORY_SHARE * gbyte_per_s, launch_us=LAUNCH_US, name=name,
    )  # fmt: skip
    setattr(Device, name, device)


# NVIDIA's data sheets.
_named("t4", 65, 8.1, 320, 16, 0.5)
_named("v100", 125, 15.7, 900, 32, 0.6)
_named("a10", 125, 31.2, 600, 24, 0.5)
_named("a100_40", 312, 19.5, 1555, 40, 0.65)
_named("a100", 312, 19.5, 2039, 80, 0.65)
_named("l40s", 362, 91.6, 864, 48, 0.5)
_named("rtx_4090", 165.2, 82.6, 1008, 24, 0.6)
_named("h100", 989, 67, 3350, 80, 0.5)
_named("h200", 989, 67, 4800, 141, 0.5)
_named("b200", 2250, 80, 8000, 180, 0.5)
