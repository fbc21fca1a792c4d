"""What every rank is in the middle of, as Python stacks, at any moment: also of a rank that is blocked in C++.

The rank writes them into its recording memory, behind the ring: a thread of labkit's does (`worker.stack_writer`), or where that
one does not get the interpreter's lock, a signal handler in C.
"""

from __future__ import annotations

import contextlib
import linecache
import math
import os
import re
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import psutil

from labkit.group.output import cell_label
from labkit.recording.record import is_students
from labkit.recording.ring_layout import RING_BYTES
from labkit.worker.launch import RankProcess
from labkit.worker.stack_writer import ASK, INTERRUPT

__all__ = ["Frame", "Stacks", "ask", "crash", "readable", "stacks_of"]

LIMIT_S: Final = 1.0  # for the ranks to write; they may have to wait for a core
EACH_S: Final = 0.02  # and so much more for each of them
SWITCHES_S: Final = 0.1  # of a core, in which a rank that runs Python hands the interpreter's lock on some twenty times
STARVED_S: Final = 3.0  # more for a rank that gets no core
QUIET_S: Final = 0.02  # a stack is written line by line: so long after the last one it is whole
LOOK_EVERY_S: Final = 0.002
LONGEST_BYTES: Final = 1 << 16  # of a stack: faulthandler ends after 100 frames
# How the stack of the main thread ends: with its outermost frame, or where it is too deep. Beyond 100 threads it is missing.
WHOLE: Final = ("in <module>\n", "\n  ...\n")
LONGEST_END: Final = max(map(len, WHOLE))

_THREAD: Final = re.compile(r"(?:Stack|(?:Current t|T)hread 0x(?P<ident>[0-9a-f]+)).*\(most recent call first\):")
_FRAME: Final = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')


class Frame(NamedTuple):
    """Where a function on a stack is."""

    file: str
    line: int
    function: str


class Stacks(dict[str, str]):
    """By the name of each rank, where it is: prints as a report."""

    def __repr__(self) -> str:
        return "\n\n".join(f"{name} {text}" for name, text in self.items())


def ask(processes: Iterable[RankProcess]) -> list[str]:
    """The raw stacks of ranks, as `faulthandler` writes them; "" for one that does not answer in time, or not to the end.

    Args:
        processes: ranks that live.
    """
    ranks = list(processes)
    answers = _answers(ranks, INTERRUPT if ASK is None else ASK)
    silent = [i for i, text in enumerate(answers) if not text]
    if silent and ASK is not None:  # something holds the interpreter's lock all the time, so no other thread changes its stack
        for i, text in zip(silent, _answers([ranks[i] for i in silent], INTERRUPT), strict=True):
            answers[i] = text
    return answers


def _answers(ranks: Sequence[RankProcess], by_signal: int) -> list[str]:
    """What ranks write when they are asked by a signal; "" for one that does not in time, or not to the end."""
    for process in ranks:
        with contextlib.suppress(OSError):  # it has just ended
            os.lseek(process.memory, RING_BYTES, os.SEEK_SET)  # the rank's descriptor is the same open file, and writes there
            if process.sentinel >= 0:
                signal.pidfd_send_signal(process.sentinel, by_signal)
            else:
                os.kill(process.pid, by_signal)
    until = time.monotonic() + LIMIT_S + EACH_S * len(ranks)
    answers = [_Answer(process) for process in ranks]
    waiting = answers
    while waiting and time.monotonic() < until:
        time.sleep(LOOK_EVERY_S)
        waiting = [answer for answer in waiting if not answer.whole()]
    if by_signal == ASK:  # whoever is silent now will be interrupted, and that may crash a rank which has only had no core so far
        used_s = {answer: answer.cpu_s() for answer in waiting}
        until = time.monotonic() + STARVED_S
        while waiting and time.monotonic() < until:
            time.sleep(LOOK_EVERY_S)
            waiting = [a for a in waiting if not (a.whole() or a.frozen or a.cpu_s() >= used_s[a] + SWITCHES_S)]
    return [answer.take() for answer in answers]


class _Answer:
    """What a rank writes of its stacks, until it is whole."""

    def __init__(self, process: RankProcess) -> None:
        self._process = process
        self._end, self._changed = RING_BYTES, time.monotonic()

    @property
    def frozen(self) -> bool:
        """Whether a signal has stopped the rank."""
        return self._process.frozen

    def cpu_s(self) -> float:
        """How long the rank has computed; for ever where it has ended."""
        try:
            return sum(psutil.Process(self._process.pid).cpu_times()[:2])
        except psutil.NoSuchProcess:
            return math.inf

    def whole(self) -> bool:
        """Whether the rank has written all of it."""
        try:
            end, now = os.lseek(self._process.memory, 0, os.SEEK_CUR), time.monotonic()
        except OSError:
            return True  # the rank has ended, and another thread has taken its memory away
        if end != self._end:
            self._end, self._changed = end, now
        if end == RING_BYTES or now < self._changed + QUIET_S:
            return False
        # A rank that has lost its core in the middle writes the rest later: its oldest thread, the main one, comes last.
        return self._tail().endswith(WHOLE)

    def take(self) -> str:
        """The stacks; "" where they are not whole."""
        try:
            text = os.pread(self._process.memory, self._end - RING_BYTES, RING_BYTES).decode("ascii", errors="replace")
            os.ftruncate(self._process.memory, RING_BYTES)
        except OSError:
            return ""
        return text if text.endswith(WHOLE) else ""

    def _tail(self) -> str:
        return os.pread(self._process.memory, LONGEST_END, max(RING_BYTES, self._end - LONGEST_END)).decode("ascii", "replace")


def crash(process: RankProcess) -> str:
    """Where the student's code was when C code crashed in a rank, as a traceback; "" if none did, or none of theirs ran."""
    raw = os.pread(process.memory, LONGEST_BYTES, RING_BYTES).strip(b"\0").decode("ascii", errors="replace")
    _, crashed, stack = raw.rpartition("Fatal Python error")
    _, frames = next(_threads(stack), (0, []))
    text = _stack(frames) if crashed else ""
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
    stacks = [text for _, frames in _threads(raw) if (text := _stack(frames))]
    return (
        "is idle: no function of yours is running" if not stacks else "is here:\n" + "\n  and on another thread:\n".join(stacks)
    )


def stacks_of(raw: str) -> Iterator[tuple[int, tuple[Frame, ...]]]:
    """The identity of each thread, and its frames, outermost first; the main thread first.

    Args:
        raw: as `ask` gives it.
    """
    for ident, frames in _threads(raw):
        yield ident, tuple(Frame(frame["file"], int(frame["line"]), frame["function"]) for frame in frames)


def _state(pid: int) -> str:
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "its process is gone"
    if status == psutil.STATUS_STOPPED:
        return "its process was stopped by a signal (SIGSTOP); SIGCONT lets it go on"
    return f"its process is {status}, and did not come to it within {LIMIT_S:.0f} s"


def _threads(raw: str) -> Iterator[tuple[int, list[re.Match[str]]]]:
    """Each thread's identity and its frames, outermost first; the main one, which is the oldest and is written last, first."""
    found: list[tuple[int, list[re.Match[str]]]] = []
    writer = -1
    for line in raw.splitlines():
        if thread := _THREAD.match(line):
            if line.startswith("Current"):
                writer = len(found)
            found.append((int(thread["ident"] or "0", 16), []))
        elif found and (frame := _FRAME.match(line)):
            found[-1][1].insert(0, frame)
    if not found:
        return
    main = found.pop()
    if 0 <= writer < len(found):  # the thread of labkit's
        found.pop(writer)
    yield main
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
