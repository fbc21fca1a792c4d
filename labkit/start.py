"""How a process starts, and how it surely ends.

Linux forks ranks from a server, a small process that has imported the frameworks and never computed:

    notebook ──socket──> server ──fork──> rank, rank, ...      a rank is up in about 10 ms, its imported pages shared
        └──────────────socket, pipe, shared memory─────┘

A rank ends when it is told to, when its server dies (PR_SET_PDEATHSIG, which also ends a rank that is blocked in C++), and the
server ends when the notebook's process does, however that dies: the server holds its pidfd. Where fork is unsafe (macOS), ranks
are spawned, and spare ones that have imported everything wait for the next group.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib
import itertools
import mmap
import os
import pickle
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn, Protocol

from labkit.errors import LabError
from labkit.streams import print_to

__all__ = ["ForkStarter", "RankProcess", "SpawnStarter", "Starter", "serve", "spawned"]

READY_LIMIT_S: Final = 180.0  # a first import of TensorFlow from a cold disk has been seen to take a minute
REPLY_LIMIT_S: Final = 30.0
BATCH: Final = 64  # ranks a fork request may ask for: three descriptors each, and the kernel passes 253 at the most
PR_SET_PDEATHSIG: Final = 1

Main = Callable[[socket.socket, mmap.mmap], None]


class RankProcess:
    """A started rank, as its owner in the notebook holds it.

    Args:
        pid: its process id; it leads a process group of its own.
        sock: the stream that carries frames to and from it.
        output: descriptor of the pipe that everything it prints comes out of.
        ring: the memory that it records into.
    """

    def __init__(self, pid: int, sock: socket.socket, output: int, ring: mmap.mmap) -> None:
        self.pid = pid
        self.sock = sock
        self.output = output
        self.ring = ring
        try:
            self.sentinel = os.pidfd_open(pid)  # readable once the process has ended
        except (AttributeError, OSError):
            self.sentinel = -1  # then the end of the stream tells
        os.set_blocking(output, False)

    def close(self) -> None:
        """Let go of what belongs to the rank on this side; the process must have ended, or ends by this."""
        self.sock.close()
        for fd in (self.output, self.sentinel):
            if fd >= 0:
                os.close(fd)
        self.output = self.sentinel = -1


class Starter(Protocol):
    """Something that makes ranks."""

    def start(self, count: int) -> list[RankProcess]:
        """Start `count` ranks that wait for their first frame."""

    def end(self, processes: Sequence[RankProcess]) -> dict[int, int]:
        """Kill ranks and whatever they started; their exit codes by pid, a negative one being the signal that ended them."""

    def close(self) -> None:
        """End everything that this starter holds."""


class _Pipes:
    """The two ends of what connects the notebook with one rank that is about to start."""

    def __init__(self, ring_bytes: int, make_shared: Callable[[int], int]) -> None:
        self.near, far = socket.socketpair()
        self.output, write = os.pipe()
        if hasattr(fcntl, "F_SETPIPE_SZ"):
            with contextlib.suppress(OSError):  # over the user's limit for pipes: the default size works as well
                fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 1 << 20)  # a rank that prints much while nobody looks is blocked later
        ring = make_shared(ring_bytes)
        self.ring = mmap.mmap(ring, ring_bytes)
        self.far = [far.detach(), write, ring]

    def close_far(self) -> None:
        for fd in self.far:
            os.close(fd)
        self.far = []

    def close(self) -> None:
        self.close_far()
        self.near.close()
        os.close(self.output)


class ForkStarter:
    """Ranks forked from a server.

    Args:
        preload: modules the server imports, in order; one that is missing is left out.
        environment: variables the server gets beside the notebook's own.
        ring_bytes: size of a rank's recording memory.
        make_shared: gives a descriptor of that much new shared memory.
    """

    def __init__(
        self, preload: Sequence[str], environment: dict[str, str], ring_bytes: int, make_shared: Callable[[int], int]
    ) -> None:
        self._ring_bytes, self._make_shared = ring_bytes, make_shared
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._ready = False
        self._log = make_shared(0)
        self._socket, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with far:
            self._process = _python("serve", [far.fileno()], [list(preload), os.getpid()], environment, self._log)

    def start(self, count: int) -> list[RankProcess]:
        """Start `count` ranks that wait for their first frame."""
        ranks: list[RankProcess] = []
        with self._lock:
            self._wait_until_ready()
            try:
                while len(ranks) < count:
                    pipes = [_Pipes(self._ring_bytes, self._make_shared) for _ in range(min(BATCH, count - len(ranks)))]
                    try:
                        pids = self._ask("fork", len(pipes), [fd for p in pipes for fd in p.far])
                    except BaseException:
                        for p in pipes:
                            p.close()  # ranks that came up all the same see the end of their stream, and go
                        raise
                    for pid, p in zip(pids, pipes, strict=True):
                        p.close_far()
                        ranks.append(RankProcess(pid, p.near, p.output, p.ring))
            except BaseException:
                for rank in ranks:
                    rank.close()
                raise
        return ranks

    def end(self, processes: Sequence[RankProcess]) -> dict[int, int]:
        """Kill ranks and whatever they started; their exit codes by pid."""
        with self._lock:
            try:
                codes: dict[int, int] = self._ask("end", [p.pid for p in processes], [])
            except LabError:  # the server is gone, and its ranks with it
                codes = {p.pid: -signal.SIGKILL for p in processes}
        return codes

    def alive(self) -> bool:
        """Whether the server still runs."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the server, and with it every rank it forked."""
        self._socket.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._log >= 0:
            os.close(self._log)
            self._log = -1

    def _wait_until_ready(self) -> None:
        if not self._ready:
            self._receive(0, READY_LIMIT_S)
            self._ready = True

    def _ask(self, what: str, argument: Any, fds: Sequence[int]) -> Any:
        number = next(self._ids)
        try:
            socket.send_fds(self._socket, [pickle.dumps((number, what, argument))], fds)
        except OSError:
            raise self._death() from None
        return self._receive(number, REPLY_LIMIT_S)

    def _receive(self, number: int, limit_s: float) -> Any:
        until = time.monotonic() + limit_s
        while True:
            self._socket.settimeout(max(0.0, until - time.monotonic()))
            try:
                data = self._socket.recv(1 << 16)
            except TimeoutError:
                raise LabError(f"the process that starts ranks did not answer within {limit_s:.0f} s") from None
            except OSError:
                data = b""
            if not data:
                raise self._death()
            got, answer = pickle.loads(data)
            if got != number:
                continue  # the answer to a request whose caller was interrupted
            if isinstance(answer, Exception):
                raise answer
            return answer

    def _death(self) -> LabError:
        log = os.pread(self._log, 1 << 16, 0).decode(errors="replace").strip()
        tail = "\n".join(log.splitlines()[-12:])
        return LabError(f"the process that starts ranks has ended{': ' + tail if tail else ''}")


class SpawnStarter:
    """Ranks as fresh interpreters, for systems where a fork is unsafe; spares that have imported everything are kept warm.

    Args:
        preload, environment, ring_bytes, make_shared: as for `ForkStarter`.
    """

    def __init__(
        self, preload: Sequence[str], environment: dict[str, str], ring_bytes: int, make_shared: Callable[[int], int]
    ) -> None:
        self._preload, self._environment = list(preload), environment
        self._ring_bytes, self._make_shared = ring_bytes, make_shared
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._spares: list[RankProcess] = []
        self._lock = threading.Lock()

    def warm(self, count: int) -> None:
        """See that `count` spare ranks are importing, or have imported, what they need. Returns at once."""
        with self._lock:
            while len(self._spares) < count:
                self._spares.append(self._spawn())

    def start(self, count: int) -> list[RankProcess]:
        """Hand out `count` ranks, spares first."""
        with self._lock:
            while len(self._spares) < count:
                self._spares.append(self._spawn())
            ranks, self._spares = self._spares[:count], self._spares[count:]
        return ranks

    def end(self, processes: Sequence[RankProcess]) -> dict[int, int]:
        """Kill ranks and whatever they started; their exit codes by pid."""
        for process in processes:
            _kill_group(process.pid)
        return {p.pid: self._children.pop(p.pid).wait() for p in processes if p.pid in self._children}

    def alive(self) -> bool:
        """Always: nothing stands between the notebook and the ranks."""
        return True

    def close(self) -> None:
        """End the spares."""
        with self._lock:
            spares, self._spares = self._spares, []
        self.end(spares)
        for spare in spares:
            spare.close()

    def _spawn(self) -> RankProcess:
        pipes = _Pipes(self._ring_bytes, self._make_shared)
        try:
            child = _python("spawned", pipes.far, [self._preload, os.getpid()], self._environment, subprocess.DEVNULL)
        except BaseException:
            pipes.close()
            raise
        pipes.close_far()
        self._children[child.pid] = child
        return RankProcess(child.pid, pipes.near, pipes.output, pipes.ring)


def _python(
    function: str, fds: Sequence[int], arguments: list[Any], environment: dict[str, str], log: int
) -> subprocess.Popen[bytes]:
    """A new interpreter that finds what this one finds and runs a function of this module, out of reach of Ctrl-C."""
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from labkit.start import {function}; {function}({list(fds)!r}, *{arguments!r})"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


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
                answer = []
                for i in range(argument):
                    pid = os.fork()
                    if pid == 0:
                        mine = received[3 * i : 3 * i + 3]
                        sock.close()
                        for fd in set(received) - set(mine):
                            os.close(fd)
                        _live_as_rank(mine, parent=me)
                    with contextlib.suppress(OSError):  # the child has done it itself
                        os.setpgid(pid, pid)
                    answer.append(pid)
                children.update(answer)
                for fd in received:
                    os.close(fd)
            else:
                answer = _end_children([pid for pid in argument if pid in children])
                children.difference_update(answer)
            sock.send(pickle.dumps((number, answer)))
    _end_children(sorted(children))
    os._exit(0)


def _end_children(pids: Sequence[int]) -> dict[int, int]:
    for pid in pids:
        _kill_group(pid)
    return {pid: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids}


def _kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # the rank alone, where it has not made its group yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def spawned(fds: list[int], preload: list[str], notebook: int) -> NoReturn:
    """The life of a spawned rank: import, then do as told."""
    threading.Thread(target=_end_with, args=(notebook,), daemon=True, name="labkit-watch").start()
    _import_all(preload)
    _live_as_rank(fds)


def _end_with(notebook: int) -> None:
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(notebook).wait()
    os.killpg(0, signal.SIGKILL)


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
            that spawned it for the death of its parent.
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
