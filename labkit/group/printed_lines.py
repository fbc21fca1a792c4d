r"""The lines that one rank prints, as a terminal would show them, within bounds.

A progress bar overwrites its line (`\r`); several bars move the cursor between lines (`\n` and `ESC [A`, as tqdm's
`position=`).
"""

from __future__ import annotations

import re
import unicodedata
from collections import deque
from typing import Final

KEPT_LINES: Final = 1_000  # the first lines of a rank in a run, and as many of the last ones
KEPT_CHARACTERS: Final = 200_000  # of each of the two parts, so that a notebook remains a file that can be opened
LINE_CHARACTERS: Final = 10_000
HELD_LINES: Final = 24  # in a terminal, once the cursor has moved up: they may still be overwritten
TAB_COLUMNS: Final = 8
COLOURS: Final = 8  # codes that apply at the same time

_MOVE: Final = re.compile(rb"\x1b\[(\d{0,9})([AF])|\x1b\[([23])J|\x1b\[[01]?(G)")  # up, clears the screen, to column 1
_STEP: Final = re.compile(rb"\n|" + _MOVE.pattern)
_UNFINISHED: Final = re.compile(rb"\x1b(\[\d{0,3})?\Z")
# Other cursor movements, which are removed; colours (`m`) are kept, since a notebook shows them.
_OTHER: Final = re.compile(r"\x1b(?!\[\d{0,9}[CDG])(\[[0-?]*[ -/]*[@-ln-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|[78=>cDEHMNOZ])")
_COLOUR: Final = re.compile(r"\x1b\[[\d;:]*m")
_IN_LINE: Final = re.compile(r"\x08|\x1b\[\d{0,9}[CDG]")  # moves within the line: back, right, left, to a column
_TOKEN: Final = re.compile(rf"({_COLOUR.pattern})|" + r"(\x08)|\x1b\[(\d{0,9})([CDG])|(.)", re.DOTALL)
# gloo prints this in torch 2.10, on each rank for each group; in pieces, so it is recognized by the whole line.
_GLOO: Final = re.compile(r"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\. Expected number of connected peer ranks is : \d+")


class Lines:
    """The lines of one rank, within bounds.

    `tqdm` draws a bar of position 2 from the line of the cursor: two lines down, the bar, two lines up. When it is
    closed, it is written where the cursor is, and the cursor goes down. What was drawn below is then stale: a bar that
    still works will be drawn again, counted from the new line.
    """

    def __init__(self) -> None:
        self._head: list[str] = []
        self._tail: deque[str] = deque()
        self._room = [KEPT_CHARACTERS, KEPT_CHARACTERS]  # in head and tail
        self._left_out = 0
        self._above: list[bytes] = []  # complete lines that are held back, since the cursor may move there
        self._open = bytearray()  # the cursor's line
        self._below: list[bytes] = []  # the lines below it, if the cursor has moved up
        self._number = 0  # of the cursor's line
        # The numbers of the lines that the cursor left upwards, and what made them stale: the number of a line above
        # that has been written since then and left downwards. If the cursor comes back to that one, they are not.
        self._drawn: dict[int, int | None] = {}
        self._written = False  # whether anything has been written since the cursor came to its line
        self._moved = False  # whether the cursor has ever moved up
        self._begun = b""  # the beginning of an incomplete escape sequence

    def feed(self, data: bytes) -> list[str]:
        """Add what the rank has printed, and return the lines that cannot change any more."""
        if self._begun:
            data, self._begun = self._begun + data, b""
        if b"\x1b" in data:
            if unfinished := _UNFINISHED.search(data):
                data, self._begun = data[: unfinished.start()], unfinished.group()
            plain = not self._below and not _MOVE.search(data)
        else:
            plain = not self._below
        if plain:
            return self._feed_plain(data)
        at = 0
        for step in _STEP.finditer(data):
            self._write(data[at : step.start()])
            at = step.end()
            if step.group() == b"\n":
                self._move_down()
            elif step[2]:
                for _ in range(min(int(step[1] or 1), HELD_LINES)):
                    self._move_up()
            elif step[3]:
                self._clear()
            else:
                self._write(b"\r")
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

    def _feed_plain(self, data: bytes) -> list[str]:
        """Add what does not move the cursor up, and has nothing below it."""
        *whole, rest = data.split(b"\n")
        if not whole:
            self._write(rest)
            return []
        if self._drawn:
            self._write(whole[0])
            whole[0] = b""
        if self._open:
            whole[0] = bytes(self._open) + whole[0]
            self._open.clear()
        self._above += whole
        self._number += len(whole)
        self._written = False
        if rest:
            self._write(rest)
        if self._above[-1] and not self._moved:
            lines, self._above = self._above, []
            return self._keep(lines)
        return self._settle()

    def _settle(self) -> list[str]:
        """Keep the lines that the cursor will not reach any more."""
        lines = self._above
        count = len(lines)
        if self._moved:
            count = max(count - HELD_LINES, 0)
        else:  # empty lines may be the way down to the first bar
            while count and not lines[count - 1] and len(lines) - count < HELD_LINES:
                count -= 1
        self._above = lines[count:]
        if self._drawn:
            first = self._number - len(self._above)
            lines = self._without_stale(lines[:count], first - count)
            self._drawn = {number: by for number, by in self._drawn.items() if number >= first}
        return self._keep(lines[:count])

    def _keep(self, whole: list[bytes]) -> list[str]:
        """Add complete lines, and return them as text."""
        lines = _texts(whole)
        for line in lines:
            self._add(line)
        return lines

    def _unkept(self) -> list[bytes]:
        """The lines that are not kept yet; of the cursor's and those below, neither empty nor stale ones."""
        rest = [bytes(self._open), *self._below]
        if not self._written:
            rest = self._without_stale(rest, self._number)
        above = self._without_stale(self._above, self._number - len(self._above))
        return above + [line for line in rest if _clean(line).strip()]

    def _without_stale(self, lines: list[bytes], first: int) -> list[bytes]:
        """Lines, of which the first has this number, with nothing in the stale ones."""
        return [b"" if self._drawn.get(number) is not None else line for number, line in enumerate(lines, first)]

    def _write(self, data: bytes) -> None:
        """Write in the cursor's line."""
        if not data:
            return
        if data.strip(b"\r"):
            self._written = True
            self._drawn.pop(self._number, None)
        self._open += data
        # Overwritten text is dropped, and a line without end must not fill the memory.
        if self._open.endswith(b"\r\r"):
            self._open[:] = self._open.rstrip(b"\r") + b"\r"
        del self._open[: self._open.rfind(b"\r", 0, -1) + 1]
        del self._open[4 * LINE_CHARACTERS :]

    def _move_down(self) -> None:
        if self._written:
            for number, by in self._drawn.items():
                if number > self._number and by is None:
                    self._drawn[number] = self._number
        self._above.append(bytes(self._open))
        self._arrive(self._below.pop(0) if self._below else b"", 1)

    def _move_up(self) -> None:
        """Move the cursor to the line above, if it is still there."""
        if not self._above and not self._fetch_line():
            return
        self._moved = True
        if self._written:
            self._drawn[self._number] = None
        self._below.insert(0, bytes(self._open))
        self._arrive(self._above.pop(), -1)
        for number, by in self._drawn.items():
            if by is not None and by >= self._number:
                self._drawn[number] = None

    def _arrive(self, line: bytes, step: int) -> None:
        """Move the cursor to a line, which is replaced by what is written next."""
        self._open = bytearray(line if not line or line.endswith(b"\r") else line + b"\r")
        self._number += step
        self._written = False

    def _fetch_line(self) -> bool:
        """Take back the last kept line, and return whether there is one."""
        kept = self._tail or self._head
        if not kept or len(self._below) >= HELD_LINES:
            return False
        line = kept.pop()
        self._room[1 if kept is self._tail else 0] += len(line)
        self._above.append(line.encode())
        return True

    def _forget_unkept(self) -> None:
        self._above.clear()
        self._open.clear()
        self._below.clear()
        self._drawn.clear()
        self._written = False

    def _clear(self) -> None:
        """Clear the screen, as `clear_output` does."""
        self._head.clear()
        self._tail.clear()
        self._forget_unkept()
        self._room = [KEPT_CHARACTERS, KEPT_CHARACTERS]
        self._left_out = 0

    def _add(self, line: str) -> None:
        head = not self._tail and len(self._head) < KEPT_LINES and self._room[0] >= len(line)
        (self._head if head else self._tail).append(line)
        self._room[0 if head else 1] -= len(line)
        while len(self._tail) > KEPT_LINES or self._room[1] < 0:
            self._room[1] += len(self._tail.popleft())
            self._left_out += 1


def _texts(lines: list[bytes]) -> list[str]:
    """Lines as text, without those of gloo."""
    return [line for line in map(_clean, lines) if not _GLOO.fullmatch(line)]


def _clean(line: bytes) -> str:
    """A line as text, in the last state that a progress bar left."""
    text = line.decode("utf-8", errors="replace").rstrip("\r").rpartition("\r")[2]
    if "\x1b" in text:
        text = _OTHER.sub("", text)
    if "\t" in text:
        text = _without_tabs(text)
    if ("\b" in text or "\x1b" in text) and _IN_LINE.search(text):
        text = _overwritten(text)
    return text if len(text) <= LINE_CHARACTERS else text[:LINE_CHARACTERS] + " ... (cut)"


def _without_tabs(text: str) -> str:
    """A line with spaces for tabs, since the rank's name before the line moves the columns."""
    if text.isascii() and "\x1b" not in text:
        return text.expandtabs(TAB_COLUMNS)
    *parts, rest = text.split("\t")
    for i, part in enumerate(parts):
        columns = sum(map(_columns, _COLOUR.sub("", part)))
        parts[i] += " " * (TAB_COLUMNS - columns % TAB_COLUMNS)
    return "".join(parts) + rest


def _columns(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):  # drawn on the character before
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _overwritten(text: str) -> str:
    """A line after the cursor has moved in it: each column has the last character written there, in its colours."""
    cells: list[tuple[str, str]] = []  # colours and character
    colours: list[str] = []
    column = 0
    for colour, _, count, move, character in _TOKEN.findall(text):
        if colour:
            colours = [] if colour in ("\x1b[m", "\x1b[0m") else [*colours, colour][-COLOURS:]
        elif character:
            cells[column : column + 1] = [("".join(colours), character)]
            column += 1
        else:
            steps = int(count or 1)
            column = {"C": column + steps, "G": steps - 1}.get(move, column - steps)
            column = min(max(column, 0), LINE_CHARACTERS)
            cells += [("", " ")] * (column - len(cells))
    shown, last = [], ""
    for style, character in [*cells, ("".join(colours), "")]:
        if style != last:
            shown.append("\x1b[0m" * bool(last) + style)
            last = style
        shown.append(character)
    return "".join(shown)
