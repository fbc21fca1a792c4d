"""`Table`: texts in rows and columns, as lines of text and as HTML."""

from __future__ import annotations

import html
from collections.abc import Collection, Sequence
from dataclasses import dataclass


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
