"""`Prediction`: a number that was worked out, and, for whoever asks, its working in LaTeX."""

from __future__ import annotations

import math
import numbers
from typing import Any, Final

from labkit.link import Link

__all__ = ["Prediction", "Working", "check_arguments", "in_latex", "in_words"]

_COUNTS: Final = frozenset(
    {"ranks", "stages", "micro_batches", "chunks", "buckets", "batch", "sequence", "hidden", "value_bytes"}
)
_UNITS: Final = {
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")),
    "B": ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")),
    "bit/s": ((1e12, "Tbit/s"), (1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s")),
}


class Working(str):
    """How a number comes about, in LaTeX; a notebook shows it set."""

    __slots__ = ()

    def _repr_latex_(self) -> str:
        return f"$$\\begin{{aligned}}{self}\\end{{aligned}}$$"


class Prediction(float):
    """A predicted number, in seconds, bytes, or as a share of one; calculating with it gives plain numbers.

    Args:
        value: in the unit.
        unit: "s", "B", or "" for a share.
        symbol: what the formula calls it, in LaTeX.
        formula: the right side of the formula, in LaTeX.
        inserted: the same with the numbers in place of the letters.
        source: where the formula comes from.
    """

    unit: str
    symbol: str
    formula: str
    inserted: str
    source: str

    def __new__(cls, value: float, unit: str, symbol: str, formula: str, inserted: str, source: str) -> Prediction:
        """A float cannot be given its value later."""
        self = super().__new__(cls, value)
        self.unit, self.symbol, self.formula, self.inserted, self.source = unit, symbol, formula, inserted, source
        return self

    def __getnewargs__(self) -> Any:
        """What it is made of anew where it is sent to."""
        return float(self), self.unit, self.symbol, self.formula, self.inserted, self.source

    def __repr__(self) -> str:
        return in_words(float(self), self.unit)

    __str__ = __repr__

    @property
    def working(self) -> Working:
        """The formula, the numbers inserted, and the result, in LaTeX. The last line of a cell shows it set."""
        rest = "".join(rf" \\ &= {step}" for step in (self.inserted, in_latex(float(self), self.unit)))
        return Working(f"{self.symbol} &= {self.formula}{rest}")


def in_words(value: float, unit: str) -> str:
    """A number with three digits and the unit that suits it: "16.1 ms", "4.00 MB", "27.3 %"."""
    figures, shown = _scaled(value, unit)
    return f"{figures} {shown}"


def in_latex(value: float, unit: str) -> str:
    """The same in LaTeX."""
    figures, shown = _scaled(value, unit)
    shown = shown.replace("%", r"\%").replace("µs", r"µs")
    return rf"{figures}\,\text{{{shown}}}"


def check_arguments(**arguments: Any) -> None:
    """Refuse what cannot be meant: links, whole numbers from 1 for counts, and else numbers from 0."""
    for name, value in arguments.items():
        if name == "link":
            if not isinstance(value, Link):
                raise TypeError(
                    f"link={value!r}: expected a Link, as in lab.Link(gbit_per_s=1, latency_us=50) or lab.Link.ethernet_1g"
                )
        elif name in _COUNTS:
            if not isinstance(value, numbers.Integral) or isinstance(value, bool):
                raise TypeError(f"{name}={value!r}: expected a whole number from 1")
            if int(value) < 1:
                raise ValueError(f"{name}={value!r}: expected a whole number from 1")
        elif not isinstance(value, numbers.Real) or isinstance(value, bool):
            raise TypeError(f"{name}={value!r}: expected a number from 0")
        elif not (math.isfinite(value) and float(value) >= 0):
            raise ValueError(f"{name}={value!r}: expected a number from 0")


def _scaled(value: float, unit: str) -> tuple[str, str]:
    if not unit:
        return _three_digits(100 * value), "%"
    sizes = _UNITS[unit]
    reached = [(size, shown) for size, shown in sizes if abs(value) >= 0.9995 * size]
    size, shown = reached[0] if reached else sizes[-1] if value else (1.0, unit)
    return _three_digits(value / size), shown


def _three_digits(value: float) -> str:
    size = abs(value)
    if abs(size - round(size)) <= 1e-9 * size and size < 1e6:
        return f"{value:.0f}"
    return f"{value:.0f}" if size >= 99.95 else f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"
