"""`Prediction`: a computed number with its derivation in LaTeX; and the checks of what it is computed from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from labkit.costs.link import Link
from labkit.costs.network import Network
from labkit.costs.rounds import Round
from labkit.errors.lists import listed
from labkit.errors.units import in_words, scaled
from labkit.errors.wrong_calls import check_number

# The units in which a prediction can be read: which of "s", "B" and "" (a fraction) each measures, and its size.
UNITS: Final = {
    "": ("", 1.0), "%": ("", 1e-2),
    "s": ("s", 1.0), "ms": ("s", 1e-3), "µs": ("s", 1e-6),
    "B": ("B", 1.0), "kB": ("B", 1e3), "MB": ("B", 1e6), "GB": ("B", 1e9),
    "KiB": ("B", 2.0**10), "MiB": ("B", 2.0**20), "GiB": ("B", 2.0**30),
}  # fmt: skip
_COUNTS: Final = frozenset(
    {"ranks", "stages", "micro_batches", "chunks", "buckets", "batch", "sequence", "hidden", "value_bytes", "calls"}
)
LARGEST: Final = 1e30  # bytes or seconds: more is certainly a mistake, and would overflow
GPIPE: Final = "gpipe"
ONE_F_ONE_B: Final = "1f1b"
INTERLEAVED: Final = "interleaved 1f1b"
_SCHEDULES: Final = {  # letters and digits only, in lower case
    "gpipe": GPIPE, "1f1b": ONE_F_ONE_B, "interleaved": INTERLEAVED, "interleaved1f1b": INTERLEAVED,
}  # fmt: skip


class Working(str):
    """The derivation of a number in LaTeX, which a notebook renders."""

    __slots__ = ()

    def _repr_latex_(self) -> str:
        return f"$$\\begin{{aligned}}{self}\\end{{aligned}}$$"


class Prediction(float):
    """A predicted number of seconds or bytes, or a fraction.

    A sum of predictions in one unit is a prediction; other arithmetic gives plain floats, which have no unit.
    """

    unit: str  # "s", "B", or "" for a fraction
    symbol: str  # in LaTeX
    formula: str  # its right side, in LaTeX
    inserted: str  # the formula with numbers in place of the symbols
    source: str  # of the formula

    def __new__(cls, value: float, unit: str, symbol: str, formula: str, inserted: str, source: str) -> Prediction:
        """Create the number: a float's value is set here, not in `__init__`."""
        self = super().__new__(cls, value)
        self.unit, self.symbol, self.formula, self.inserted, self.source = unit, symbol, formula, inserted, source
        return self

    @classmethod
    def of(
        cls, rounds: tuple[Round, ...], nbytes: float, network: Network, formulas: Mapping[str, str], source: str
    ) -> Prediction:
        """Return how long the rounds of an algorithm take for n bytes over a network.

        α and B have an index if there are several nodes. `formulas` says what the rounds of a level take, in α and B;
        if it does not, their coefficients are written.
        """
        symbols, numbers = [], []
        for level, (times, share) in latency_and_share(rounds, network, nbytes).items():
            link: Link = getattr(network, level)
            template = rf"{times}\,*<\alpha>" + (rf" + {share:.4g}\,*<\frac{{n}}{{B}}>" if share else "")
            of_level = {r"\alpha": in_seconds(link.latency_s), r"\frac{n}{B}": transfer_in_latex(nbytes, link)}
            general, inserted = filled(template, of_level)
            numbers.append(inserted)
            index = "" if network.nodes == 1 else rf"_\text{{{level}}}"
            symbols.append(formulas.get(level, general).replace(r"\alpha", rf"\alpha{index}").replace("B}", f"B{index}}}"))
        formula = " + ".join(symbols) or formulas.get("inside", "0")
        return cls(network.rounds_s(rounds, nbytes), "s", "T", formula, " + ".join(numbers) or "0", source)

    @classmethod
    def filled(
        cls, value: float, unit: str, symbol: str, template: str, numbers: Mapping[str, str], source: str, more: str = ""
    ) -> Prediction:
        """Return a number with the derivation that `filled` gives for a template; `more` explains its symbols."""
        formula, inserted = filled(template, numbers)
        return cls(value, unit, symbol, formula + more, inserted, source)

    def __getnewargs__(self) -> Any:
        """The arguments with which it is unpickled."""
        return float(self), self.unit, self.symbol, self.formula, self.inserted, self.source

    def __add__(self, other: Any) -> Any:
        """The sum of two predictions in one unit is one, and so is that with 0, with which `sum` begins."""
        if isinstance(other, Prediction) and other.unit == self.unit:
            either = dict.fromkeys((self.symbol, other.symbol)), dict.fromkeys((self.source, other.source))
            symbol, source = " + ".join(either[0]), "; ".join(either[1])
            formula, inserted = f"{self.formula} + {other.formula}", f"{self.inserted} + {other.inserted}"
            return Prediction(float(self) + float(other), self.unit, symbol, formula, inserted, source)
        return self if type(other) is int and other == 0 else super().__add__(other)

    __radd__ = __add__

    def __repr__(self) -> str:
        return in_words(float(self), self.unit)

    __str__ = __repr__

    def in_unit(self, unit: str) -> float:
        """The number in another unit, one of `UNITS`; a ValueError if the prediction does not have it."""
        base, size = UNITS.get(unit, (None, 1.0))
        if base != self.unit:
            raise ValueError(f"the prediction, {self}, is not in {unit or 'plain numbers'}")
        return float(self) / size

    @property
    def working(self) -> Working:
        """The formula, the numbers inserted, and the result, in LaTeX; rendered as a cell's last expression."""
        rest = "".join(rf" \\ &= {step}" for step in (self.inserted, in_latex(float(self), self.unit)))
        return Working(f"{self.symbol} &= {self.formula}{rest}")


def latency_and_share(rounds: Iterable[Round], network: Network, nbytes: float) -> dict[str, tuple[int, float]]:
    """Return for each level the rounds that last as long as it does, and the share of n that it carries in them.

    Which level is the slower depends on n.
    """
    sums = {"between": (0, 0.0), "inside": (0, 0.0)}
    for each in rounds:
        level = network.slower(each, nbytes)
        share = each.between if level == "between" else each.inside
        count, total = sums[level]
        sums[level] = count + each.times, total + (share or 0.0)
    return {level: found for level, found in sums.items() if found[0]}


def filled(template: str, numbers: Mapping[str, str]) -> tuple[str, str]:
    r"""Return a formula in LaTeX with its symbols, and with the number of each symbol in its place.

    The template has each symbol in angle brackets. `*` is a product, whose factors stand side by side if they are
    symbols, and have a dot between them if they are numbers: r"<k>\,*<t_a>".
    """
    symbols = re.sub("<(.*?)>", r"\1", template).replace("*", "")
    return symbols, re.sub("<(.*?)>", lambda found: numbers[found[1]], re.sub(r"(\\,|\\cdot| )?\*", r" \\cdot ", template))


def in_latex(value: float, unit: str) -> str:
    """A value with its unit in LaTeX."""
    figures, shown = scaled(value, unit)
    shown = shown.replace("%", r"\%")
    return rf"{figures}\,\text{{{shown}}}"


def in_seconds(seconds: float) -> str:
    """A time in LaTeX."""
    return in_latex(seconds, "s")


def transfer_in_latex(nbytes: float, link: Link) -> str:
    """The time in which bytes pass through a link, as a fraction in LaTeX."""
    return rf"\frac{{8 \cdot {in_latex(nbytes, 'B')}}}{{{in_latex(link.gbit_per_s * 1e9, 'bit/s')}}}"


def check_arguments(**arguments: Any) -> None:
    """Check arguments by name: links and networks, counts (whole numbers from 1), and other numbers (from 0)."""
    for name, value in arguments.items():
        if name == "link":
            if not isinstance(value, Link | Network):
                raise TypeError(
                    f"link={value!r}: expected a Link, as in lab.Link(gbit_per_s=1, latency_us=50) or lab.Link.ethernet_1g, "
                    "or a lab.Network"
                )
        elif name in _COUNTS:
            check_number(value, f"{name}={value!r}: expected a whole number from 1", whole=True, at_least=1)
        else:
            check_number(value, f"{name}={value!r}: expected a number from 0", at_least=0, below=LARGEST)


def schedule_name(given: Any, argument: str) -> str:
    """Return `GPIPE`, `ONE_F_ONE_B` or `INTERLEAVED` for "1F1B", "interleaved_1f1b", torch's "ScheduleGPipe", ..."""
    expected = f"{argument}={given!r}: expected {listed(map(repr, (GPIPE, ONE_F_ONE_B, INTERLEAVED)), word='or')}"
    if not isinstance(given, str):
        raise TypeError(expected)
    letters = "".join(character for character in given.lower() if character.isalnum())
    if letters.removeprefix("schedule") not in _SCHEDULES:
        raise ValueError(expected)
    return _SCHEDULES[letters.removeprefix("schedule")]
