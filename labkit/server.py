"""The other side of a start: the server that ranks are forked from, and how a process becomes a rank."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import mmap
import os
import pickle
import random
import select
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any, Final, NoReturn

from labkit.errors import LabError
from labkit.streams import print_to

__all__ = ["BATCH", "guard", "kill_group", "serve", "spawned"]

BATCH: Final = 64  # ranks a fork request may ask for: three descriptors each, and the kernel passes 253 at the most
PR_SET_PDEATHSIG: Final = 1
GUARD_LOOKS_EVERY_MS: Final = 500


def serve(fds: list[int], preload: list[str], notebook: int) -> NoReturn:
    """The server's whole life: import, then fork ranks as told, until the notebook's process is gone."""
    _import_all(preload)
    sock = socket.socket(fileno=fds[0])
    children: set[int] = set()
    me = os.getpid()
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    try:
        poll.register(os.pidfd_open(notebook), select.POLLIN)
    except OSError:  # no such process, or a kernel without pidfds: the end of the stream tells as well
        pass
    sock.send(pickle.dumps((0, None)))
    with contextlib.suppress(OSError):  # the notebook went while we answered
        while {fd for fd, _ in poll.poll()} == {sock.fileno()}:
            data, received, _, _ = socket.recv_fds(sock, 1 << 16, 3 * BATCH)
            if not data:
                break
            number, what, argument = pickle.loads(data)
            answer: Any
            if what == "fork":
                answer = _fork(argument, received, sock, me)
                if isinstance(answer, list):
                    children.update(answer)
            else:
                answer = _end_children([pid for pid in argument if pid in children])
                children.difference_update(answer)
            sock.send(pickle.dumps((number, answer)))
    _end_children(sorted(children))
    os._exit(0)


def _fork(count: int, received: Sequence[int], sock: socket.socket, me: int) -> list[int] | LabError:
    """Fork ranks, each with its three of the received descriptors; their pids, or why not."""
    pids: list[int] = []
    try:
        for i in range(count):
            pid = os.fork()
            if pid == 0:
                mine = received[3 * i : 3 * i + 3]
                sock.close()
                for fd in set(received) - set(mine):
                    os.close(fd)
                _live_as_rank(mine, parent=me)
            with contextlib.suppress(OSError):  # the child has done it itself
                os.setpgid(pid, pid)
            pids.append(pid)
    except OSError as error:
        _end_children(pids)
        return LabError(f"this system does not let {count} more processes start: {error}. Close other groups and notebooks.")
    finally:
        for fd in received:
            os.close(fd)
    return pids


def _end_children(pids: Sequence[int]) -> dict[int, int]:
    for pid in pids:
        kill_group(pid)
    return {pid: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids}


def kill_group(pid: int) -> None:
    """End a rank and whatever it has started."""
    for kill in (os.killpg, os.kill):  # the rank alone, where it has not made its group yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def spawned(fds: list[int], preload: list[str]) -> NoReturn:
    """The life of a spawned rank: import, then do as told."""
    _import_all(preload)
    _live_as_rank(fds)


def guard(fds: list[int], notebook: int) -> NoReturn:
    """The life of the process that ends spawned ranks when the notebook's process has gone: they may be too busy to notice it.

    Args:
        fds: a pipe from the notebook: "+pid" for a rank that has started, "-pid" for one that has ended, a line each.
        notebook: its process id.
    """
    ranks: set[int] = set()
    poll = select.poll()
    poll.register(fds[0], select.POLLIN)
    rest = b""
    while os.getppid() == notebook:  # a fork of the notebook's process may hold the pipe open for longer
        if not poll.poll(GUARD_LOOKS_EVERY_MS):
            continue
        data = os.read(fds[0], 1 << 16)
        if not data:
            break
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            (ranks.add if line[:1] == b"+" else ranks.discard)(int(line[1:]))
    for rank in ranks:
        kill_group(rank)
    os._exit(0)


def _import_all(names: Sequence[str]) -> None:
    for name in names:
        with contextlib.suppress(ImportError):  # what is not installed cannot be preloaded; using it says so
            importlib.import_module(name)
    import gc

    gc.collect()
    gc.freeze()  # the collector would otherwise touch, and so copy, every page that forked ranks share


def _live_as_rank(fds: Sequence[int], parent: int | None = None) -> NoReturn:
    """Turn this process into a rank, and end it when the rank's work is over.

    Args:
        fds: socket, output pipe and recording memory.
        parent: the server that forked it. Not so for a spawned rank: the kernel would take the end of the notebook's *thread*
            that spawned it for the death of its parent. It has a guard instead.
    """
    code = 1
    try:
        if parent is not None:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # it died before we asked
                os._exit(1)
        with contextlib.suppress(OSError):  # a session leader leads its own group already
            os.setpgid(0, 0)
        connection, output, ring = fds
        print_to(output)
        random.seed()
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()  # otherwise every rank draws what its server would have drawn
        from labkit.rank import main
        from labkit.ring import RING_BYTES

        main(socket.socket(fileno=connection), mmap.mmap(ring, RING_BYTES))
        code = 0
    except BaseException:  # noqa: BLE001  # nobody above us: say it on the rank's own output, which the notebook shows
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):  # a broken stream must not keep a process alive
            sys.stdout.flush()
        os._exit(code)
