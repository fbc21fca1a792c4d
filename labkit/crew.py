"""The processes of a group: started together, set up together, ended together."""

from __future__ import annotations

import contextlib
import os
import selectors
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from labkit.arguments import Plan
from labkit.borrow import may_read
from labkit.channel import Channel
from labkit.errors import LabError, RankError, RankFailure
from labkit.exits import MemoryKiller, explain_exit
from labkit.ledger import LEDGER_BYTES
from labkit.ring import RingReader
from labkit.runtimes import Seat
from labkit.start import RankProcess, Starter, aside
from labkit.wire import Parcel, shared_memory

__all__ = ["Crew", "Member"]

START_LIMIT_S: Final = (
    180.0  # for all ranks to set up; 0.05 s if forked, but a spawned one may import TensorFlow from a cold disk
)
CLOSE_LIMIT_S: Final = 0.5  # for a rank to leave its process group by itself, before it is ended
LOOK_EVERY_S: Final = 0.1  # at what ranks print while they set up: they would be blocked when nobody reads it
READ_BYTES: Final = 1 << 16
PIPE_BYTES: Final = 1 << 20  # the most that a rank's pipe holds, and so the most that it has printed when we begin to look


class Member:
    """A rank while its process lives: the process and what this side knows of it.

    Attributes:
        unshown: what it has printed while no run was under way.
        known_files: the student's files that it has the names, and perhaps the lines, of.
        borrowed: for `%%ranks`, what the notebook's names meant when they last travelled, or were assigned there.
    """

    def __init__(self, rank: int, name: str, process: RankProcess) -> None:
        self.rank, self.name, self.process = rank, name, process
        self.channel = Channel(process.sock)
        self.reader = RingReader(process.ring)
        self.unshown = b""
        self.output_open = True
        self.known_files: dict[str, tuple[str, list[str]]] = {}
        self.borrowed: dict[str, Any] = {}


class Crew:
    """One generation of a group's processes.

    Args:
        plan: the group as it was asked for.
        starter: what starts and ends processes.

    Attributes:
        spent: whether the framework has computed in them, and cannot begin anew.
        members: the ranks, in rank order.
        selector: has channels and ends of the members registered, with `(what, member)` as data. Their output is looked at now
            and then instead: to wake up at every print would cost the ranks, which print, more than the notebook.
        notes: what the student should be told once.
        memory_killer: tells whether the kernel has ended a rank because memory was short.

    It exists before its processes do, and they are started and ended on threads of their own: Stop interrupts the waiting, not
    the deed, so there is never a process that nobody knows of. Whoever makes a crew ends it, also where `start` fails.
    """

    def __init__(self, plan: Plan, starter: Starter) -> None:
        self.plan, self._starter = plan, starter
        self.members: list[Member] = []
        self.selector = selectors.DefaultSelector()
        self.notes: list[str] = []
        self.spent = False
        self.memory_killer = MemoryKiller()
        self._burying = threading.Lock()
        self._codes: dict[int, int] = {}
        self._changing = threading.Lock()  # held while processes come into `_processes`, or are taken out to be ended
        self._processes: list[RankProcess] = []
        self._over = False
        self._start_failed: BaseException | None = None

    def start(self) -> None:
        """Start the processes and set them up.

        Raises:
            LabError: the processes did not come up.
            RankError: a rank failed while it was set up.
        """
        with aside(self._start):
            pass
        if self._start_failed is not None:
            raise self._start_failed
        self.members = [Member(i, name, p) for i, (name, p) in enumerate(zip(self.plan.names, self._processes, strict=True))]
        self._set_up(self.plan)

    def _start(self) -> None:
        try:
            processes = self._starter.start(len(self.plan.names))
        except BaseException as error:  # noqa: BLE001  # whoever waits for this thread raises it
            self._start_failed = error
            return
        with self._changing:
            if not self._over:
                self._processes = processes
                return
        self._let_go(processes)  # nobody waits for them any more

    def _set_up(self, plan: Plan) -> None:
        for member in self.members:
            self.selector.register(member.channel, selectors.EVENT_READ, ("frame", member))
            if member.process.sentinel >= 0:
                self.selector.register(member.process.sentinel, selectors.EVENT_READ, ("end", member))
        changes = {
            name: os.environ.get(name)
            for name in self._starter.environment.keys() | os.environ.keys()
            if os.environ.get(name) != self._starter.environment.get(name)
        }
        lend = may_read(self.members[0].process.pid)
        ledger = None if plan.link is None else Parcel(b"", fd=shared_memory(LEDGER_BYTES))
        for member in self.members:
            with contextlib.suppress(OSError):  # as in `_send_all`
                member.channel.send("seat", _seat(plan, member.rank, lend, changes), ledger)
        if ledger is not None:
            ledger.close()
        self._send_all("offers", self._answers("offer"))
        for notes in self._answers("ready"):
            self.notes += notes

    def exchange(self, kind: str, data: Any, parcel: Parcel | None, expected: str) -> list[Any]:
        """Send a frame to every rank, outside a run, and wait until all have answered it: what they say, in rank order."""
        self._send_all(kind, data, parcel)
        return self._answers(expected)

    def _send_all(self, kind: str, data: Any, parcel: Parcel | None = None) -> None:
        for member in self.members:
            with contextlib.suppress(OSError):  # it has just ended; `_answers` will see that, and say why
                member.channel.send(kind, data, parcel)

    def _answers(self, expected: str) -> list[Any]:
        """One frame from every rank, outside a run."""
        answers: dict[int, Any] = {}
        until = time.monotonic() + START_LIMIT_S
        while len(answers) < len(self.members):
            if time.monotonic() > until:
                late = [m.name for m in self.members if m.rank not in answers]
                raise LabError(f"{', '.join(late)} did not answer within {START_LIMIT_S:.0f} s while the group was starting")
            for key, _ in self.selector.select(LOOK_EVERY_S):
                _, member = key.data
                if member.rank not in answers:
                    answers[member.rank] = self._answer(member, expected)
            for member in self.members:
                self._keep_output(member)
        return [answers[m.rank] for m in self.members]

    def _answer(self, member: Member, expected: str) -> Any:
        try:
            frame = member.channel.receive()
        except (EOFError, OSError):
            struck = self.memory_killer.struck()
            headline = explain_exit(self.bury(member), struck)
            self._keep_output(member)
            last = member.unshown.decode(errors="replace").strip().splitlines()[-10:]
            raise RankError([RankFailure(member.rank, member.name, headline, "\n".join(last))]) from None
        if frame.kind == "raised":
            raise RankError([frame.data])
        assert frame.kind == expected, f"{frame.kind!r} where {expected!r} was expected"
        return frame.data

    def printed(self, member: Member) -> Iterator[bytes]:
        """What a rank has printed and nobody has read yet, in pieces; not what it prints meanwhile, which may have no end."""
        count = 0
        while member.output_open and count < PIPE_BYTES:
            try:
                data = os.read(member.process.output, READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                member.output_open = False
                return
            yield data
            count += len(data)
            if len(data) < READ_BYTES:
                return

    def _keep_output(self, member: Member) -> None:
        """Leave it for the next run to show."""
        member.unshown += b"".join(self.printed(member))

    def forget(self, member: Member) -> None:
        """Look no more for frames from a rank, or for its end."""
        for thing in (member.channel, member.process.sentinel):
            with contextlib.suppress(KeyError, ValueError):  # never registered, or no more
                self.selector.unregister(thing)

    def bury(self, member: Member) -> int:
        """The exit code of a rank that has ended, or is ended by this."""
        with self._burying:
            self._codes |= self._starter.end([member.process])
        return self._codes.get(member.process.pid, 0)

    def kill(self) -> None:
        """End the processes and leave the rest to the run that is under way on another thread."""
        with self._burying:
            self._codes |= self._starter.end([m.process for m in self.members])

    def end(self, *, graceful: bool = False, wait: bool = True) -> None:
        """End the processes. Once that has begun, this does nothing.

        Args:
            graceful: let the ranks leave their process group by themselves first.
            wait: until it is done.
        """
        if self._over:
            return
        done = aside(lambda: self._end(graceful))
        if wait:
            with done:
                pass

    def _end(self, graceful: bool) -> None:
        with self._changing:
            first, self._over = not self._over, True
            processes, self._processes = self._processes, []
        if not first:
            return
        if graceful:
            for member in self.members:
                try:
                    member.channel.send("close")
                except OSError:
                    continue  # it has gone already
            self._await_end()
        self._let_go(processes)
        self.selector.close()

    def _let_go(self, processes: Sequence[RankProcess]) -> None:
        if processes:  # else what should have started them may be busy importing
            self._starter.end(processes)
        for process in processes:
            process.close()

    def _await_end(self) -> None:
        left = {m.rank for m in self.members}
        until = time.monotonic() + CLOSE_LIMIT_S
        while left and time.monotonic() < until:
            for key, _ in self.selector.select(max(0.0, until - time.monotonic())):
                _, member = key.data
                left.discard(member.rank)
                self.forget(member)


def _seat(plan: Plan, rank: int, lend: bool, environment: Mapping[str, str | None]) -> Seat:
    return Seat(
        rank,
        plan.names,
        plan.runtime,
        plan.threads,
        plan.devices,
        plan.devices_per_rank,
        plan.jobs,
        tuple(sys.path),
        os.getcwd(),
        lend,
        dict(environment),
        plan.link,
    )
