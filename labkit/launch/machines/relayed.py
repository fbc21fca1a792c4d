"""The relay's side of a machine and of its ranks: the far ends of what the notebook holds, filled from the line."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import mmap
import os
import pickle
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from labkit.errors.exceptions import LabError
from labkit.launch.machines.engines import Connection
from labkit.launch.machines.facts import (
    HELLO,
    REPORT_BYTES,
    SILENT_S,
    AgentRequest,
    Facts,
    KnownMachine,
    RankReport,
    write_report,
)  # fmt: skip
from labkit.launch.machines.forwarding import TAKEN, Forwarding, FramePort, Segments
from labkit.launch.machines.line import FrameKind, Large, Line
from labkit.launch.server_requests import Failed, Reap
from labkit.recording.clock import Clock
from labkit.recording.ring_buffer import RING_BYTES
from labkit.recording.ring_copy import RingCopy

ASK_EVERY_S: Final = 0.25  # between two questions for the time, which a machine that is not lost answers
FIRST_READINGS: Final = 16  # of a clock, at once: the first ones take longer
LONGEST_NOISE: Final = 300  # characters
OWN_PAUSE_S: Final = 1.0  # a longer pause between two looks is this process's own: machines were not silent, but not heard
_TIME: Final = struct.Struct("<q")
_TIMES: Final = struct.Struct("<qq")


class LostError(Exception):
    """A machine is lost, or cannot be reached; the text says how that was noticed."""


class AgentMachine:
    """A machine and its agent."""

    facts: Facts  # what the agent has said about it

    def __init__(self, name: str, connection: Connection) -> None:
        self.name, self._connection = name, connection
        self.line = Line(connection.reader, connection.writer)
        self.large, self.segments, self.clock = Large(), Segments(self.line), Clock()
        self.ranks: dict[int, RelayedRank] = {}  # by number
        self._read_ns, self._round_trip_ns = 0, sys.maxsize  # what its clock showed last, and the shortest round trip
        self.lost = ""  # how its loss was noticed
        self._heard_s = time.monotonic()
        self._number = HELLO
        loop = asyncio.get_running_loop()
        self._replies: dict[int, asyncio.Future[Any]] = {HELLO: loop.create_future()}
        self._tasks = [asyncio.ensure_future(work) for work in (self._hear(), self._write(), self._watch())]

    async def meet(self, limit_s: float) -> None:
        """Wait for the agent's first word, and read its clock."""
        try:
            facts = await asyncio.wait_for(asyncio.shield(self._replies[HELLO]), limit_s)
        except TimeoutError:
            self.lose(f"it said nothing for {limit_s:.0f} s")
            raise LostError(self.lost) from None
        self.facts = facts
        for _ in range(FIRST_READINGS):
            self._ask_time()

    @property
    def offset_ns(self) -> int:
        """What is added to a time there, by the last reading of its clock.

        Only ranks ask for it: the line of a clock follows the readings slowly once a time was converted, and the first
        readings are bad ones, since they wait for the agent to start.
        """
        return self.clock.here(self._read_ns) - self._read_ns

    @property
    def known(self) -> KnownMachine:
        """What is known of it."""
        return KnownMachine(self.name, self.facts, self._round_trip_ns, self.clock.error_ns)

    async def ask(self, request: AgentRequest) -> Any:
        """Send the agent a request, and return its reply. LostError: the machine is lost; LabError: it has refused."""
        if self.lost:
            raise LostError(self.lost)
        self._number += 1
        number = self._number
        self._replies[number] = asyncio.get_running_loop().create_future()
        self.line.send(FrameKind.CONTROL, number, pickle.dumps(request), urgent=isinstance(request, Reap))
        try:
            reply = await self._replies[number]
        finally:
            self._replies.pop(number, None)
        if isinstance(reply, Failed):
            raise LabError(f"{self.name}: {reply.reason}")
        return reply

    def lose(self, how: str) -> None:
        """The machine is lost: end what waits for it."""
        if self.lost:
            return
        self.lost = how
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(LostError(how))
                reply.exception()  # it may be that nobody waits for it
        for rank in self.ranks.values():
            rank.gone()
        self.close()

    def close(self) -> None:
        """End the agent."""
        self.line.close()
        self._connection.close()
        self.drop_data()
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()

    def drop_data(self) -> None:
        """Send no more large data, and forget what was sent: without ranks, nobody needs it. So does the agent."""
        self.line.drop_large()
        self.segments.clear()
        self.large.clear()

    def _ask_time(self) -> None:
        self.line.send(FrameKind.CLOCK, 0, _TIME.pack(time.perf_counter_ns()), urgent=True)

    async def _write(self) -> None:
        with contextlib.suppress(OSError):  # reading notices it, too
            await self.line.write()

    async def _watch(self) -> None:
        looked_s = time.monotonic()
        while True:
            await asyncio.sleep(ASK_EVERY_S)
            now = time.monotonic()
            if now > looked_s + OWN_PAUSE_S:
                self._heard_s += now - looked_s
            looked_s = now
            # Before its first word, an agent may have to wait for a core or a slow disk; `meet` has a limit of its own.
            if hasattr(self, "facts") and now > self._heard_s + SILENT_S:
                self.lose(f"it has not answered for {SILENT_S:.0f} s")
                return
            self._ask_time()
            self.segments.tidy()

    async def _hear(self) -> None:
        printed = await self.line.begin()
        async for kind, number, data in self.line.blocks():
            self._heard_s = time.monotonic()
            if kind is FrameKind.CLOCK:
                asked_ns, there_ns = _TIMES.unpack(data)
                heard_ns = time.perf_counter_ns()
                self.clock.read(asked_ns, there_ns, heard_ns)
                self._round_trip_ns = min(self._round_trip_ns, heard_ns - asked_ns)
                self._read_ns = there_ns
                for rank in self.ranks.values():
                    rank.reported(offset_ns=self.offset_ns, error_ns=self.clock.error_ns)
            elif kind is FrameKind.PART:
                if self.large.add(number, data):
                    for rank in self.ranks.values():
                        rank.frames.write()
            elif kind is FrameKind.CONTROL:
                future = self._replies.get(number)
                if future is not None and not future.done():
                    future.set_result(pickle.loads(data))
            elif kind is FrameKind.STATES:
                for of_rank, (status, load) in pickle.loads(data).items():
                    if of_rank in self.ranks:
                        self.ranks[of_rank].reported(status=status, load=load)
            elif number in self.ranks:
                rank = self.ranks[number]
                if kind is FrameKind.RECORDS:
                    rank.recorded(data)
                elif kind is FrameKind.OUTPUT:
                    rank.printed(data)
                elif kind is FrameKind.FRAME:
                    rank.framed(data)
                elif kind is FrameKind.TAKEN:
                    rank.frames.taken(TAKEN.unpack(data)[0])
                elif kind is FrameKind.GONE:
                    rank.framed(None)
        how = await self._connection.ended() or "the connection to it has ended"
        self.lose(
            how if hasattr(self, "facts") or not printed.strip() else f"{how} It printed: {printed.strip()[-LONGEST_NOISE:]}"
        )


class RelayedRank:
    """The relay's side of one rank.

    `fds` are the far ends of its socket and its pipe, and its memory. `closed` is called with its number when the
    notebook closes the socket.
    """

    def __init__(self, number: int, fds: list[int], machine: AgentMachine, closed: Callable[[int], None]) -> None:
        self._number, self._line = number, machine.line
        connection, self._output, memory = fds
        os.truncate(memory, RING_BYTES + REPORT_BYTES)
        self._memory = mmap.mmap(memory, RING_BYTES + REPORT_BYTES)
        os.close(memory)
        os.set_blocking(self._output, False)
        self._loop = asyncio.get_running_loop()
        self._copy = RingCopy(self._memory, machine.clock)
        self._report = RankReport()
        self.reported(offset_ns=machine.offset_ns, error_ns=machine.clock.error_ns)
        self._prints = bytearray()
        self._printed = self._written = 0  # bytes of prints, that have come, and that the pipe has taken
        self._held: deque[tuple[int, bytes | None]] = deque()  # frames, None for its end, and `_printed` when each came
        self._waiting = self._gone = False
        port = FramePort(socket.socket(fileno=connection))
        self.frames = Forwarding(number, port, machine.line, machine.segments, machine.large, closed=lambda: closed(number))

    def reported(self, **changes: Any) -> None:
        """Its machine has reported changes of these fields of its `RankReport`."""
        self._report = dataclasses.replace(self._report, **changes, reported_ns=time.perf_counter_ns())
        write_report(self._memory, self._report)

    def recorded(self, news: bytes) -> None:
        """Copy what is new in its ring."""
        self._copy.apply(news)
        self.reported()

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
