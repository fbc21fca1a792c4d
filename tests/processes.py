"""What is left of processes that were to end."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Iterable

import psutil

__all__ = ["left_after"]


def left_after(limit_s: float, pids: Iterable[int]) -> list[psutil.Process]:
    """Wait until processes have ended; those that have not when the time is over.

    One that has ended and that its parent has not taken notice of is no process any more: where the parent has ended as well,
    some systems take seconds to bury it.
    """
    running: dict[int, int] = {}
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            running[os.pidfd_open(pid)] = pid
    poll = select.poll()
    for fd in running:
        poll.register(fd, select.POLLIN)
    until = time.monotonic() + limit_s
    try:
        while running and (ended := poll.poll(max(0.0, until - time.monotonic()) * 1000)):
            for fd, _ in ended:
                poll.unregister(fd)
                os.close(fd)
                del running[fd]
        return [psutil.Process(pid) for pid in running.values() if psutil.pid_exists(pid)]
    finally:
        for fd in running:
            os.close(fd)
