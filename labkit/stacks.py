"""What every rank is in the middle of, as Python stacks, at any moment: also of a rank that is blocked in C++.

A rank that is blocked runs no Python, so it cannot be asked in Python. But a signal interrupts it in C, where `faulthandler`
writes down the stacks of all threads without the interpreter's lock: into the rank's recording memory, behind the ring.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Final

import psutil

from labkit.output import cell_label
from labkit.record import is_students
from labkit.ring import RING_BYTES
from labkit.server import STACKS
from labkit.start import RankProcess

__all__ = ["Stacks", "ask", "crash", "helpers", "readable"]

LIMIT_S: Final = 1.0  # for a rank to begin; it may have to wait for a core
QUIET_S: Final = 0.02  # a stack is written line by line: so long after the last one it is whole
LOOK_EVERY_S: Final = 0.002
LONGEST_BYTES: Final = 1 << 16  # of a stack: faulthandler ends after 100 frames

_COMMUNICATES: Final = os.path.join("torch", "distributed")
_THREAD: Final = re.compile(r"(?:Stack|(?:Current t|T)hread 0x[0-9a-f]+).*\(most recent call first\):")
_FRAME: Final = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')


class Stacks(dict[str, str]):
    """By the name of each rank, where it is: prints as a report."""

    def __repr__(self) -> str:
        return "\n\n".join(f"{name} {text}" for name, text in self.items())


def ask(processes: Iterable[RankProcess]) -> list[str]:
    """The raw stacks of ranks, as `faulthandler` writes them; "" for one that does not answer.

    Args:
        processes: ranks that live.
    """
    ranks = list(processes)
    for process in ranks:
        os.lseek(process.memory, RING_BYTES, os.SEEK_SET)  # the rank's descriptor is the same open file, and writes there
        with contextlib.suppress(ProcessLookupError):
            if process.sentinel >= 0:
                signal.pidfd_send_signal(process.sentinel, STACKS)
            else:
                os.kill(process.pid, STACKS)
    until = time.monotonic() + LIMIT_S
    return [_answer(process, until) for process in ranks]


def _answer(process: RankProcess, until: float) -> str:
    end, changed = RING_BYTES, time.monotonic()
    while (now := time.monotonic()) < (until if end == RING_BYTES else changed + QUIET_S):
        if (at := os.lseek(process.memory, 0, os.SEEK_CUR)) != end:
            end, changed = at, now
        time.sleep(LOOK_EVERY_S)
    text = os.pread(process.memory, end - RING_BYTES, RING_BYTES).decode("ascii", errors="replace")
    os.ftruncate(process.memory, RING_BYTES)
    return text


def crash(process: RankProcess) -> str:
    """Where the student's code was when C code crashed in a rank, as a traceback; "" if none did, or none of theirs ran."""
    raw = os.pread(process.memory, LONGEST_BYTES, RING_BYTES).strip(b"\0").decode("ascii", errors="replace")
    _, crashed, stack = raw.rpartition("Fatal Python error")
    text = _stack(next(_threads(stack), [])) if crashed else ""
    half = re.sub(r"^ +", lambda spaces: spaces[0][::2], text, flags=re.MULTILINE)  # a traceback is indented by two
    return f"Traceback (most recent call last):\n{half}" if half else ""


def readable(raw: str, pid: int) -> str:
    """A rank's stacks in words: the student's frames, and beneath each stack what it is in, as Python prints tracebacks.

    Args:
        raw: as `ask` gives it.
        pid: the rank's process, which is looked at if it gave no answer.
    """
    if not raw:
        return f"does not answer: {_state(pid)}"
    stacks = [text for frames in _threads(raw) if (text := _stack(frames))]
    return (
        "is idle: no function of yours is running" if not stacks else "is here:\n" + "\n  and on another thread:\n".join(stacks)
    )


def helpers(raw: str) -> int:
    """How many threads beside the main one may communicate: they run the student's code or torch's for it, or are timers.

    Args:
        raw: as `ask` gives it.
    """
    _, *others = _threads(raw)
    return sum(_may_communicate([frame["file"] for frame in frames]) for frames in others)


def _may_communicate(files: list[str]) -> bool:
    return any(is_students(file) or _COMMUNICATES in file for file in files) or set(files) == {threading.__file__}


def _state(pid: int) -> str:
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "its process is gone"
    if status == psutil.STATUS_STOPPED:
        return "its process was stopped by a signal (SIGSTOP); SIGCONT lets it go on"
    return f"its process is {status}, and did not come to it within {LIMIT_S:.0f} s"


def _threads(raw: str) -> Iterator[list[re.Match[str]]]:
    """The frames of each thread, outermost first; the thread that took the signal, which is the main one, first."""
    found: list[list[re.Match[str]]] = []
    first = 0
    for line in raw.splitlines():
        if _THREAD.match(line):
            if line.startswith("Current"):
                first = len(found)
            found.append([])
        elif found and (frame := _FRAME.match(line)):
            found[-1].insert(0, frame)
    if found:
        yield found.pop(first)
    yield from found


def _stack(frames: list[re.Match[str]]) -> str:
    """One stack; "" where none of it is the student's."""
    last = max((i for i, frame in enumerate(frames) if is_students(frame["file"])), default=-1)
    if last < 0:
        return ""
    kept = [frame for i, frame in enumerate(frames) if is_students(frame["file"]) or i == last + 1]
    lines = []
    for frame in kept:
        lines.append(f'    File "{cell_label(frame["file"])}", line {frame["line"]}, in {frame["function"]}')
        source = linecache.getline(frame["file"], int(frame["line"])).strip()
        if source and is_students(frame["file"]):
            lines.append(f"        {source}")
    return "\n".join(lines)
