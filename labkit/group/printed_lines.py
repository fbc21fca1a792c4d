r"""The lines that one rank prints, within bounds.

A progress bar overwrites its line (`\r`, or `\b` back to its beginning). Bars that move the cursor up (`ESC [A`, as
tqdm's `position=`) share one line.
"""

from __future__ import annotations

import re
from collections import deque
from typing import Final

KEPT_LINES: Final = 1_000  # the first lines of a rank in a run, and as many of the last ones
KEPT_CHARACTERS: Final = 200_000  # of each of the two parts, so that a notebook remains a file that can be opened
LINE_CHARACTERS: Final = 10_000
HELD_LINES: Final = 24  # in a terminal, once the cursor has moved up: they may still be overwritten

_MOVE: Final = re.compile(rb"\x1b\[(\d{0,9})[AF]|\x1b\[([23])J")  # up; clears the screen
_UNFINISHED: Final = re.compile(rb"\x1b(\[\d{0,9})?\Z")
# Other cursor movements, which are removed; colours (`m`) are kept, since a notebook shows them.
_OTHER: Final = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-ln-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|[78=>cDEHMNOZ])")
_BACK: Final = re.compile(r"(\x08*)([^\x08]+)")
# gloo prints this in torch 2.10, on each rank for each group; in pieces, so it is recognized by the whole line.
_GLOO: Final = re.compile(r"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\. Expected number of connected peer ranks is : \d+")


class Lines:
    """The lines of one rank, within bounds."""

    def __init__(self) -> None:
        self._head: list[str] = []
        self._tail: deque[str] = deque()
        self._room = [KEPT_CHARACTERS, KEPT_CHARACTERS]  # in head and tail
        self._left_out = 0
        self._held: list[bytes] = []  # complete lines that are held back, since the cursor may move there
        self._open = bytearray()  # the cursor's line
        self._moved = False  # whether the cursor has ever moved up
        self._begun = b""  # the beginning of an incomplete escape sequence

    def feed(self, data: bytes) -> list[str]:
        """Add what the rank has printed, and return the lines that cannot change any more."""
        data, self._begun = self._begun + data, b""
        if b"\x1b" in data and (unfinished := _UNFINISHED.search(data)):
            data, self._begun = data[: unfinished.start()], unfinished.group()
        at = 0
        for move in _MOVE.finditer(data):
            self._write(data[at : move.start()])
            at = move.end()
            if move[2]:
                self._clear()
            else:
                for _ in range(min(int(move[1] or 1), HELD_LINES)):
                    self._move_up()
        self._write(data[at:])
        return self._settle()

    def finish(self) -> list[str]:
        """Complete the last line, and return the lines not returned yet."""
        lines = self._keep(self._unkept())
        self._forget_unkept()
        self._moved, self._begun = False, b""
        return lines

    def shown(self, last: int | None = None) -> list[str]:
        """All kept lines, with a note of how many were left out; or the last lines, including unfinished ones."""
        if last is not None:
            return [*self._head[-last:], *self._tail, *_texts(self._unkept())][-last:]
        gap = [f"... {self._left_out:,} lines left out ..."] if self._left_out else []
        return [*self._head, *gap, *self._tail]

    def _write(self, text: bytes) -> None:
        *whole, rest = text.split(b"\n")
        if whole:
            whole[0] = bytes(self._open) + whole[0]
            self._open.clear()
            self._held += whole
        self._open += rest
        # Overwritten text is dropped, and a line without end must not fill the memory.
        if self._open.endswith(b"\r\r"):
            self._open[:] = self._open.rstrip(b"\r") + b"\r"
        del self._open[: self._open.rfind(b"\r", 0, -1) + 1]
        del self._open[4 * LINE_CHARACTERS :]

    def _move_up(self) -> None:
        """Join the cursor's line and the one above: what is written next replaces both."""
        if self._held:
            above = self._held.pop()
        elif kept := self._tail or self._head:
            line = kept.pop()
            self._room[1 if kept is self._tail else 0] += len(line)
            above = line.encode()
        else:
            return
        self._moved = True
        if not self._open:
            self._open[:] = above
        if self._open and not self._open.endswith(b"\r"):
            self._open += b"\r"

    def _settle(self) -> list[str]:
        """Keep the lines that the cursor will not reach any more."""
        count = len(self._held)
        if self._moved:
            count = max(count - HELD_LINES, 0)
        else:  # empty lines may be the way down to the first bar
            while count and not self._held[count - 1] and len(self._held) - count < HELD_LINES:
                count -= 1
        lines, self._held = self._held[:count], self._held[count:]
        return self._keep(lines)

    def _keep(self, whole: list[bytes]) -> list[str]:
        lines = _texts(whole)
        for line in lines:
            head = not self._tail and len(self._head) < KEPT_LINES and self._room[0] >= len(line)
            (self._head if head else self._tail).append(line)
            self._room[0 if head else 1] -= len(line)
            while len(self._tail) > KEPT_LINES or self._room[1] < 0:
                self._room[1] += len(self._tail.popleft())
                self._left_out += 1
        return lines

    def _unkept(self) -> list[bytes]:
        """The lines that are not kept yet, without an empty last one."""
        line = bytes(self._open)
        return [*self._held, line] if _clean(line).strip() else self._held

    def _forget_unkept(self) -> None:
        self._held = []
        self._open.clear()

    def _clear(self) -> None:
        """Clear the screen, as `clear_output` does."""
        self._head.clear()
        self._tail.clear()
        self._forget_unkept()
        self._room = [KEPT_CHARACTERS, KEPT_CHARACTERS]
        self._left_out = 0


def _texts(lines: list[bytes]) -> list[str]:
    return [line for line in map(_clean, lines) if not _GLOO.fullmatch(line)]


def _clean(line: bytes) -> str:
    """A line as text, in the last state that a progress bar left."""
    text = line.decode("utf-8", errors="replace").rstrip("\r").rpartition("\r")[2]
    if "\x1b" in text:
        text = _OTHER.sub("", text)
    if "\b" in text:
        pieces, text = _BACK.findall(text), ""
        for back, piece in pieces:
            text = piece if len(back) >= len(text) else text + piece
    text = text.expandtabs()  # since the rank's name before the line moves the columns
    return text if len(text) <= LINE_CHARACTERS else text[:LINE_CHARACTERS] + " ... (cut)"
