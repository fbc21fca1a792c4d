"""The agent: starts ranks on its machine, and passes on what the notebook and they send each other.

It is run as `python -m labkit.launch.machines.agent`, with the relay at its stdin and stdout. It ends, and its ranks
with it, when the connection does, or when it has heard nothing of the relay for `LOST_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import os
import pickle
import struct
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from labkit.errors.exceptions import LabError
from labkit.errors.exit_reasons import OOMKillCounters
from labkit.launch.capacity import raise_limit
from labkit.launch.machines.facts import HELLO, SILENT_S, AgentRequest, Connect, Facts, Listen, Prepare
from labkit.launch.machines.forwarding import TAKEN, Forwarding, FramePort
from labkit.launch.machines.line import READ_BYTES, FrameKind, Large, Line
from labkit.launch.rank_process import RankProcess, Status
from labkit.launch.resource_usage import Load
from labkit.launch.server_requests import Failed, Fork, Forked, Reap
from labkit.launch.starters import ForkStarter, SpawnStarter, Starter
from labkit.recording.ring_copy import RingTap
from labkit.worker.process_state import remove_leftovers
from labkit.worker.runtimes.registry import RUNTIMES

LOST_S: Final = SILENT_S + 2  # longer than the relay waits before it takes this machine for lost
LOOK_EVERY_S: Final = 0.05  # between looks at prints and rings
SAMPLE_EVERY_S: Final = 0.25  # between two reports of the ranks' states
RECORDS_BYTES: Final = 1 << 18  # of records in one block
OUTPUT_BYTES: Final = 1 << 16  # of prints in one block
OPEN_S: Final = 10.0  # for which an agent listens for the others
CONNECT_S: Final = 6.0  # for a connection to one, which takes two round trips, the first for its network card's address
# What may wait on a slow line. A round trip of 40 ms still leaves 3 MB/s for the prints of a rank.
OUTPUT_WINDOW: Final = 1 << 17  # of a rank's prints; then the rank waits, as for a full pipe
BACKLOG_BYTES: Final = 1 << 18  # of all; then records wait in the rank's ring, which overwrites the oldest
LONG_BACKLOG: Final = 1 << 16  # with more, the ends of ranks are reported before their last prints
# By these variables, libraries take an agent or a rank for a task of the job step that has started the agent.
_OF_A_STEP: Final = ("SLURM_", "PMI_", "PMIX_")
_TIME: Final = struct.Struct("<q")


class _AgentRank:
    """A rank on this machine."""

    def __init__(self, number: int, process: RankProcess, agent: _Agent) -> None:
        self.number, self.process, self._line = number, process, agent.line
        self._tap = RingTap(process.ring)
        self.frames = Forwarding(
            number, FramePort(process.sock), agent.line, None, agent.large, before=self.report, closed=self._closed
        )
        self._output_under_way = 0
        self._output_open = True
        self._loop = asyncio.get_running_loop()
        self._gone = False
        if process.sentinel >= 0:
            self._loop.add_reader(process.sentinel, self._ended)

    def look(self) -> None:
        """Send prints and records, unless the line is slow: then prints wait, and records are lost in the end."""
        self._print(OUTPUT_WINDOW)
        if self._line.backlog < BACKLOG_BYTES and (news := self._tap.news(RECORDS_BYTES)):
            self._line.send(FrameKind.RECORDS, self.number, news)

    def report(self, most_bytes: float = math.inf) -> bool:
        """Send what the rank has printed, and at most so many bytes of records; return whether that is all."""
        self._print(math.inf)  # a pipe's capacity at most
        while news := self._tap.news(RECORDS_BYTES):
            self._line.send(FrameKind.RECORDS, self.number, news)
            most_bytes -= len(news)
            if most_bytes <= 0:
                return not self._tap.behind
        return True

    def _print(self, window_bytes: float) -> None:
        while self._output_open and self._output_under_way < window_bytes:
            try:
                data = os.read(self.process.output, OUTPUT_BYTES)
            except BlockingIOError:
                return
            self._output_open = bool(data)
            if data:
                self._output_under_way += len(data)
                self._line.send(FrameKind.OUTPUT, self.number, data)
            if len(data) < OUTPUT_BYTES:
                return

    def taken(self, frames: int, output: int) -> None:
        self._output_under_way -= output
        if frames:
            self.frames.taken(frames)

    def _closed(self) -> None:
        if self.process.sentinel < 0:
            self._ended()

    def _ended(self) -> None:
        """Its process has ended by itself: send what it has left."""
        if self.forget():
            self.frames.read_all()
            self.report()
            self._line.send(FrameKind.GONE, self.number)

    def forget(self) -> bool:
        """Do not wait for its end any more; return whether it had not come yet."""
        first, self._gone = not self._gone, True
        if first and self.process.sentinel >= 0:
            self._loop.remove_reader(self.process.sentinel)
        return first

    def close(self, *, ended_now: bool) -> None:
        """Close all that belongs to it.

        If its process was ended just now, send what it has left, but not on a slow line: nobody waits for that.
        """
        if ended_now and self._line.backlog < LONG_BACKLOG:
            self.frames.read_all()
            self.report(BACKLOG_BYTES)
        self.frames.close()
        self.process.close()


class _Agent:
    """The agent's side of a line."""

    def __init__(self, line: Line) -> None:
        self.line, self.large = line, Large()
        self._facts = Facts.here()
        self._ranks: dict[int, _AgentRank] = {}
        self._starter: Starter | None = None
        self._heard_s = time.monotonic()
        self._oom_kills = OOMKillCounters()
        self._states: dict[int, tuple[Status, Load]] = {}  # as they were last reported
        self._sampled: tuple[int, ...] | None = None  # the ranks of `_loads`
        self._loads: Callable[[int], Sequence[Load]]
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Serve the relay until the line ends, or nothing is heard any more; then end all ranks."""
        self.line.announce()
        writing = asyncio.ensure_future(self.line.write())
        working = [asyncio.ensure_future(work()) for work in (self._look, self._sample, self._hear)]
        self._send(HELLO, self._facts)
        done, _ = await asyncio.wait([writing, *working], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            with contextlib.suppress(OSError):
                task.result()
        if self._starter is not None:
            await asyncio.to_thread(self._starter.close)

    async def _hear(self) -> None:
        async for kind, number, data in self.line.blocks():
            self._heard_s = time.monotonic()
            if kind is FrameKind.CLOCK:
                self.line.send(FrameKind.CLOCK, 0, data + _TIME.pack(time.perf_counter_ns()), urgent=True)
            elif kind is FrameKind.PART:
                if self.large.add(number, data):
                    for rank in self._ranks.values():
                        rank.frames.write()
            elif kind is FrameKind.FORGET:
                self.large.forget(number)
            elif kind is FrameKind.CONTROL:
                task = asyncio.ensure_future(self._handle(number, pickle.loads(data)))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            elif number in self._ranks:
                rank = self._ranks[number]
                if kind is FrameKind.FRAME:
                    rank.frames.deliver(data)
                elif kind is FrameKind.TAKEN:
                    rank.taken(*TAKEN.unpack(data))

    async def _look(self) -> None:
        while time.monotonic() < self._heard_s + LOST_S:
            for rank in self._ranks.values():
                rank.look()
            await asyncio.sleep(LOOK_EVERY_S)

    async def _sample(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_EVERY_S)
            ranks = list(self._ranks.values())
            states = await asyncio.to_thread(self._states_of, ranks)
            news = {number: state for number, state in states.items() if self._states.get(number) != state}
            self._states = states
            if news:
                self.line.send(FrameKind.STATES, 0, pickle.dumps(news), urgent=True)

    def _states_of(self, ranks: Sequence[_AgentRank]) -> dict[int, tuple[Status, Load]]:
        """Return the states of ranks. Called on another thread."""
        self._oom_kills.sample(time.monotonic())
        if not ranks or self._starter is None:
            return {}
        numbers = tuple(rank.number for rank in ranks)
        if self._sampled != numbers:
            self._loads, self._sampled = self._starter.monitor([rank.process for rank in ranks], "auto"), numbers
        loads = self._loads(time.perf_counter_ns())
        return {rank.number: (rank.process.status(), load) for rank, load in zip(ranks, loads, strict=True)}

    async def _handle(self, number: int, request: AgentRequest) -> None:
        try:
            reply = await self._reply(request)
        except LabError as error:
            reply = Failed(str(error))
        except Exception as error:  # noqa: BLE001  # the relay waits for this reply
            reply = Failed(f"{type(error).__name__}: {error}")
        self._send(number, reply, urgent=isinstance(request, Reap) and self.line.backlog > LONG_BACKLOG)

    async def _reply(self, request: AgentRequest) -> Any:
        if isinstance(request, Prepare):
            return await asyncio.to_thread(self._prepare, request.runtime)
        if isinstance(request, Listen):
            return await listen_for_a_moment(self._facts.address)
        if isinstance(request, Connect):
            return await unreached(request.targets)
        assert self._starter is not None, "a starter comes first"
        if isinstance(request, Fork):
            processes = await asyncio.to_thread(self._starter.start, len(request.ranks))
            for number, process in zip(request.ranks, processes, strict=True):
                self._ranks[number] = _AgentRank(number, process, self)
            return Forked({number: process.pid for number, process in zip(request.ranks, processes, strict=True)})
        mine = {number: self._ranks[number] for number in request.ranks if number in self._ranks}
        processes = [rank.process for rank in mine.values()]
        if isinstance(request, Reap):
            living = [rank for rank in mine.values() if rank.forget()]
            ends = await asyncio.to_thread(self._starter.end, processes)
            kills = self._oom_kills.recent()
            for number, rank in mine.items():
                rank.close(ended_now=rank in living)
                self._ranks.pop(number, None)
            await asyncio.to_thread(remove_leftovers)
            if not self._ranks:  # nobody needs large data any more, and the relay does not send the rest of it
                self.line.drop_large()
                self.large.clear()
            return {number: dataclasses.replace(end, oom_kills=kills) for number, end in zip(mine, ends, strict=True)}
        if request.question is None:
            for rank in mine.values():
                rank.report()
            return dict.fromkeys(mine, True)
        answers = await asyncio.to_thread(request.question.answer, processes)
        # A rank that records faster than the line carries has no answer: records that say otherwise would come later.
        return {n: one for n, one in zip(mine, answers, strict=True) if mine[n].report(RECORDS_BYTES)}

    def _prepare(self, runtime: str) -> None:
        kind = RUNTIMES[runtime]
        make = ForkStarter if sys.platform == "linux" else SpawnStarter
        self._starter = make(kind.preload, kind.environment)
        self._starter.wait_until_ready()

    def _send(self, number: int, reply: Any, *, urgent: bool = False) -> None:
        self.line.send(FrameKind.CONTROL, number, pickle.dumps(reply), urgent=urgent)


async def listen_for_a_moment(address: str) -> int:
    """Accept connections for `OPEN_S`; return the port."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), address, 0)
    asyncio.get_running_loop().call_later(OPEN_S, server.close)
    port: int = server.sockets[0].getsockname()[1]
    return port


async def unreached(targets: Sequence[tuple[str, str, int]]) -> list[tuple[str, str, int, str]]:
    """Return the machines to which this one cannot connect, and why; of each, name, address and port are given."""

    async def problem(address: str, port: int) -> str:
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(address, port), CONNECT_S)
        except TimeoutError:
            return f"no answer within {CONNECT_S:g} s"
        except OSError as error:
            return os.strerror(error.errno) if error.errno else str(error)
        writer.close()
        return ""

    problems = await asyncio.gather(*(problem(address, port) for _, address, port in targets))
    return [(*target, why) for target, why in zip(targets, problems, strict=True) if why]


def main() -> None:
    """Run the agent on this process's stdin and stdout."""
    raise_limit()
    for name in [name for name in os.environ if name.startswith(_OF_A_STEP)]:
        del os.environ[name]
    # What Python or a library prints must not get between the blocks.
    streams = [os.fdopen(os.dup(0), "rb", buffering=0), os.fdopen(os.dup(1), "wb", buffering=0)]
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(*streams))
    os._exit(1)  # interrupted


async def _serve(source: Any, target: Any) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(READ_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), source)
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, target)
    await _Agent(Line(reader, asyncio.StreamWriter(transport, protocol, reader, loop))).serve()
    os._exit(0)  # here: the end of the loop would wait for threads, which may wait for ranks that have ended


if __name__ == "__main__":
    main()
