"""`RelayedRank`: the relay's side of one rank: the far ends of what the notebook holds, filled from the line.

The state of a rank on another machine is kept up to date in shared memory behind the rank's ring.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from labkit.launch.machines.forwarding import TAKEN, Forwarding, Segments
from labkit.launch.machines.frame_port import FramePort
from labkit.launch.machines.line import FrameKind, Large, Line
from labkit.launch.rank_process import Status
from labkit.launch.resource_usage import Load
from labkit.recording.clock import Clock
from labkit.recording.ring_buffer import RING_BYTES
from labkit.recording.ring_copy import RingCopy

# The word for the state, exiting, CPU seconds, memory in bytes, GPU load; in ns, offset and error of the clock, and the
# time of the last report.
_STATE: Final = struct.Struct("<16s?dqiqqq")
STATE_BYTES: Final = _STATE.size


@dataclass(frozen=True, slots=True)
class RelayedState:
    """The state of a rank, as its agent has last reported it."""

    status: Status  # the state of its process
    load: Load  # the resources that it uses


UNREPORTED: Final = RelayedState(Status("sleeping", exiting=False, cpu_s=0.0), Load())  # before the first report


def write_state(memory: Any, state: RelayedState, offset_ns: int, error_ns: int, reported_ns: int) -> None:
    """In the relay: store a rank's state.

    Args:
        memory: its mapped memory, of `RING_BYTES` + `STATE_BYTES` bytes.
        state: the state.
        offset_ns: what must be added to a time of the rank's machine now.
        error_ns: a bound on the error of that.
        reported_ns: when its machine reported last, on this machine's clock.
    """
    status, load = state.status, state.load
    busy = -1 if load.busy is None else load.busy
    values = status.state.encode(), status.exiting, status.cpu_s, load.nbytes, busy, offset_ns, error_ns, reported_ns
    _STATE.pack_into(memory, RING_BYTES, *values)


def read_state(memory: int) -> tuple[RelayedState, int, int, int]:
    """In the notebook: return a rank's state, its clock's offset and error, and its machine's last report, in ns."""
    data = os.pread(memory, _STATE.size, RING_BYTES)
    if len(data) < _STATE.size:  # the relay has not mapped it yet
        return UNREPORTED, 0, 0, 0
    word, exiting, cpu_s, nbytes, busy, offset_ns, error_ns, reported_ns = _STATE.unpack(data)
    status = Status(word.rstrip(b"\0").decode(), exiting, cpu_s)
    return RelayedState(status, Load(nbytes, None if busy < 0 else busy)), offset_ns, error_ns, reported_ns


class _MachineState(Protocol):
    """The machine of a rank, as far as the rank needs it."""

    line: Line
    segments: Segments
    large: Large
    clock: Clock

    @property
    def offset_ns(self) -> int:
        """What is added to a time there, by the last reading of its clock."""


class RelayedRank:
    """The relay's side of one rank.

    Args:
        number: its number.
        fds: the far ends of its socket and its pipe, and its memory.
        machine: its machine.
        closed: called with the number when the notebook closes the socket.
    """

    def __init__(self, number: int, fds: list[int], machine: _MachineState, closed: Callable[[int], None]) -> None:
        self._number, self._line = number, machine.line
        connection, self._output, memory = fds
        os.truncate(memory, RING_BYTES + STATE_BYTES)
        self._memory = mmap.mmap(memory, RING_BYTES + STATE_BYTES)
        os.close(memory)
        os.set_blocking(self._output, False)
        self._loop = asyncio.get_running_loop()
        self._copy = RingCopy(self._memory, machine.clock)
        self._state = UNREPORTED
        self.clock_is(machine.offset_ns, machine.clock.error_ns)
        self._prints = bytearray()
        self._printed = self._written = 0  # bytes of prints, that have come, and that the pipe has taken
        self._held: deque[tuple[int, bytes | None]] = deque()  # frames, None for its end, and `_printed` when each came
        self._waiting = self._gone = False
        port = FramePort(socket.socket(fileno=connection))
        self.frames = Forwarding(number, port, machine.line, machine.segments, machine.large, closed=lambda: closed(number))

    def recorded(self, news: bytes) -> None:
        """Copy what is new in its ring."""
        self._copy.apply(news)
        self._reported()

    def state_is(self, state: RelayedState) -> None:
        """Its state has changed."""
        self._state = state
        self._reported()

    def clock_is(self, offset_ns: int, error_ns: int) -> None:
        """The clock of its machine was read."""
        self._offset_ns, self._error_ns = offset_ns, error_ns
        self._reported()

    def _reported(self) -> None:
        write_state(self._memory, self._state, self._offset_ns, self._error_ns, time.perf_counter_ns())

    def printed(self, data: bytes) -> None:
        """Pass on what it has printed."""
        self._prints += data
        self._printed += len(data)
        self._write()

    def framed(self, data: bytes | None) -> None:
        """Pass on a frame, or its end, after the prints that have come before it."""
        self._held.append((self._printed, data))
        self._pass_on()

    def _pass_on(self) -> None:
        while self._held and self._held[0][0] <= self._written:
            _, data = self._held.popleft()
            if data is None:
                self.frames.afterwards(self.gone)
            else:
                self.frames.deliver(data)

    def _write(self) -> None:
        done = 0
        try:
            while done < len(self._prints):
                done += os.write(self._output, memoryview(self._prints)[done : done + mmap.PAGESIZE * 16])
        except BlockingIOError:
            pass
        except OSError:  # the notebook has closed the pipe
            done = len(self._prints)
        if done:
            self._line.send(FrameKind.TAKEN, self._number, TAKEN.pack(0, done), urgent=True)
            del self._prints[:done]
            self._written += done
            self._pass_on()
        if not self._gone:
            self._wait_for_room(bool(self._prints))

    def _wait_for_room(self, wait: bool) -> None:
        if wait and not self._waiting:
            self._loop.add_writer(self._output, self._write)
        elif not wait and self._waiting:
            self._loop.remove_writer(self._output)
        self._waiting = wait

    def gone(self) -> None:
        """Its process has ended, or its machine is lost: the notebook sees the end of its socket and pipe."""
        if not self._gone:
            self._gone = True
            self.frames.close()
            self._wait_for_room(False)
            os.close(self._output)

    def close(self) -> None:
        """Close everything that belongs to it."""
        self.gone()
