"""`RankProcess`: the notebook's end of a started rank, with its state now (`Status`) and how it ended (`End`)."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import psutil

from labkit.ipc.process_memory import may_read
from labkit.launch.frames import Frame

__all__ = ["End", "Pipes", "RankProcess", "Status", "command_to_resume"]

PF_EXITING: Final = 0x4
CLOCK_TICKS: Final = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100  # in a second
_STATES: Final = {
    b"R": psutil.STATUS_RUNNING,
    b"S": psutil.STATUS_SLEEPING,
    b"D": psutil.STATUS_DISK_SLEEP,
    b"T": psutil.STATUS_STOPPED,
    b"t": psutil.STATUS_TRACING_STOP,
    b"Z": psutil.STATUS_ZOMBIE,
}


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a process at one moment.

    Args:
        state: psutil's word for the state of its main thread, such as "sleeping"; "gone" after its end.
        exiting: whether it is exiting or has ended. Connections may close before its sentinel is readable.
        cpu_s: CPU time of all its threads in seconds, in steps of 10 ms; 0 after its end.
    """

    state: str
    exiting: bool
    cpu_s: float

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
    """How a process ended.

    Args:
        code: its exit code; a negative one is the number of the signal that ended it.
        crash: if it crashed in C code, the frames of the thread that did, outermost first.
    """

    code: int
    crash: tuple[Frame, ...] = ()


class Pipes:
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
        """Close the rank's ends, which the rank has received."""
        for fd in self.far:
            os.close(fd)
        self.far = []

    def close(self) -> None:
        """Close both ends. If the rank has started nevertheless, it ends, since its socket is closed."""
        self.close_far()
        self.near.close()
        os.close(self.output)
        os.close(self.memory)


class RankProcess:
    """The notebook's end of a started rank. Only this package knows process ids; others know a rank by its number.

    Args:
        number: its number among all ranks that its starter has started.
        pid: its process id; it leads its own process group.
        pipes: what connects it with the notebook; its own ends are closed here.

    Attributes:
        sock: the socket that carries messages to and from it.
        output: file descriptor of the pipe with its printed output.
        ring: the memory into which it records.
        memory: file descriptor of that memory, which shares its file offset with the rank's.
        sentinel: a file descriptor that is readable once the process has ended. -1 where there is none: then the end of
            its socket reports that.
        ended: how it ended; None until its starter has ended it.
    """

    def __init__(self, number: int, pid: int, pipes: Pipes) -> None:
        self.number, self.pid = number, pid
        self.sock, self.output, self.ring, self.memory = pipes.near, pipes.output, pipes.ring, pipes.memory
        self.ended: End | None = None
        pipes.close_far()
        try:
            self.sentinel = os.pidfd_open(pid)
        except (AttributeError, OSError):
            self.sentinel = -1
        os.set_blocking(self.output, False)

    @property
    def readable(self) -> bool:
        """Whether the notebook may read its memory, so that large results can stay there."""
        return may_read(self.pid)

    def read_output(self, count: int) -> bytes:
        """Read so many bytes of its printed output at most; b"" if it will print nothing more.

        Raises:
            BlockingIOError: there is nothing to read now.
        """
        return os.read(self.output, count)

    def status(self) -> Status:
        """Return its state now.

        Only Linux says that a process is exiting before it has ended.

        Source: proc_pid_stat(5), the Linux man-pages, and PF_EXITING in Linux's include/linux/sched.h.
        """
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as stat:
                fields = stat.read().rpartition(b")")[2].split()  # from the third on
            exiting, cpu_s = bool(int(fields[6]) & PF_EXITING), sum(map(int, fields[11:13])) / CLOCK_TICKS
            return Status(_STATES.get(fields[0], psutil.STATUS_DEAD), exiting, cpu_s)
        except OSError:
            pass
        try:
            process = psutil.Process(self.pid)
            state = process.status()
            return Status(state, state == psutil.STATUS_ZOMBIE, sum(process.cpu_times()[:2]))
        except psutil.Error:
            return Status("gone", exiting=True, cpu_s=0.0)

    def has_thread(self, number: int) -> bool:
        """Whether it has a living thread with this native id besides its main thread; False where that is unknown."""
        return number != self.pid and os.path.exists(f"/proc/{self.pid}/task/{number}")

    def signal(self, number: int) -> None:
        """Send it a signal.

        Raises:
            OSError: it has ended.
        """
        if self.sentinel >= 0:
            signal.pidfd_send_signal(self.sentinel, number)  # its process id may be another's by now
        else:
            os.kill(self.pid, number)

    def close(self) -> None:
        """Close the socket and file descriptors on this side. A process that is still running then ends."""
        self.sock.close()
        for fd in (self.output, self.sentinel, self.memory):
            if fd >= 0:
                os.close(fd)
        self.output = self.sentinel = self.memory = -1


def command_to_resume(processes: Sequence[RankProcess]) -> str:
    """Return the shell command that continues processes that a signal has stopped."""
    return f"kill -CONT {' '.join(str(process.pid) for process in processes)}"
