"""The relay: plays the server that starts ranks, for ranks on other machines.

It holds the far ends of each rank's socket, pipe and memory, and passes on what comes from them to the agent of the
rank's machine, and back. So the notebook does not know where a rank is:

    notebook ──requests──> relay ──line──> agent on pc1 ──> its fork server ──> rank 0, rank 1
        └──socket, pipe, memory──┘ └─line──> agent on pc2 ──> its fork server ──> rank 2, rank 3

It is a process of its own: engines bring threads and large libraries, which a process that students fork must not have.
It ends with the notebook's process, and its lines with it, and so do the agents.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import pickle
import socket
import struct
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, NoReturn

from labkit.errors.exceptions import LabError
from labkit.errors.lists import listed
from labkit.ipc.options import Place
from labkit.ipc.pickling import shared_memory
from labkit.launch import server_requests
from labkit.launch.capacity import raise_limit
from labkit.launch.machines.agent_requests import HELLO, Prepare, Reply, Request
from labkit.launch.machines.engines import Connection, Engine
from labkit.launch.machines.facts import Facts, KnownMachine, check_versions
from labkit.launch.machines.forwarding import TAKEN, Segments
from labkit.launch.machines.line import FrameKind, Large, Line
from labkit.launch.machines.reachability import check_reachability
from labkit.launch.machines.relayed_rank import RelayedRank
from labkit.launch.rank_process import End
from labkit.launch.server_requests import (  # fmt: skip
    BATCH,
    LONGEST_BYTES,
    READY,
    Answered,
    Ask,
    Ended,
    Failed,
    Fork,
    Forked,
    Reap,
    Survey,
    Surveyed,
    Waits,
)
from labkit.recording.clock import Clock
from labkit.worker.runtimes.registry import RUNTIMES

SILENT_S: Final = 4.0  # a machine that says nothing for so long is lost; it answers questions for the time meanwhile
ASK_EVERY_S: Final = 0.25  # between two such questions
FIRST_READINGS: Final = 16  # of a clock, at once: the first ones take longer
LONGEST_NOISE: Final = 300  # characters
OWN_PAUSE_S: Final = 1.0  # a longer pause between two looks is this process's own: machines were not silent, but not heard
_TIME: Final = struct.Struct("<q")
_TIMES: Final = struct.Struct("<qq")


class LostError(Exception):
    """A machine is lost, or cannot be reached; the text says how that was noticed."""


class _AgentMachine:
    """A machine and its agent.

    Attributes:
        facts: what the agent has said about it.
        ranks: the ranks there, by number.
        lost: how its loss was noticed; "" while it answers.
    """

    facts: Facts

    def __init__(self, name: str, connection: Connection) -> None:
        self.name, self._connection = name, connection
        self.line = Line(connection.reader, connection.writer)
        self.large, self.segments, self.clock = Large(), Segments(self.line), Clock()
        self.ranks: dict[int, RelayedRank] = {}
        self._read_ns, self._round_trip_ns = 0, sys.maxsize  # what its clock showed last, and the shortest round trip
        self.lost = ""
        self._heard_s, self._heard_boot_s = time.monotonic(), _boot_s()
        self._number = HELLO
        loop = asyncio.get_running_loop()
        self._replies: dict[int, asyncio.Future[Reply]] = {HELLO: loop.create_future()}
        self._tasks = [asyncio.ensure_future(work) for work in (self._hear(), self._write(), self._watch())]

    async def meet(self, limit_s: float) -> None:
        """Wait for the agent's first word, and read its clock.

        Raises:
            LostError: it has ended, or says nothing.
        """
        try:
            facts = await asyncio.wait_for(asyncio.shield(self._replies[HELLO]), limit_s)
        except TimeoutError:
            self.lose(f"it said nothing for {limit_s:.0f} s")
            raise LostError(self.lost) from None
        assert isinstance(facts, Facts)
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

    async def ask(self, request: Request) -> Reply:
        """Send the agent a request, and return its reply.

        Raises:
            LostError: the machine is lost.
            LabError: it has refused.
        """
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
        slept_s = _boot_s() - self._heard_boot_s
        if slept_s > SILENT_S:
            how = f"this computer slept for {slept_s / 60:.0f} min"
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
            self._heard_s, self._heard_boot_s = time.monotonic(), _boot_s()
            if kind is FrameKind.CLOCK:
                asked_ns, there_ns = _TIMES.unpack(data)
                heard_ns = time.perf_counter_ns()
                self.clock.read(asked_ns, there_ns, heard_ns)
                self._round_trip_ns = min(self._round_trip_ns, heard_ns - asked_ns)
                self._read_ns = there_ns
                for rank in self.ranks.values():
                    rank.clock_is(self.offset_ns, self.clock.error_ns)
            elif kind is FrameKind.PART:
                self.large.add(number, data)
                if self.large.complete(number):
                    for rank in self.ranks.values():
                        rank.frames.write()
            elif kind is FrameKind.CONTROL:
                reply = pickle.loads(data)
                future = self._replies.get(number)
                if future is not None and not future.done():
                    future.set_result(reply)
            elif kind is FrameKind.STATES:
                for of_rank, state in pickle.loads(data).items():
                    if of_rank in self.ranks:
                        self.ranks[of_rank].state_is(state)
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


class _Relay:
    """Serves the notebook.

    Args:
        sock: the socket that carries requests.
        engine: where the machines are.
        runtime: the name of the runtime; "" for none: the notebook asks about machines, and wants to know all problems.
    """

    def __init__(self, sock: socket.socket, engine: Engine, runtime: str) -> None:
        self._sock, self._engine, self._runtime = sock, engine, runtime
        self._machines: dict[str, _AgentMachine] = {}  # by name, in the engine's order
        self._names: Sequence[str] = ()
        self._problems: dict[str, str] = {}  # by name, why a machine cannot be used
        self._where: dict[int, _AgentMachine] = {}  # by rank
        self._layout: list[tuple[_AgentMachine, Place]] = []  # of the group that is being started, by rank
        self._met: set[_AgentMachine] = set()  # those that can connect to one another
        self._here = Facts.here()
        self._ended = asyncio.Event()
        self._notes: list[str] = []  # for the student, on the next start
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, notebook: int) -> None:
        """Serve until the notebook's process has ended or closes the socket; then end all agents."""
        loop = asyncio.get_running_loop()
        self._sock.setblocking(False)
        with contextlib.suppress(OSError, AttributeError):  # else the socket alone tells its end
            loop.add_reader(os.pidfd_open(notebook), self._ended.set)
        self._spawn(self._connect_all())
        await self._ended.wait()
        for machine in self._machines.values():
            machine.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect_all(self) -> None:
        """Connect to all machines, and tell the notebook when ranks can be started."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._sock, self._receive)

        def say(text: str) -> None:
            self._send(READY, Waits(text))

        try:
            names = self._names = await self._engine.machines(say)
            made = await asyncio.gather(
                *(self._connect(name, self._engine.connect_limit_s) for name in names), return_exceptions=True
            )
            failed = {n: one for n, one in zip(names, made, strict=True) if not isinstance(one, _AgentMachine)}
            for error in failed.values():
                if not isinstance(error, LostError | LabError):
                    raise error
            self._machines = {one.name: one for one in made if isinstance(one, _AgentMachine)}
            self._problems = {name: f"{name} cannot be used: {error}" for name, error in failed.items()}
            if self._runtime:
                await self._prepare(say)
        except Exception as error:  # noqa: BLE001  # the notebook waits for this reply
            known = isinstance(error, LabError | LostError)
            self._send(READY, Failed(str(error) if known else f"{type(error).__name__}: {error}"))
            self._ended.set()
        else:
            self._notes += self._engine.notes()
            self._send(READY, None)

    async def _prepare(self, say: Callable[[str], None]) -> None:
        """Let all machines import what ranks need.

        Raises:
            LabError: a machine cannot be used, or lacks something.
        """
        if self._problems:
            raise LabError("\n".join(self._problems.values()))
        package = RUNTIMES[self._runtime].package
        check_versions(package, self._here, [(m.name, m.facts) for m in self._machines.values()])
        say(f"{package or 'Python'} is being imported on {listed(self._machines)}")
        machines = list(self._machines.values())
        replies = await asyncio.gather(*(m.ask(Prepare(self._runtime)) for m in machines), return_exceptions=True)
        _raise_first(dict(zip(machines, replies, strict=True)))

    async def _connect(self, name: str, limit_s: float) -> _AgentMachine:
        try:
            connection = await asyncio.wait_for(self._engine.connect(name, limit_s), limit_s)
        except TimeoutError:
            raise LostError(f"it did not answer within {limit_s:.0f} s") from None
        machine = _AgentMachine(name, connection)
        await machine.meet(limit_s)
        return machine

    def _receive(self) -> None:
        """Take the notebook's next request."""
        try:
            data, fds, _, _ = socket.recv_fds(self._sock, LONGEST_BYTES, 3 * BATCH)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        if not data:
            asyncio.get_running_loop().remove_reader(self._sock)
            self._ended.set()
            return
        number, request = pickle.loads(data)
        self._spawn(self._serve_request(number, request, fds))

    async def _serve_request(self, number: int, request: server_requests.Request, fds: list[int]) -> None:
        try:
            if isinstance(request, Fork):
                reply: server_requests.Reply = await self._fork(request, fds, lambda text: self._send(number, Waits(text)))
            elif isinstance(request, Ask):
                reply = await self._ask(request)
            elif isinstance(request, Survey):
                reply = await self._survey()
            else:
                reply = await self._reap(request.ranks)
        except (LabError, LostError) as error:
            reply = Failed(str(error))
        except Exception as error:  # noqa: BLE001  # as above
            reply = Failed(f"{type(error).__name__}: {error}")
        self._send(number, reply)

    def _send(self, number: int, reply: server_requests.Reply | None) -> None:
        data, fd = pickle.dumps((number, reply)), -1
        if len(data) > LONGEST_BYTES:
            fd = shared_memory(0)
            with open(fd, "wb", closefd=False) as file:
                file.write(data)
            os.lseek(fd, 0, os.SEEK_SET)
            data = b"long"
        try:
            socket.send_fds(self._sock, [data], [fd] if fd >= 0 else [])
        except BlockingIOError:  # the notebook reads only while it waits for a reply; then it waits for the last one only
            if not isinstance(reply, Waits):
                asyncio.get_running_loop().call_later(0.01, self._send, number, reply)
        except OSError:
            self._ended.set()
        finally:
            if fd >= 0:
                os.close(fd)

    async def _fork(self, request: Fork, fds: list[int], say: Callable[[str], None]) -> server_requests.Reply:
        """Start ranks; each has three of the file descriptors."""
        mine = {number: fds[3 * i : 3 * i + 3] for i, number in enumerate(request.ranks)}
        notes: list[str] = []
        try:
            if request.first == 0:
                notes = [*self._notes, *await self._reach_lost(say)]
                self._notes = []
                self._layout = self._places(request.total)
                used = list(dict.fromkeys(machine for machine, _ in self._layout))
                if len(used) > 1 and not self._met.issuperset(used):
                    try:
                        await check_reachability(used)
                    except LostError:
                        lost = [f"{machine.name} is lost: {machine.lost}" for machine in used if machine.lost]
                        raise LostError(". ".join(lost)) from None
                    self._met.update(used)
            layout = dict(zip(request.ranks, self._layout[request.first :], strict=False))
            by_machine: dict[_AgentMachine, list[int]] = {}
            for number, (machine, _) in layout.items():
                by_machine.setdefault(machine, []).append(number)
                machine.ranks[number] = RelayedRank(number, mine.pop(number), machine, self._abandoned)
                self._where[number] = machine
            jobs = [machine.ask(Fork(numbers)) for machine, numbers in by_machine.items()]
            replies = await asyncio.gather(*jobs, return_exceptions=True)
        finally:
            for fd in (fd for left in mine.values() for fd in left):
                os.close(fd)
        if any(isinstance(reply, BaseException) for reply in replies):
            await self._reap(list(layout))
            _raise_first(dict(zip(by_machine, replies, strict=True)))
        pids = {number: pid for r in replies if isinstance(r, Forked) for number, pid in r.pids.items()}
        return Forked(pids, {number: place for number, (_, place) in layout.items()}, notes)

    async def _reach_lost(self, say: Callable[[str], None]) -> list[str]:
        """Connect to lost machines again; return a note for each that cannot be reached."""
        lost = [machine.name for machine in self._machines.values() if machine.lost]
        if not lost:
            return []
        say(f"connecting to {listed(lost)} again")

        async def again(name: str) -> _AgentMachine:
            machine = await self._connect(name, self._engine.again_limit_s)
            await machine.ask(Prepare(self._runtime))
            return machine

        made = await asyncio.gather(*(again(name) for name in lost), return_exceptions=True)
        notes = []
        for name, one in zip(lost, made, strict=True):
            if isinstance(one, _AgentMachine):
                self._machines[name] = one
            elif isinstance(one, LostError | LabError):
                left = listed(m.name for m in self._machines.values() if not m.lost)
                hint = f"To try {name} again, make a new group."
                notes += [f"{name} is not used: {one}. All ranks are on {left}. {hint}"] * bool(left)
                self._machines[name].lost = str(one)
            else:
                raise one
        return notes

    def _places(self, total: int) -> list[tuple[_AgentMachine, Place]]:
        """Where the ranks of a group are, in rank order.

        Raises:
            LabError: too few machines are left.
        """
        living = [machine for machine in self._machines.values() if not machine.lost]
        if not living:
            lost = [f"{m.name}: {m.lost}" for m in self._machines.values()]
            raise LabError(f"no machine is left. {'. '.join(lost)}")
        counts = self._engine.counts(total, [machine.name for machine in living])
        used = [(machine, count) for machine, count in zip(living, counts, strict=True) if count]
        names = frozenset(n for m, _ in used for n in (m.name, m.facts.host, m.facts.address, *m.facts.addresses))
        layout = []
        for node, (machine, count) in enumerate(used):
            for local_rank in range(count):
                place = Place(machine.name, node, len(used), local_rank, count, names=names, cores=machine.facts.cores)
                if len(used) > 1:
                    place = dataclasses.replace(place, address=machine.facts.address, interface=machine.facts.interface)
                layout.append((machine, place))
        return layout

    async def _ask(self, request: Ask) -> server_requests.Reply:
        by_machine = self._by_machine(request.ranks)
        jobs = [machine.ask(Ask(request.question, numbers)) for machine, numbers in by_machine.items()]
        found: dict[int, Any] = {}
        for reply in await asyncio.gather(*jobs, return_exceptions=True):
            if isinstance(reply, Answered):
                found |= reply.answers
            elif not isinstance(reply, LostError):
                raise LabError(str(reply))
        return Answered(found)

    async def _survey(self) -> server_requests.Reply:
        problems = dict(self._problems)
        try:  # when the machines reply, they have also answered the first questions for the time
            await check_reachability(list(self._machines.values()))
        except LabError as error:
            problems[""] = str(error)
        except LostError:  # one of those below
            pass
        problems |= {m.name: f"{m.name} is lost: {m.lost}" for m in self._machines.values() if m.lost}
        return Surveyed(self._names, [m.known for m in self._machines.values() if not m.lost], problems)

    async def _reap(self, ranks: Sequence[int]) -> server_requests.Reply:
        by_machine = self._by_machine(ranks)
        jobs = [machine.ask(Reap(numbers)) for machine, numbers in by_machine.items()]
        ends: dict[int, End] = {}
        for machine, reply in zip(by_machine, await asyncio.gather(*jobs, return_exceptions=True), strict=True):
            if isinstance(reply, Ended):
                ends |= reply.ends
            elif isinstance(reply, LostError):
                ends |= {number: End(None, lost=f"{machine.name} is lost: {machine.lost}") for number in by_machine[machine]}
        for machine, numbers in by_machine.items():
            for number in numbers:
                self._where.pop(number, None)
                if (rank := machine.ranks.pop(number, None)) is not None:
                    rank.close()
            if not machine.ranks:
                machine.drop_data()
        return Ended(ends)

    def _by_machine(self, ranks: Sequence[int]) -> dict[_AgentMachine, list[int]]:
        found: dict[_AgentMachine, list[int]] = {}
        for number in ranks:
            if number in self._where:
                found.setdefault(self._where[number], []).append(number)
        return found

    def _abandoned(self, number: int) -> None:
        """The notebook has closed a rank's socket without ending the rank, as after a failed start."""

        async def end() -> None:
            await self._reap([number])

        if number in self._where:
            self._spawn(end())


def _raise_first(replies: Mapping[_AgentMachine, object]) -> None:
    """Raise the first error among the machines' replies, with the name of a machine that is lost."""
    for machine, reply in replies.items():
        if isinstance(reply, LostError):
            raise LostError(f"{machine.name} is lost: {reply}")
        if isinstance(reply, BaseException):
            raise reply


def _boot_s() -> float:
    """How long this computer has slept since it was started, in seconds."""
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)


def relay(fds: list[int], engine: bytes, runtime: str, notebook: int) -> NoReturn:
    """Run the relay until the process `notebook` has ended; the socket in `fds` carries requests."""
    raise_limit()

    async def serve() -> None:
        await _Relay(socket.socket(fileno=fds[0]), pickle.loads(engine), runtime).serve(notebook)
        os._exit(0)  # here: the end of the loop would wait for threads, in which an engine may wait for a cluster

    asyncio.run(serve())
    raise AssertionError("the process has ended")
