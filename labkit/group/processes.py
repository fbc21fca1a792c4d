"""The processes of a group: started together, set up together, ended together."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from labkit.costs.shared_link import SHARED_LINK_BYTES
from labkit.errors.exceptions import LabError, RankError, RankFailure
from labkit.errors.exit_reasons import OOMKillCounters, exit_cause, explain_exit
from labkit.errors.lists import listed
from labkit.group.member import Member
from labkit.group.message_loop import MessageLoop
from labkit.group.options import Plan
from labkit.group.output import notebook_shell, put
from labkit.group.stack_dump import crash
from labkit.ipc.definitions import Sent
from labkit.ipc.messages import Message, encode
from labkit.ipc.pickling import Payload, shared_memory
from labkit.ipc.process_memory import may_read
from labkit.worker.edited_modules import Imported, edited
from labkit.worker.launch import RankProcess, Starter, in_background
from labkit.worker.notebook_settings import NotebookSettings, Settings
from labkit.worker.process_state import ProcessState
from labkit.worker.runtimes.base import RankConfig

__all__ = ["RankPool"]

# For all ranks to set up; 0.05 s if forked, but a spawned one may import TensorFlow from a cold disk.
START_LIMIT_S: Final = 180.0
CLOSE_LIMIT_S: Final = 0.5  # for a rank to leave its process group by itself, before it is ended
# A start that takes longer says what it waits for; a lesson's first, whose output is checked, must not.
SLOW_START_S: Final = float(os.environ.get("LABKIT_SLOW_START_S", "20"))  # the variable is for tests of checked output
LOOK_EVERY_S: Final = 0.1  # at what ranks print while they set up: they would be blocked when nobody reads it
LAST_LINES: Final = 10  # of what a rank has printed are shown where it died outside a run


class RankPool:
    """One generation of a group's processes.

    Args:
        plan: the group as it was asked for.
        starter: what starts and ends processes.
        sent: the definitions that the group has sent.
        starts_rpc: whether they are for a program that calls `init_rpc` itself.

    Attributes:
        spent: whether the framework has computed in them, and cannot begin anew.
        used: whether a run has begun in them; `called`: one of a function, and not of a cell.
        unfinished: what a `%%ranks` cell has left unfinished, which a later one may finish; a
            `group.unfinished.Unfinished`.
        members: the ranks, in rank order.
        loop: takes what they send.
        notes: what the student should be told once.
        modules: the student's modules that ranks have imported, by name.
        oom_kills: the kernel's counters of processes killed for lack of memory.

    It exists before its processes do, and they are started and ended on threads of their own: Stop interrupts the
    waiting, not the action, so there is never a process that nobody knows of. Whoever makes a pool ends it, also where
    `start` fails.
    """

    def __init__(self, plan: Plan, starter: Starter, sent: Sent, *, starts_rpc: bool = False) -> None:
        self.plan, self._starter, self.sent, self.starts_rpc = plan, starter, sent, starts_rpc
        self.members: list[Member] = []
        self.loop = MessageLoop()
        self.notes: list[str] = []
        self.spent = self.used = self.called = False
        self.unfinished: Any = None
        self._settings = NotebookSettings()
        self.oom_kills = OOMKillCounters()
        self.modules: dict[str, Imported] = {}
        self._state: ProcessState | None = None
        self._reaping = threading.Lock()
        self._codes: dict[int, int] = {}
        self._changing = threading.Lock()  # held while processes come into `_processes`, or are taken out to be ended
        self._processes: list[RankProcess] = []
        self._over = False
        self._start_failed: BaseException | None = None
        self._slow_s = float("inf")  # on `time.monotonic`, when a start that is under way is told to be slow

    def may_run(self, kind: str, starts_rpc: bool) -> bool:
        """Whether these processes may serve another run.

        Args:
            kind: "call" or "cell"; what cells define stays where it is as long as it can. Where the framework cannot
                begin anew, a function has processes of its own, and cells share theirs until one is called.
            starts_rpc: whether it calls `init_rpc` itself.
        """
        if self.plan.kind.fresh_each_run:
            return not self.used or (kind == "cell" and not self.called)
        if starts_rpc and kind == "call":
            return self.starts_rpc and not self.used
        return not (self.spent and (kind == "call" or starts_rpc))

    def start(self) -> None:
        """Start the processes and set them up.

        Raises:
            LabError: the processes did not come up.
            RankError: a rank failed while it was set up.
        """
        self._state = ProcessState.now()
        self._slow_s = time.monotonic() + SLOW_START_S
        started = in_background(self._start)
        if not started.acquire(timeout=SLOW_START_S):
            self._tell_slow_start()
            started.acquire()
        started.release()
        if self._start_failed is not None:
            raise self._start_failed
        self.members = [Member(i, name, p) for i, (name, p) in enumerate(zip(self.plan.names, self._processes, strict=True))]
        self._set_up(self.plan)
        self._slow_s = float("inf")

    def follow(self) -> list[str]:
        """Have the ranks take over what the notebook's process has changed.

        Returns:
            a line for each edited module that they have as it was.

        Raises:
            LabError: the working folder is no more.
        """
        assert self._state is not None, "ranks that were never set up"
        if not self._state.holds():
            now = ProcessState.now()
            changes = now.since(self._state)
            if changes is not None:
                self._send_all("follow", changes)
                self._state = now
        return edited(self.modules.values())

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
            self.loop.add(member)
        changes = {
            name: os.environ.get(name)
            for name in self._starter.environment.keys() | os.environ.keys()
            if os.environ.get(name) != self._starter.environment.get(name)
        }
        readable = may_read(self.members[0].process.pid)
        shared_link = None if plan.link is None else Payload(b"", fd=shared_memory(SHARED_LINK_BYTES))
        assert self._state is not None
        for member in self.members:
            rank_config = _rank_config(plan, member.rank, readable, changes, self._state, self.starts_rpc)
            with contextlib.suppress(OSError):  # as in `_send_all`
                member.channel.send("rank_config", rank_config, shared_link)
        if shared_link is not None:
            shared_link.close()
        self._send_all("offers", self._answers("offer"))
        for notes in self._answers("ready"):
            self.notes += notes

    def begin(self, on: Sequence[int], kind: str, data: Callable[[int], Any], payload: Payload) -> None:
        """Have ranks begin to run something; what they must know before goes first.

        Args:
            on: which.
            kind: of the message.
            data: what it says to a rank; where that is the object that the rank before got, it is pickled once for
                both.
            payload: what travels with it.
        """
        all_called, last, message = len(on) == len(self.members), None, None
        if gone := self.sent.take_gone():
            for member in self.members:
                member.gone += gone
        for rank in on:
            member, own = self.members[rank], data(rank)
            try:
                if member.gone:
                    member.channel.send("forget", member.gone)
                    member.gone = []
                if message is None or own is not last:
                    last, message = own, encode(kind, (all_called, own), payload)
                member.channel.send_encoded(message)
            except OSError:  # it has just ended; the run will see that, and say why
                pass

    def exchange(self, kind: str, data: Any, payload: Payload | None, expected: str) -> list[Any]:
        """Send a message to every rank, outside a run, and wait for all answers; returns them in rank order."""
        self._send_all(kind, data, payload)
        return self._answers(expected)

    def share_settings(self, pack: Callable[[Settings], Payload]) -> list[str]:
        """Send the notebook's new `logging` and warnings settings to the ranks; returns notes for the student."""
        settings = self._settings.news()
        if settings is None:
            return []
        notes = [f"the logging handler {h} is the notebook's; ranks print their messages instead." for h in settings.replaced]
        try:
            payload = pack(settings)
        except LabError as error:
            payload = pack(settings.plain())
            notes.append(f"ranks log without the notebook's formats: {str(error).splitlines()[0]}")
        try:
            self._send_all("settings", None, payload)  # without an answer, as in `follow`: the next call says what went wrong
        finally:
            payload.close()
        return notes

    def observe(self, *, begin: bool) -> list[str]:
        """Notify all ranks, if serving ones must know, that a run begins or is over; returns notes for the student."""
        if not self.plan.kind.observes_runs:
            return []
        return [note for notes in self.exchange("observe", begin, None, "observed") for note in notes]

    def _send_all(self, kind: str, data: Any, payload: Payload | None = None) -> None:
        for member in self.members:
            with contextlib.suppress(OSError):  # it has just ended; `_answers` will see that, and say why
                member.channel.send(kind, data, payload)

    def _answers(self, expected: str) -> list[Any]:
        """One message from every rank, outside a run."""
        answers = _Answers(self, expected)
        self.loop.run(answers)
        return [answers.data[m.rank] for m in self.members]

    def tell_if_slow(self) -> None:
        """Say once of a start that is under way and takes long what it is waiting for."""
        if time.monotonic() > self._slow_s:
            self._tell_slow_start()

    def _tell_slow_start(self) -> None:
        self._slow_s = float("inf")
        package, seconds = self.plan.kind.package, f"more than {SLOW_START_S:.0f} s"
        if package and self._starter.importing:
            put(f"labkit: importing {package} for the ranks takes {seconds}: a first time, from a disk, it may be a minute\n")
        else:
            put(f"labkit: the ranks take {seconds} to start; this machine is busy\n")

    def death(self, member: Member, *, at_ns: int = 0, last: str = "") -> RankFailure:
        """How a rank's process ended: exit code, OOM killer, where C code crashed, and its prints not yet shown.

        Args:
            member: the rank.
            at_ns: when that was noticed, on `time.perf_counter_ns`.
            last: what it was doing: a sentence.
        """
        oom_kills = self.oom_kills.recent()
        code = self.reap(member)
        printed = member.unshown.decode(errors="replace").strip().splitlines()[-LAST_LINES:]
        text = "\n".join(filter(None, (crash(member.process), *printed)))
        cause = exit_cause(code, oom_kills)
        return RankFailure(member.rank, member.name, explain_exit(code, oom_kills), text, at_ns=at_ns, last=last, cause=cause)

    def reap(self, member: Member) -> int:
        """The exit code of a rank that has ended, or is ended by this."""
        with self._reaping:
            self._codes |= self._starter.end([member.process])
        return self._codes.get(member.process.pid, 0)

    def kill(self) -> None:
        """End the processes and leave the rest to the run that is under way on another thread."""
        with self._reaping:
            self._codes |= self._starter.end([m.process for m in self.members])

    def end(self, *, graceful: bool = False, wait: bool = True) -> None:
        """End the processes. Once that has begun, this does nothing.

        Args:
            graceful: let the ranks leave their process group by themselves first.
            wait: until it is done.
        """
        if self._over:
            return
        done = in_background(lambda: self._end(graceful))
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
            self.loop.run(_Ends(self.members))
        self._let_go(processes)
        self.loop.close()

    def _let_go(self, processes: Sequence[RankProcess]) -> None:
        if processes:  # else what should have started them may be busy importing
            self._starter.end(processes)
        for process in processes:
            process.close()


class _Answers:
    """Takes one answer from every rank, outside a run: see `Receiver`.

    Args:
        pool: the processes.
        kind: of the messages that answer.

    Attributes:
        data: by the number of a rank, what it has answered so far.
    """

    def __init__(self, pool: RankPool, kind: str) -> None:
        self._pool, self._kind = pool, kind
        self._until_s = time.monotonic() + START_LIMIT_S
        self.data: dict[int, Any] = {}

    def pause_s(self) -> float | None:
        for member in self._pool.members:
            member.keep_output()
        if len(self.data) == len(self._pool.members):
            return None
        self._pool.tell_if_slow()
        if time.monotonic() > self._until_s:
            late = listed(m.name for m in self._pool.members if self.expects(m))
            raise LabError(f"{late} did not answer within {START_LIMIT_S:.0f} s while the group was starting")
        return LOOK_EVERY_S

    def expects(self, member: Member) -> bool:
        return member.rank not in self.data

    def message(self, member: Member, message: Message) -> None:
        if message.kind in ("shown", "warned"):  # by a thread that goes on between two runs, or while it is set up
            member.unseen.append((message.kind, message.data))
            return
        if message.kind == "raised":
            raise RankError([message.data])
        assert message.kind == self._kind, f"{message.kind!r} where {self._kind!r} was expected"
        self.data[member.rank] = message.data

    def died(self, member: Member) -> None:
        member.keep_output()
        raise RankError([self._pool.death(member)])


class _Ends:
    """Waits until ranks that were told to have ended by themselves, but not long: see `Receiver`."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._left = {m.rank for m in members}
        self._until_s = time.monotonic() + CLOSE_LIMIT_S

    def pause_s(self) -> float | None:
        left_s = self._until_s - time.monotonic()
        return left_s if self._left and left_s > 0 else None

    def expects(self, _: Member) -> bool:
        return False

    def message(self, _: Member, __: Message) -> None:
        """What a thread shows or warns of now, nobody reads any more."""

    def died(self, member: Member) -> None:
        self._left.discard(member.rank)


def _rank_config(
    plan: Plan, rank: int, readable: bool, environment: Mapping[str, str | None], state: ProcessState, starts_rpc: bool
) -> RankConfig:
    return RankConfig(
        rank,
        plan.names,
        plan.runtime,
        plan.threads,
        plan.devices,
        plan.devices_per_rank,
        plan.jobs,
        state.path,
        state.folder,
        readable,
        dict(environment),
        plan.link,
        notebook_shell() is not None,
        starts_rpc,
        plan.rpc_options,
    )
