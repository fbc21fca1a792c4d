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
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NoReturn

from labkit.errors.exceptions import LabError
from labkit.errors.lists import listed
from labkit.ipc.options import Place
from labkit.ipc.pickling import shared_memory
from labkit.launch import server_requests
from labkit.launch.capacity import raise_limit
from labkit.launch.machines.engines import Engine
from labkit.launch.machines.facts import Connect, Facts, Listen, Prepare, check_versions
from labkit.launch.machines.relayed import AgentMachine, LostError, RelayedRank
from labkit.launch.rank_process import End
from labkit.launch.server_requests import BATCH, LONGEST_BYTES, READY, Ask, Failed, Fork, Forked, Reap, Surveyed, Waits
from labkit.worker.runtimes.registry import RUNTIMES


class _Relay:
    """Serves the notebook over a socket. With the runtime "", it asks about machines, and wants all problems."""

    def __init__(self, sock: socket.socket, engine: Engine, runtime: str) -> None:
        self._sock, self._engine, self._runtime = sock, engine, runtime
        self._machines: dict[str, AgentMachine] = {}  # by name, in the engine's order
        self._names: Sequence[str] = ()
        self._problems: dict[str, str] = {}  # by name, why a machine cannot be used
        self._where: dict[int, AgentMachine] = {}  # by rank
        self._layout: list[tuple[AgentMachine, Place]] = []  # of the group that is being started, by rank
        self._met: set[AgentMachine] = set()  # those that can connect to one another
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
        loop = asyncio.get_running_loop()
        loop.add_reader(self._sock, self._receive)

        def say(text: str) -> None:
            self._send(READY, Waits(text))

        try:
            names = self._names = await self._engine.machines(say)
            made = await asyncio.gather(
                *(self._connect(name, self._engine.connect_limit_s) for name in names), return_exceptions=True
            )
            failed = {n: one for n, one in zip(names, made, strict=True) if not isinstance(one, AgentMachine)}
            for error in failed.values():
                if not isinstance(error, LostError | LabError):
                    raise error
            self._machines = {one.name: one for one in made if isinstance(one, AgentMachine)}
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
        if self._problems:
            raise LabError("\n".join(self._problems.values()))
        package = RUNTIMES[self._runtime].package
        check_versions(package, self._here, [(m.name, m.facts) for m in self._machines.values()])
        say(f"{package or 'Python'} is being imported on {listed(self._machines)}")
        machines = list(self._machines.values())
        replies = await asyncio.gather(*(m.ask(Prepare(self._runtime)) for m in machines), return_exceptions=True)
        _raise_first(dict(zip(machines, replies, strict=True)))

    async def _connect(self, name: str, limit_s: float) -> AgentMachine:
        try:
            connection = await asyncio.wait_for(self._engine.connect(name, limit_s), limit_s)
        except TimeoutError:
            raise LostError(f"it did not answer within {limit_s:.0f} s") from None
        machine = AgentMachine(name, connection)
        await machine.meet(limit_s)
        return machine

    def _receive(self) -> None:
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
                reply: Any = await self._fork(request, fds, lambda text: self._send(number, Waits(text)))
            elif isinstance(request, Ask):
                reply = await self._ask(request)
            elif isinstance(request, server_requests.Survey):
                reply = await self._survey()
            else:
                reply = await self._reap(request.ranks)
        except (LabError, LostError) as error:
            reply = Failed(str(error))
        except Exception as error:  # noqa: BLE001  # as above
            reply = Failed(f"{type(error).__name__}: {error}")
        self._send(number, reply)

    def _send(self, number: int, reply: Any) -> None:
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

    async def _fork(self, request: Fork, fds: list[int], say: Callable[[str], None]) -> Any:
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
            by_machine: dict[AgentMachine, list[int]] = {}
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
        pids = {number: pid for reply in replies if isinstance(reply, Forked) for number, pid in reply.pids.items()}
        return Forked(pids, {number: place for number, (_, place) in layout.items()}, notes)

    async def _reach_lost(self, say: Callable[[str], None]) -> list[str]:
        """Connect to lost machines again; return a note for each that cannot be reached."""
        lost = [machine.name for machine in self._machines.values() if machine.lost]
        if not lost:
            return []
        say(f"connecting to {listed(lost)} again")

        async def again(name: str) -> AgentMachine:
            machine = await self._connect(name, self._engine.again_limit_s)
            await machine.ask(Prepare(self._runtime))
            return machine

        made = await asyncio.gather(*(again(name) for name in lost), return_exceptions=True)
        notes = []
        for name, one in zip(lost, made, strict=True):
            if isinstance(one, AgentMachine):
                self._machines[name] = one
            elif isinstance(one, LostError | LabError):
                left = listed(m.name for m in self._machines.values() if not m.lost)
                hint = f"To try {name} again, make a new group."
                notes += [f"{name} is not used: {one}. All ranks are on {left}.\n{hint}"] * bool(left)
                self._machines[name].lost = str(one)
            else:
                raise one
        return notes

    def _places(self, total: int) -> list[tuple[AgentMachine, Place]]:
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

    async def _ask(self, request: Ask) -> Any:
        by_machine = self._by_machine(request.ranks)
        jobs = [machine.ask(Ask(request.question, numbers)) for machine, numbers in by_machine.items()]
        found: dict[int, Any] = {}
        for reply in await asyncio.gather(*jobs, return_exceptions=True):
            if isinstance(reply, LostError):
                continue
            if isinstance(reply, BaseException):
                raise LabError(str(reply))
            found |= reply
        return found

    async def _survey(self) -> Any:
        problems = dict(self._problems)
        try:  # when the machines reply, they have also answered the first questions for the time
            await check_reachability(list(self._machines.values()))
        except LabError as error:
            problems[""] = str(error)
        except LostError:  # one of those below
            pass
        problems |= {m.name: f"{m.name} is lost: {m.lost}" for m in self._machines.values() if m.lost}
        return Surveyed(self._names, [m.known for m in self._machines.values() if not m.lost], problems)

    async def _reap(self, ranks: Sequence[int]) -> Any:
        by_machine = self._by_machine(ranks)
        jobs = [machine.ask(Reap(numbers)) for machine, numbers in by_machine.items()]
        ends: dict[int, End] = {}
        for machine, reply in zip(by_machine, await asyncio.gather(*jobs, return_exceptions=True), strict=True):
            if isinstance(reply, LostError):
                ends |= {number: End(None, lost=f"{machine.name} is lost: {machine.lost}") for number in by_machine[machine]}
            elif not isinstance(reply, BaseException):
                ends |= reply
        for machine, numbers in by_machine.items():
            for number in numbers:
                self._where.pop(number, None)
                if (rank := machine.ranks.pop(number, None)) is not None:
                    rank.gone()
            if not machine.ranks:
                machine.drop_data()
        return ends

    def _by_machine(self, ranks: Sequence[int]) -> dict[AgentMachine, list[int]]:
        found: dict[AgentMachine, list[int]] = {}
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


def _raise_first(replies: Mapping[AgentMachine, object]) -> None:
    """Raise the first error among the machines' replies, with the name of a machine that is lost."""
    for machine, reply in replies.items():
        if isinstance(reply, LostError):
            raise LostError(f"{machine.name} is lost: {reply}")
        if isinstance(reply, BaseException):
            raise reply


async def check_reachability(machines: Sequence[AgentMachine]) -> None:
    """Let each machine connect to each other one, as its ranks will; otherwise gloo would wait for half an hour."""
    ports = await asyncio.gather(*(machine.ask(Listen()) for machine in machines))
    targets = [(m.name, m.facts.address, port) for m, port in zip(machines, ports, strict=True)]
    replies = await asyncio.gather(*(m.ask(Connect([t for t in targets if t[0] != m.name])) for m in machines))
    failed = [
        f"{machine.name} cannot connect to {name} at {address} (port {port}): {why}"
        for machine, reply in zip(machines, replies, strict=True)
        for name, address, port, why in reply
    ]
    if failed:
        raise LabError(
            f"{'; '.join(failed)}. Ranks connect to one another at random ports: does a firewall stop that, or is this not the "
            "address at which the machines reach each other? The variable LABKIT_ADDRESS of a machine names another."
        )


def relay(fds: list[int], engine: bytes, runtime: str, notebook: int) -> NoReturn:
    """Run the relay until the process `notebook` has ended; the socket in `fds` carries requests."""
    raise_limit()

    async def serve() -> None:
        await _Relay(socket.socket(fileno=fds[0]), pickle.loads(engine), runtime).serve(notebook)
        os._exit(0)  # here: the end of the loop would wait for threads, in which an engine may wait for a cluster

    asyncio.run(serve())
    raise AssertionError("the process has ended")
