"""`predictions`: a table of predicted and measured values with their ratios."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final

from labkit.costs.prediction import UNITS, Prediction
from labkit.errors.lists import Table
from labkit.errors.units import three_digits
from labkit.errors.wrong_calls import public_api
from labkit.tracing.measurement import UNITS_OF_TIME, Measurement, busy_machine, measurement_of

MIME: Final = "application/vnd.labkit.predictions+json"  # the numbers, for programs that read an executed notebook
HEADINGS: Final = ("", "predicted", "measured", "ratio")


@dataclass(frozen=True, slots=True)
class Quantity:
    """One quantity."""

    name: str  # what was predicted
    predicted: float  # in the table's unit
    measured: float  # in the same unit
    measurement: Measurement | None = None  # the same with its spread; None if it is not known

    def values(self) -> Iterator[float]:
        """All its numbers."""
        yield from (self.predicted, self.measured)
        if self.measurement is not None:
            yield from (self.measurement.low, self.measurement.high)

    @property
    def ratio(self) -> float:
        """Measured divided by predicted; NaN if zero was predicted."""
        return self.measured / self.predicted if self.predicted else math.nan


@dataclass(frozen=True, repr=False)
class Predictions:
    """A table of predicted and measured values. A notebook shows it as a table; `print` shows the same as text."""

    rows: tuple[Quantity, ...]
    unit: str = ""  # of all values; "" for plain numbers
    notes: tuple[str, ...] = ()  # lines below the table: that the machine was busy, or that rows are too close to call

    def cells(self) -> list[tuple[str, str, str, str]]:
        """The texts of the table, row by row."""
        whole = all(value == round(value) for row in self.rows for value in row.values())

        def shown(value: float) -> str:
            small = 0 < abs(value) < 0.0995  # two decimals would not be three digits
            figures = f"{value:,.0f}" if whole or abs(value) >= 999.5 else f"{value:.3g}" if small else three_digits(value)
            return f"{figures} {self.unit}".strip()

        return [
            (
                row.name,
                shown(row.predicted),
                row.measurement.in_words(shown) if row.measurement else shown(row.measured),
                "" if math.isnan(row.ratio) else f"{row.ratio:.2f}",
            )
            for row in self.rows
        ]

    def __repr__(self) -> str:
        return "\n".join([*Table(HEADINGS, self.cells()).lines(), *self.notes])

    def _repr_html_(self) -> str:
        notes = "".join(f"<div>{html.escape(note)}</div>" for note in self.notes)
        return Table(HEADINGS, self.cells()).html("text-align:{};padding:2px 12px") + notes

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return {"text/plain": repr(self), "text/html": self._repr_html_(), **self.numbers()}

    def numbers(self) -> dict[str, Any]:
        """The values by their MIME type."""
        rows = [{"name": row.name, "predicted": row.predicted, "measured": row.measured} for row in self.rows]
        return {MIME: {"unit": self.unit, "rows": rows}}


@public_api
def predictions(values: Mapping[str, tuple[Any, Any]], unit: str = "") -> Predictions:
    """Show predicted beside measured values, each pair with its ratio: measured divided by predicted.

    For example: `lab.predictions({"step": (10.8, 11.3), "all_reduce": (predicted, 0.94)}, unit="ms")`.

    Args:
        values: for each quantity its predicted and its measured value, numbers in `unit`; a `lab.predict` result is
            converted to it. A value may also be a run, for `step_ms` of it, or a list of several runs or measurements.
            The table then shows the spread of what was measured, and says which rows are too close to call.
        unit: of all values: "s", "ms", "µs", "B", "kB", "MB", "GB", "KiB", "MiB", "GiB", "%" or "".

    Returns:
        the table, which the notebook shows.

    Raises:
        TypeError: not a mapping of pairs of numbers, or a run in a table whose unit is not one of time.
        ValueError: no quantity, an unknown unit, a number that is not finite, or a prediction in another unit.
    """
    if unit not in UNITS:
        raise ValueError(f"predictions(unit={unit!r}): expected one of {', '.join(map(repr, UNITS))}")
    if not isinstance(values, Mapping):
        raise TypeError(f'predictions({values!r}): expected pairs by name, as in lab.predictions({{"step": (10.8, 11.3)}}, "ms")')
    if not values:
        raise ValueError("predictions({}): expected at least one quantity")
    rows = []
    for name, pair in values.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TypeError(f"predictions({name!r}: {pair!r}): expected a pair, the predicted and the measured value")
        predicted, measured = (_measurement(str(name), value, unit) for value in pair)
        rows.append(Quantity(str(name), predicted.value, measured.value, measured))
    return Predictions(tuple(rows), unit, tuple(_notes(rows, unit)))


def _notes(rows: Sequence[Quantity], unit: str) -> Iterator[str]:
    measured = {row.name: row.measurement for row in rows if row.measurement is not None}
    warnings = [one.busy for one in measured.values() if one.busy]
    if not warnings and unit in UNITS_OF_TIME:
        warnings = [busy_machine()]
    yield from filter(None, warnings[:1])
    for (name, one), (other, another) in combinations(measured.items(), 2):
        if one != another and one.low < one.high and another.low < another.high and one.too_close(another):
            yield f"Too close to call: {name} and {other}. The difference is inside their spread."


def _measurement(name: str, value: Any, unit: str) -> Measurement:
    if isinstance(value, Prediction):
        try:
            value = value.in_unit(unit)
        except ValueError as error:
            raise ValueError(f"predictions({name!r}: ...): {error}") from None
    found = measurement_of(value, unit, f"predictions({name!r}: ...)")
    if found is None:
        raise TypeError(f"predictions({name!r}: {value!r}): expected one number, a run, or a list of either")
    if not math.isfinite(found.low + found.value + found.high):
        raise ValueError(f"predictions({name!r}: {value!r}): expected a finite number")
    return found
