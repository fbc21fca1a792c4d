"""Ends the processes that a rank's code has started, even daemons outside its process group; guards spawned ranks.

A daemon forks twice or starts a new session, so a signal to the rank's process group does not reach it. On Linux a
process can become the parent of its orphaned descendants (PR_SET_CHILD_SUBREAPER). Each rank does so, and so does the
server: it adopts the processes that a rank leaves behind. Spawned ranks end their own descendants, if they have time
to.

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
from typing import Any, Final, NoReturn

PR_SET_CHILD_SUBREAPER: Final = 36
ENDS_ITSELF: Final = "torch_shm_manag"  # torch's torch_shm_manager (Linux keeps 15 characters), which cleans up shared memory
END_LIMIT_S: Final = 1.0  # for killed processes to end; a process that is blocked in a driver is left alone
GUARD_CHECK_EVERY_MS: Final = 500


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants. Only Linux supports this; elsewhere it does nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children() -> set[int]:
    """Return the process ids of this process's children, including adopted ones; empty if they are not known."""
    pid = os.getpid()
    try:
        with open(f"/proc/{pid}/task/{pid}/children", "rb") as file:
            return set(map(int, file.read().split()))
    except OSError:  # not Linux, or a kernel without CONFIG_PROC_CHILDREN
        return set()


def end_children(kept: Collection[int] = ()) -> None:
    """End this process's children, except the process ids `kept`, and the processes that they leave behind."""
    until = time.monotonic() + END_LIMIT_S
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
    """End the children of this process that are not in its process group, which others end as a whole."""
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
            poll = select.poll()  # `select.select` supports descriptors up to 1,023 only
            poll.register(fd, select.POLLIN)
            poll.poll(max(0.0, until - time.monotonic()) * 1000)
        finally:
            os.close(fd)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def kill_groups(pids: Collection[int]) -> None:
    """End ranks and their process groups. All are stopped first, so that none reacts to another's end."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            for kill in (os.killpg, os.kill):  # `kill` in case the rank has not created its process group yet
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    kill(pid, number)


def descendants(pids: Collection[int]) -> list[Any]:
    """Return the descendants of running processes, as `psutil.Process` objects."""
    import psutil  # imported here, to keep the server small

    found = []
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            found += psutil.Process(pid).children(recursive=True)
    return found


def end_all(processes: Collection[Any]) -> None:
    """End processes that `descendants` has found."""
    import psutil

    for process in processes:
        with contextlib.suppress(psutil.Error):  # it has already ended
            if not process.name().startswith(ENDS_ITSELF):
                process.kill()


def guard(fds: list[int], notebook: int) -> NoReturn:
    """Run the guard, which ends spawned ranks after the notebook's process has ended; they may be too busy to notice.

    `fds` has a pipe from the notebook with one line for each rank that starts, "+pid", and each that ends, "-pid".
    """
    ranks: set[int] = set()
    poll = select.poll()
    poll.register(fds[0], select.POLLIN)
    rest = b""
    while os.getppid() == notebook:  # a child of the notebook's process may keep the pipe open for longer
        if not poll.poll(GUARD_CHECK_EVERY_MS):
            continue
        data = os.read(fds[0], 1 << 16)
        if not data:
            break
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            (ranks.add if line[:1] == b"+" else ranks.discard)(int(line[1:]))
    started = descendants(ranks)
    kill_groups(ranks)
    end_all(started)
    os._exit(0)
