"""Ranks at breakpoints: which of them the student is asked about, and the question below the cell."""

from __future__ import annotations

import sys
import threading
import time
from typing import Final

from labkit.group.output import notebook_shell, put
from labkit.group.pool_state import Member

TURN_S: Final = 1.0  # how long the others wait for a rank that executes a command and does not come back to its prompt
NOBODY: Final = (
    "breakpoint() was skipped: here, nobody can be asked for commands. It works in JupyterLab, Notebook and in a terminal, in a "
    "run that was started by the main thread."
)


class Breakpoints:
    """The ranks at breakpoints. They are asked first come, first served, and a rank keeps its turn until it continues.

    A rank also loses its turn while it executes a command for long: it may wait for a rank that waits for its turn.
    After the first error of a rank, the others are asked until they continue, and not again.
    """

    def __init__(self) -> None:
        self.texts: dict[int, str] = {}  # by rank, in order of arrival, what its debugger has printed since its last prompt
        self._last = self._closed = False
        self.stopped: set[int] = set()  # ranks at their prompts, or executing a command until they continue
        self.done: set[int] = set()  # ranks that are not asked again: they have ended, or continued after an error
        self._turn: int | None = None
        self._since_s = 0.0  # when the rank whose turn it is got its last command

    def arrived(self, rank: int, text: str) -> None:
        """A rank is at its prompt."""
        self.texts[rank] = text
        self.stopped.add(rank)

    def ended(self, rank: int) -> None:
        """A rank has ended, perhaps at its prompt."""
        self.done.add(rank)

    def left(self, rank: int) -> None:
        """A rank continues, or has returned."""
        self.texts.pop(rank, None)
        self.stopped.discard(rank)
        if self._last:
            self.done.add(rank)
        if self._turn == rank:
            self._turn = None

    def last_call(self) -> None:
        """A rank has failed."""
        self._last = True

    def busy(self, now_s: float) -> bool:
        """Whether a rank is to be asked, or may come back to its prompt soon."""
        if self._closed:
            return False
        executes = self._turn is not None and self._turn not in self.done and now_s - self._since_s < TURN_S
        return executes or self.next(now_s) is not None

    def close(self) -> None:
        """The run is about to end: nobody is asked any more."""
        self._closed = True

    def next(self, now_s: float) -> int | None:
        """Return the rank to ask now; None if there is none, or the last one may come back to its prompt soon."""
        if self._closed:
            return None
        asking = [rank for rank in self.texts if rank not in self.done]
        if self._turn in asking:
            return self._turn
        if self._turn is not None and now_s - self._since_s < TURN_S:
            return None
        return asking[0] if asking else None

    def asked(self, rank: int) -> None:
        """The rank got its command."""
        del self.texts[rank]
        self._turn, self._since_s = rank, time.monotonic()


def ask(member: Member, text: str) -> str | None:
    """Show what a rank's debugger has printed, of which the last line is the prompt, and ask for a command.

    Return the line; "" at the end of the input; None if nobody can be asked.
    """
    if not can_ask():
        return None
    *lines, prompt = text.split("\n")
    put("".join(f"[{member.name}] {line}\n" for line in lines))
    try:
        return f"{input(f'[{member.name}] {prompt}')}\n"
    except EOFError:
        return "" if notebook_shell() is not None or sys.stdin.isatty() else None
    except (OSError, NotImplementedError):  # NotImplementedError: of a kernel whose front end has no input
        return None


def can_ask() -> bool:
    """Whether the front end of the notebook, or the terminal, can ask for input."""
    if threading.current_thread() is not threading.main_thread():
        return False
    shell = notebook_shell()
    # The kernel's own function finds this out as well, but only after the lines above the prompt have been shown.
    return bool(getattr(shell.kernel, "_allow_stdin", True)) if shell is not None else sys.stdin is not None
