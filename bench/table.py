"""Readable numbers, and Markdown tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Goal", "duration", "goal_rows", "mib", "table"]


def duration(seconds: float | None) -> str:
    """A duration in a suitable unit."""
    if seconds is None:
        return "–"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.{0 if seconds / size >= 100 else 1 if seconds / size >= 10 else 2}f} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def mib(size: float | None) -> str:
    """A size in MiB."""
    return "–" if size is None else f"{size / 2**20:.0f} MiB"


@dataclass(frozen=True, slots=True)
class Goal:
    """One row of the table of goals.

    Args:
        quantity: the measured quantity.
        value: labkit's; None if it could not be measured.
        floor: the lower bound to compare with.
        floor_name: its name.
        at_most: the goal, in `unit`.
        unit: "times" for a multiple of the floor, "seconds" for a limit, "slower" for a fraction above the floor.
        is_size: whether the numbers are bytes and not seconds.
    """

    quantity: str
    value: float | None
    floor: float | None
    floor_name: str
    at_most: float
    unit: str = "times"
    is_size: bool = False

    def cells(self) -> list[str]:
        """Its cells: quantity, labkit's, lower bound, ratio, goal, and whether it was reached."""
        show = mib if self.is_size else duration
        ratio = self.value / self.floor if self.value is not None and self.floor else None
        reached = {
            "times": None if ratio is None else ratio <= self.at_most,
            "slower": None if ratio is None else ratio - 1 <= self.at_most,
            "seconds": None if self.value is None else self.value <= self.at_most,
        }[self.unit]
        goal = {
            "times": f"at most {self.at_most:g}×",
            "slower": f"at most {self.at_most:.0%} slower",
            "seconds": duration(self.at_most),
        }
        beside = "" if self.floor is None else f"{show(self.floor)} ({self.floor_name})"
        shown = "" if ratio is None else f"{ratio - 1:+.1%}" if self.unit == "slower" else f"{ratio:.2f}×"
        word = {None: "not measured", True: "yes", False: "**no**"}[reached]
        return [self.quantity, show(self.value), beside, shown, goal[self.unit], word]


def goal_rows(goals: Sequence[Goal]) -> str:
    """The table of goals."""
    return table(["what", "labkit", "beside it", "ratio", "goal", "reached"], [goal.cells() for goal in goals])


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows as a Markdown table, padded for reading as plain text."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines]
    return "\n".join([text[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *text[1:]])
