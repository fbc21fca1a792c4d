"""What ranks print: labelled and shown while they run, bounded, and grouped in rank order at the end.

In a notebook one display under the cell is updated by the thread that runs the cell, and gives way at the end to plain text, so
that a checked cell reads the same each time. In a terminal lines appear as they come.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

__all__ = ["Output", "cell_label", "notebook_shell"]

KEPT_LINES: Final = 1_000  # the first ones of what a rank prints in a run, and as many of the last ones
KEPT_CHARACTERS: Final = 200_000  # of each of the two parts: a notebook is to stay a file that one can open
LINE_CHARACTERS: Final = 10_000
LIVE_LINES: Final = 12  # of each rank, while the run goes on
LIVE_AFTER_S: Final = 0.3  # a run shorter than that shows its prints once, at the end
LIVE_EVERY_S: Final = 0.15


class _Lines:
    """The lines of one rank, within bounds."""

    def __init__(self) -> None:
        self._head: list[str] = []
        self._tail: deque[str] = deque()
        self._room = [KEPT_CHARACTERS, KEPT_CHARACTERS]  # in head and tail
        self._left_out = 0
        self._open = bytearray()  # a line that has no end yet

    def feed(self, data: bytes) -> list[str]:
        """Take what the rank has printed; the lines that are complete now."""
        *whole, rest = data.split(b"\n")
        if whole:
            whole[0] = bytes(self._open) + whole[0]
            self._open.clear()
        self._open += rest
        # What a progress bar writes over is gone, and a line without end must not fill the memory.
        del self._open[: self._open.rfind(b"\r", 0, -1) + 1]
        del self._open[4 * LINE_CHARACTERS :]
        lines = [_clean(line) for line in whole]
        for line in lines:
            self._add(line)
        return lines

    def finish(self) -> list[str]:
        """Close a last line that has no end."""
        return self.feed(b"\n") if self._open else []

    def shown(self, last: int | None = None) -> list[str]:
        """All lines kept, with a word about what was left out; or the last ones, the unfinished one included."""
        if last is not None:
            unfinished = [_clean(bytes(self._open))] if self._open else []
            return [*self._head[-last:], *self._tail, *unfinished][-last:]
        gap = [f"... {self._left_out:,} lines left out ..."] if self._left_out else []
        return [*self._head, *gap, *self._tail]

    def _add(self, line: str) -> None:
        head = not self._tail and len(self._head) < KEPT_LINES and self._room[0] >= len(line)
        (self._head if head else self._tail).append(line)
        self._room[0 if head else 1] -= len(line)
        while len(self._tail) > KEPT_LINES or self._room[1] < 0:
            self._room[1] += len(self._tail.popleft())
            self._left_out += 1


def _clean(line: bytes) -> str:
    """A line as text; of what a progress bar wrote over and over, the last state."""
    text = line.decode("utf-8", errors="replace").rstrip("\r").rpartition("\r")[2]
    return text if len(text) <= LINE_CHARACTERS else text[:LINE_CHARACTERS] + " ... (cut)"


class Output:
    """The prints of all ranks in one run.

    Args:
        names: the names of the ranks, in rank order.
        show: False keeps them without showing them.
    """

    def __init__(self, names: Sequence[str], *, show: bool = True) -> None:
        self._names = names
        self._ranks = [_Lines() for _ in names]
        self._shell = notebook_shell() if show else None
        self._terminal = show and self._shell is None
        self._handle: Any = None
        self._start = self._shown_at = time.monotonic()
        self._changed = False
        self._word = ""

    def say(self, word: str) -> None:
        """Show a word of our own beneath the prints while the run goes on; "" takes it back."""
        if word and not self._word and self._terminal:
            sys.stderr.write(f"{word}\n")
        self._changed |= word != self._word
        self._word = word

    def feed(self, rank: int, data: bytes) -> None:
        """Take what a rank printed."""
        lines = self._ranks[rank].feed(data)
        self._changed = True
        if self._terminal and lines:
            self._print(rank, lines)

    def refresh(self) -> None:
        """Show what is new, if it is time to; call it now and then from the thread that runs the cell."""
        now = time.monotonic()
        if self._shell is None or not self._changed or now - self._start < LIVE_AFTER_S or now - self._shown_at < LIVE_EVERY_S:
            return
        lines = [f"[{name}] {line}" for name, r in zip(self._names, self._ranks, strict=True) for line in r.shown(LIVE_LINES)]
        text = "\n".join([*lines, self._word] if self._word else lines)
        if self._handle is None:
            from IPython.display import display

            # Empty at first: nbval looks at a display's first state alone, and the text that counts is printed at the end.
            self._handle = display({}, raw=True, display_id=True)
        self._handle.update({"text/plain": text}, raw=True)
        self._shown_at, self._changed = now, False

    def finish(self) -> str:
        """End all lines, show the final state and return it."""
        for rank, lines in enumerate(self._ranks):
            rest = lines.finish()
            if self._terminal and rest:
                self._print(rank, rest)
        text = "\n".join(f"[{name}] {line}" for name, r in zip(self._names, self._ranks, strict=True) for line in r.shown())
        if self._handle is not None:
            self._handle.update({}, raw=True)
            self._handle = None
        if self._shell is not None and text:
            print(text)
        return text

    def _print(self, rank: int, lines: list[str]) -> None:
        sys.stdout.write("".join(f"[{self._names[rank]}] {line}\n" for line in lines))
        sys.stdout.flush()


def cell_label(filename: str) -> str:
    """What the student calls a file: "cell 5" for a cell of this notebook, else the base name."""
    if on_ranks := re.fullmatch(r"<(cell \d+) on the ranks>", filename):
        return on_ranks[1]
    shell = _shell()
    number = getattr(shell.compile, "_filename_map", {}).get(filename) if shell is not None else None
    return f"cell {number}" if number is not None else os.path.basename(filename)


def notebook_shell() -> Any:
    """IPython's shell where it belongs to a notebook's kernel, else None."""
    shell = _shell()
    return shell if shell is not None and hasattr(shell, "kernel") else None


def _shell() -> Any:
    """IPython's shell, in a notebook or in a terminal; None where there is none."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
