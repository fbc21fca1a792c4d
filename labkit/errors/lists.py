"""Joins names and numbers for all messages and figures: "rank 0, rank 1 and rank 3", "0-3, 5"; and `Table`."""

from __future__ import annotations

import html
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any


def listed(items: Iterable[Any], *, word: str = "and", most: int | None = None, rest: str = "more") -> str:
    """Join items as in "a, b and c"; "" if there are none.

    Only so many as `most` are named; if at least two are left, they are counted: "a, b and 3 more", or another `rest`.
    """
    texts = [str(item) for item in items]
    if most is not None and len(texts) > most + 1:
        texts = [*texts[:most], f"{len(texts) - most} {rest}"]
    return f" {word} ".join(filter(None, [", ".join(texts[:-1]), *texts[-1:]]))


def numbers_in_words(numbers: Sequence[int]) -> str:
    """Join ascending whole numbers as in "0-3, 5"; there is at least one."""
    gaps = [(a, b) for a, b in pairwise(numbers) if b != a + 1]
    starts, ends = [numbers[0], *(b for _, b in gaps)], [*(a for a, _ in gaps), numbers[-1]]
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def counted(count: float, noun: str) -> str:
    """Join a number and its noun: "1 rank", "3 ranks", "0 ranks", "1.5 cores"."""
    return f"{count:.15g} {noun}" if count == 1 else f"{count:.15g} {noun}s"


def these(ranks: Sequence[str]) -> str:
    """Name a single rank, or count several: "rank 0", "3 ranks"."""
    return ranks[0] if len(ranks) == 1 else counted(len(ranks), "rank")


@dataclass(frozen=True, slots=True)
class Table:
    """A table of texts."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Collection[int] = (0,)  # the columns of words, aligned at the left; the others have numbers

    def lines(self) -> list[str]:
        """The table as text: the columns are two spaces apart."""
        every = [self.headings, *self.rows]
        widths = [max(map(len, column)) for column in zip(*every, strict=True)]
        lines = []
        for row in every:
            cells = zip(range(len(row)), row, widths, strict=True)
            lines.append("  ".join(text.ljust(w) if k in self.words else text.rjust(w) for k, text, w in cells))
        return lines

    def html(self, style: str) -> str:
        """The table as HTML; `style` is that of a cell, with "{}" for its alignment."""
        head = self._html_row(self.headings, "th", style)
        body = "".join(self._html_row(row, "td", style) for row in self.rows)
        return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"

    def _html_row(self, row: Sequence[str], tag: str, style: str) -> str:
        aligned = (style.format("left" if k in self.words else "right") for k in range(len(row)))
        cells = (f'<{tag} style="{look}">{html.escape(text)}</{tag}>' for look, text in zip(aligned, row, strict=True))
        return f"<tr>{''.join(cells)}</tr>"
