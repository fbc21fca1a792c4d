"""Where the threads of ranks are at any moment, also in ranks that are blocked in C++; see `worker.stack_writer`."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from labkit.launch.frames import StackFrame, stacks_in
from labkit.launch.rank_process import RankProcess
from labkit.worker.stack_writer import ANSWER_AT, ASK, HEADER, INTERRUPT, TEXT_AT, TEXT_BYTES, Look, ThreadLook

LIMIT_S: Final = 1.0  # for the ranks to write; they may have to wait for a core
EACH_S: Final = 0.02  # more for each rank
SWITCHES_S: Final = 0.1  # of CPU time, in which a rank that runs Python releases the GIL about twenty times
STARVED_S: Final = 3.0  # more for a rank that gets no core
CHECK_EVERY_S: Final = 0.002
QUIET_S: Final = 0.02  # `faulthandler` writes line by line: it is done this long after a line that may be the last
COMPLETE: Final = ("in <module>\n", "\n  ...\n")  # the end of the main thread's stack, which is the last: its outermost frame

_Answer = TypeVar("_Answer")


def ask(processes: Sequence[RankProcess], *, insist: bool = True) -> list[Look | None]:
    """The threads of living ranks; None for a rank that does not answer in time.

    With `insist`, ranks that lack a core get more time: `interrupt` may crash a rank that was only waiting for one.
    """
    asked_ns = time.perf_counter_ns()  # earlier answers do not count
    for process in processes:
        _send(process, ASK)
    answers = _answers(processes, lambda process: _look(process, asked_ns), LIMIT_S + EACH_S * len(processes))
    late = [i for i, answer in enumerate(answers) if answer is None] if insist else []
    enough_s = {i: processes[i].status().cpu_s + SWITCHES_S for i in late}
    until = time.monotonic() + STARVED_S
    while late and time.monotonic() < until:
        time.sleep(CHECK_EVERY_S)
        for i in late:
            with contextlib.suppress(OSError):
                answers[i] = _look(processes[i], asked_ns)
        late = [i for i in late if answers[i] is None and _lacks_core(processes[i], enough_s[i])]
    return answers


def interrupt(processes: Sequence[RankProcess]) -> list[list[tuple[StackFrame, ...]]]:
    """The stacks of living ranks in which a thread holds the GIL, the main thread's last; [] if one does not answer."""
    if not processes:
        return []
    for process in processes:
        with contextlib.suppress(OSError):  # it has just ended
            os.ftruncate(process.memory, TEXT_AT)
            os.lseek(process.memory, TEXT_AT, os.SEEK_SET)  # the rank's descriptor shares this file position
        _send(process, INTERRUPT)
    _answers(processes, lambda process: _text(process).endswith(COMPLETE) or None, LIMIT_S + EACH_S * len(processes))
    time.sleep(QUIET_S)
    texts = [_text(process) for process in processes]
    return [stacks_in(text) if text.endswith(COMPLETE) else [] for text in texts]


def _send(process: RankProcess, number: int) -> None:
    with contextlib.suppress(OSError):  # it has just ended
        process.signal(number)


def _lacks_core(process: RankProcess, enough_s: float) -> bool:
    """Whether a rank has had less CPU time than it needs, and will continue when it gets a core."""
    status = process.status()
    return not status.frozen and not status.exiting and status.cpu_s < enough_s


def _answers(
    processes: Sequence[RankProcess], answer: Callable[[RankProcess], _Answer | None], limit_s: float
) -> list[_Answer | None]:
    """What ranks write within a time limit."""
    answers: list[_Answer | None] = [None] * len(processes)
    until = time.monotonic() + limit_s
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
    """What `faulthandler` has written; "" if another thread has closed the memory."""
    with contextlib.suppress(OSError):
        return os.pread(process.memory, TEXT_BYTES, TEXT_AT).rstrip(b"\0").decode("ascii", errors="replace")
    return ""


def crashed_in(process: RankProcess) -> tuple[StackFrame, ...]:
    """The frames, outermost first, of the thread in which a rank crashed in C code; none if it did not crash."""
    _, crashed, stack = _text(process).rpartition("Fatal Python error")
    return next(iter(stacks_in(stack)), ()) if crashed else ()
