"""A rank writes down the stacks of its threads when a signal asks for them.

`faulthandler` can write all stacks from within a signal handler, without the interpreter's lock. That works in a rank that is
blocked in C, but while other threads run Python it reads frames that they change, and may crash. So a thread of labkit's
writes them first, while it holds the lock; a rank is only interrupted where that thread cannot have the lock.
"""

from __future__ import annotations

import _thread
import contextlib
import faulthandler
import signal
from collections.abc import Iterator
from typing import Final

__all__ = ["ASK", "INTERRUPT", "held_back", "prepare", "write_when_asked"]

INTERRUPT: Final = getattr(signal, "SIGRTMAX", signal.SIGUSR2)  # macOS has no real-time signals
ASK: Final[int | None] = signal.SIGRTMAX - 1 if hasattr(signal, "SIGRTMAX") else None  # to the thread; None: there is none


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Processes that this thread starts meanwhile have both signals blocked, which would end them, until they `prepare`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, set(filter(None, (ASK, INTERRUPT))))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def prepare() -> None:
    """Let neither signal end a rank that cannot answer yet. For a process with one thread, which forks ranks or becomes one."""
    for number in filter(None, (ASK, INTERRUPT)):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {INTERRUPT})
    if ASK is not None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {ASK})  # also of the threads that libraries will start: one of ours takes it


def write_when_asked(memory: int) -> None:
    """Write the stacks of this process to a descriptor, at its offset, whenever a signal asks for them.

    Args:
        memory: the descriptor of the rank's recording memory.
    """
    faulthandler.register(INTERRUPT, memory, all_threads=True)
    if ASK is not None:
        _thread.start_new_thread(_serve, (ASK, memory))  # unlike those of `threading`, not listed among the student's threads


def _serve(ask: int, memory: int) -> None:
    while True:
        signal.sigwait({ask})
        while signal.sigtimedwait({ask}, 0) is not None:  # asked again while it had to wait for the lock: one answer will do
            pass
        faulthandler.dump_traceback(memory, all_threads=True)
