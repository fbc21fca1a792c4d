"""`Prediction`: a number that was worked out, and, for whoever asks, its working in LaTeX."""

from __future__ import annotations

import numbers
from typing import Any, Final

from labkit.costs.link import Link, as_float
from labkit.errors.units import in_words, scaled

__all__ = ["Prediction", "Working", "check_arguments", "in_latex"]

_COUNTS: Final = frozenset(
    {"ranks", "stages", "micro_batches", "chunks", "buckets", "batch", "sequence", "hidden", "value_bytes"}
)
LARGEST: Final = 1e30  # bytes or seconds: more can only be a mistake, and would end as an overflow


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


def in_latex(value: float, unit: str) -> str:
    """The same in LaTeX."""
    figures, shown = scaled(value, unit)
    shown = shown.replace("%", r"\%").replace("µs", r"µs")
    return rf"{figures}\,\text{{{shown}}}"


def check_arguments(**arguments: Any) -> None:
    """Refuse invalid arguments. Valid are links, whole numbers from 1 for counts, and else numbers from 0."""
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
        elif not 0 <= as_float(value) < LARGEST:
            raise ValueError(f"{name}={value!r}: expected a number from 0")
