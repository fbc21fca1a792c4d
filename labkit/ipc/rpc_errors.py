"""Errors of functions called by RPC: the text that the callee sends, and how the caller parses it.

torch sends an error as text: the callee's `WorkerInfo`, then its traceback. Each RPC call that the error passes through
wraps the text once more. This file formats and parses it, so that one traceback leads from the caller to the callee.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Final

from labkit.recording.record import is_students

_ON = re.compile(r"On WorkerInfo\(id=\d+, name=(?P<name>[^)]*)\):\n")
_FRAME = re.compile(r'\s*File "(?P<file>[^"]+)", line ')
_PLACE: Final = " (on {})"  # the end of a headline: the rank on which the error was raised
_PLACED = re.compile(re.escape(_PLACE.format("NAME")).replace("NAME", "[^)]*") + "$")
_BEGIN = "Traceback (most recent call last):\n"
_PASSED_THROUGH = re.compile(r"\s*(\n\nAt:\n  \S+\(\d+\): _handle_exception\s*)?$")  # added by the caller's C++ code
_DEEPEST: Final = 8  # levels of nested quoting: a KeyError quotes its message each time it is raised


@dataclass(frozen=True, slots=True)
class RemoteError:
    """An error of a callee, as its caller sees it."""

    headline: str  # one line: its type and message, and the rank on which it was raised
    traceback: str  # "on shard1:", the callee's frames, and the error


def sent(worker: object, headline: str, traceback: str) -> str:
    """Return the text that a callee sends, in torch's format, which begins with its `WorkerInfo`.

    The text is escaped, because the receiver decodes escape sequences, and the message may contain some.
    """
    return f"On {worker}:\n{headline}\n{traceback}".encode("unicode_escape").decode()


def remote_error(text: str) -> RemoteError | None:
    """Parse a callee's error from the message of an error; None if the message contains none."""
    if "On WorkerInfo(" not in text:
        return None
    quoted = 0
    while (on := _ON.search(text)) is None:
        if quoted == _DEEPEST:
            return None
        text, quoted = text.encode("latin-1", "backslashreplace").decode("unicode_escape"), quoted + 1
    rest = _PASSED_THROUGH.sub("", text[on.end() :], count=1)
    for _ in range(quoted):
        rest = _PASSED_THROUGH.sub("", rest.removesuffix("'").removesuffix('"'), count=1)
    headline, _, whole = rest.partition("\n")
    before, _, frames = whole.partition(_BEGIN)
    if before or _BEGIN in frames:  # a chain of errors, each with its own traceback
        frames = whole
    if not _PLACED.search(headline):  # else the callee had itself made the call that failed
        headline += _PLACE.format(on["name"])
    return RemoteError(headline, f"on {on['name']}:\n{_students(frames)}".rstrip())


def _students(traceback: str) -> str:
    """Drop the frames of libraries, which torch lists as well."""
    kept, skipping = [], False
    for line in traceback.splitlines():
        frame = _FRAME.match(line)
        if frame:
            skipping = os.path.isabs(frame["file"]) and not is_students(frame["file"])
        elif not line.startswith("    "):
            skipping = False
        if not skipping:
            kept.append(line)
    return "\n".join(kept)
