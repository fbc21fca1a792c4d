"""How bytes, times and rates are said, everywhere: three digits, in the unit that suits the number."""

from __future__ import annotations

from typing import Final

__all__ = ["bytes_in_words", "in_words", "scaled", "three_digits", "time_in_words", "unit_of", "unit_of_bytes"]

UNITS: Final = {
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")),
    "B": ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")),
    "iB": ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B")),  # memory, in powers of two
    "bit/s": ((1e12, "Tbit/s"), (1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s"), (1.0, "bit/s")),
}
ROUNDS_UP: Final = 0.9995  # of a unit, from where three digits would be 1000 of the smaller one


def in_words(value: float, unit: str) -> str:
    """A number with three digits and the unit that suits it: "16.1 ms", "4 MB", "27.3 %".

    Args:
        value: in units of `unit`; a share from 0 to 1 where that is "".
        unit: "s", "B", "iB" (bytes in powers of two), "bit/s", or "".
    """
    figures, shown = scaled(value, unit)
    return f"{figures} {shown}"


def scaled(value: float, unit: str) -> tuple[str, str]:
    """The two parts of `in_words`; a whole number has no digits after the point."""
    if not unit:
        return _whole_or_three_digits(100 * value), "%"
    sizes = UNITS[unit]
    reached = [(size, shown) for size, shown in sizes if abs(value) >= ROUNDS_UP * size]
    size, shown = reached[0] if reached else sizes[-1] if value else next(one for one in sizes if one[0] == 1)
    return _whole_or_three_digits(value / size), shown


def bytes_in_words(nbytes: float) -> str:
    """A size in powers of ten: "4.19 MB", "94 B"."""
    unit, size = unit_of_bytes(nbytes)
    return f"{nbytes:.0f} B" if unit == "B" else f"{three_digits(nbytes / size)} {unit}"


def unit_of_bytes(nbytes: float, unit: str = "B") -> tuple[str, float]:
    """The unit in which a size reads well, and how many bytes it is; `unit` is "B", or "iB" for powers of two."""
    return next((shown, size) for size, shown in UNITS[unit] if nbytes >= ROUNDS_UP * size or size == 1)


def unit_of(duration_ns: float) -> tuple[str, float]:
    """The unit in which a time reads well, and its length in ns. An axis has some ticks in it, so one and a half are wanted."""
    return next((shown, size * 1e9) for size, shown in UNITS["s"] if duration_ns >= 1.5e9 * size or shown == "ns")


def time_in_words(duration_ns: float) -> str:
    """A time with three digits and its unit: "67.7 ms"."""
    unit, length_ns = unit_of(duration_ns)
    return f"{three_digits(duration_ns / length_ns)} {unit}"


def three_digits(value: float) -> str:
    """A number of three digits, or more where they stand before the point."""
    size = abs(value)
    return f"{value:.0f}" if size >= 99.95 else f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"


def _whole_or_three_digits(value: float) -> str:
    size = abs(value)
    if abs(size - round(size)) <= 1e-9 * size and size < 1e6:
        return f"{value:.0f}"
    return three_digits(value)
