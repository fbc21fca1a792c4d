"""`RankProcess`: the notebook's end of a started rank, with its state now (`Status`) and how it ended (`End`)."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import psutil

from labkit.ipc.options import Place
from labkit.ipc.pickling import shared_memory
from labkit.ipc.process_memory import may_read
from labkit.launch.frames import StackFrame
from labkit.recording.clock import Clock
from labkit.recording.ring_buffer import RING_BYTES

PF_EXITING: Final = 0x4


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a process at one moment."""

    state: str  # psutil's word for the state of its main thread, such as "sleeping"; "gone" once it has been reaped
    exiting: bool  # whether it is exiting or has ended. Connections may close before its sentinel is readable.
    cpu_s: float  # CPU time of all its threads in seconds, in steps of 10 ms; 0 after its end

    @property
    def frozen(self) -> bool:
        """Whether a signal (SIGSTOP) has stopped the process; SIGCONT continues it."""
        return self.state == psutil.STATUS_STOPPED

    @property
    def wants_core(self) -> bool:
        """Whether its main thread is running, or waiting for a core or the disk."""
        return self.state in (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)


@dataclass(frozen=True, slots=True)
class End:
    """How a process ended."""

    code: int | None  # its exit code; a negative one is the number of the signal that ended it. None if its machine is lost.
    crash: tuple[StackFrame, ...] = ()  # if it crashed in C code, the frames of the thread that did, outermost first
    lost: str = ""  # if its machine is lost, its name, and how the loss was noticed
    oom_kills: str = ""  # on another machine, what its kernel's OOM killer has done there lately, in words


class RankProcess:
    """The notebook's end of a rank. Only this package knows process ids; others know a rank by its number."""

    clock: Clock = Clock()  # converts times of its machine to this process's

    def __init__(self, number: int) -> None:
        self.number = number  # among all ranks of its starter
        self.pid = 0  # before it has started. It leads its own process group.
        self.sentinel = -1  # a file descriptor that is readable once it has ended; -1: the end of its socket reports that
        self.ended: End | None = None  # how it ended, once its starter has ended it
        self.place: Place | None = None  # where it is; None if all ranks of its group are on this machine
        self.sock, sock = socket.socketpair()
        self.output, output = os.pipe()  # what it prints
        os.set_blocking(self.output, False)
        if hasattr(fcntl, "F_SETPIPE_SZ"):
            with contextlib.suppress(OSError):  # above the user's limit for pipes: the default size works as well
                # A rank that prints while the notebook does not read blocks only when the pipe is full.
                fcntl.fcntl(output, fcntl.F_SETPIPE_SZ, 1 << 20)
        memory = shared_memory(RING_BYTES)
        self.ring = mmap.mmap(memory, RING_BYTES)  # into which it records
        self.memory = os.dup(memory)  # shares its file offset with the rank's
        self.far = [sock.detach(), output, memory]  # until it has started, the rank's ends

    def started(self, pid: int) -> None:
        """The process has started and has its ends."""
        self.pid = pid
        self._close_far()
        with contextlib.suppress(AttributeError, OSError):
            self.sentinel = os.pidfd_open(pid)

    @property
    def readable(self) -> bool:
        """Whether the notebook may read its memory, so that large results can stay there."""
        return may_read(self.pid)

    def status(self) -> Status:
        """Return its state now."""
        try:
            process = psutil.Process(self.pid)
            with process.oneshot():
                return Status(process.status(), self._exiting(), sum(process.cpu_times()[:2]))
        except psutil.Error:
            return Status("gone", exiting=True, cpu_s=0.0)

    def reported_ns(self, now_ns: int) -> int:
        """Return until when its state and its records are known: on this machine, until now."""
        return now_ns

    def _exiting(self) -> bool:
        """Whether it is exiting; only Linux says so before it has ended.

        Source: proc_pid_stat(5), the Linux man-pages, and PF_EXITING in Linux's include/linux/sched.h.
        """
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as stat:
                return bool(int(stat.read().rpartition(b")")[2].split()[6]) & PF_EXITING)
        except OSError:
            return False

    def has_thread(self, number: int) -> bool:
        """Whether it has a living thread with this native id besides its main thread; False where that is unknown."""
        return number != self.pid and os.path.exists(f"/proc/{self.pid}/task/{number}")

    def signal(self, number: int) -> None:
        """Send it a signal; raise OSError if it has ended."""
        if self.sentinel >= 0:
            signal.pidfd_send_signal(self.sentinel, number)  # its process id may be another's by now
        else:
            os.kill(self.pid, number)

    def close(self) -> None:
        """Close the socket and file descriptors on this side. A process that is still running then ends."""
        self._close_far()
        self.sock.close()
        for fd in (self.output, self.sentinel, self.memory):
            if fd >= 0:
                os.close(fd)
        self.output = self.sentinel = self.memory = -1

    def _close_far(self) -> None:
        for fd in self.far:
            os.close(fd)
        self.far = []


def command_to_resume(processes: Sequence[RankProcess]) -> str:
    """Return the shell command that continues processes that a signal has stopped."""
    there: dict[str, list[str]] = {}
    for process in processes:
        there.setdefault("" if process.place is None else process.place.machine, []).append(str(process.pid))
    commands = [f"{f'on {machine}: ' * bool(machine)}kill -CONT {' '.join(pids)}" for machine, pids in there.items()]
    return "; ".join(commands)
