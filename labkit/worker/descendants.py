"""Processes that a rank's code has started, also those that have left its process group and forgotten their parent.

A daemon forks twice or begins a session of its own, so no signal to the rank's process group reaches it. On Linux a
process can ask to become the parent of orphans below it (PR_SET_CHILD_SUBREAPER): every rank does, and so does the
server that ranks are forked from, which then finds what a rank that has ended leaves behind among its own children.
Spawned ranks end theirs themselves, as far as they get to it.

Source: prctl(2) and proc_pid_task(5), the Linux man-pages.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Collection
from typing import Any, Final

__all__ = ["adopt_orphans", "children", "descendants", "end_all", "end_children", "end_other_sessions"]

PR_SET_CHILD_SUBREAPER: Final = 36
ENDS_ITSELF: Final = "torch_shm_manag"  # torch's, which then removes shared memory; the system keeps 15 characters of its name
LIMIT_S: Final = 1.0  # for killed processes to end; one that the kernel keeps in a device's driver is left


def adopt_orphans() -> None:
    """Become the parent of processes that this one's descendants leave behind. Elsewhere than on Linux that cannot be had."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children() -> set[int]:
    """The process ids of this process's children, adopted ones included; none where the system does not tell."""
    pid = os.getpid()
    try:
        with open(f"/proc/{pid}/task/{pid}/children", "rb") as file:
            return set(map(int, file.read().split()))
    except OSError:  # not Linux, or a kernel without CONFIG_PROC_CHILDREN
        return set()


def end_children(kept: Collection[int] = ()) -> None:
    """End all children of this process but some, and what those leave behind in turn.

    Args:
        kept: process ids.
    """
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        unwanted = [pid for pid in children() - set(kept) if _command(pid) != ENDS_ITSELF]
        if not unwanted:
            return
        for pid in unwanted:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for pid in unwanted:
            _await_end(pid, until)


def end_other_sessions() -> None:
    """End the children of this process that are not of its process group, which is ended as a whole."""
    if sys.platform == "linux":
        end_children({pid for pid in children() if _group(pid) == os.getpgrp()})
    else:
        end_all([p for p in descendants([os.getpid()]) if _group(p.pid) != os.getpgrp()])


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except OSError:
        return -1


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def _await_end(pid: int, until: float) -> None:
    with contextlib.suppress(OSError):
        fd = os.pidfd_open(pid)
        try:
            poll = select.poll()  # `select.select` takes no descriptor above 1,023, and the server of many ranks has such
            poll.register(fd, select.POLLIN)
            poll.poll(max(0.0, until - time.monotonic()) * 1000)
        finally:
            os.close(fd)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def descendants(pids: Collection[int]) -> list[Any]:
    """The processes (psutil's) that living processes have started, directly or not."""
    import psutil  # the server, which is to be small, does without

    found = []
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            found += psutil.Process(pid).children(recursive=True)
    return found


def end_all(processes: Collection[Any]) -> None:
    """End processes that `descendants` found."""
    import psutil

    for process in processes:
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            process.kill()
