"""`predictions`: a table of predicted and measured values with their ratios."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from labkit.costs.prediction import UNITS, Prediction
from labkit.errors.units import three_digits
from labkit.errors.wrong_calls import one_number, public_api

__all__ = ["MIME", "Predictions", "Row", "predictions"]

MIME: Final = "application/vnd.labkit.predictions+json"  # the numbers, for programs that read an executed notebook
HEADINGS: Final = ("", "predicted", "measured", "ratio")


@dataclass(frozen=True, slots=True)
class Row:
    """One quantity.

    Args:
        name: what was predicted.
        predicted: in the table's unit.
        measured: in the same unit.
    """

    name: str
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        """Measured divided by predicted; NaN if zero was predicted."""
        return self.measured / self.predicted if self.predicted else math.nan


@dataclass(frozen=True, repr=False)
class Predictions:
    """A table of predicted and measured values. A notebook shows it as a table; `print` shows the same as text.

    Args:
        rows: the quantities.
        unit: of all values; "" for plain numbers.
    """

    rows: tuple[Row, ...]
    unit: str = ""

    def cells(self) -> list[tuple[str, str, str, str]]:
        """The texts of the table, row by row."""
        whole = all(value == round(value) for row in self.rows for value in (row.predicted, row.measured))

        def shown(value: float) -> str:
            small = 0 < abs(value) < 0.0995  # two decimals would not be three digits
            figures = f"{value:,.0f}" if whole or abs(value) >= 999.5 else f"{value:.3g}" if small else three_digits(value)
            return f"{figures} {self.unit}".strip()

        return [
            (row.name, shown(row.predicted), shown(row.measured), "" if math.isnan(row.ratio) else f"{row.ratio:.2f}")
            for row in self.rows
        ]

    def __repr__(self) -> str:
        table = [HEADINGS, *self.cells()]
        first, *others = (max(map(len, column)) for column in zip(*table, strict=True))
        return "\n".join(
            "  ".join([name.ljust(first), *(text.rjust(width) for text, width in zip(texts, others, strict=True))])
            for name, *texts in table
        )

    def _repr_html_(self) -> str:
        def line(row: tuple[str, ...], tag: str) -> str:
            cells = (
                f'<{tag} style="text-align:{"right" if column else "left"};padding:2px 12px">{html.escape(text)}</{tag}>'
                for column, text in enumerate(row)
            )
            return f"<tr>{''.join(cells)}</tr>"

        body = "".join(line(row, "td") for row in self.cells())
        return f"<table><thead>{line(HEADINGS, 'th')}</thead><tbody>{body}</tbody></table>"

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
        values: for each quantity its predicted and its measured value, numbers in `unit`; a `labkit.predict` result is
            converted to it.
        unit: of all values: "s", "ms", "µs", "B", "kB", "MB", "GB", "KiB", "MiB", "GiB", "%" or "".

    Returns:
        the table, which the notebook shows.

    Raises:
        TypeError: not a mapping of pairs of numbers.
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
        predicted, measured = (_number(str(name), value, unit) for value in pair)
        rows.append(Row(str(name), predicted, measured))
    return Predictions(tuple(rows), unit)


def _number(name: str, value: Any, unit: str) -> float:
    if isinstance(value, Prediction):
        try:
            return value.in_unit(unit)
        except ValueError as error:
            raise ValueError(f"predictions({name!r}: ...): {error}") from None
    number = one_number(value)
    if number is None:
        raise TypeError(f"predictions({name!r}: {value!r}): expected one number")
    if not math.isfinite(number):
        raise ValueError(f"predictions({name!r}: {value!r}): expected a finite number")
    return number
