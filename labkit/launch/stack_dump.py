"""Where the threads of ranks are at any moment, also in ranks that are blocked in C++; see `worker.stack_writer`."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from labkit.launch.frames import StackFrame, stack_in
from labkit.launch.rank_process import RankProcess
from labkit.worker.stack_writer import ANSWER_AT, ASK, HEADER, INTERRUPT, TEXT_AT, TEXT_BYTES, Look, ThreadLook

LIMIT_S: Final = 1.0  # for the ranks to write; they may have to wait for a core
EACH_S: Final = 0.02  # more for each rank
CHECK_EVERY_S: Final = 0.002
COMPLETE: Final = ("in <module>\n", "\n  ...\n")  # the end of the main thread's stack: its outermost frame, or it is too deep

_Answer = TypeVar("_Answer")


def ask(processes: Sequence[RankProcess]) -> list[Look | None]:
    """The threads of living ranks; None for a rank that does not answer in time."""
    asked_ns = time.perf_counter_ns()  # earlier answers do not count
    return _answers(processes, ASK, lambda process: _look(process, asked_ns))


def interrupt(processes: Sequence[RankProcess]) -> list[tuple[StackFrame, ...] | None]:
    """The stacks of the main threads of living ranks in which a thread holds the GIL; None as in `ask`."""
    for process in processes:
        with contextlib.suppress(OSError):  # it has just ended
            os.ftruncate(process.memory, TEXT_AT)
            os.lseek(process.memory, TEXT_AT, os.SEEK_SET)  # the rank's descriptor shares this file position
    return _answers(processes, INTERRUPT, _main_stack)


def _answers(
    processes: Sequence[RankProcess], by_signal: int, answer: Callable[[RankProcess], _Answer | None]
) -> list[_Answer | None]:
    """What ranks write in reply to a signal."""
    for process in processes:
        with contextlib.suppress(OSError):  # it has just ended
            process.signal(by_signal)
    answers: list[_Answer | None] = [None] * len(processes)
    until = time.monotonic() + LIMIT_S + EACH_S * len(processes)
    while None in answers and time.monotonic() < until:
        time.sleep(CHECK_EVERY_S)
        for i, process in enumerate(processes):
            with contextlib.suppress(OSError):  # it has ended, and another thread has closed its memory
                answers[i] = answer(process) if answers[i] is None else answers[i]
    return answers


def _look(process: RankProcess, asked_ns: int) -> Look | None:
    """What a rank has written since then; None if it has not, or is writing."""
    header = os.pread(process.memory, HEADER.size, ANSWER_AT)
    looked_ns, nbytes = HEADER.unpack(header) if len(header) == HEADER.size else (0, 0)
    if looked_ns < asked_ns:
        return None
    body = os.pread(process.memory, nbytes, ANSWER_AT + HEADER.size)
    if os.pread(process.memory, HEADER.size, ANSWER_AT) != header:  # it was writing again
        return None
    threads, handles_signals = json.loads(body)
    return Look([ThreadLook(*thread) for thread in threads], handles_signals)


def _text(process: RankProcess) -> str:
    return os.pread(process.memory, TEXT_BYTES, TEXT_AT).rstrip(b"\0").decode("ascii", errors="replace")


def _main_stack(process: RankProcess) -> tuple[StackFrame, ...] | None:
    text = _text(process)
    return stack_in(text) if text.endswith(COMPLETE) else None


def crashed_in(process: RankProcess) -> tuple[StackFrame, ...]:
    """The frames, outermost first, of the thread in which a rank crashed in C code; none if it did not crash."""
    with contextlib.suppress(OSError):  # another thread has closed its memory
        _, crashed, stack = _text(process).rpartition("Fatal Python error")
        return stack_in(stack) if crashed else ()
    return ()
