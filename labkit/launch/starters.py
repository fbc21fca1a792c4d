"""Starts the processes of ranks, and makes sure that they end.

On Linux, ranks are forked from a server, a small process that has imported the frameworks and never computed:

    notebook ──socket──> server ──fork──> rank, rank, ...      a rank starts in about 10 ms and shares imported pages
        └──────────────socket, pipe, shared memory─────┘

The server kills ranks on request, and a rank dies with its server (PR_SET_PDEATHSIG, which also ends a rank that is
blocked in C++). The server watches the pidfd of the notebook's process and ends with it, however that dies. Where fork
is unsafe (macOS), ranks are spawned: spare ranks that have already imported everything wait for the next group, and a
guard process, which knows all ranks, ends them after the notebook's process has ended.
"""

from __future__ import annotations

import _thread
import contextlib
import itertools
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar

from labkit.errors.exceptions import LabError
from labkit.ipc.pickling import shared_memory
from labkit.launch.descendants import descendants, end_all, kill_groups
from labkit.launch.rank_process import End, RankProcess
from labkit.launch.resource_usage import Load, ResourceMonitor, gpus_of
from labkit.launch.server_requests import BATCH, LONGEST_BYTES, READY, Failed, Fork, Forked, Reap, Reply, Request, Waits
from labkit.launch.thread_states import crashed_in
from labkit.worker.stack_writer import held_back

READY_LIMIT_S: Final = 180.0  # a first import of TensorFlow from a cold disk has taken a minute
REPLY_LIMIT_S: Final = 60.0

_Answer_co = TypeVar("_Answer_co", covariant=True)


class Question(Protocol[_Answer_co]):
    """Something about ranks that is answered where their processes are."""

    def answer(self, processes: Sequence[RankProcess]) -> Sequence[_Answer_co]:
        """Return the answer for each of some living ranks."""

    @property
    def unknown(self) -> _Answer_co:
        """What stands for the answer for a rank of a machine that does not answer."""


class Starter(ABC):
    """Starts ranks in one way, asks about them, and ends them."""

    importing = True  # whether the modules that ranks need may still be being imported
    waiting_for = ""  # what a start is waiting for, in words, if that is something else
    ready_limit_s: float = READY_LIMIT_S  # for the first start
    _process: subprocess.Popen[bytes]  # the server or the guard

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self.notes: list[str] = []  # for the student, about the latest start
        self._ending = threading.Lock()
        # The notebook's variables, which ranks inherit, without PYTHONWARNINGS, which may turn warnings of imports into
        # errors. Ranks get that variable later, like others that they do not inherit, and the filters with the
        # notebook's settings.
        self.environment = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}

    @abstractmethod
    def start(self, count: int) -> list[RankProcess]:
        """Start `count` ranks, which wait for their first message.

        Raises:
            LabError, OSError: the system allows no more processes, or what starts them has ended or does not reply.
        """

    def _new_rank(self) -> RankProcess:
        return RankProcess(next(self._numbers))

    def ask(self, question: Question[_Answer_co], processes: Sequence[RankProcess]) -> Sequence[_Answer_co]:
        """Ask a question about living ranks; return the answer for each."""
        return question.answer(processes)

    def end(self, processes: Sequence[RankProcess]) -> list[End]:
        """Kill ranks and the processes that they have started; return how each ended, now or before."""
        with self._ending:
            living = [process for process in processes if process.ended is None]
            ends = self._kill(living) if living else {}
            for process in living:  # an end is missing if Stop has interrupted the first attempt to reap the process
                process.ended = ends.get(process.number) or End(-signal.SIGKILL, crashed_in(process))
            return [process.ended for process in processes if process.ended is not None]

    def wait_until_ready(self) -> None:  # noqa: B027  # by default, each rank imports by itself
        """Wait until ranks can be started fast."""

    def catch_up(self, processes: Sequence[RankProcess]) -> bool:  # noqa: ARG002  # nothing is late on this machine
        """Wait until all that ranks had recorded and printed before this call can be read; return whether it can."""
        return True

    def monitor(self, processes: Sequence[RankProcess], devices: str) -> Callable[[int], tuple[Load, ...]]:
        """Return what samples the load of ranks, in rank order, at a time; `devices` is "auto", "cpu" or "cuda"."""
        return ResourceMonitor(processes, gpus_of(len(processes), devices)).sample

    @abstractmethod
    def _kill(self, processes: Sequence[RankProcess]) -> Mapping[int, End]:
        """Kill ranks and the processes that they have started; return how each ended, by number."""

    def alive(self) -> bool:
        """Whether its own process is running."""
        return self._process.poll() is None

    @abstractmethod
    def close(self) -> None:
        """End the starter's own processes, and all ranks that it has started."""


class ServerStarter(Starter):
    """Has a process of its own start the ranks, and asks it for everything over a socket."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._requests = itertools.count(READY + 1)
        self._log = shared_memory(0)
        self._socket: socket.socket

    def _run(self, function: str, arguments: list[Any], environment: dict[str, str]) -> None:
        self._socket, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with far:
            self._process = _python(function, [far.fileno()], arguments, environment, self._log)

    def start(self, count: int) -> list[RankProcess]:
        """Start `count` ranks."""
        ranks: list[RankProcess] = []
        with self._lock:
            self._wait_until_ready()
            try:
                while len(ranks) < count:
                    batch = [self._new_rank() for _ in range(min(BATCH, count - len(ranks)))]
                    request = Fork([rank.number for rank in batch], len(ranks), count)
                    ranks += batch
                    forked = self._ask(request, [fd for rank in batch for fd in rank.far])
                    assert isinstance(forked, Forked)
                    self.notes = [*forked.notes] if request.first == 0 else self.notes
                    for rank in batch:
                        rank.place = forked.places.get(rank.number)
                        rank.started(forked.pids[rank.number])
            except BaseException:  # ranks that have started nevertheless end, as their socket is closed
                for rank in ranks:
                    rank.close()
                raise
        return ranks

    def wait_until_ready(self) -> None:
        """Wait until ranks can be started."""
        with self._lock:
            self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        if self.importing:
            self._receive(READY, self.ready_limit_s)

    def close(self) -> None:
        """End the process, and with it all ranks that it has started."""
        self._socket.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._log >= 0:
            os.close(self._log)
            self._log = -1

    def _ask(self, request: Request, fds: Sequence[int] = ()) -> Reply:
        number = next(self._requests)
        try:
            socket.send_fds(self._socket, [pickle.dumps((number, request))], fds)
        except OSError:
            raise self._death() from None
        return self._receive(number, REPLY_LIMIT_S)

    def _receive(self, number: int, limit_s: float) -> Reply:
        until = time.monotonic() + limit_s
        self.waiting_for = ""
        while True:
            try:  # at the end of a program, another thread may close the socket at any moment
                self._socket.settimeout(max(0.0, until - time.monotonic()))
                data, fds, _, _ = socket.recv_fds(self._socket, LONGEST_BYTES, 1)
            except TimeoutError:
                raise LabError(f"the process that starts ranks did not reply within {limit_s:.0f} s") from None
            except OSError:
                data, fds = b"", []
            if fds:  # a long reply is in shared memory
                with open(fds[0], "rb") as file:
                    data = file.read()
            if not data:
                raise self._death()
            got, reply = pickle.loads(data)
            if got == number and isinstance(reply, Waits):
                self.waiting_for = reply.text
                continue
            self.importing &= got != READY
            if got == number:  # otherwise the reply to a request that was interrupted
                self.waiting_for = ""
                if isinstance(reply, Failed):
                    raise LabError(reply.reason)
                return reply

    def _death(self) -> LabError:
        log = ""
        with contextlib.suppress(OSError):  # closed, perhaps at this moment by another thread
            log = os.pread(self._log, 1 << 16, 0).decode(errors="replace").strip()
        tail = "\n".join(log.splitlines()[-12:])
        return LabError(f"the process that starts ranks has ended{': ' + tail if tail else ''}")


class ForkStarter(ServerStarter):
    """Forks ranks from a server that has imported modules (those that are installed), with variables of its own."""

    def __init__(self, preload: Sequence[str], environment: dict[str, str]) -> None:
        super().__init__()
        self._run("labkit.launch.fork_server:serve", [list(preload), os.getpid()], self.environment | environment)

    def _kill(self, processes: Sequence[RankProcess]) -> Mapping[int, End]:
        with self._lock:
            try:
                codes = self._ask(Reap([process.number for process in processes]))
            except LabError:  # the server has ended, and its ranks with it, but not the processes that these have started
                kill_groups([process.pid for process in processes])
                return {}
        return _with_crashes(processes, codes)


class SpawnStarter(Starter):
    """Starts ranks as new interpreters, where fork is unsafe; keeps spare ones. Arguments: as for `ForkStarter`.

    Each rank imports; whether a spare one has finished is not known before it replies.
    """

    def __init__(self, preload: Sequence[str], environment: dict[str, str]) -> None:
        super().__init__()
        self._preload, self._settings = list(preload), environment
        self._children: dict[int, subprocess.Popen[bytes]] = {}  # by the ranks' numbers
        self._spares: list[RankProcess] = []
        self._lock = threading.Lock()
        read_end, self._guard_pipe = os.pipe()
        self._process = _python(
            "labkit.launch.descendants:guard", [read_end], [os.getpid()], self.environment, subprocess.DEVNULL
        )
        os.close(read_end)

    def warm(self, count: int) -> None:
        """Make sure that `count` spare ranks exist, which import the modules that they need. Does not wait for them."""

        def spawn() -> None:
            with self._lock, contextlib.suppress(OSError):  # if the system allows no more, the next group reports that
                while len(self._spares) < count:
                    self._spares.append(self._spawn())

        in_background(spawn).acquire()  # on the main thread, Stop could leave the file descriptors of a spare open

    def start(self, count: int) -> list[RankProcess]:
        """Return `count` ranks, spare ones first."""
        with self._lock:
            for spare in [s for s in self._spares if self._children[s.number].poll() is not None]:
                self._spares.remove(spare)  # another process has killed it
                self.end([spare])
                spare.close()
            while len(self._spares) < count:
                self._spares.append(self._spawn())
            ranks, self._spares = self._spares[:count], self._spares[count:]
        return ranks

    def _kill(self, processes: Sequence[RankProcess]) -> Mapping[int, End]:
        pids = [process.pid for process in processes]
        started = descendants(pids)
        kill_groups(pids)
        end_all(started)
        codes = {p.number: self._children.pop(p.number).wait() for p in processes if p.number in self._children}
        self._notify_guard("-", pids)
        return _with_crashes(processes, codes)

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
        rank = self._new_rank()
        try:
            child = _python(
                "labkit.launch.new_process:spawned",
                rank.far,
                [self._preload],
                self.environment | self._settings,
                subprocess.DEVNULL,
            )
        except BaseException:
            rank.close()
            raise
        self._children[rank.number] = child
        self._notify_guard("+", [child.pid])
        rank.started(child.pid)
        return rank


def _with_crashes(processes: Sequence[RankProcess], codes: Mapping[int, int]) -> dict[int, End]:
    return {p.number: End(codes[p.number], crashed_in(p)) for p in processes if p.number in codes}


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


def _python(
    function: str, fds: Sequence[int], arguments: list[Any], environment: dict[str, str], log: int
) -> subprocess.Popen[bytes]:
    """Start an interpreter that runs a function, "module:name", in a new session, out of reach of Ctrl-C."""
    module, _, name = function.partition(":")
    begin = f"import sys; sys.path[:] = {sys.path!r}; from {module} import {name}"
    code = f"{begin}; {name}({list(fds)!r}, *{arguments!r})"
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
