"""The processes of a group, which are started, set up and ended together."""

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
from labkit.group.lost_ranks import LostRanks
from labkit.group.member import Member
from labkit.group.message_loop import MessageLoop
from labkit.group.options import Plan
from labkit.group.output import Notice, notebook_shell
from labkit.group.stack_report import crash
from labkit.ipc.definitions import Sent
from labkit.ipc.messages import Message, encode
from labkit.ipc.pickling import Payload, shared_memory
from labkit.ipc.process_memory import may_read
from labkit.launch.starters import RankProcess, Starter, in_background
from labkit.worker.edited_modules import Imported, edited
from labkit.worker.notebook_settings import NotebookSettings, Settings
from labkit.worker.process_state import ProcessState
from labkit.worker.runtimes.base import RankConfig

__all__ = ["SLOW_S", "RankPool"]

# For all ranks to set up: 0.05 s if they are forked, but a spawned rank may import TensorFlow from a cold disk.
START_LIMIT_S: Final = 180.0
CLOSE_LIMIT_S: Final = 0.5  # for a rank to leave its process group by itself, before it is ended
# A start that takes longer says what it waits for, and a run that shows nothing for so long says where its ranks are.
SLOW_S: Final = float(os.environ.get("LABKIT_SLOW_S", "20"))  # the variable is for tests of programs' output
LOOK_EVERY_S: Final = 0.1  # how often output is read while ranks set up: they would block if nobody read it
LAST_LINES: Final = 10  # the last lines of a rank's output, shown if it died outside a run


class RankPool:
    """One generation of a group's processes.

    Args:
        plan: the group as requested.
        starter: starts and ends the processes.
        sent: the definitions that the group has sent.
        starts_rpc: whether the processes are for a program that calls `init_rpc` itself.

    Attributes:
        spent: whether the framework has computed in the processes and cannot be initialized again.
        used: whether a run has begun in the processes.
        called: whether a run of a function, as opposed to a cell, has begun in them.
        unfinished: a `group.unfinished.Unfinished`: the operation that a `%%ranks` cell has left unfinished, and that a
            later cell may finish.
        members: the ranks, in rank order.
        loop: receives what the ranks send.
        notes: notes for the student, to be shown once.
        modules: the student's modules that ranks have imported, by name.
        lost: the ranks whose process has ended, and without which the others went on.
        oom_kills: the kernel's counters of processes killed by the OOM killer.

    A pool exists before its processes do. Separate threads start and end them: Stop interrupts only the waiting, not
    the action, so no process is ever left untracked. Whoever creates a pool must end it, even if `start` fails.
    """

    def __init__(self, plan: Plan, starter: Starter, sent: Sent, *, starts_rpc: bool = False) -> None:
        self.plan, self._starter, self.sent, self.starts_rpc = plan, starter, sent, starts_rpc
        self.members: list[Member] = []
        self.loop = MessageLoop()
        self.notes: list[str] = []
        self.spent = self.used = self.called = False
        self.unfinished: Any = None
        self._settings = NotebookSettings()
        self.lost = LostRanks(plan)
        self.oom_kills = OOMKillCounters()
        self.modules: dict[str, Imported] = {}
        self._state: ProcessState | None = None
        self._reaping = threading.Lock()
        self._codes: dict[int, int] = {}
        self._changing = threading.Lock()  # held while processes are added to `_processes`, or removed to be ended
        self._processes: list[RankProcess] = []
        self._over = False
        self._start_failed: BaseException | None = None
        self._slow_s = float("inf")  # on `time.monotonic`: when a start in progress is reported as slow
        self._slow_notice = Notice()

    def may_run(self, kind: str, starts_rpc: bool) -> bool:
        """Return whether these processes may serve another run.

        The definitions of cells stay in the processes as long as possible. If the framework cannot be initialized
        again, each function call gets new processes, and cells share theirs until a function is called.

        Args:
            kind: "call" (of a function) or "cell".
            starts_rpc: whether the run calls `init_rpc` itself.
        """
        if self.plan.kind.fresh_each_run:
            return not self.used or (kind == "cell" and not self.called)
        if starts_rpc and kind == "call":
            return self.starts_rpc and not self.used
        return not (self.spent and (kind == "call" or starts_rpc))

    def start(self) -> None:
        """Start the processes and set them up.

        Raises:
            LabError: the processes did not start.
            RankError: a rank failed during setup.
        """
        self._state = ProcessState.now()
        self._slow_s = time.monotonic() + SLOW_S
        try:
            self._start_and_set_up()
        finally:
            self._slow_s = float("inf")
            self._slow_notice.clear()

    def _start_and_set_up(self) -> None:
        started = in_background(self._start)
        if not started.acquire(timeout=SLOW_S):
            self._tell_slow_start()
            started.acquire()
        started.release()
        if self._start_failed is not None:
            raise self._start_failed
        self.members = [Member(i, name, p) for i, (name, p) in enumerate(zip(self.plan.names, self._processes, strict=True))]
        self._set_up(self.plan)

    def follow(self) -> list[str]:
        """Apply changes of the notebook's process to the ranks.

        Returns:
            a line for each edited module of which the ranks still have the old version.

        Raises:
            LabError: the working folder no longer exists.
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
        self._let_go(processes)  # the pool has been ended meanwhile

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
        """Start a run on some ranks, after telling them which definitions to forget.

        Args:
            on: the ranks.
            kind: the kind of the message.
            data: returns the message's data for a rank; if that is the same object as for the previous rank, it is
                pickled only once.
            payload: the payload of the message.
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
            except OSError:  # it has just ended; the run will notice and explain it
                pass

    def exchange(self, kind: str, data: Any, payload: Payload | None, expected: str) -> list[Any]:
        """Send a message to every rank, outside a run, wait for all answers and return them in rank order."""
        self._send_all(kind, data, payload)
        return self._answers(expected)

    def share_settings(self, pack: Callable[[Settings], Payload]) -> list[str]:
        """Send the notebook's new `logging` and warnings settings to the ranks; return notes for the student."""
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
            self._send_all("settings", None, payload)  # without an answer, as in `follow`: the next call reports errors
        finally:
            payload.close()
        return notes

    def observe(self, *, begin: bool) -> list[str]:
        """Notify all ranks, if serving ones must know, that a run begins or is over; return notes for the student."""
        if not self.plan.kind.observes_runs:
            return []
        return [note for notes in self.exchange("observe", begin, None, "observed") for note in notes or ()]

    def _send_all(self, kind: str, data: Any, payload: Payload | None = None) -> None:
        for member in self.members:
            with contextlib.suppress(OSError):  # it has just ended; `_answers` will notice and explain it
                member.channel.send(kind, data, payload)

    def _answers(self, expected: str) -> list[Any]:
        """Return one message from every rank, outside a run."""
        answers = _Answers(self, expected)
        self.loop.run(answers)
        return [answers.data.get(m.rank) for m in self.members]

    def tell_if_slow(self) -> None:
        """If a start in progress takes long, say once what it is waiting for."""
        if time.monotonic() > self._slow_s:
            self._tell_slow_start()

    def _tell_slow_start(self) -> None:
        self._slow_s = float("inf")
        package, seconds = self.plan.kind.package, f"more than {SLOW_S:.0f} s"
        if package and self._starter.importing:
            slow = f"importing {package} for the ranks takes {seconds}; the first time, from disk, it may take a minute"
        else:
            slow = f"the ranks take {seconds} to start; this machine is busy"
        self._slow_notice.show(f"labkit: {slow}")

    def death(self, member: Member, *, at_ns: int = 0, last: str = "") -> RankFailure:
        """Explain how a rank's process ended: exit code, OOM killer, location of a C crash, and output not yet shown.

        Args:
            member: the rank.
            at_ns: when its end was noticed, on `time.perf_counter_ns`.
            last: a sentence that says what the rank was doing.
        """
        oom_kills = self.oom_kills.recent()
        code = self.reap(member)
        printed = member.unshown.decode(errors="replace").strip().splitlines()[-LAST_LINES:]
        text = "\n".join(filter(None, (crash(member.process), *printed)))
        cause = exit_cause(code, oom_kills)
        return RankFailure(member.rank, member.name, explain_exit(code, oom_kills), text, at_ns=at_ns, last=last, cause=cause)

    def reap(self, member: Member) -> int:
        """Reap a rank's process, ending it first if necessary, and return its exit code."""
        with self._reaping:
            self._codes |= self._starter.end([member.process])
        return self._codes.get(member.process.pid, 0)

    def kill(self) -> None:
        """End the processes and leave the rest to the run in progress on another thread."""
        with self._reaping:
            self._codes |= self._starter.end([m.process for m in self.members])

    def end(self, *, graceful: bool = False, wait: bool = True) -> None:
        """End the processes. Further calls do nothing.

        Args:
            graceful: first let the ranks leave their process group by themselves.
            wait: whether to wait until the processes have ended.
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
                    continue  # it is already gone
            self.loop.run(_Ends(self.members))
        self._let_go(processes)
        self.loop.close()

    def _let_go(self, processes: Sequence[RankProcess]) -> None:
        if processes:  # if there are none, the starter may be busy importing
            self._starter.end(processes)
        for process in processes:
            process.close()


class _Answers:
    """Receives one answer from every rank, outside a run; see `Receiver`.

    Args:
        pool: the processes.
        kind: the kind of the messages that are answers.

    Attributes:
        data: the answers received so far, by rank number.
    """

    def __init__(self, pool: RankPool, kind: str) -> None:
        self._pool, self._kind = pool, kind
        self._until_s = time.monotonic() + START_LIMIT_S
        self.data: dict[int, Any] = {}

    def pause_s(self) -> float | None:
        for member in self._pool.members:
            member.keep_output()
        if not any(map(self.expects, self._pool.members)):
            return None
        self._pool.tell_if_slow()
        if time.monotonic() > self._until_s:
            late = listed(m.name for m in self._pool.members if self.expects(m))
            raise LabError(f"{late} did not answer within {START_LIMIT_S:.0f} s while the group was starting")
        return LOOK_EVERY_S

    def expects(self, member: Member) -> bool:
        return member.rank not in self.data and member.rank not in self._pool.lost

    def message(self, member: Member, message: Message) -> None:
        if message.kind in ("shown", "warned"):  # from a thread that keeps running between two runs, or during setup
            member.unseen.append((message.kind, message.data))
            return
        if message.kind == "raised":
            raise RankError([message.data])
        assert message.kind == self._kind, f"{message.kind!r} where {self._kind!r} was expected"
        self.data[member.rank] = message.data

    def died(self, member: Member) -> None:
        member.keep_output()
        if member.rank not in self._pool.lost:
            raise RankError([self._pool.death(member)])


class _Ends:
    """Waits briefly for ranks that were told to end by themselves; see `Receiver`."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._left = {m.rank for m in members}
        self._until_s = time.monotonic() + CLOSE_LIMIT_S

    def pause_s(self) -> float | None:
        left_s = self._until_s - time.monotonic()
        return left_s if self._left and left_s > 0 else None

    def expects(self, _: Member) -> bool:
        return False

    def message(self, _: Member, __: Message) -> None:
        """Discard the message: what a thread displays or warns of now, nobody reads."""

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
