"""Figures of guesses: one guess beside its prediction and measurement, and all guesses of the course."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from labkit.errors.units import percent
from labkit.plots.bars import STYLES
from labkit.plots.predictions import Predictions, Quantity
from labkit.plots.scaling import PREDICTED
from labkit.plots.style import INK, axes_for, describe

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GUESSED: Final = "#B0406B"  # a wine red that is visible on dark pages, too, and that no kind of span has
MEASURED: Final = STYLES["backward"].colour  # as in the scaling figure
ROW_IN: Final = 0.34
WIDE: Final = 20.0  # between the smallest and the largest value: from here on the axis is logarithmic
CLOSE: Final = 2.0  # a guess within this factor of the measurement counts as close
CLOSE_POINTS: Final = 5.0  # of per cent: a guess within so many points of the measurement was right
SURE: Final = 1.5  # a spread whose ends differ by a larger factor, or by more than `SURE_POINTS`, decides no guess inside it
SURE_POINTS: Final = 20.0
COUNTED: Final = 20  # whole numbers up to this one are counted, not measured: a guess hits them or not
SHOWN_FACTORS: Final = (1.0, 2.0, 5.0, 10.0, 100.0, 1000.0)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A guess that was revealed."""

    lesson: str  # the notebook that asked for it; "" if unknown
    quantity: str  # its name for the student: "step"
    unit: str  # "ms", "MB", ...; "" for a plain number
    measured: float  # the measured value, in `unit`
    guess: float | None = None  # the guess that was sealed before the first reveal, in `unit`; None if there was none
    predicted: float | None = None  # the value that a formula gives, in `unit`; None if there is none
    changed: float | None = None  # the guess that was made after the first reveal, if it differs; else None
    # the measurement's spread: its lowest and its highest value, in `unit`; None if it is not known
    spread: tuple[float, float] | None = None
    busy: str = ""  # a warning that other programs kept the machine busy meanwhile; "" if they did not

    @property
    def undecided(self) -> str:
        """Why nothing is known about the guess: the machine was busy, or the spread is wide; "" if it is."""
        if self.busy:
            return self.busy
        if self.guess is None or self.spread is None or not self._in_spread(self.guess):
            return ""
        low, high = self.spread
        wide = high - low > SURE_POINTS if self.unit == "%" else high > SURE * low
        return f"Too close to call: measured {self.spread_in_words()}. Measure again" if wide else ""

    def _in_spread(self, value: float) -> bool:
        return self.spread is not None and self.spread[0] <= value <= self.spread[1]

    @property
    def is_count(self) -> bool:
        """Whether it is a small whole number of things, which a guess hits or misses: 1 for 2 is wrong, not close."""
        return not self.unit and self.measured <= COUNTED and self.measured == round(self.measured)

    def in_words(self, value: float) -> str:
        """A value with its unit and three significant digits: "12 ms"."""
        return f"{_digits(value)} {self.unit}".strip()

    def spread_in_words(self) -> str:
        """The spread: "124 ms to 133 ms"; "" if it is not known."""
        return " to ".join(self.in_words(value) for value in self.spread or ())

    def verdict(self) -> str:
        """How good the guess was: "Your guess was 20 % too high"."""
        if self.undecided:
            return self.undecided
        if self.guess is None:
            return "Revealed without a guess"
        if _digits(self.guess) == _digits(self.measured):
            return "Your guess was right"
        if self.is_count:
            return f"Your guess was {_digits(self.guess)} instead of {_digits(self.measured)}"
        if self._in_spread(self.guess):
            return "Your guess was within the spread"
        way = "high" if self.guess > self.measured else "low"
        if self.unit == "%":
            points = abs(self.guess - self.measured)
            within = f"within {CLOSE_POINTS:.0f} points"
            return f"Your guess was {within if points <= CLOSE_POINTS else f'{_points(points)} too {way}'}"
        if self.guess <= 0 or self.measured <= 0:
            return "Your guess beside the measurement"
        factor = max(self.guess / self.measured, self.measured / self.guess)
        if factor < 1.1:
            return "Your guess was within 10 %"
        if factor < 2:
            return f"Your guess was {percent(abs(self.guess / self.measured - 1))} too {way}"
        return f"Your guess was too {way} by a factor of {_digits(factor)}"


def draw_outcome(outcome: Outcome, ax: Axes | None = None) -> Axes:
    """Draw guess, prediction and measurement on one scale, each with its ratio to the measurement."""
    rows: list[tuple[str, float | None, str, str]] = [("your guess", outcome.guess, GUESSED, "D")]
    if outcome.changed is not None:
        rows.append(("changed after the reveal", outcome.changed, INK, "d"))
    if outcome.predicted is not None:
        rows.append(("predicted", outcome.predicted, PREDICTED, "s"))
    rows.append(("measured", outcome.measured, MEASURED, "o"))
    values = [*(value for _, value, _, _ in rows if value is not None), *(outcome.spread or ())]
    logarithmic = min(values) > 0 and max(values) > WIDE * min(values)
    with axes_for(ax, 0.75 + ROW_IN * len(rows)) as ax:
        if logarithmic:
            ax.set_xscale("log")
            left, right = min(values) / 2, max(values) * 2
        else:
            left, right = min(0.0, 1.1 * min(values)), 1.08 * max(*values, 0.0) or 1.0
            if not outcome.unit and all(value == round(value) for value in values):  # counts
                from matplotlib.ticker import MaxNLocator

                ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.set_xlim(left, right)
        ax.axvline(outcome.measured, color=MEASURED, linewidth=0.8, alpha=0.4)
        for row, (label, value, color, marker) in enumerate(rows):
            if value is None:
                ax.text(0.0, row, " none was sealed", transform=ax.get_yaxis_transform(), va="center", color=INK, fontsize=8.5)
                continue
            filled = color if row != 1 or outcome.changed is None else "none"
            start = left if logarithmic else 0.0
            ax.plot([start, value], [row, row], color=color, linewidth=1.4, alpha=0.55)
            ax.plot([value], [row], marker, color=color, markerfacecolor=filled, clip_on=False)
            words = _beside(outcome, value)
            if label == "measured" and outcome.spread is not None:
                ax.plot(outcome.spread, [row, row], color=color, linewidth=5, alpha=0.4, solid_capstyle="butt")
                words += f" ({outcome.spread_in_words()})"
            ax.text(1.01, row, words, transform=ax.get_yaxis_transform(), va="center", fontsize=8.5)
        ax.set_yticks(range(len(rows)), [label for label, *_ in rows])
        ax.set_ylim(len(rows) - 0.5, -0.5)
        ax.tick_params(axis="y", length=0)
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.9g}")
        ax.minorticks_off()
        ax.grid(axis="x")
        ax.set_xlabel(f"{outcome.quantity} ({outcome.unit})" if outcome.unit else outcome.quantity)
        ax.set_title(outcome.verdict())
    each = "; ".join(f"{label} {_beside(outcome, value)}" for label, value, _, _ in rows if value is not None)
    compared = () if outcome.predicted is None else (Quantity(outcome.quantity, outcome.predicted, outcome.measured),)
    numbers = Predictions(compared, outcome.unit).numbers() if compared else None
    return describe(ax, f"A guess beside the measurement: {outcome.verdict()}. {each}.", numbers)


def draw_calibration(outcomes: Sequence[Outcome], right: int = 0, choices: int = 0, ax: Axes | None = None) -> Axes:
    """Draw how far each guess of the course was from the measurement, in the order given.

    Outcomes without a guess are left out. A zero that is not matched by the other value lies at the edge: no factor
    leads from one to the other. `right` of the `choices`, guesses that were no numbers, were right; small whole numbers
    count like them, and have a cross if they were wrong.
    """
    drawn = [o for o in outcomes if o.guess is not None]
    pairs = [(o.guess or 0.0, o.measured) for o in drawn]
    ratios = [1.0 if guess == right else guess / right if right else math.inf for guess, right in pairs]
    factors = np.array([max(ratio, 1 / ratio if ratio else math.inf) for ratio in ratios])
    is_count = np.array([o.is_count for o in drawn], bool)
    kinds = " and ".join(["choices"] * (choices > 0) + ["counts"] * bool(is_count.any()))
    right, choices = right + int((factors[is_count] == 1).sum()), choices + int(is_count.sum())
    summary = _summary(factors[~is_count], right, choices, kinds)
    widest = max([10.0, *(factor for factor in factors.tolist() if factor < math.inf)]) * 1.15
    with axes_for(ax, 0.95 + ROW_IN * 0.8 * max(len(drawn), 1)) as ax:
        ax.set_xscale("log")
        ax.set_xlim(1 / widest, widest)
        ax.axvspan(1 / CLOSE, CLOSE, color=INK, alpha=0.15, linewidth=0)
        ax.axvline(1.0, color=MEASURED, linewidth=0.8)
        for row, (outcome, ratio) in enumerate(zip(drawn, ratios, strict=True)):
            at = min(max(ratio, 1 / widest), widest)
            ax.plot([1.0, at], [row, row], color=GUESSED, linewidth=1.4, alpha=0.55)
            missed = "x" if outcome.is_count and ratio != 1 else "D"
            ax.plot([at], [row], missed if at == ratio else "<" if at < 1 else ">", color=GUESSED, clip_on=False)
            words = f"{outcome.in_words(outcome.guess or 0.0)} for {outcome.in_words(outcome.measured)}"
            ax.text(1.01, row, words, transform=ax.get_yaxis_transform(), va="center", fontsize=8.5)
        ax.set_yticks(range(len(drawn)), [" · ".join(filter(None, (o.lesson, o.quantity))) for o in drawn])
        ax.set_ylim(max(len(drawn), 1) - 0.5, -0.5)
        ax.tick_params(axis="y", length=0)
        ticks = sorted({side for f in SHOWN_FACTORS if f < widest for side in (1 / f, f)})
        ax.set_xticks(ticks, [_factor(tick) for tick in ticks])
        ax.minorticks_off()
        ax.set_xlabel("guess ÷ measured")
        ax.set_title(summary)
    return describe(ax, f"All guesses of the course: {summary}.")


def _beside(outcome: Outcome, value: float) -> str:
    words = outcome.in_words(value)
    if words == outcome.in_words(outcome.measured) or not outcome.measured or outcome.is_count:
        return words
    if outcome.unit == "%":
        return f"{words}, {_points(abs(value - outcome.measured))} too {'high' if value > outcome.measured else 'low'}"
    return f"{words}, {_digits(value / outcome.measured)} × measured"


def _points(value: float) -> str:
    shown = f"{value:.0f}" if value >= 10 else f"{value:.2g}"
    return f"{shown} point{'s' * (shown != '1')}"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def _factor(ratio: float) -> str:
    return "1" if ratio == 1 else f"{ratio:g}×" if ratio > 1 else f"1/{1 / ratio:g}"


def _summary(factors: np.ndarray, right: int, choices: int, kinds: str) -> str:
    parts = []
    if len(factors):
        middle = math.exp(float(np.median(np.log(factors))))
        typical = f", median factor {_digits(middle)}" if middle < math.inf else ""
        parts.append(f"{(factors <= CLOSE).sum()} of {len(factors)} guesses within a factor of {CLOSE:.0f}{typical}")
    if choices:
        parts.append(f"{right} of {choices} {kinds} right")
    return "; ".join(parts) or "No guess has been revealed yet"
