"""Formats bytes, times and rates for all messages and figures: three digits, in a unit that suits the number."""

from __future__ import annotations

import math
from typing import Final

UNITS: Final = {
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")),
    "B": ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")),
    "iB": ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B")),  # memory, in powers of two
    "bit/s": ((1e12, "Tbit/s"), (1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s"), (1.0, "bit/s")),
}
ROUNDS_UP: Final = 0.9995  # share of a unit from which three digits would read "1000" in the next smaller unit


def in_words(value: float, unit: str) -> str:
    """Format a number, given in one of `UNITS`, with three digits: "16.1 ms", "4 MB"; a fraction: "27.3 %"."""
    return " ".join(scaled(value, unit))


def scaled(value: float, unit: str) -> tuple[str, str]:
    """Return the number and the unit of `in_words`; whole numbers have no decimal places."""
    if not unit:
        return _whole_or_three_digits(100 * value), "%"
    sizes = UNITS[unit]
    reached = [(size, shown) for size, shown in sizes if abs(value) >= ROUNDS_UP * size]
    size, shown = reached[0] if reached else sizes[-1] if value else next(one for one in sizes if one[0] == 1)
    return _whole_or_three_digits(value / size), shown


def bytes_in_words(nbytes: float) -> str:
    """Format a size in decimal units: "4.19 MB", "94 B"."""
    unit, size = unit_of_bytes(nbytes)
    return f"{nbytes:.0f} B" if unit == "B" else f"{three_digits(nbytes / size)} {unit}"


def unit_of_bytes(nbytes: float) -> tuple[str, float]:
    """Return a readable unit for a size, and its length in bytes."""
    return next((shown, size) for size, shown in UNITS["B"] if nbytes >= ROUNDS_UP * size or size == 1)


def unit_of(duration_ns: float) -> tuple[str, float]:
    """Return a unit for a time, and its length in ns: on an axis of at least one and a half units are several ticks."""
    return next((shown, size * 1e9) for size, shown in UNITS["s"] if duration_ns >= 1.5e9 * size or shown == "ns")


def round_stride(extent: float, most: int) -> float:
    """Return a round distance between the ticks of an axis, with at most `most` of them after 0, up to `extent`."""
    power = 10.0 ** math.floor(math.log10(extent / most))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= extent / most)


def time_in_words(duration_ns: float) -> str:
    """Format a time with three digits and its unit: "67.7 ms"."""
    unit, length_ns = unit_of(duration_ns)
    return f"{three_digits(duration_ns / length_ns)} {unit}"


def clock_time(seconds: float, *, tenths: bool = False) -> str:
    """Format a duration as a clock does: "12 s", "3 min 20 s", "2 h 5 min"; with tenths, "12.3 s" below a minute."""
    whole = int(seconds) if tenths else round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if tenths else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def rate_in_words(per_s: float, noun: str) -> str:
    """Format a rate: "12.3 steps/s" if `noun` is "step"; a very low one by its inverse: "12.3 s per step"."""
    if per_s < 0.1:
        return f"{in_words(1 / per_s, 's')} per {noun}"
    return f"{per_s:.3g} {noun}s/s" if per_s < 1000 else f"{per_s:.0f} {noun}s/s"


def percent(share: float) -> str:
    """Format a fraction of 1 in whole percent: "5 %"."""
    return f"{100 * share:.0f} %"


def three_digits(value: float) -> str:
    """Format a number with three digits; numbers from 1,000 on keep all digits before the decimal point."""
    size = abs(value)
    return f"{value:.0f}" if size >= 99.95 else f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"


def _whole_or_three_digits(value: float) -> str:
    size = abs(value)
    if abs(size - round(size)) <= 1e-9 * size and size < 1e6:
        return f"{value:.0f}"
    return three_digits(value)
