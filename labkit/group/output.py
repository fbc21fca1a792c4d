"""What ranks print: labelled and shown while they run, bounded, and grouped in rank order at the end.

In a notebook one display under the cell is updated by the thread that runs the cell, and gives way at the end to plain text, so
that a checked cell reads the same each time. In a terminal lines appear as they come.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any, Final, TextIO

from labkit.group.displays import Displays
from labkit.group.repeated_warnings import GroupedWarnings
from labkit.group.terminal_lines import Lines
from labkit.ipc.ranks_cell import cell_number

__all__ = ["Output", "cell_label", "notebook_shell", "put"]

LIVE_LINES: Final = 12  # of each rank, while the run goes on
WARNED_AFTER_S: Final = 1.0  # so long a terminal waits for other ranks to warn of the same
LIVE_AFTER_S: Final = 0.3  # a run shorter than that shows its prints once, at the end
LIVE_EVERY_S: Final = 0.15


class Output:
    """The prints of all ranks in one run.

    Args:
        names: the names of the ranks, in rank order.
        show: False keeps them without showing them.
    """

    def __init__(self, names: Sequence[str], *, show: bool = True) -> None:
        self._names = names
        self._ranks: dict[int, Lines] = {}  # of those that have printed: most runs print nothing, and most of those are short
        self._shell = notebook_shell() if show else None
        self._terminal = show and self._shell is None
        self._displays, self._warnings = Displays(names), GroupedWarnings(names)
        self._warned: list[str] = []  # the lines of those that have been printed
        self._warned_at = 0.0  # when the first of those came that a terminal has not seen yet
        self._handle: Any = None
        self._start = self._shown_at = time.monotonic()
        self._changed = False
        self._word = ""

    def say(self, word: str) -> None:
        """Show a word of our own beneath the prints while the run goes on; "" takes it back."""
        if word and not self._word and self._terminal:
            put(f"{word}\n", sys.stderr)
        self._changed |= word != self._word
        self._word = word

    def feed(self, rank: int, data: bytes) -> None:
        """Take what a rank printed."""
        if rank not in self._ranks:
            self._ranks[rank] = Lines()
        lines = self._ranks[rank].feed(data)
        self._changed = True
        if self._terminal and lines:
            self._print(rank, lines)

    def take(self, rank: int, kind: str, data: Any) -> None:
        """Take what a rank shows beside text ("shown"), which appears at the end, or a warning of it ("warned")."""
        if kind == "shown":
            self._displays.take(rank, data)
        else:
            self._warned_at = self._warned_at if self._warnings else time.monotonic()
            self._warnings.take(rank, *data)
            self._changed = True

    def refresh(self) -> None:
        """Show what is new, if it is time to; call it now and then from the thread that runs the cell."""
        now = time.monotonic()
        if self._terminal and self._warnings and now - self._warned_at > WARNED_AFTER_S:
            self._put_warnings()
        if self._shell is None or not self._changed or now - self._start < LIVE_AFTER_S or now - self._shown_at < LIVE_EVERY_S:
            return
        lines = [*self._shown(LIVE_LINES), *self._warnings.lines()]
        text = "\n".join([*lines, self._word] if self._word else lines)
        if self._handle is None:
            from IPython.display import display

            # Empty at first: nbval looks at a display's first state alone, and the text that counts is printed at the end.
            self._handle = display({}, raw=True, display_id=True)
        self._handle.update({"text/plain": text}, raw=True)
        self._shown_at, self._changed = now, False

    def finish(self) -> str:
        """End all lines, show the final state and return it."""
        for rank in sorted(self._ranks):
            rest = self._ranks[rank].finish()
            if self._terminal and rest:
                self._print(rank, rest)
        text = "\n".join(self._shown())
        if self._handle is not None:
            self._handle.update({}, raw=True)
            self._handle = None
        if self._shell is not None and text:
            put(f"{text}\n")
        if self._shell is not None or self._terminal:
            self._put_warnings()
        if self._shell is not None:
            self._displays.finish(put)
        return "\n".join(filter(None, (text, *self._warned)))

    def _shown(self, last: int | None = None) -> list[str]:
        """What the ranks have printed, labelled, in rank order; of each all that is kept, or the last lines."""
        return [f"[{self._names[rank]}] {line}" for rank in sorted(self._ranks) for line in self._ranks[rank].shown(last)]

    def _put_warnings(self) -> None:
        """Print the warnings so far, on standard error, where a program's own go."""
        if not self._warnings:
            return
        lines = self._warnings.lines()
        self._warned += lines
        self._warnings = GroupedWarnings(self._names)
        if lines:
            put("".join(f"{line}\n" for line in lines), sys.stderr)

    def _print(self, rank: int, lines: list[str]) -> None:
        put("".join(f"[{self._names[rank]}] {line}\n" for line in lines))


def put(text: str, stream: TextIO | None = None) -> None:
    """Write text to a stream, by default standard output. A program may have closed it, or have none: `Run.output` has it all."""
    stream = stream if stream is not None else sys.stdout
    if stream is not None and not getattr(stream, "closed", False):
        stream.write(text)
        stream.flush()


def cell_label(filename: str) -> str:
    """What the student calls a file: "cell 5" for a cell of this notebook, else the base name."""
    shell, number = _shell(), cell_number(filename)
    if number is None and shell is not None:
        number = getattr(shell.compile, "_filename_map", {}).get(filename)
    return f"cell {number}" if number is not None else os.path.basename(filename)


def notebook_shell() -> Any:
    """IPython's shell where it belongs to a notebook's kernel, else None."""
    shell = _shell()
    return shell if shell is not None and hasattr(shell, "kernel") else None


def _shell() -> Any:
    """IPython's shell, in a notebook or in a terminal; None where there is none."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
