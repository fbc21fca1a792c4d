"""Starts the processes of ranks, and makes sure that they end.

On Linux, ranks are forked from a server, a small process that has imported the frameworks and never computed:

    notebook ──socket──> server ──fork──> rank, rank, ...      a rank starts in about 10 ms and shares imported pages
        └──────────────socket, pipe, shared memory─────┘

A rank ends on request or when its server dies (PR_SET_PDEATHSIG, which also ends a rank that is blocked in C++). The
server watches the pidfd of the notebook's process and ends with it, however that dies. Where fork is unsafe (macOS),
ranks are spawned: spare ranks that have already imported everything wait for the next group, and a guard process, which
knows all ranks, ends them after the notebook's process has ended.
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
from labkit.launch.descendants import descendants, end_all
from labkit.launch.fork_server import BATCH, READY, kill_groups
from labkit.worker.stack_writer import held_back

__all__ = ["ForkStarter", "RankProcess", "SpawnStarter", "Starter", "in_background"]

READY_LIMIT_S: Final = 180.0  # a first import of TensorFlow from a cold disk has taken a minute
REPLY_LIMIT_S: Final = 60.0
PF_EXITING: Final = 0x4
CLOCK_TICKS: Final = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100  # in a second


class RankProcess:
    """The notebook's end of a started rank.

    Args:
        pid: its process id; it leads its own process group.
        sock: the socket that carries messages to and from it.
        output: file descriptor of the pipe with its printed output.
        ring: the memory into which it records.
        memory: file descriptor of that memory, which shares its file offset with the rank's.
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
            self.sentinel = -1  # the end of the rank is then noticed by the end of its socket
        os.set_blocking(output, False)

    @property
    def frozen(self) -> bool:
        """Whether a signal (SIGSTOP) has stopped the process; SIGCONT continues it."""
        try:
            return psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
        except psutil.NoSuchProcess:
            return False

    @property
    def exiting(self) -> bool:
        """Whether the process is exiting or has ended. Connections may close before the pidfd is readable.

        Source: proc_pid_stat(5), the Linux man-pages, and PF_EXITING in Linux's include/linux/sched.h. On other systems
            it
        is True only after the process has ended.
        """
        stat = self._stat()
        return bool(int(stat[6]) & PF_EXITING) if stat else not psutil.pid_exists(self.pid)

    @property
    def wants_core(self) -> bool:
        """Whether its main thread is running or waiting for a core or the disk; False if that is unknown."""
        return self._stat()[:1] in ([b"R"], [b"D"])

    @property
    def cpu_s(self) -> float:
        """CPU time of all its threads in seconds, in steps of 10 ms; 0 if the system does not report it."""
        return sum(map(int, self._stat()[11:13])) / CLOCK_TICKS

    def _stat(self) -> list[bytes]:
        """Return the fields of proc_pid_stat(5) from the third on; [] if there are none."""
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as stat:
                return stat.read().rpartition(b")")[2].split()
        except OSError:
            return []

    def close(self) -> None:
        """Close the socket and file descriptors on this side. A process that is still running then ends."""
        self.sock.close()
        for fd in (self.output, self.sentinel, self.memory):
            if fd >= 0:
                os.close(fd)
        self.output = self.sentinel = self.memory = -1


class Starter(Protocol):
    """A way to start ranks."""

    environment: dict[str, str]  # the notebook's variables when the starter was created; its ranks inherit them

    @property
    def importing(self) -> bool:
        """Whether the modules that ranks need may still be being imported."""

    def start(self, count: int) -> list[RankProcess]:
        """Start `count` ranks, which wait for their first message."""

    def end(self, processes: Sequence[RankProcess]) -> dict[int, int]:
        """Kill ranks and the processes that they have started; return exit codes by pid, negative for signals."""

    def close(self) -> None:
        """End the starter's own processes."""


class _Pipes:
    """Both ends of the socket, pipe and memory that connect the notebook with a rank that is about to start."""

    def __init__(self, ring_bytes: int, make_shared: Callable[[int], int]) -> None:
        self.near, far = socket.socketpair()
        self.output, write = os.pipe()
        if hasattr(fcntl, "F_SETPIPE_SZ"):
            with contextlib.suppress(OSError):  # above the user's limit for pipes: the default size works as well
                # A rank that prints while the notebook does not read blocks only when the pipe is full.
                fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 1 << 20)
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
    """Forks ranks from a server.

    Args:
        preload: modules that the server imports, in order; modules that are not installed are skipped.
        environment: variables that the server gets in addition to the notebook's.
        ring_bytes: size of a rank's recording memory in bytes.
        make_shared: creates shared memory of a given size, and returns its file descriptor.
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
        """Whether the server has not reported yet that it is ready."""
        return not self._ready

    def start(self, count: int) -> list[RankProcess]:
        """Start `count` ranks, which wait for their first message.

        Raises:
            LabError: the system allows no more processes, or the server has ended or does not reply.
        """
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
                            p.close()  # ranks that have started nevertheless end, as their socket is closed
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
        """Kill ranks and the processes that they have started; return the exit codes by pid."""
        with self._lock:
            try:
                codes: dict[int, int] = self._ask("end", [p.pid for p in processes], [])
            except LabError:  # the server has ended, and its ranks with it, but not the processes that these have started
                codes = {p.pid: -signal.SIGKILL for p in processes}
                for process in processes:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(process.pid, signal.SIGKILL)
        return codes

    def alive(self) -> bool:
        """Whether the server is running."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the server, and with it all ranks that it has forked."""
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

    def _ask(self, action: str, argument: Any, fds: Sequence[int]) -> Any:
        number = next(self._ids)
        try:
            socket.send_fds(self._socket, [pickle.dumps((number, action, argument))], fds)
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
                raise LabError(f"the process that starts ranks did not reply within {limit_s:.0f} s") from None
            except OSError:
                data = b""
            if not data:
                raise self._death()
            got, reply = pickle.loads(data)
            self._ready |= got == READY
            if got != number:
                continue  # the reply to a request that was interrupted
            if isinstance(reply, Exception):
                raise reply
            return reply

    def _death(self) -> LabError:
        log = os.pread(self._log, 1 << 16, 0).decode(errors="replace").strip() if self._log >= 0 else ""  # -1: closed
        tail = "\n".join(log.splitlines()[-12:])
        return LabError(f"the process that starts ranks has ended{': ' + tail if tail else ''}")


class SpawnStarter:
    """Starts ranks as new interpreters, where fork is unsafe; keeps spare ones. Arguments: as for `ForkStarter`."""

    def __init__(
        self, preload: Sequence[str], environment: dict[str, str], ring_bytes: int, make_shared: Callable[[int], int]
    ) -> None:
        self.environment = _environment()
        self._preload, self._settings = list(preload), environment
        self._ring_bytes, self._make_shared = ring_bytes, make_shared
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._spares: list[RankProcess] = []
        self._lock = threading.Lock()
        read_end, self._guard_pipe = os.pipe()
        self._process = _python("guard", [read_end], [os.getpid()], self.environment, subprocess.DEVNULL)
        os.close(read_end)

    importing = True  # each rank imports; whether a spare one has finished is not known before it replies

    def warm(self, count: int) -> None:
        """Make sure that `count` spare ranks exist, which import the modules that they need. Does not wait for them."""

        def spawn() -> None:
            with self._lock, contextlib.suppress(OSError):  # if the system allows no more, the next group reports that
                while len(self._spares) < count:
                    self._spares.append(self._spawn())

        in_background(spawn).acquire()  # on the main thread, Stop could leave the file descriptors of a spare open

    def start(self, count: int) -> list[RankProcess]:
        """Return `count` ranks, spare ones first.

        Raises:
            OSError: the system allows no more processes.
        """
        with self._lock:
            for spare in [s for s in self._spares if self._children[s.pid].poll() is not None]:
                self._spares.remove(spare)  # another process has killed it
                self.end([spare])
                spare.close()
            while len(self._spares) < count:
                self._spares.append(self._spawn())
            ranks, self._spares = self._spares[:count], self._spares[count:]
        return ranks

    def end(self, processes: Sequence[RankProcess]) -> dict[int, int]:
        """Kill ranks and the processes that they have started; return the exit codes by pid."""
        pids = [p.pid for p in processes]
        started = descendants(pids)
        kill_groups(pids)
        end_all(started)
        codes = {p.pid: self._children.pop(p.pid).wait() for p in processes if p.pid in self._children}
        self._notify_guard("-", codes)
        return codes

    def alive(self) -> bool:
        """Whether the guard is running."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the spare ranks and the guard."""
        with self._lock:
            spares, self._spares = self._spares, []
        self.end(spares)
        for spare in spares:
            spare.close()
        if self._guard_pipe >= 0:
            os.close(self._guard_pipe)
            self._guard_pipe = -1
        self._process.kill()
        self._process.wait()

    def _notify_guard(self, sign: str, pids: Iterable[int]) -> None:
        with contextlib.suppress(OSError):  # the guard has ended, or this starter was closed before its last ranks
            os.write(self._guard_pipe, "".join(f"{sign}{pid}\n" for pid in pids).encode())

    def _spawn(self) -> RankProcess:
        pipes = _Pipes(self._ring_bytes, self._make_shared)
        try:
            child = _python("spawned", pipes.far, [self._preload], self.environment | self._settings, subprocess.DEVNULL)
        except BaseException:
            pipes.close()
            raise
        pipes.close_far()
        self._children[child.pid] = child
        self._notify_guard("+", [child.pid])
        return RankProcess(child.pid, pipes.near, pipes.output, pipes.ring, pipes.memory)


def in_background(action: Callable[[], None]) -> threading.Lock:
    """Call a function on a new thread; return a lock that is held until it has returned.

    Not on a `threading.Thread`: its `start` fails if Stop interrupts it while it waits for the thread to begin.
    Where no thread can be started, as at the end of a program in Python 3.12, the function is called here.
    """
    done = threading.Lock()
    done.acquire()

    def do() -> None:
        try:
            action()
        finally:
            done.release()

    try:
        _thread.start_new_thread(do, ())
    except RuntimeError:
        do()
    return done


def _environment() -> dict[str, str]:
    """Return the environment variables without PYTHONWARNINGS, which may turn warnings of imports into errors.

    Ranks get that variable later, like others that they do not inherit, and the filters with the notebook's settings.
    """
    return {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}


def _python(
    function: str, fds: Sequence[int], arguments: list[Any], environment: dict[str, str], log: int
) -> subprocess.Popen[bytes]:
    """Start an interpreter that runs a function of `launch.fork_server`, in a new session, out of reach of Ctrl-C."""
    begin = f"import sys; sys.path[:] = {sys.path!r}; from labkit.launch.fork_server import {function}"
    code = f"{begin}; {function}({list(fds)!r}, *{arguments!r})"
    with held_back():
        return subprocess.Popen(
            [sys.executable, "-c", code],
            env={name: value for name, value in environment.items() if name != "LABKIT_TRACE"},  # for scripts only
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
