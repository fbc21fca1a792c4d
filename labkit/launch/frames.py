"""The stack frames of a rank: each says whose code it runs, and its source line where that matters.

Both are found out where the files are, so that whoever reads a frame needs neither the files nor their folders.
"""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
from collections.abc import Iterator
from enum import Enum
from typing import Final, NamedTuple

from labkit.errors.exceptions import JUDGES, LABKIT
from labkit.recording.record import is_students

_STDLIB: Final = tuple({os.path.normcase(sysconfig.get_path(p)) + os.sep for p in ("stdlib", "platstdlib")})
_PACKAGES: Final = ("site-packages", "dist-packages")
_THREAD: Final = re.compile(r"(?:Stack|(?:Current t|T)hread 0x(?P<ident>[0-9a-f]+)).*\(most recent call first\):")
_FRAME: Final = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')


class Owner(Enum):
    """Whose code a file contains."""

    STUDENT = "student"
    LABKIT = "labkit"
    STDLIB = "stdlib"
    LIBRARY = "library"


class StackFrame(NamedTuple):
    """A stack frame.

    Args:
        file, line, function: where it is.
        own: whose code it runs.
        source: the source line, if it is the student's or the innermost frame; "" if unknown.
    """

    file: str
    line: int
    function: str
    own: Owner
    source: str = ""


def frame_at(file: str, line: int, function: str, *, innermost: bool = False) -> StackFrame:
    """Return the frame at a place, classified by the files and folders of this machine."""
    own = _owner(file)
    with_source = innermost or own is Owner.STUDENT
    return StackFrame(file, line, function, own, linecache.getline(file, line).strip() if with_source else "")


def _owner(file: str) -> Owner:
    if is_students(file):
        return Owner.STUDENT
    if file.startswith(LABKIT) or JUDGES in file:
        return Owner.LABKIT
    in_stdlib = os.path.normcase(file).startswith(_STDLIB) and not any(part in file for part in _PACKAGES)
    return Owner.STDLIB if in_stdlib else Owner.LIBRARY


def stacks_in(raw: str) -> Iterator[tuple[int, tuple[StackFrame, ...]]]:
    """The identity and the frames (outermost first) of each thread; the main thread, which is the oldest, first.

    Args:
        raw: the stacks of a rank, as `faulthandler` writes them.
    """
    found: list[tuple[int, list[StackFrame]]] = []
    writer = -1
    for text in raw.splitlines():
        if thread := _THREAD.match(text):
            if text.startswith("Current"):
                writer = len(found)
            found.append((int(thread["ident"] or "0", 16), []))
        elif found and (match := _FRAME.match(text)):
            frames = found[-1][1]
            frames.append(frame_at(match["file"], int(match["line"]), match["function"], innermost=not frames))
    if not found:
        return
    main = found.pop()  # it is written last
    if 0 <= writer < len(found):  # labkit's own thread
        found.pop(writer)
    for ident, frames in (main, *found):
        yield ident, tuple(reversed(frames))
