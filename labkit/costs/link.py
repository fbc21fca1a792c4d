"""`Link`: how long messages and collectives take between ranks, by latency and bandwidth alone.

The model is that of Hockney ("The communication challenge for MPP", 1994): a message of n bytes takes α + n/B, whatever
else goes on elsewhere. Every rank has one such link into a network without other limits, and both directions work at
once.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from labkit.errors.wrong_calls import public_api
from labkit.recording.operations import OPERATION_TYPES, Cost, type_of

__all__ = ["Link", "as_float", "cost_of", "rounds_and_share"]

BITS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A link between ranks: `lab.Group(4, link=lab.Link(gbit_per_s=1, latency_us=50))`.

    Args:
        gbit_per_s: bandwidth of each direction, in 10⁹ bits per second; both directions work at once.
        latency_us: time from the begin of sending to the arrival of a message without content, in microseconds.
        name: what it is called; "" shows the numbers alone.
        source: where the numbers come from.

    Links by name, such as `Link.ethernet_1g`, have the bandwidth of their standard or their maker's data sheet
    (`.source`). Latencies stand in no standard: they depend on software, and those here are round numbers of our own,
    of the order that programs see.

    Raises:
        TypeError, ValueError: an invalid number.
    """

    gbit_per_s: float
    latency_us: float
    name: str = field(default="", compare=False)
    source: str = field(default="", repr=False, compare=False)

    ethernet_1g: ClassVar[Link]
    ethernet_10g: ClassVar[Link]
    ethernet_100g: ClassVar[Link]
    infiniband_hdr: ClassVar[Link]
    infiniband_ndr: ClassVar[Link]
    pcie4: ClassVar[Link]
    pcie5: ClassVar[Link]
    nvlink3: ClassVar[Link]
    nvlink4: ClassVar[Link]

    def __post_init__(self) -> None:
        _check("gbit_per_s", self.gbit_per_s, "above 0, in 10⁹ bits per second", self.gbit_per_s)
        _check("latency_us", self.latency_us, "of at least 0, in microseconds", 1)

    def __str__(self) -> str:
        figures = f"{self.gbit_per_s:.4g} Gbit/s, {self.latency_us:.4g} µs"
        return f"{self.name} ({figures})" if self.name else figures

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth of each direction, in bytes per second."""
        return self.gbit_per_s * 1e9 / BITS

    @property
    def latency_s(self) -> float:
        """Latency in seconds."""
        return self.latency_us * 1e-6

    @public_api
    def seconds(self, operation: str, nbytes: float, ranks: int = 2) -> float:
        """How long an operation takes from the moment when all its ranks have come.

        Args:
            operation: as torch.distributed calls it: "all_reduce", "broadcast", "send", ...
            nbytes: size in bytes, as `rounds_and_share` counts it.
            ranks: how many take part.

        Raises:
            TypeError, ValueError: no operation is called so, or an invalid number.
        """
        if not isinstance(nbytes, numbers.Real) or isinstance(nbytes, bool):
            raise TypeError(f"nbytes={nbytes!r}: expected a number from 0")
        if not 0 <= as_float(nbytes) < math.inf:
            raise ValueError(f"nbytes={nbytes!r}: expected a number from 0")
        rounds, share = rounds_and_share(operation, ranks)
        return rounds * self.latency_s + share * nbytes / self.bytes_per_s


Link.__init__ = public_api(Link.__init__)  # type: ignore[method-assign]  # dataclass makes it


def rounds_and_share(operation: str, ranks: int) -> tuple[int, float]:
    """The two numbers of an operation's cost, rounds·α + share·n/B; `recording.operations` says what n is.

    Raises:
        TypeError, ValueError: as `cost_of`.
    """
    cost = cost_of(operation, ranks)
    return cost.rounds(ranks), cost.share(ranks)


def cost_of(operation: str, ranks: int) -> Cost:
    """The cost of an operation, by its name.

    Raises:
        TypeError, ValueError: no operation is called so, or an invalid number of ranks.
    """
    if not isinstance(operation, str):
        raise TypeError(f"operation={operation!r}: expected the name of one, such as 'all_reduce'")
    if not isinstance(ranks, numbers.Integral) or isinstance(ranks, bool):
        raise TypeError(f"ranks={ranks!r}: expected a whole number from 1")
    if ranks < 1:
        raise ValueError(f"ranks={ranks!r}: expected a whole number from 1")
    cost = type_of(operation).cost
    if cost is None:
        known = ", ".join(kind.name for kind in OPERATION_TYPES if kind.cost is not None)
        raise ValueError(f"{operation!r} is no operation whose cost is known; expected {known}")
    return cost


def as_float(value: Any) -> float:
    """A number as a float; infinite where it is a whole number that is too large for one."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _check(name: str, value: Any, expected: str, positive: Any) -> None:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(f"Link({name}={value!r}): expected a number {expected}")
    if not (0 <= as_float(value) < math.inf and positive > 0):
        raise ValueError(f"Link({name}={value!r}): expected a number {expected}")


def _named(name: str, gbit_per_s: float, latency_us: float, source: str) -> None:
    assumed = "the latency is assumed"
    link = Link(gbit_per_s=gbit_per_s, latency_us=latency_us, name=name, source=f"{source}; {assumed}")
    setattr(Link, name, link)


_named("ethernet_1g", 1, 50, "1000BASE-T, IEEE 802.3ab: 1 Gbit/s in each direction")
_named("ethernet_10g", 10, 30, "10 Gigabit Ethernet, IEEE 802.3ae: 10 Gbit/s in each direction")
_named("ethernet_100g", 100, 20, "100 Gigabit Ethernet, IEEE 802.3ba: 100 Gbit/s in each direction")
_named("infiniband_hdr", 200, 2, "InfiniBand HDR, four lanes of 50 Gbit/s: 200 Gbit/s in each direction")
_named("infiniband_ndr", 400, 2, "InfiniBand NDR, four lanes of 100 Gbit/s: 400 Gbit/s in each direction")
# 16 lanes; of 130 bits sent, 128 are content.
_named("pcie4", 16 * 16 * 128 / 130, 2, "PCI Express 4.0, 16 lanes of 16 GT/s, 128b/130b: 252 Gbit/s in each direction")
_named("pcie5", 16 * 32 * 128 / 130, 2, "PCI Express 5.0, 16 lanes of 32 GT/s, 128b/130b: 504 Gbit/s in each direction")
# NVIDIA gives the sum of both directions: half of it is the bandwidth of one.
_named("nvlink3", 2400, 2, "NVIDIA A100 data sheet: NVLink 600 GB/s for both directions together, so 300 GB/s in each")
_named("nvlink4", 3600, 2, "NVIDIA H100 (SXM) data sheet: NVLink 900 GB/s for both directions together, so 450 GB/s in each")
