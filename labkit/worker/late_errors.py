"""Errors that come late: those of kernels on a GPU, and those of child processes that have died."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Final

SIGNAL_LIMIT_S: Final = 1.0  # for the signal to arrive after a connection broke: the kernel closes files first


def context_error(wait_s: float = 0.0) -> RuntimeError | None:
    """Return the error that every CUDA call in this process raises from now on; None if CUDA works or is not in use.

    After a kernel has failed, every later CUDA call fails too, and only a new process has a valid context.

    Running kernels of the current stream may still fail; it waits so long for them.

    Source: "CUDA Runtime API", NVIDIA, error handling: later calls report errors of kernels.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    until = time.monotonic() + wait_s
    try:
        if not torch.cuda.is_current_stream_capturing():  # a query would abort the capture of a CUDA graph
            while not torch.cuda.current_stream().query() and time.monotonic() < until:
                time.sleep(0.0005)
    except RuntimeError as error:
        return error
    return None


@contextlib.contextmanager
def without_child_deaths() -> Iterator[Callable[[BaseException], BaseException]]:
    """Report an error in the `with` block, in which the deaths of child processes raise no other; for the main thread.

    Once a program has used a `DataLoader` with workers, torch handles SIGCHLD: when a worker has died, the handler
    raises an error in the main thread, wherever that is, also while it sends a message. A worker that dies also breaks
    its connection, and either comes first.

    Gives what returns an error's cause: what the program's handler raises if a child process has died just now; else
    the error.
    """
    handler = signal.getsignal(signal.SIGCHLD)
    if not callable(handler):
        yield lambda error: error
        return
    deaths: list[int] = []
    signal.signal(signal.SIGCHLD, lambda number, _: deaths.append(number))

    def cause_of(error: BaseException) -> BaseException:
        until = time.monotonic() + (SIGNAL_LIMIT_S if isinstance(error, (ConnectionError, EOFError)) else 0)
        while not deaths and time.monotonic() < until:
            time.sleep(0.001)
        if deaths:
            try:
                handler(signal.SIGCHLD, None)
            except Exception as death:  # noqa: BLE001  # whatever the handler raises
                return death
        return error

    try:
        yield cause_of
    finally:
        signal.signal(signal.SIGCHLD, handler)
