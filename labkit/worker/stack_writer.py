"""Writes where the threads of a rank are when a signal requests it.

A thread of labkit's does that while it holds the interpreter's lock (GIL), so no other thread changes its stack.

If a thread holds the GIL all the time in C code, as one of TensorFlow's that waits for the servers of other ranks, a
signal handler of `faulthandler` writes the stacks, without the GIL. It may crash while other threads run Python, since
it reads frames that they change. So it is used only if labkit's thread does not answer.
"""

from __future__ import annotations

import _thread
import contextlib
import faulthandler
import itertools
import json
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Final, NamedTuple

from labkit.recording.ring_layout import RING_BYTES

# macOS has no real-time signals.
INTERRUPT: Final = getattr(signal, "SIGRTMAX", signal.SIGUSR2)  # handled by `faulthandler`
ASK: Final = signal.SIGRTMAX - 1 if hasattr(signal, "SIGRTMAX") else signal.SIGURG  # received by labkit's thread

# Both lie behind the ring in the rank's recording memory.
TEXT_AT: Final = RING_BYTES  # what `faulthandler` writes
TEXT_BYTES: Final = 1 << 16  # at most: it stops after 100 frames
ANSWER_AT: Final = TEXT_AT + TEXT_BYTES  # what labkit's thread writes: a header, then `Look` as JSON
HEADER: Final = struct.Struct("<qq")  # when the threads were looked at, in ns, and the size of what follows; 0 while it changes

MOST_FRAMES: Final = 100  # of a stack, innermost first
# Handled in every rank, by Python, torch's DataLoader and labkit, or to end the process.
_USUAL: Final = {signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, ASK}


class ThreadLook(NamedTuple):
    """One thread that runs Python."""

    ident: int
    number: int  # its native id; 0 if unknown
    cpu_ns: int  # the CPU time that it has used; -1 if unknown
    runnable: bool  # whether it is running, or continues when it gets a core
    joins: bool  # whether it is in `Thread.join` without a time limit
    frames: list[tuple[str, int, str]]  # file, line, function; the innermost first


class Look(NamedTuple):
    """The threads of a rank at one moment, the main thread first, without labkit's own."""

    threads: list[ThreadLook]
    handles_signals: bool  # whether the program handles signals, besides the usual ones


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Block both signals in processes that this thread starts inside the `with` block, until they call `prepare`.

    The signals would otherwise end them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {ASK, INTERRUPT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def prepare() -> None:
    """Ignore both signals until `write_when_asked` is called. The process must have a single thread."""
    for number in (ASK, INTERRUPT):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {INTERRUPT})
    # Blocked also in threads that libraries start later; labkit's own thread receives it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {ASK})


def write_when_asked(memory: int) -> None:
    """Write where the threads of this process are whenever a signal requests it; called in the main thread.

    `memory` is the file descriptor of the rank's recording memory.
    """
    os.lseek(memory, TEXT_AT, os.SEEK_SET)
    faulthandler.register(INTERRUPT, memory, all_threads=True)
    signal.signal(ASK, lambda *_: None)  # some systems drop a signal that is ignored, even if a thread waits for it
    _thread.start_new_thread(_serve, (memory, _thread.get_ident()))  # `threading.enumerate` does not list it


def _serve(memory: int, main: int) -> None:
    while True:
        signal.sigwait({ASK})
        while ASK in signal.sigpending():  # asked again while it waited for the GIL: one answer is enough
            signal.sigwait({ASK})
        with contextlib.suppress(OSError):  # no room: the rank remains silent
            _write(memory, main)


def _write(memory: int, main: int) -> None:
    looked_ns = time.perf_counter_ns()
    body = json.dumps(look(main)).encode()
    # A reader that finds the same header before and after the body has the whole body.
    os.pwrite(memory, HEADER.pack(0, 0), ANSWER_AT)
    os.pwrite(memory, body, ANSWER_AT + HEADER.size)
    os.pwrite(memory, HEADER.pack(looked_ns, len(body)), ANSWER_AT)


def look(main: int) -> Look:
    """Where the threads of this process are, without the calling thread; `main` is the `ident` of the main thread."""
    own, used = _thread.get_ident(), {ident: _used(clock) for ident, clock in _clocks().items()}
    # No local variable holds these frames: this function's own is among them, and the cycle would keep all of them.
    threads = [
        ThreadLook(ident, *used.get(ident, _UNKNOWN), _joins(frame), _frames(frame))
        for ident, frame in sys._current_frames().items()
        if ident != own
    ]
    handled = any(callable(signal.getsignal(number)) for number in signal.valid_signals() - _USUAL)
    return Look(sorted(threads, key=lambda thread: thread.ident != main), handled)


_UNKNOWN: Final = (0, -1, False)


def _clocks() -> dict[int, int]:
    """The clock of the CPU time of each thread that runs Python, by `ident`; {} if the system has none (macOS).

    The system would read freed memory for the `ident` of a thread that has ended. While a thread holds the GIL, none
    ends that runs Python. So one call of a C function, `dict`, lists the threads and asks for their clocks: between
    two calls, Python may pass the GIL on.
    """
    if sys.platform == "darwin":
        return {}
    idents, same = itertools.tee(itertools.chain.from_iterable(itertools.starmap(sys._current_frames, [()])))
    return dict(zip(idents, map(time.pthread_getcpuclockid, same), strict=True))


def _used(clock: int) -> tuple[int, int, bool]:
    """A thread's native id, its CPU time, and whether it is runnable.

    Source: the native id in a clock's number is CPUCLOCK_PID in the kernel's include/linux/posix-timers.h; the state of
    a thread is in proc_pid_stat(5), the Linux man-pages.
    """
    number = ~(clock >> 3)
    try:
        with open(f"/proc/self/task/{number}/stat", "rb") as stat:
            state = stat.read().rpartition(b") ")[2][:1]
        return number, time.clock_gettime_ns(clock), state == b"R"
    except OSError:  # it has just ended
        return _UNKNOWN


def _joins(innermost: FrameType) -> bool:
    """Whether it is in `Thread.join` without a time limit, which waits at the same line as with one."""
    code = innermost.f_code
    if code.co_filename != threading.__file__ or code.co_name not in ("join", "_wait_for_tstate_lock"):  # until 3.12, this
        return False
    return innermost.f_locals.get("timeout") in (None, -1)


def _frames(innermost: FrameType) -> list[tuple[str, int, str]]:
    frames: list[tuple[str, int, str]] = []
    frame: FrameType | None = innermost
    while frame is not None and len(frames) < MOST_FRAMES:
        line = frame.f_lineno or frame.f_code.co_firstlineno  # between two lines, a frame has none
        frames.append((frame.f_code.co_filename, line, frame.f_code.co_name))
        frame = frame.f_back
    return frames
