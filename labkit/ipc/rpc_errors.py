"""The error of a function that was called by RPC: how the callee sends it, and what the caller makes of it.

torch sends an error as text, which begins with the callee's `WorkerInfo` and holds its traceback, and wraps it once more at every
call that it passes through. The text is made and taken apart here, so that one traceback leads from the caller to the callee.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Final

from labkit.recording.record import is_students

__all__ = ["RemoteError", "remote_error", "sent"]

_ON = re.compile(r"On WorkerInfo\(id=\d+, name=(?P<name>[^)]*)\):\n")
_FRAME = re.compile(r'\s*File "(?P<file>[^"]+)", line ')
_BEGIN = "Traceback (most recent call last):\n"
_PASSED_THROUGH = re.compile(r"\s*(\n\nAt:\n  \S+\(\d+\): _handle_exception\s*)?$")  # where the caller's own C++ raised it anew
_DEEPEST: Final = 8  # of quotations within quotations: a KeyError quotes its message, and once more wherever it is raised anew


@dataclass(frozen=True, slots=True)
class RemoteError:
    """An error of a callee, as its caller reads it.

    Args:
        headline: one line: its type and message, and on which rank it was raised.
        traceback: "on shard1:", the callee's frames, and the error.
    """

    headline: str
    traceback: str


def sent(worker: object, headline: str, traceback: str) -> str:
    """What a callee sends: torch's form, which begins with its `WorkerInfo`.

    Whoever receives it decodes escapes in it, of which a message may have some of its own.
    """
    return f"On {worker}:\n{headline}\n{traceback}".encode("unicode_escape").decode()


def remote_error(text: str) -> RemoteError | None:
    """What a callee has said, if an error's message holds something of the kind."""
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
    if before or _BEGIN in frames:  # several errors, one of which led to another: each has a traceback of its own
        frames = whole
    place = f"on {on['name']}"
    if not re.search(r" \(on [^)]*\)$", headline):  # else that one had called somebody itself
        headline = f"{headline} ({place})"
    return RemoteError(headline, f"{place}:\n{_students(frames)}".rstrip())


def _students(traceback: str) -> str:
    """Without the frames of libraries that torch itself lists."""
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
