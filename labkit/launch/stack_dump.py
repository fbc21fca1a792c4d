"""The Python stacks of ranks at any moment, also of ranks that are blocked in C++.

A rank writes its stacks into its recording memory, behind the ring. A thread of labkit's does that
(`worker.stack_writer`), or a signal handler in C if that thread does not get the interpreter's lock (GIL).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Sequence
from typing import Final

from labkit.launch.frames import StackFrame, stacks_in
from labkit.launch.rank_process import RankProcess
from labkit.recording.ring_layout import RING_BYTES
from labkit.worker.stack_writer import ASK, INTERRUPT

LIMIT_S: Final = 1.0  # for the ranks to write; they may have to wait for a core
EACH_S: Final = 0.02  # more for each rank
SWITCHES_S: Final = 0.1  # of CPU time, in which a rank that runs Python releases the GIL about twenty times
STARVED_S: Final = 3.0  # more for a rank that gets no core
QUIET_S: Final = 0.02  # a stack is written line by line: it is complete this long after the last line
CHECK_EVERY_S: Final = 0.002
LONGEST_BYTES: Final = 1 << 16  # of a stack: faulthandler stops after 100 frames
# The end of the main thread's stack: its outermost frame, or "..." if it is too deep. Beyond 100 threads it is missing.
COMPLETE: Final = ("in <module>\n", "\n  ...\n")
LONGEST_END: Final = max(map(len, COMPLETE))


def ask(processes: Iterable[RankProcess], *, insist: bool = True) -> list[str]:
    """The raw stacks of ranks, as `faulthandler` writes them; "" for a rank that does not answer completely in time.

    Args:
        processes: living ranks.
        insist: whether to interrupt ranks that do not answer because a thread holds the GIL.
    """
    ranks = list(processes)
    answers = _answers(ranks, INTERRUPT if ASK is None else ASK)
    silent = [i for i, text in enumerate(answers) if not text]
    if insist and silent and ASK is not None:  # a thread holds the GIL all the time, so no other thread changes its stack
        for i, text in zip(silent, _answers([ranks[i] for i in silent], INTERRUPT), strict=True):
            answers[i] = text
    return answers


def _answers(ranks: Sequence[RankProcess], by_signal: int) -> list[str]:
    """What ranks write in reply to a signal; "" for a rank that does not answer completely in time."""
    for process in ranks:
        with contextlib.suppress(OSError):  # it has just ended
            os.lseek(process.memory, RING_BYTES, os.SEEK_SET)  # the rank's descriptor shares this file position
            process.signal(by_signal)
    until = time.monotonic() + LIMIT_S + EACH_S * len(ranks)
    answers = [_Answer(process) for process in ranks]
    waiting = answers
    while waiting and time.monotonic() < until:
        time.sleep(CHECK_EVERY_S)
        waiting = [answer for answer in waiting if not answer.complete()]
    if by_signal == ASK:  # silent ranks are interrupted next, which may crash a rank that was only waiting for a core
        enough_s = {answer: answer.process.status().cpu_s + SWITCHES_S for answer in waiting}
        until = time.monotonic() + STARVED_S
        while waiting and time.monotonic() < until:
            time.sleep(CHECK_EVERY_S)
            waiting = [a for a in waiting if not a.complete() and a.lacks_core(enough_s[a])]
    return [answer.take() for answer in answers]


class _Answer:
    """The stacks that a rank is writing."""

    def __init__(self, process: RankProcess) -> None:
        self.process = process
        self._end, self._changed = RING_BYTES, time.monotonic()

    def lacks_core(self, enough_s: float) -> bool:
        """Whether the rank has had less CPU time than it needs, and will continue when it gets a core."""
        status = self.process.status()
        return not status.frozen and not status.exiting and status.cpu_s < enough_s

    def complete(self) -> bool:
        """Whether the rank has written all of its stacks."""
        try:
            end, now = os.lseek(self.process.memory, 0, os.SEEK_CUR), time.monotonic()
        except OSError:
            return True  # the rank has ended, and another thread has closed its memory
        if end != self._end:
            self._end, self._changed = end, now
        if end == RING_BYTES or now < self._changed + QUIET_S:
            return False
        # A rank that lost its core while writing continues later; the oldest thread, the main thread, is written last.
        return self._tail().endswith(COMPLETE)

    def take(self) -> str:
        """The stacks; "" if they are incomplete."""
        try:
            text = os.pread(self.process.memory, self._end - RING_BYTES, RING_BYTES).decode("ascii", errors="replace")
            os.ftruncate(self.process.memory, RING_BYTES)
        except OSError:
            return ""
        return text if text.endswith(COMPLETE) else ""

    def _tail(self) -> str:
        return os.pread(self.process.memory, LONGEST_END, max(RING_BYTES, self._end - LONGEST_END)).decode("ascii", "replace")


def crashed_in(process: RankProcess) -> tuple[StackFrame, ...]:
    """The frames, outermost first, of the thread in which a rank crashed in C code; none if it did not crash."""
    try:
        raw = os.pread(process.memory, LONGEST_BYTES, RING_BYTES).strip(b"\0").decode("ascii", errors="replace")
    except OSError:  # another thread has closed it
        return ()
    _, crashed, stack = raw.rpartition("Fatal Python error")
    return next((frames for _, frames in stacks_in(stack)), ()) if crashed else ()
