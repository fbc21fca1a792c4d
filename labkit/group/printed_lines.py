r"""The lines that one rank prints, as a terminal would show them, within bounds.

A progress bar overwrites its line (`\r`); several bars move the cursor between lines (`\n` and `ESC [A`, as tqdm's
`position=`).
"""

from __future__ import annotations

import re
from collections import deque
from typing import Final

__all__ = ["KEPT_CHARACTERS", "KEPT_LINES", "LINE_CHARACTERS", "Lines"]

KEPT_LINES: Final = 1_000  # the first lines of a rank in a run, and as many of the last ones
KEPT_CHARACTERS: Final = 200_000  # of each of the two parts, so that a notebook remains a file that can be opened
LINE_CHARACTERS: Final = 10_000
HELD_LINES: Final = 24  # in a terminal, once the cursor has moved up: they may still be overwritten

_STEP: Final = re.compile(rb"\n|\x1b\[(\d*)([AF])|\x1b\[[23]J")  # ends a line, moves up, or clears the screen
_UNFINISHED: Final = re.compile(rb"\x1b(\[\d{0,3})?\Z")
# Other cursor movements, which are removed; colours (`m`) are kept, since a notebook shows them.
_OTHER: Final = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-ln-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|[78=>cDEHMNOZ])")
# gloo prints this in torch 2.10, on each rank for each group; in pieces, so it is recognized by the whole line.
_GLOO: Final = re.compile(r"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\. Expected number of connected peer ranks is : \d+")


class Lines:
    """The lines of one rank, within bounds."""

    def __init__(self) -> None:
        self._head: list[str] = []
        self._tail: deque[str] = deque()
        self._room = [KEPT_CHARACTERS, KEPT_CHARACTERS]  # in head and tail
        self._left_out = 0
        self._open = bytearray()  # the cursor's line
        self._below: list[bytes] = []  # the lines below it, if the cursor has moved up
        self._moved = False  # whether the cursor has ever moved up
        self._held: deque[str] = deque()  # complete lines that are held back, since the cursor may move there
        self._begun = b""  # the beginning of an incomplete escape sequence

    def feed(self, data: bytes) -> list[str]:
        """Add what the rank has printed, and return the lines that are now complete."""
        if self._begun:
            data, self._begun = self._begun + data, b""
        if b"\x1b" not in data and not self._below:
            return self._give(self._feed_plain(data))
        if unfinished := _UNFINISHED.search(data):
            data, self._begun = data[: unfinished.start()], unfinished.group()
        complete: list[str] = []
        at = 0
        for step in _STEP.finditer(data):
            self._write(data[at : step.start()])
            at = step.end()
            if step.group() == b"\n":
                complete += self._keep([bytes(self._open)])
                self._open = bytearray(self._below.pop(0).rstrip(b"\r") + b"\r" if self._below else b"")
            elif step[2]:
                for _ in range(min(int(step[1] or 1), HELD_LINES)):
                    self._move_up(complete)
            else:
                complete.clear()
                self._clear()
        self._write(data[at:])
        return self._give(complete)

    def finish(self) -> list[str]:
        """Complete the last line, and return the lines not returned yet."""
        self._begun = b""
        rest = [bytes(self._open), *self._below]
        self._open.clear()
        self._below.clear()
        while rest and not _clean(rest[-1]):
            rest.pop()
        lines = [*self._held, *self._keep(rest)]
        self._held.clear()
        self._moved = False
        return lines

    def shown(self, last: int | None = None) -> list[str]:
        """All kept lines, with a note of how many were left out; or the last lines, including unfinished ones."""
        if last is not None:
            unfinished = [_clean(line) for line in (bytes(self._open), *self._below)]
            while unfinished and not unfinished[-1]:
                unfinished.pop()
            return [*self._head[-last:], *self._tail, *unfinished][-last:]
        gap = [f"... {self._left_out:,} lines left out ..."] if self._left_out else []
        return [*self._head, *gap, *self._tail]

    def _feed_plain(self, data: bytes) -> list[str]:
        *whole, rest = data.split(b"\n")
        if whole:
            whole[0] = bytes(self._open) + whole[0]
            self._open.clear()
        self._write(rest)
        return self._keep(whole)

    def _keep(self, whole: list[bytes]) -> list[str]:
        """Add complete lines, and return them as text, without those of gloo."""
        lines = [line for line in map(_clean, whole) if not _GLOO.fullmatch(line)]
        for line in lines:
            self._add(line)
        return lines

    def _write(self, data: bytes) -> None:
        if not data:
            return
        self._open += data
        # Overwritten text is dropped, and a line without end must not fill the memory.
        del self._open[: self._open.rfind(b"\r", 0, -1) + 1]
        del self._open[4 * LINE_CHARACTERS :]

    def _move_up(self, complete: list[str]) -> None:
        """Move the cursor to the line above, if it is still kept."""
        kept = self._tail or self._head
        if not kept:
            return
        self._moved = True
        line = kept.pop()
        self._room[1 if kept is self._tail else 0] += len(line)
        if complete:
            complete.pop()
        elif self._held:
            self._held.pop()
        self._below.insert(0, bytes(self._open))
        self._open = bytearray(line.encode() + b"\r")

    def _clear(self) -> None:
        """Clear the screen, as `clear_output` does."""
        self._head.clear()
        self._tail.clear()
        self._held.clear()
        self._open.clear()
        self._below.clear()
        self._room = [KEPT_CHARACTERS, KEPT_CHARACTERS]
        self._left_out = 0

    def _give(self, complete: list[str]) -> list[str]:
        """The lines that cannot change any more; once the cursor has moved up, the last lines are held back."""
        if not self._moved:
            return complete
        self._held += complete
        return [self._held.popleft() for _ in range(len(self._held) - HELD_LINES)]

    def _add(self, line: str) -> None:
        head = not self._tail and len(self._head) < KEPT_LINES and self._room[0] >= len(line)
        (self._head if head else self._tail).append(line)
        self._room[0 if head else 1] -= len(line)
        while len(self._tail) > KEPT_LINES or self._room[1] < 0:
            self._room[1] += len(self._tail.popleft())
            self._left_out += 1


def _clean(line: bytes) -> str:
    """A line as text, in the last state that a progress bar left."""
    text = line.decode("utf-8", errors="replace").rstrip("\r").rpartition("\r")[2]
    if "\x1b" in text:
        text = _OTHER.sub("", text)
    if "\b" in text:  # a bar may move back by single characters
        kept: list[str] = []
        for character in text:
            if character != "\b":
                kept.append(character)
            elif kept:
                kept.pop()
        text = "".join(kept)
    return text if len(text) <= LINE_CHARACTERS else text[:LINE_CHARACTERS] + " ... (cut)"
