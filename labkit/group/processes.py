"""The processes of a group, which are started, set up and ended together."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, TypeVar

from labkit.costs.shared_link import SHARED_LINK_BYTES
from labkit.errors.exceptions import LabError, RankError, RankFailure
from labkit.errors.exit_reasons import OOMKillCounters, explain_exit
from labkit.errors.lists import counted, listed
from labkit.group.deadlock_words import crash
from labkit.group.message_loop import MessageLoop
from labkit.group.output import Notice, notebook_shell
from labkit.group.pool_state import LostRanks, Member, Phase, PoolState, Request
from labkit.group.unfinished import Unfinished, still_unfinished
from labkit.ipc import protocol
from labkit.ipc.options import Options, Place
from labkit.ipc.pickling import Payload, Sent, shared_memory
from labkit.ipc.protocol import Message
from labkit.launch.rank_process import RankProcess
from labkit.launch.resource_usage import Load
from labkit.launch.starters import Question, Starter, in_background
from labkit.recording.cores import usable_cores
from labkit.worker.process_state import NotebookFilters, ProcessState, edited
from labkit.worker.runtimes.base import Runtime

# For all ranks to set up: 0.05 s if they are forked, but a spawned rank may import TensorFlow from a cold disk.
START_LIMIT_S: Final = 180.0
# A run that shows nothing for so long says where its ranks are. The variable is for tests of programs' output.
SLOW_S: Final = float(os.environ.get("LABKIT_SLOW_S", "20"))
STARTING_S: Final = SLOW_S if "LABKIT_SLOW_S" in os.environ else 3.0  # a start that takes longer says what it waits for
SILENT_NS: Final = 1_000_000_000  # a machine that has not reported for so long: it does so four times a second
READ_EVERY_S: Final = 0.1  # how often output is read while ranks set up: they would block if nobody read it
LAST_LINES: Final = 10  # the last lines of a rank's output, shown if it died outside a run

_Reply = TypeVar("_Reply", bound=Message)
_Answer = TypeVar("_Answer")


class RankPool:
    """One generation of a group's processes.

    A pool exists before its processes do. Separate threads start and end them: Stop interrupts only the waiting, not
    the action, so no process is ever left untracked. Whoever creates a pool must end it, even if `start` fails.
    """

    def __init__(self, options: Options, kind: type[Runtime], starter: Starter, sent: Sent, *, starts_rpc: bool = False) -> None:
        self.options, self.kind, self._starter, self.sent, self._starts_rpc = options, kind, starter, sent, starts_rpc
        self.state = PoolState(kind, starts_rpc=starts_rpc)
        self.members: list[Member] = []
        self.loop = MessageLoop()
        self.notes: list[str] = []  # for the student, to be shown once
        self.unfinished: Unfinished | None = None  # what a `%%ranks` cell has left, and a later cell may finish
        self._filters = NotebookFilters()
        self.lost = LostRanks(options, kind)  # those that have ended, and without which the others went on
        self.oom_kills = OOMKillCounters()
        self._restarts = 0  # what the ranks have been told: how many times all ranks were replaced in their run
        self.cores = usable_cores()  # how many the ranks share
        self.modules: dict[tuple[str, str], protocol.ImportedModule] = {}  # of the student, by name and machine
        self._copied: ProcessState | None = None  # the state of this process that the ranks have
        self._changing = threading.Lock()  # held while processes are added to `_processes`, or removed to be ended
        self._processes: list[RankProcess] = []
        self._start_failed: BaseException | None = None
        self._slow_s = float("inf")  # on `time.monotonic`: when a start in progress is reported as slow
        self._slow_notice = Notice()

    def may_serve(self, request: Request) -> bool:
        """Whether these processes may serve a run. Prints the reason if a cell has left an operation unfinished."""
        if not self.state.may_serve(request):
            return False
        left = None if request.cell else still_unfinished(self.unfinished, self.members)
        if left is not None:
            print(f"labkit: {left.before_a_run()}")
        return left is None

    @property
    def machines(self) -> set[str]:
        """The names of the machines that the ranks are on; empty for this one."""
        return {member.process.place.machine for member in self.members if member.process.place is not None}

    def silent(self, now_ns: int) -> dict[int, int]:
        """Return the ranks whose machine does not answer, with the time of its last report."""
        reported = {member.rank: member.process.reported_ns(now_ns) for member in self.members}
        return {rank: at_ns for rank, at_ns in reported.items() if now_ns - at_ns > SILENT_NS}

    def start(self) -> None:
        """Start the processes and set them up. LabError: they did not start; RankError: a rank failed during setup."""
        self._copied = ProcessState.now()
        self._slow_s = time.monotonic() + STARTING_S
        try:
            started = in_background(self._start)
            if not started.acquire(timeout=STARTING_S):
                self.tell_if_slow()
                started.acquire()
            started.release()
            if self._start_failed is not None:
                raise self._start_failed
            self.notes += self._starter.notes
            named = zip(self.options.names, self._processes, strict=True)
            self.members = [Member(i, name, process) for i, (name, process) in enumerate(named)]
            self._set_up()
            self.state.set_up()
        finally:
            self._slow_s = float("inf")
            self._slow_notice.clear()

    def follow(self) -> list[str]:
        """Apply changes of the notebook's process to the ranks; return what the student must know about them."""
        assert self._copied is not None, "ranks that were never set up"
        if not self._copied.holds():
            now = ProcessState.now()
            changes = now.since(self._copied)
            if changes is not None:
                self.tell(changes)
                self._copied = now
        notes = edited(self.modules.values())
        if logging.getLogger().level < logging.WARNING:
            notes.append("ranks do not have the notebook's logging: call logging.basicConfig(...) in the function that they run.")
        return notes

    def _start(self) -> None:
        try:
            processes = self._starter.start(len(self.options.names))
        except BaseException as error:  # noqa: BLE001  # whoever waits for this thread raises it
            self._start_failed = error
            return
        with self._changing:
            if self.state.phase is not Phase.CLOSED:
                self._processes = processes
                return
        self._let_go(processes)  # the pool has been ended meanwhile

    def _set_up(self) -> None:
        for member in self.members:
            self.loop.add(member)
        changes = {
            name: os.environ.get(name)
            for name in self._starter.environment.keys() | os.environ.keys()
            if os.environ.get(name) != self._starter.environment.get(name)
        }
        by_machine: dict[str, tuple[float, list[int]]] = {}
        for member in self.members:
            place = member.process.place
            machine, cores = ("", self.cores) if place is None else (place.machine, place.cores)
            by_machine.setdefault(machine, (cores, []))[1].append(member.rank)
        self.cores = sum(cores for cores, _ in by_machine.values())
        shared_link = None if self.options.link is None else Payload(b"", fd=shared_memory(SHARED_LINK_BYTES))
        assert self._copied is not None
        config = protocol.RankConfig(
            rank=-1,
            options=self.options,
            path=self._copied.path,
            folder=self._copied.folder,
            environment=changes,
            rich=notebook_shell() is not None,
            starts_rpc=self._starts_rpc,
            shares_cores=any(len(ranks) > cores for cores, ranks in by_machine.values()),
            payload=shared_link,
        )
        for member in self.members:
            place = member.process.place or Place.here(member.rank, config.size)
            own = dataclasses.replace(config, rank=member.rank, place=place, readable_memory=member.process.readable)
            with contextlib.suppress(OSError):  # as in `tell`
                member.channel.send(own)
        if shared_link is not None:
            shared_link.close()
        self.tell(protocol.Offers(self._answers(protocol.Offer)))
        for done in self._answers(protocol.Done):
            self.notes += done.notes

    def begin(self, on: Sequence[int], message: Callable[[Member], Message]) -> None:
        """Start a run on some ranks, after telling them which definitions to forget.

        `message` returns the message for a rank; one that several ranks get is pickled once.
        """
        last: Message | None = None
        frame: protocol.Frame | None = None
        if gone := self.sent.take_gone():
            for member in self.members:
                member.gone += gone
        for rank in on:
            member = self.members[rank]
            own = message(member)
            try:
                if member.gone:
                    member.channel.send(protocol.Forget(member.gone))
                    member.gone = []
                if frame is None or own is not last:
                    last, frame = own, protocol.encode(own)
                member.channel.send_frame(frame)
            except OSError:  # it has just ended; the run will notice and explain it
                pass

    def exchange(self, request: Message, reply: type[_Reply]) -> list[_Reply]:
        """Send a request to every rank, outside a run, wait for all replies and return them in rank order."""
        self.tell(request)
        return self._answers(reply)

    def profiled(self) -> list[list[Any]]:
        """Stop torch's profiler; return the events of each rank, with times of this process's clock."""
        replies = self.exchange(protocol.Profile(begin=False), protocol.Profiled)
        heres = [member.process.clock.here for member in self.members]
        return [
            [(*names, here(start_ns), here(end_ns)) for *names, start_ns, end_ns in reply.events]
            for reply, here in zip(replies, heres, strict=True)
        ]

    def share_filters(self, pack: Callable[[Any], Payload]) -> None:
        """Send the notebook's filters of warnings to the ranks if they have changed."""
        filters = self._filters.news()
        if filters is None:
            return
        payload = pack(filters)
        try:
            self.tell(protocol.NewFilters(payload))  # without an answer, as in `follow`: the next call reports errors
        finally:
            payload.close()

    def tell_restarts(self, count: int) -> None:
        """Tell the ranks how many times all ranks have been replaced in the run that begins, if they do not know."""
        if count != self._restarts:
            self._restarts = count
            self.tell(protocol.Restarted(count))

    def observe(self, *, begin: bool) -> list[str]:
        """Notify all ranks, if serving ones must know, that a run begins or is over; return notes for the student."""
        if not self.kind.observes_runs:
            return []
        return [note for done in self.exchange(protocol.Observe(begin), protocol.Done) for note in done.notes]

    def ask(self, question: Question[_Answer], members: Sequence[Member]) -> Sequence[_Answer]:
        """Ask a question about the processes of some ranks; return the answer for each."""
        return self._starter.ask(question, [member.process for member in members])

    def catch_up(self) -> bool:
        """Wait until all that ranks have recorded and printed so far can be read; return whether it can."""
        return self._starter.catch_up([member.process for member in self.members if member.process.ended is None])

    def monitor(self) -> Callable[[int], tuple[Load, ...]]:
        """Return what samples the load of the ranks."""
        return self._starter.monitor([member.process for member in self.members], self.options.devices)

    def tell(self, message: Message) -> None:
        """Send a message to every rank, and wait for nothing."""
        frame = protocol.encode(message)
        for member in self.members:
            with contextlib.suppress(OSError):  # it has just ended; `_answers` will notice and explain it
                member.channel.send_frame(frame)

    def _answers(self, expected: type[_Reply]) -> list[_Reply]:
        answers = _Answers(self, expected)
        self.loop.run(answers)
        return [reply for _, reply in sorted(answers.replies.items())]

    def tell_if_slow(self) -> None:
        """If a start in progress takes long, say once what it is waiting for."""
        if time.monotonic() < self._slow_s:
            return
        self._slow_s = float("inf")
        doing = self._starter.waiting_for
        if not doing and self.kind.package and self._starter.importing:
            doing = f"importing {self.kind.package}, which may take a minute the first time"
        self._slow_notice.show(f"labkit: starting {counted(len(self.options.names), 'rank')}{doing and f': {doing}'} ...")

    def death(self, member: Member, *, at_ns: int = 0, last: str = "", ago_ns: int = 0) -> RankFailure:
        """Explain how a rank's process ended: exit code, OOM killer, location of a C crash, and output not yet shown.

        Its end was noticed at `at_ns`, on `time.perf_counter_ns`. The sentence `last` says what it was doing at its
        last report, `ago_ns` before that.
        """
        oom_kills = self.oom_kills.recent() if member.process.place is None else ""
        (end,) = self._starter.end([member.process])
        oom_kills = oom_kills or end.oom_kills
        printed = member.unshown.decode(errors="replace").strip().splitlines()[-LAST_LINES:]
        text = "\n".join(filter(None, (crash(end.crash), *printed)))
        cause, headline = explain_exit(end.code, oom_kills, end.lost)
        if end.lost and last:  # it may have gone on since
            doing = f"{last[0].lower()}{last[1:]}".replace("it was", "it had been", 1)
            last = f"By its last report, {ago_ns / 1e9:.1f} s earlier, {doing}"
        return RankFailure(member.rank, member.name, headline, text, at_ns=at_ns, last=last, cause=cause)

    def kill(self) -> None:
        """End the processes at once, and leave the rest to the run in progress."""
        self._starter.end([m.process for m in self.members])

    def end(self, *, wait: bool = True) -> None:
        """End the processes. Further calls do nothing."""
        if self.state.phase is Phase.CLOSED:
            return
        done = in_background(self._end)
        if wait:
            with done:
                pass

    def _end(self) -> None:
        with self._changing:
            first = self.state.close()
            processes, self._processes = self._processes, []
        if not first:
            return
        self._let_go(processes)
        self.loop.close()

    def _let_go(self, processes: Sequence[RankProcess]) -> None:
        if processes:  # if there are none, the starter may be busy importing
            self._starter.end(processes)
        for process in processes:
            process.close()


class _Answers(Generic[_Reply]):
    """Receives one reply from every rank, outside a run; see `Receiver`."""

    def __init__(self, pool: RankPool, expected: type[_Reply]) -> None:
        self._pool, self._expected = pool, expected
        self._until_s = time.monotonic() + START_LIMIT_S
        self.replies: dict[int, _Reply] = {}

    def pause_s(self) -> float | None:
        for member in self._pool.members:
            member.keep_output()
        if not any(map(self.expects, self._pool.members)):
            return None
        self._pool.tell_if_slow()
        if time.monotonic() > self._until_s:
            late = listed(m.name for m in self._pool.members if self.expects(m))
            raise LabError(f"{late} did not answer within {START_LIMIT_S:.0f} s")
        return READ_EVERY_S

    def expects(self, member: Member) -> bool:
        return member.rank not in self.replies and member.rank not in self._pool.lost

    def message(self, member: Member, message: Message) -> None:
        if isinstance(
            message, protocol.Displayed | protocol.Warned
        ):  # from a thread that keeps running between two runs, or during setup
            member.unseen.append(message)
            return
        if isinstance(message, protocol.Raised):
            raise RankError([message.failure])
        assert isinstance(message, self._expected), f"{message} where {self._expected.__name__} was expected"
        self.replies[member.rank] = message

    def died(self, member: Member) -> None:
        member.keep_output()
        if member.rank not in self._pool.lost:
            raise RankError([self._pool.death(member)])
