"""The stack frames of a rank: each says whose code it runs, and its source line where that matters.

Both are found out where the files are, so that whoever reads a frame needs neither the files nor their folders.
"""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
from enum import Enum
from typing import Final, NamedTuple

from labkit.errors.exceptions import OWN_CODE
from labkit.recording.record import is_students

_STDLIB: Final = tuple({os.path.normcase(sysconfig.get_path(p)) + os.sep for p in ("stdlib", "platstdlib")})
_PACKAGES: Final = ("site-packages", "dist-packages")
_BEGINNING: Final = "(most recent call first):"
_FRAME: Final = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')


class Owner(Enum):
    """Whose code a file contains."""

    STUDENT = "student"
    LABKIT = "labkit"
    STDLIB = "stdlib"
    LIBRARY = "library"


class StackFrame(NamedTuple):
    """A stack frame."""

    file: str
    line: int
    function: str
    own: Owner  # whose code it runs
    source: str = ""  # the source line, if it is the student's or the innermost frame; "" if unknown


def frame_at(file: str, line: int, function: str, *, innermost: bool = False) -> StackFrame:
    """Return the frame at a place, classified by the files and folders of this machine."""
    own = _owner(file)
    with_source = innermost or own is Owner.STUDENT
    return StackFrame(file, line, function, own, linecache.getline(file, line).strip() if with_source else "")


def _owner(file: str) -> Owner:
    if is_students(file):
        return Owner.STUDENT
    if file.startswith(OWN_CODE):
        return Owner.LABKIT
    in_stdlib = os.path.normcase(file).startswith(_STDLIB) and not any(part in file for part in _PACKAGES)
    return Owner.STDLIB if in_stdlib else Owner.LIBRARY


def stacks_in(text: str) -> list[tuple[StackFrame, ...]]:
    """The stacks in a text of `faulthandler`, each with its outermost frame first."""
    found: list[list[StackFrame]] = []
    for line in text.splitlines():
        if line.endswith(_BEGINNING):
            found.append([])
        elif found and (match := _FRAME.match(line)):
            frames = found[-1]
            frames.append(frame_at(match["file"], int(match["line"]), match["function"], innermost=not frames))
    return [tuple(reversed(frames)) for frames in found]
