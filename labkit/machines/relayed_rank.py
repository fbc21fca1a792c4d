"""`RelayedRank`: the relay's side of one rank: the far ends of what the notebook holds, filled from the line."""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from labkit.machines.forwarding import TAKEN, Forwarding, Segments
from labkit.machines.frame_port import FramePort
from labkit.machines.line import Kind, Large, Line
from labkit.machines.states import STATE_BYTES, UNREPORTED, RankState, write_state
from labkit.recording.clock import Clock
from labkit.recording.ring_copy import RingCopy
from labkit.recording.ring_layout import RING_BYTES


class _Machine(Protocol):
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

    def __init__(self, number: int, fds: list[int], machine: _Machine, closed: Callable[[int], None]) -> None:
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

    def state_is(self, state: RankState) -> None:
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
            self._line.send(Kind.TAKEN, self._number, TAKEN.pack(0, done), urgent=True)
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
