"""The other side of a start: the server that ranks are forked from, and how a process becomes a rank."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import mmap
import os
import pickle
import select
import signal
import socket
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Final, NoReturn

from labkit.errors.exceptions import LabError
from labkit.ipc.stdio import print_to
from labkit.recording.fork_isolation import keep_from_forks
from labkit.worker import network_namespace
from labkit.worker.descendants import adopt_orphans, children, descendants, end_all, end_children, end_other_sessions
from labkit.worker.network_namespace import Network
from labkit.worker.open_files import raise_limit
from labkit.worker.stack_writer import prepare, write_when_asked

__all__ = ["BATCH", "READY", "guard", "kill_groups", "serve", "spawned"]

BATCH: Final = 64  # ranks a fork request may ask for: three descriptors each, and the kernel passes 253 at the most
PR_SET_PDEATHSIG: Final = 1
READY: Final = 0  # the number of the answer that nobody has asked for: everything is imported
GUARD_LOOKS_EVERY_MS: Final = 500


def serve(fds: list[int], preload: list[str], notebook: int) -> NoReturn:
    """The server's whole life: import, then fork ranks as told, until the notebook's process is gone."""
    raise_limit()
    prepare()
    adopt_orphans()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # inherited where the notebook's process ignores it: ranks' ends would be lost
    try:
        network = network_namespace.make(network_namespace.wanted(os.environ))  # while there is one thread only
    except LabError as error:
        sys.exit(str(error))  # into the log, which the notebook shows
    with _ended_with(notebook):
        _import_all(preload)
    _Server(socket.socket(fileno=fds[0]), network).serve(notebook)
    os._exit(0)


@contextlib.contextmanager
def _ended_with(notebook: int) -> Iterator[None]:
    """Meanwhile, end this process as soon as another is gone. Afterwards no thread is left: whoever forks must have one only."""
    there = _watch(notebook)
    stop, stopping = os.pipe()

    def watch() -> None:
        if there in select.select([there, stop], [], [])[0]:
            os._exit(0)

    thread = threading.Thread(target=watch)
    if there >= 0:
        thread.start()
    try:
        yield
    finally:
        os.close(stopping)
        if there >= 0:
            thread.join()
            os.close(there)
        os.close(stop)


class _Server:
    """What forks ranks, and ends them.

    Args:
        sock: where requests come from: "fork" a number of ranks, given three descriptors each, or "end" some.
        network: where ranks talk to one another.
    """

    def __init__(self, sock: socket.socket, network: Network) -> None:
        self._sock, self._network = sock, network
        self._ranks: dict[int, int] = {}  # by pid, a descriptor that is readable once the rank has ended; -1 on an old kernel
        self._codes: dict[int, int] = {}  # exit codes of ranks that have ended and that nobody has asked about yet
        self._poll = select.poll()
        self._helpers = children()  # that an imported library has started

    def serve(self, notebook: int) -> None:
        """Do as told until the notebook's process is gone; then end all ranks."""
        self._poll.register(self._sock, select.POLLIN)
        alive = _watch(notebook)
        if alive >= 0:
            self._poll.register(alive, select.POLLIN)
        with contextlib.suppress(OSError):  # the notebook went while we answered
            self._sock.send(pickle.dumps((READY, None)))
            going_on = True
            while going_on:
                ready = {fd for fd, _ in self._poll.poll()}
                self._reap([pid for pid, fd in self._ranks.items() if fd in ready])
                if self._sock.fileno() in ready:
                    going_on = self._do_as_told()
                going_on &= alive not in ready
        self._reap(list(self._ranks))

    def _do_as_told(self) -> bool:
        """Do what the next request says; False where there is none any more."""
        data, received, _, _ = socket.recv_fds(self._sock, 1 << 16, 3 * BATCH)
        if not data:
            return False
        number, what, argument = pickle.loads(data)
        answer: Any
        if what == "fork":
            answer = self._fork(argument, received)
        else:
            self._reap([pid for pid in argument if pid in self._ranks])
            answer = {pid: self._codes.pop(pid) for pid in argument if pid in self._codes}
        self._sock.send(pickle.dumps((number, answer)))
        return True

    def _fork(self, count: int, received: Sequence[int]) -> list[int] | LabError:
        """Fork ranks, each with its three of the received descriptors; their pids, or why not."""
        pids: list[int] = []
        me = os.getpid()
        try:
            for i in range(count):
                mine = received[3 * i : 3 * i + 3]
                pid = os.fork()
                if pid == 0:
                    others = {*received, *self._ranks.values(), self._sock.fileno()} - {*mine, -1}
                    _live_as_rank(mine, self._network, parent=me, unneeded=others)
                with contextlib.suppress(OSError):  # the child has done it itself
                    os.setpgid(pid, pid)
                pids.append(pid)
                self._ranks[pid] = _watch(pid)
                if self._ranks[pid] >= 0:
                    self._poll.register(self._ranks[pid], select.POLLIN)
        except OSError as error:
            self._reap(pids)
            return LabError(f"this system does not let {count} more processes start: {error}. Close other groups and notebooks.")
        finally:
            for fd in received:
                os.close(fd)
        return pids

    def _reap(self, pids: Sequence[int]) -> None:
        """End ranks, and what they have started; what has ended by itself keeps its exit code."""
        kill_groups(pids)
        for pid in pids:
            self._codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            fd = self._ranks.pop(pid)
            if fd >= 0:
                self._poll.unregister(fd)
                os.close(fd)
        if pids:
            end_children(self._helpers | self._ranks.keys())


def _watch(pid: int) -> int:
    """A descriptor that is readable once a process has ended; -1 where there is no such process, or the kernel is too old."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1


def kill_groups(pids: Collection[int]) -> None:
    """End ranks and whatever they have started. All are halted first, so that none sees the end of another and complains."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            for kill in (os.killpg, os.kill):  # the rank alone, where it has not made its group yet
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    kill(pid, number)


def spawned(fds: list[int], preload: list[str]) -> NoReturn:
    """The life of a spawned rank: import, then do as told."""
    raise_limit()
    prepare()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # as in `serve`
    _import_all(preload)
    _live_as_rank(fds, Network())


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
    started = descendants(ranks)
    kill_groups(ranks)
    end_all(started)
    os._exit(0)


def _import_all(names: Sequence[str]) -> None:
    for name in names:
        with contextlib.suppress(ImportError):  # what is not installed cannot be preloaded; using it says so
            importlib.import_module(name)
    import gc

    gc.collect()
    gc.freeze()  # the collector would otherwise touch, and so copy, every page that forked ranks share


def _reseed() -> None:
    """Draw new seeds, as in a process that has just started: else every rank would draw what its server would have drawn.

    `random` does it by itself after a fork. TensorFlow and CUDA seed their generators when these are first used, in the rank.
    """
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        # Not `torch.seed`: that queues a seed for CUDA, which is to draw one of its own.
        sys.modules["torch"].default_generator.seed()


def _live_as_rank(fds: Sequence[int], network: Network, parent: int | None = None, unneeded: Iterable[int] = ()) -> NoReturn:
    """Turn this process into a rank, and end it when the rank's work is over.

    Args:
        fds: socket, output pipe and recording memory.
        network: where it talks to the other ranks.
        parent: the server that forked it. Not so for a spawned rank: the kernel would take the end of the notebook's *thread*
            that spawned it for the death of its parent. It has a guard instead.
        unneeded: descriptors of the server that the rank closes.
    """
    code = 1
    try:
        for fd in unneeded:
            os.close(fd)
        if parent is not None:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # it died before we asked
                os._exit(1)
        with contextlib.suppress(OSError):  # a session leader leads its own group already
            os.setpgid(0, 0)
        adopt_orphans()
        connection, output, ring = fds
        print_to(output)
        _reseed()
        from labkit.recording.ring_layout import RING_BYTES
        from labkit.worker.main_loop import main

        # Also where no Python runs, because the rank is blocked in C++ or has crashed there; `group.stack_dump` reads it.
        os.lseek(ring, RING_BYTES, os.SEEK_SET)
        write_when_asked(ring)
        faulthandler.enable(ring, all_threads=False)
        os.register_at_fork(after_in_child=faulthandler.disable)  # what the rank forks is no rank
        memory = mmap.mmap(ring, RING_BYTES)
        keep_from_forks(memory)
        main(socket.socket(fileno=connection), memory, network)
        if parent is None:  # else the server ends what is left
            end_other_sessions()
        code = 0
    except BaseException:  # noqa: BLE001  # nobody above us: say it on the rank's own output, which the notebook shows
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):  # a broken stream must not keep a process alive
            sys.stdout.flush()
        os._exit(code)
