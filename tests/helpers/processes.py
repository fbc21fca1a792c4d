"""Facts about processes: which have not ended, and over which network ranks communicate."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from labkit.launch.descendants import PR_SET_CHILD_SUBREAPER
from labkit.worker.network_namespace import PrivateNetwork

PR_GET_CHILD_SUBREAPER: Final = 37
START = ("fork", "spawn")  # the ways in which ranks start
# Each spawned rank starts Python and imports its framework, which takes seconds of a core. `make test` spawns ranks
# only where starting them, their life time or Stop is at stake.
SELDOM_SPAWNED = ("fork", pytest.param("spawn", marks=pytest.mark.slow))
GONE_LIMIT_S = 60.0  # for processes to end: the promise is 2 s, but a busy machine may notice it later

shared: set[int] = set()  # kernels that several tests use: what these start may stay until they end
kept: set[Any] = set()  # groups that a test opens and later tests of its file use

LISTEN = "0A"  # in the tables of /proc/net


def left_after(limit_s: float, pids: Iterable[int]) -> list[psutil.Process]:
    """Wait until processes have ended; returns those still running at the time limit.

    A process that has ended but is not yet reaped does not count: if its parent has ended as well,
    some systems take seconds to reap it.
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
        left = []
        for pid in running.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                left.append(psutil.Process(pid))
        return left
    finally:
        for fd in running:
            os.close(fd)


def below(pids: Iterable[int]) -> set[psutil.Process]:
    """The descendants of processes, as far as these are still running."""
    found: set[psutil.Process] = set()
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.update(psutil.Process(pid).children(recursive=True))
    return found


def children_of(module: str) -> set[psutil.Process]:
    """This process's children that run a module. Zombies do not count: other tests make this process adopt orphans."""
    found = set()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # ZombieProcess is one
            if any(module in word for word in child.cmdline()):
                found.add(child)
    return found


def adopts_orphans() -> bool:
    """Whether this process becomes the parent of orphaned descendants. Source: prctl(2)."""
    found = ctypes.c_int()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(found), 0, 0, 0)
    return bool(found.value)


def adopt_no_orphans() -> None:
    """Undo `adopt_orphans`: the orphans of later tests would stay as zombies of this process."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def network_of_ranks() -> PrivateNetwork:
    """Called in a rank: the network over which it communicates with the others, which its own code does not use."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the listing's own
            if os.readlink(f"/proc/self/fd/{fd}").startswith("net:"):
                return PrivateNetwork(fd)
    return PrivateNetwork()


def who_listens(port: int) -> int:
    """Called in a rank, and in the network of ranks: which of the ranks listens on a port of TensorFlow's."""
    rows = [row.split() for row in Path("/proc/thread-self/net/tcp6").read_text().splitlines()[1:]]
    inodes = {int(row[9]) for row in rows if int(row[1].rpartition(":")[2], 16) == port and row[3] == LISTEN}
    found = set()
    for rank in psutil.Process(os.getppid()).children():
        for fd in Path(f"/proc/{rank.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if fd.stat().st_ino in inodes:
                    found.add(rank.pid)
    (pid,) = found
    return pid
