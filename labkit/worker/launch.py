"""How a process starts, and how it surely ends.

Linux forks ranks from a server, a small process that has imported the frameworks and never computed:

    notebook ──socket──> server ──fork──> rank, rank, ...      a rank is up in about 10 ms, its imported pages shared
        └──────────────socket, pipe, shared memory─────┘

A rank ends when it is told to, when its server dies (PR_SET_PDEATHSIG, which also ends a rank that is blocked in C++), and the
server ends when the notebook's process does, however that dies: the server holds its pidfd. Where fork is unsafe (macOS), ranks
are spawned, and spare ones that have imported everything wait for the next group; a guard, which is told of every rank, ends
them when the notebook's process has gone.
"""

from __future__ import annotations

import _thread
import contextlib
import fcntl
import itertools
import mmap
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol

import psutil

from labkit.errors.exceptions import LabError
from labkit.worker.descendants import descendants, end_all
from labkit.worker.fork_server import BATCH, READY, kill_groups
from labkit.worker.stack_writer import held_back

__all__ = ["ForkStarter", "RankProcess", "SpawnStarter", "Starter", "in_background"]

READY_LIMIT_S: Final = 180.0  # a first import of TensorFlow from a cold disk has been seen to take a minute
REPLY_LIMIT_S: Final = 60.0
PF_EXITING: Final = 0x4
CLOCK_TICKS: Final = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100  # in a second


class RankProcess:
    """A started rank, as its owner in the notebook holds it.

    Args:
        pid: its process id; it leads a process group of its own.
        sock: the stream that carries frames to and from it.
        output: descriptor of the pipe that everything it prints comes out of.
        ring: the memory that it records into.
        memory: the descriptor of that memory, the same open file as the rank's.
    """

    def __init__(self, pid: int, sock: socket.socket, output: int, ring: mmap.mmap, memory: int) -> None:
        self.pid = pid
        self.sock = sock
        self.output = output
        self.ring = ring
        self.memory = memory
        try:
            self.sentinel = os.pidfd_open(pid)  # readable once the process has ended
        except (AttributeError, OSError):
            self.sentinel = -1  # then the end of the stream tells
        os.set_blocking(output, False)

    @property
    def frozen(self) -> bool:
        """Whether a signal (SIGSTOP) has stopped the process; SIGCONT lets it go on."""
        try:
            return psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
        except psutil.NoSuchProcess:
            return False

    @property
    def exiting(self) -> bool:
        """Whether the process is at its end, or beyond. Its connections may close a while before its sentinel tells.

        Source: proc_pid_stat(5), the Linux man-pages, and PF_EXITING in Linux's include/linux/sched.h. Other systems do not tell
        before the end.
        """
        stat = self._stat()
        return bool(int(stat[6]) & PF_EXITING) if stat else not psutil.pid_exists(self.pid)

    @property
    def wants_core(self) -> bool:
        """Whether its main thread runs, or would with a core or the disk at hand. False where the system does not tell."""
        return self._stat()[:1] in ([b"R"], [b"D"])

    @property
    def cpu_s(self) -> float:
        """How long it has had a core, all threads together; in steps of 10 ms, and 0 where the system does not tell."""
        return sum(map(int, self._stat()[11:13])) / CLOCK_TICKS

    def _stat(self) -> list[bytes]:
        """Its fields of proc_pid_stat(5), the third first; [] where there are none."""
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as stat:
                return stat.read().rpartition(b")")[2].split()
        except OSError:
            return []

    def close(self) -> None:
        """Let go of what belongs to the rank on this side; the process must have ended, or ends by this."""
        self.sock.close()
        for fd in (self.output, self.sentinel, self.memory):
            if fd >= 0:
                os.close(fd)
        self.output = self.sentinel = self.memory = -1


class Starter(Protocol):
    """Something that makes ranks."""

    environment: dict[str, str]  # the notebook's variables when it came to be, which its ranks inherit

    @property
    def importing(self) -> bool:
        """Whether what ranks come from may still be importing what they need."""

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
        self.memory = os.dup(ring)
        self.far = [far.detach(), write, ring]

    def close_far(self) -> None:
        for fd in self.far:
            os.close(fd)
        self.far = []

    def close(self) -> None:
        self.close_far()
        self.near.close()
        os.close(self.output)
        os.close(self.memory)


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
        self.environment = _environment()
        self._ring_bytes, self._make_shared = ring_bytes, make_shared
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._ready = False
        self._log = make_shared(0)
        self._socket, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with far:
            self._process = _python(
                "serve", [far.fileno()], [list(preload), os.getpid()], self.environment | environment, self._log
            )

    @property
    def importing(self) -> bool:
        """Whether the server has not said that it is ready."""
        return not self._ready

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
                        ranks.append(RankProcess(pid, p.near, p.output, p.ring, p.memory))
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
            except LabError:  # the server is gone, and its ranks with it, but not what these have started
                codes = {p.pid: -signal.SIGKILL for p in processes}
                for process in processes:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(process.pid, signal.SIGKILL)
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
            self._receive(READY, READY_LIMIT_S)

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
            self._ready |= got == READY  # whoever hears it
            if got != number:
                continue  # the answer to a request whose caller was interrupted
            if isinstance(answer, Exception):
                raise answer
            return answer

    def _death(self) -> LabError:
        log = os.pread(self._log, 1 << 16, 0).decode(errors="replace").strip() if self._log >= 0 else ""  # else it was closed
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
        self.environment = _environment()
        self._preload, self._settings = list(preload), environment
        self._ring_bytes, self._make_shared = ring_bytes, make_shared
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._spares: list[RankProcess] = []
        self._lock = threading.Lock()
        told, self._tell = os.pipe()
        self._process = _python("guard", [told], [os.getpid()], self.environment, subprocess.DEVNULL)
        os.close(told)

    importing = True  # each rank does, and a spare one may have: which has is not known before it answers

    def warm(self, count: int) -> None:
        """See that `count` spare ranks are importing, or have imported, what they need. Returns at once."""

        def spawn() -> None:
            with self._lock, contextlib.suppress(OSError):  # if no more can be had, the next group will say so
                while len(self._spares) < count:
                    self._spares.append(self._spawn())

        in_background(spawn).acquire()  # a Stop in the middle of it would leave open what the next spare was to have

    def start(self, count: int) -> list[RankProcess]:
        """Hand out `count` ranks, spares first."""
        with self._lock:
            for spare in [s for s in self._spares if self._children[s.pid].poll() is not None]:
                self._spares.remove(spare)  # somebody has killed it
                self.end([spare])
                spare.close()
            while len(self._spares) < count:
                self._spares.append(self._spawn())
            ranks, self._spares = self._spares[:count], self._spares[count:]
        return ranks

    def end(self, processes: Sequence[RankProcess]) -> dict[int, int]:
        """Kill ranks and whatever they started; their exit codes by pid."""
        pids = [p.pid for p in processes]
        started = descendants(pids)
        kill_groups(pids)
        end_all(started)
        codes = {p.pid: self._children.pop(p.pid).wait() for p in processes if p.pid in self._children}
        self._tell_guard("-", codes)
        return codes

    def alive(self) -> bool:
        """Whether the guard still runs."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the spares and the guard."""
        with self._lock:
            spares, self._spares = self._spares, []
        self.end(spares)
        for spare in spares:
            spare.close()
        if self._tell >= 0:
            os.close(self._tell)
            self._tell = -1
        self._process.kill()
        self._process.wait()

    def _tell_guard(self, sign: str, pids: Iterable[int]) -> None:
        with contextlib.suppress(OSError):  # the guard is gone, or this starter was closed before its last ranks
            os.write(self._tell, "".join(f"{sign}{pid}\n" for pid in pids).encode())

    def _spawn(self) -> RankProcess:
        pipes = _Pipes(self._ring_bytes, self._make_shared)
        try:
            child = _python("spawned", pipes.far, [self._preload], self.environment | self._settings, subprocess.DEVNULL)
        except BaseException:
            pipes.close()
            raise
        pipes.close_far()
        self._children[child.pid] = child
        self._tell_guard("+", [child.pid])
        return RankProcess(child.pid, pipes.near, pipes.output, pipes.ring, pipes.memory)


def in_background(action: Callable[[], None]) -> threading.Lock:
    """Do something on a thread of its own; the lock is free once it is done.

    Not a `threading.Thread`: its `start` waits in Python code for the thread to begin, and breaks if Stop comes meanwhile.
    """
    done = threading.Lock()
    done.acquire()

    def do() -> None:
        try:
            action()
        finally:
            done.release()

    _thread.start_new_thread(do, ())
    return done


def _environment() -> dict[str, str]:
    """This process's, for those that ranks come from: their imports would fail where PYTHONWARNINGS makes warnings errors.

    Ranks get the variable with what else they do not inherit, and the filters with the notebook's settings.
    """
    return {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}


def _python(
    function: str, fds: Sequence[int], arguments: list[Any], environment: dict[str, str], log: int
) -> subprocess.Popen[bytes]:
    """A new interpreter that finds what this one finds and runs a function of `worker.fork_server`, out of reach of Ctrl-C."""
    begin = f"import sys; sys.path[:] = {sys.path!r}; from labkit.worker.fork_server import {function}"
    code = f"{begin}; {function}({list(fds)!r}, *{arguments!r})"
    with held_back():
        return subprocess.Popen(
            [sys.executable, "-c", code],
            env={name: value for name, value in environment.items() if name != "LABKIT_TRACE"},  # that is for scripts
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
