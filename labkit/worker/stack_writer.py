"""Writes the stacks of a rank's threads when a signal requests them.

`faulthandler` can write all stacks from a signal handler, without the GIL. That works in a rank that is blocked in C
code, but may crash while other threads run Python, because it reads frames that they change. So a thread of labkit
first tries to write them while it holds the GIL; the signal handler is used only if that thread cannot get the GIL.
"""

from __future__ import annotations

import _thread
import contextlib
import faulthandler
import signal
from collections.abc import Iterator
from typing import Final

INTERRUPT: Final = getattr(signal, "SIGRTMAX", signal.SIGUSR2)  # macOS has no real-time signals
ASK: Final[int | None] = signal.SIGRTMAX - 1 if hasattr(signal, "SIGRTMAX") else None  # received by the thread; None without one


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Block both signals in processes that this thread starts inside the `with` block, until they call `prepare`.

    The signals would otherwise end them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, set(filter(None, (ASK, INTERRUPT))))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def prepare() -> None:
    """Ignore both signals until `write_when_asked` is called. The process must have a single thread."""
    for number in filter(None, (ASK, INTERRUPT)):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {INTERRUPT})
    if ASK is not None:
        # Blocked also in threads that libraries start later; labkit's own thread receives it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {ASK})


def write_when_asked(memory: int) -> None:
    """Write the stacks of this process whenever a signal requests them.

    Args:
        memory: the file descriptor of the rank's recording memory; stacks are written at its current offset.
    """
    faulthandler.register(INTERRUPT, memory, all_threads=True)
    if ASK is not None:
        _thread.start_new_thread(_serve, (ASK, memory))  # `threading.enumerate` does not list it


def _serve(ask: int, memory: int) -> None:
    while True:
        signal.sigwait({ask})
        while signal.sigtimedwait({ask}, 0) is not None:  # repeated while it waited for the GIL: one reply is enough
            pass
        faulthandler.dump_traceback(memory, all_threads=True)
