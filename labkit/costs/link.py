"""`Link`: the time that messages and collectives take between ranks, from latency and bandwidth alone.

The model is Hockney's ("The communication challenge for MPP", 1994): a message of n bytes takes α + n/B, regardless of
other traffic. Every rank has one such link into a network without other limits, and both directions work at the same
time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Final

from labkit.costs.rounds import cost_of
from labkit.errors.wrong_calls import check_number, public_api, public_class

BITS: Final = 8


@public_class
@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A link between ranks: `lab.Group(4, link=lab.Link(gbit_per_s=1, latency_us=50))`.

    Args:
        gbit_per_s: bandwidth of each direction, in 10⁹ bits per second; both directions work at the same time.
        latency_us: time from the start of sending to the arrival of an empty message, in microseconds.
        name: the name to show; "" shows only the numbers.
        source: where the numbers come from.

    Predefined links, such as `Link.ethernet_1g`, have the bandwidth of their standard or of the maker's data sheet
    (`.source`). Standards do not specify latencies, because they depend on software. The latencies here are our own
    round numbers, of the order of magnitude that programs see.

    Raises:
        TypeError: `gbit_per_s` or `latency_us` is not a number.
        ValueError: one of them is out of range.
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
        gbit_per_s = f"Link(gbit_per_s={self.gbit_per_s!r}): expected a number above 0, in 10⁹ bits per second"
        check_number(self.gbit_per_s, gbit_per_s, above=0, below=math.inf)
        latency_us = f"Link(latency_us={self.latency_us!r}): expected a number of at least 0, in microseconds"
        check_number(self.latency_us, latency_us, at_least=0, below=math.inf)

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
        """Return how long an operation takes, in seconds, once all its ranks have arrived.

        Args:
            operation: its name in torch.distributed: "all_reduce", "broadcast", "send", ...
            nbytes: its size in bytes, the n of `rounds_and_share`.
            ranks: the number of participating ranks.

        Raises:
            TypeError: `operation` is not a string, or `nbytes` or `ranks` is not a number.
            ValueError: the operation's cost is not known, or `nbytes` or `ranks` is out of range.
        """
        check_number(nbytes, f"nbytes={nbytes!r}: expected a number from 0", at_least=0, below=math.inf)
        rounds, share = rounds_and_share(operation, ranks)
        return rounds * self.latency_s + share * nbytes / self.bytes_per_s


def rounds_and_share(operation: str, ranks: int) -> tuple[int, float]:
    """Return the rounds and the share in an operation's cost, rounds·α + share·n/B; `recording.operations` has n."""
    cost = cost_of(operation, ranks)
    return cost.rounds(ranks), cost.share(ranks)


def _named(name: str, gbit_per_s: float, latency_us: float, source: str) -> None:
    assumed = "the latency is assumed"
    link = Link(gbit_per_s=gbit_per_s, latency_us=latency_us, name=name, source=f"{source}; {assumed}")
    setattr(Link, name, link)


_named("ethernet_1g", 1, 50, "1000BASE-T, IEEE 802.3ab: 1 Gbit/s in each direction")
_named("ethernet_10g", 10, 30, "10 Gigabit Ethernet, IEEE 802.3ae: 10 Gbit/s in each direction")
_named("ethernet_100g", 100, 20, "100 Gigabit Ethernet, IEEE 802.3ba: 100 Gbit/s in each direction")
_named("infiniband_hdr", 200, 2, "InfiniBand HDR, four lanes of 50 Gbit/s: 200 Gbit/s in each direction")
_named("infiniband_ndr", 400, 2, "InfiniBand NDR, four lanes of 100 Gbit/s: 400 Gbit/s in each direction")
# 16 lanes; 128 of every 130 bits sent are payload.
_named("pcie4", 16 * 16 * 128 / 130, 2, "PCI Express 4.0, 16 lanes of 16 GT/s, 128b/130b: 252 Gbit/s in each direction")
_named("pcie5", 16 * 32 * 128 / 130, 2, "PCI Express 5.0, 16 lanes of 32 GT/s, 128b/130b: 504 Gbit/s in each direction")
# NVIDIA states the sum of both directions; each has half of it.
_named("nvlink3", 2400, 2, "NVIDIA A100 data sheet: NVLink 600 GB/s for both directions together, so 300 GB/s in each")
_named("nvlink4", 3600, 2, "NVIDIA H100 (SXM) data sheet: NVLink 900 GB/s for both directions together, so 450 GB/s in each")
