"""Counts what makes a lesson readable: words, lines, guesses, checked cells. Prints a table.

python -m tools.lesson_numbers
"""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import nbformat

NOTEBOOKS: Final = Path(__file__).resolve().parents[1] / "notebooks"
CHECKED: Final = "nbval-check-output"
_UNREAD: Final = re.compile(r"!\[[^\]]*\]\([^)]*\)|<[^>]+>|\]\([^)]*\)", re.DOTALL)  # pictures, tags, targets of links
_FORMULA: Final = re.compile(r"\${1,2}[^$]+\${1,2}", re.DOTALL)
_PICTURE: Final = re.compile(r"!\[([^\]]*)\]\(([^)]*)\)", re.DOTALL)


@dataclass(frozen=True)
class Numbers:
    """The numbers of one lesson."""

    name: str  # the notebook's name without ".ipynb"
    words: int  # in all text cells; a formula counts as one word
    words_per_cell: float  # the median over the text cells
    words_to_code: int  # before the first cell of code that does more than import
    words_to_picture: int  # before the first cell that watches a run
    lines_per_cell: float  # the median over the code cells
    longest_line: int  # of the code, in characters
    guesses: int  # calls of `lab.guess`
    checked: int  # cells whose output the tests compare
    pictures: tuple[tuple[str, str], ...]  # the alternative text and the file of each diagram
    headings: tuple[str, ...]  # the headings of the second level
    kilobytes: float  # of the executed notebook


def numbers_of(path: Path) -> Numbers:
    """Count what is in a lesson."""
    cells = nbformat.read(path, as_version=4).cells
    text = [c.source for c in cells if c.cell_type == "markdown"]
    code = [c.source for c in cells if c.cell_type == "code"]
    first = next((i for i, c in enumerate(cells) if c.cell_type == "code" and not _only_imports(c.source)), len(cells))
    watch = next(
        (i for i, c in enumerate(cells) if c.cell_type == "code" and re.search(r"\.watch\(|--watch", c.source)), len(cells)
    )
    return Numbers(
        path.stem,
        words=sum(map(_words, text)),
        words_per_cell=statistics.median(map(_words, text)),
        words_to_code=_words_before(cells, first),
        words_to_picture=_words_before(cells, watch),
        lines_per_cell=statistics.median(len(source.splitlines()) for source in code),
        longest_line=max(len(line) for source in code for line in source.splitlines()),
        guesses=sum(source.count("lab.guess(") for source in code),
        checked=sum(CHECKED in c.metadata.get("tags", []) for c in cells),
        pictures=tuple(found for source in text for found in _PICTURE.findall(source)),
        headings=tuple(line[3:].strip() for source in text for line in source.splitlines() if line.startswith("## ")),
        kilobytes=path.stat().st_size / 1000,
    )


def _words(source: str) -> int:
    return len(re.findall(r"\w[\w'’.-]*", _FORMULA.sub(" x ", _UNREAD.sub(" ", source))))


def _words_before(cells: list[Any], end: int) -> int:
    return sum(_words(c.source) for c in cells[:end] if c.cell_type == "markdown")


def _only_imports(source: str) -> bool:
    return all(re.match(r"(import|from)\b|\s*(#|$)|[\w, ]*\)$|    \w+,$", line) for line in source.splitlines())


def main() -> None:
    """Print a table of all lessons."""
    print("| lesson | words | per text cell | before code | before a moving picture | lines per code cell | guesses | checked |")
    print("|---|---|---|---|---|---|---|---|")
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        n = numbers_of(path)
        print(
            f"| {n.name} | {n.words:,} | {n.words_per_cell:g} | {n.words_to_code} | {n.words_to_picture} | "
            f"{n.lines_per_cell:g} | {n.guesses} | {n.checked} |"
        )


if __name__ == "__main__":
    main()
