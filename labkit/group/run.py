"""One run: in progress (`Execution`, which receives what ranks send) and completed (`Run`: plain data)."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from labkit.errors.exceptions import DeadlockError, LabError, RankError, RankFailure, RunError, RunTimeoutError, Stopped
from labkit.errors.exit_reasons import Cause
from labkit.errors.library_hints import library_hint
from labkit.errors.lists import these
from labkit.group import breakpoints
from labkit.group.collector import Picture, Records
from labkit.group.deadlock import PARTED, Deadlock, first_mismatch
from labkit.group.deadlock_monitor import DeadlockMonitor
from labkit.group.deadlock_words import deadlock_in_words, doing, serving_for_ever
from labkit.group.mismatches import mismatch_error, mismatch_hint, shapes_note, unlike_exchange
from labkit.group.output import Output, put
from labkit.group.pool_state import Member
from labkit.group.processes import RankPool
from labkit.group.unfinished import Unfinished, left_unfinished, may_go_on
from labkit.ipc import pickling, protocol
from labkit.ipc.protocol import Message
from labkit.ipc.tracebacks import unreadable
from labkit.launch.frames import StackFrame
from labkit.launch.resource_usage import Cores, Load
from labkit.recording.cores import machine_load
from labkit.recording.operations import SERVE
from labkit.recording.rank_facts import Fact
from labkit.recording.schema import Pending
from labkit.tracing.silent_faults import SilentFault
from labkit.tracing.trace import Trace, about_names
from labkit.tracing.verdict import faults_of
from labkit.worker.debugger import quit_failure

LOOK_EVERY_S: Final = 0.05  # between reads of rings and prints; the fastest writer needs twice as long to fill a ring
FULL_BYTES: Final = 1 << 15  # a rank that has printed this much since the last read may soon block: read again at once
# After the first failure, the time in which the other ranks may return or fail before they are stopped.
GRACE_S: Final = 0.1  # usually
LEFT_S: Final = 1.0  # if a rank has left its prompt for good: it may end by itself, and then keeps its state
CAUSE_S: Final = 0.4  # if all failures are lost connections: another rank may still report the cause
DEATH_S: Final = 5.0  # if also a process is about to end: its death is certainly the cause


class Run:
    """A completed run, or, as the attribute `run` of an error, what had happened of a run until then.

    Attributes:
        results: the function's return values, one for each rank that called it, in rank order; None if it has none.
        output: the printed lines, in rank order.
        ranks: the names of the ranks that called it.
        facts: by rank, what it has noted for `labkit.verdict`.
        load: the load average of this machine over the minute before the end.
    """

    def __init__(
        self, name: str, ranks: tuple[str, ...], results: list[Any], records: Records, profiled: Sequence[list[Any]],
        facts: Mapping[int, Sequence[Fact]]
    ) -> None:  # fmt: skip
        self._name, self.ranks, self.results, self.output = name, ranks, results, ""
        self._records, self._profiled, self.facts = records, profiled, facts
        self.load = machine_load()
        self._trace: Trace | None = None

    @property
    def trace(self) -> Trace:
        """The spans of all ranks on one clock."""
        if self._trace is None:
            self._trace = self._records.trace(self._profiled)
        return self._trace

    def __repr__(self) -> str:
        return f"<Run of {self._name} on {these(self.ranks)}>"


class Execution:
    """A run in progress. Everything happens on the thread that called `run`.

    What can go wrong, and the tests that show it; those without a file are in `tests/group/test_faults.py`:

    - A rank fails while others wait for it. They get a short time to return or to report what they see, and are then
      stopped (`test_one_rank_raises_while_the_others_wait_for_it`).
    - A rank dies. Others may report "connection closed" before its end is noticed, so consequences wait for a cause
      (`test_the_death_of_a_rank_is_reported_before_broken_connections`).
    - A rank dies after it has answered. Others may still need it, so this is a failure, too
      (`test_a_rank_that_dies_after_it_has_returned`), and a large result in its memory is lost with it
      (`test_pickling.py`: `test_a_rank_that_dies_before_its_result_is_read`).
    - A rank is late because it got no core, not because it hangs
      (`test_a_rank_without_a_core_since_another_failed_is_waited_for`).
    - A rank prints more than its pipe holds, and blocks until somebody reads
      (`test_output.py`: `test_100_000_lines_of_each_rank`).
    - Ranks wait for one another (`test_deadlock_run.py`), or all serve the others for ever, and none returns.
    - A person debugs a rank (`test_breakpoints.py`). Then no time counts, and the others do not wait in vain.
    - All return, and the results are wrong (`test_mismatches.py`), or something is left for the next run to meet
      (`test_unfinished.py`).
    - Stop comes at any moment (`test_stop.py`), or another thread closes the group (`test_lifetime.py`). Then, as after
      each failure that leaves ranks in an unknown state, the pool is spent and its processes end.
    """

    def __init__(
        self, pool: RankPool, on: Sequence[int], name: str, picture: Picture | None, called: StackFrame | None = None,
        failed: Execution | None = None
    ) -> None:  # fmt: skip
        self._pool, self._members = pool, pool.members
        self._on, self._name, self._picture = tuple(on), name, picture
        self._names = tuple(m.name for m in self._members)
        self._starts_again = failed is not None  # after an attempt that has failed, and on fresh ranks
        self._output: Output = Output(self._names) if failed is None else failed._output
        earlier = None if failed is None else failed._records
        self._records: Records = Records(self._members, pool.options.link, pool.cores, earlier)
        self.failed: RankFailure | None = None  # why this attempt is to be followed by another one
        self._results: dict[int, Any] = {}
        self._facts: dict[int, list[Fact]] = {}  # by rank, what it has noted
        self._failures: dict[int, RankFailure] = {}
        self._exits: dict[int, RankFailure] = {}  # of ranks that called `exit(0)`; failures if others return values
        self._serving: set[int] = set()  # ranks that were called, and serve the others until these have returned
        self._released = False  # whether the serving ranks have been told to stop
        self._dead: set[int] = set()  # ranks whose process has ended
        self._breakpoints = breakpoints.Breakpoints()
        self._quit: dict[int, RankFailure] = {}  # ranks at whose prompt the student has typed `q`
        self._monitor = DeadlockMonitor(pool, self._on, self._records, self._results, self._failures, self._serving, called)
        self._loads: Callable[[int], Sequence[Load]] | None = None
        if picture is not None:  # slow: finding GPUs takes a fifth of the time of an empty run, starting NVML milliseconds
            self._loads = pool.monitor()
        self.notes: list[str] = []  # for the student, after a successful run
        self.faults: list[SilentFault] = []  # what makes the run's numbers wrong, as far as it is found
        self.unfinished: Unfinished | None = None
        # Whether any rank has communicated or left an operation unfinished, as the ranks report when they return.
        self._communicated, self._unfinished = False, pool.kind.serving_threads > 0
        self._deadline_s: float | None = None
        self._debugged_s: float | None = None  # until when the time since a rank is at a breakpoint has been taken out
        self._looked_s = self._pictured_s = self._recorded_s = 0.0
        self._hurry = False  # whether a rank prints so much that its output must be read without a pause
        self._failed_s = 0.0  # when the first failure was reported, or when the student was last asked after it
        self._announced = False  # whether the student knows of it at a prompt
        self._cores = Cores([])
        self._start_ns = time.perf_counter_ns()  # before any rank is called: nothing of this run happens earlier

    def wait(self, deadline_s: float | None, *, profile: bool = False, may_restart: bool = False) -> Run | None:
        """Receive messages until every rank that was called has answered; return the completed run.

        The deadline is on `time.monotonic`'s clock. If the run `may_restart`, return None where a rank has failed and
        another attempt on fresh ranks is to follow.

        Raises:
            RankError: a rank failed, or keeps the others waiting for ever.
            DeadlockError: the ranks wait for one another, or all of them serve for ever.
            MismatchError: ranks gave different arguments to an operation, so that its result is wrong.
            RunTimeoutError: the deadline has passed.
            Stopped: the student pressed Stop.
        """
        for member in self._members:
            if member.unshown:
                self._output.feed(member.rank, member.unshown)
                member.unshown = b""
            while member.unseen:
                self._output.take(member.rank, member.unseen.pop(0))
        if self._picture is not None and self._starts_again:
            self._picture.restart(self._start_ns)
        elif self._picture is not None:
            title = f"{self._name} on {these([self._names[i] for i in self._on])}"
            self._picture.begin(tuple(m.label for m in self._members), title, self._start_ns, self._on)
        self._deadline_s = deadline_s
        self._looked_s = self._pictured_s = self._recorded_s = time.monotonic()
        try:
            self._pool.loop.run(self)
            if self._quit and self._unanswered():  # the program may have caught what should have ended it
                self._pool.state.spend()
            self._failures |= self._quit | self._failures
            if any(result is not None for result in self._results.values()):
                self._failures |= self._exits
            if not self._failures:
                if self._serving or len(self._on) < len(self._members) or self._pool.kind.serving_threads:
                    self._pool.catch_up()  # ranks that serve have sent nothing since their last record
                self.notes += self._pool.lost.notes(self._start_ns) + self._pool.observe(begin=False)
                self._check_arguments()
        except KeyboardInterrupt:
            self._pool.state.spend()  # first: Stop may be pressed again
            stop = Stopped(self._name, self._doings_with_lines())
            stop.run = self._finish("stopped")
            raise stop from None
        except BaseException as error:
            self._pool.state.spend()
            run = self._finish("stopped by an error")
            if isinstance(error, RunError):
                error.run = run
            raise
        if self._failures:
            failed = self._error()
            for failure in failed.failures:
                self._records.end(failure.rank, failure.at_ns)
            if may_restart and not self._quit:
                self.failed = failed.failures[0]
                if self._picture is not None:
                    self._show(self._picture)  # all of this attempt
                self._pool.state.spend()
                self._close("failed")
                self._output.complete()
                return None
            failed.run = self._finish("stopped by an error")
            raise failed
        if self._unfinished and not self._pool.kind.fresh_each_run:
            self.unfinished = left_unfinished(self._members, self._records)
        run = self._finish(profile=profile)
        self.notes += about_names(kind for m in self._members for kind in m.reader.no_room)
        self.faults = faults_of(run, run.trace.last_attempt() if self._communicated or self._unfinished else None)
        return run

    def _check_arguments(self) -> None:
        unequal, transposed = self._records.unequal() if self._communicated else ([], [])
        if unequal:
            sides = first_mismatch([(self._names.index(name), p) for name, p in unequal])
            raise mismatch_error(unequal, self._monitor.parting(sides)[0])
        if transposed:
            self.notes.append(shapes_note(transposed))

    def pause_s(self) -> float | None:
        """See `Receiver`: read output and records, and check for deadlocks and time limits, each when it is due."""
        now = time.monotonic()
        if self._deadline_s is not None and self._debugged_s is not None:
            self._deadline_s += now - self._debugged_s
        self._debugged_s = now if self._breakpoints.stopped - self._breakpoints.done else None
        asking = bool(self._failures) and self._breakpoints.busy(now) and not self._any_exiting()
        if asking or ((self._failures or self._quit) and not self._failed_s):
            self._breakpoints.last_call()
            self._failed_s, self._cores = now, Cores([m.process for m in self._members])
        late = self._unanswered()
        if not late and not self._end_to_come():
            return None
        if (
            self._failed_s
            and now - self._failed_s > self._grace_s()
            and not self._cores.lacked((self._members[rank].process for rank in late), GRACE_S / 2)
        ):
            return None
        if self._deadline_s is not None and now > self._deadline_s:
            headline = f"{self._name} took longer than the group's timeout_s={self._pool.options.timeout_s:g}"
            raise RunTimeoutError(headline, self._monitor.notice, self._doings_with_lines())
        if now - self._looked_s > LOOK_EVERY_S or self._hurry:
            self._looked_s = now
            self._hurry = max(self._read_output(m) for m in self._members) >= FULL_BYTES
            self._drain()
            if not asking and not self._breakpoints.texts:  # otherwise ranks may wait for one that a person debugs
                self._look_for_stuck(time.perf_counter_ns())
            self._pool.oom_kills.sample(now)
        if self._picture is not None and now - self._pictured_s > self._picture.interval_s:
            self._show(self._picture)
        self._output.refresh()
        if (rank := self._breakpoints.next(now)) is not None and not self._any_exiting():
            self._ask(self._members[rank])
        return 0 if self._hurry else GRACE_S / 10 if self._failed_s else LOOK_EVERY_S

    def _drain(self) -> None:
        if any(len(fresh) for fresh in self._records.drain()):
            self._recorded_s = time.monotonic()

    def _ask(self, member: Member) -> None:
        self._drain()
        if self._picture is not None:
            self._show(self._picture)
            self._picture.hold(self._breakpoints.texts.keys())
        self._output.show()
        if self._failures and not self._announced and breakpoints.can_ask():
            self._announced = True
            put(f"labkit: {next(iter(self._failures.values()))}. The run ends when the ranks at breakpoints have continued.\n")
        try:
            text = self._breakpoints.texts[member.rank]
            line = None if breakpoints.NOBODY in self.notes else breakpoints.ask(member, text)
            if self._any_exiting():  # a rank has ended while the student thought
                return
            member.channel.send(protocol.Command(line))
        except OSError:  # a rank has ended, which the loop will report
            return
        except KeyboardInterrupt:
            self._breakpoints.close()
            self._catch_up()
            if not self._failures:
                raise
            return
        self._breakpoints.asked(member.rank)
        if line is None and breakpoints.NOBODY not in self.notes:
            self.notes.append(breakpoints.NOBODY)
        self._output.show()

    def _any_exiting(self) -> bool:
        """Whether a process is about to end, or has just ended."""
        return any(m.process.status().exiting for m in self._members if m.rank not in self._dead)

    def _catch_up(self) -> None:
        """Receive what has arrived while the student thought: Stop must not hide that a rank has failed meanwhile."""
        until_s = time.monotonic() + GRACE_S
        while self._pool.loop.poll(self) and time.monotonic() < until_s:
            pass

    def _grace_s(self) -> float:
        if (self._quit.keys() | self._breakpoints.done) & self._unanswered():
            return LEFT_S
        if any(not f.consequence for f in (self._quit | self._failures).values()):
            return GRACE_S
        return DEATH_S if self._end_to_come() else CAUSE_S

    def _end_to_come(self) -> bool:
        """Whether all failures are lost connections, and a process, perhaps one that only serves, is about to end."""
        if not self._failures or any(not f.consequence for f in self._failures.values()):
            return False
        return any(m.process.status().exiting for m in self._members if m.rank not in self._dead and m.rank not in self._failures)

    def _look_for_stuck(self, now_ns: int) -> None:
        silent_s = self._output.silent_s
        if self._picture is not None:  # it has shown what was recorded
            silent_s = min(silent_s, time.monotonic() - self._recorded_s)
        deadlock = self._monitor.check(now_ns, silent_s)
        self._output.say(self._monitor.notice or self._monitor.silence)
        if deadlock is not None:
            raise self._deadlock_error(deadlock)

    def _show(self, picture: Picture) -> None:
        assert self._loads is not None
        now_ns, pending = time.perf_counter_ns(), [m.reader.pending() for m in self._members]
        picture.update(now_ns, self._records.unshown(), pending, self._loads(now_ns), self._pool.silent(now_ns))
        self._pictured_s = time.monotonic()

    def _unanswered(self) -> set[int]:
        return set(self._on).difference(self._results, self._failures, self._pool.lost)

    def expects(self, member: Member) -> bool:
        """See `Receiver`."""
        return not any(member.rank in ranks for ranks in (self._results, self._failures, self._pool.lost))

    def message(self, member: Member, message: Message) -> None:
        """See `Receiver`: handle a message. EOFError: the rank is gone, and with it the shared memory of its result."""
        if isinstance(message, protocol.Displayed | protocol.Warned):
            self._output.take(member.rank, message)
            return
        self._read_output(member)
        match message:
            case protocol.Assigned():
                member.assigned = message.names
            case protocol.Imported():
                self._pool.modules |= {(module.name, module.machine): module for module in message.modules}
            case protocol.Serving():
                self._serving.add(member.rank)
                self._release_servers()
            case protocol.AtBreakpoint():
                self._breakpoints.arrived(member.rank, message.text)
                if self._quit:
                    self._quit_too(member)
            case protocol.LeftBreakpoint():
                self._left_breakpoint(member, message)
            case protocol.Raised():
                self._raised(member, message)
            case protocol.Returned():
                self._returned(member, message)
            case _:
                raise AssertionError(f"{message} during a run")

    def _raised(self, member: Member, message: protocol.Raised) -> None:
        clock = member.process.clock
        self._failures[member.rank] = dataclasses.replace(message.failure, at_ns=clock.here(message.failure.at_ns))
        self._breakpoints.left(member.rank)
        self._pool.state.framework_spent |= message.spent
        if message.failure.broken:
            self._pool.state.spend()

    def _left_breakpoint(self, member: Member, message: protocol.LeftBreakpoint) -> None:
        self._breakpoints.left(member.rank)
        put("".join(f"[{member.name}] {line}\n" for line in message.text.splitlines()))
        if message.quits:
            self._breakpoints.close()
            self._quit[member.rank] = quit_failure(member.rank, member.name, time.perf_counter_ns())
            for rank in list(self._breakpoints.texts):
                self._quit_too(self._members[rank])

    def _quit_too(self, member: Member) -> None:
        """After `q` at another rank's prompt, end a rank that is at its own, so that both can be kept."""
        with contextlib.suppress(OSError):  # it has just ended, which the loop will report
            member.channel.send(protocol.Command("q\n"))
            self._breakpoints.asked(member.rank)

    def _returned(self, member: Member, message: protocol.Returned) -> None:
        self._communicated |= message.communicated
        self._unfinished |= message.unfinished
        for rank, end in message.exits.items():
            self._exits[rank] = dataclasses.replace(end, at_ns=member.process.clock.here(end.at_ns))
        self._pool.state.framework_spent |= message.spent
        self._facts[member.rank] = message.facts
        self.notes += message.notes
        if message.payload.copied_from_gpu:
            self.notes.append("CUDA tensors in results come back as CPU tensors.")
        try:
            self._results[member.rank] = pickling.unpack(message.payload, sent=self._pool.sent)
        except EOFError:  # the rank is gone, and with it the memory that it shared
            raise
        except Exception as error:  # noqa: BLE001  # the student's classes may raise anything when they are unpickled
            self._failures[member.rank] = unreadable(error, member.rank, member.name)
        self._breakpoints.left(member.rank)
        if message.payload.owner_pid:
            member.channel.send(protocol.ResultRead())
        self._release_servers()

    def _release_servers(self) -> None:
        """Tell the serving ranks to stop once all others that were called have returned, but not if none was."""
        if self._released or not self._serving:
            return
        if not all(rank in self._results or rank in self._serving or rank in self._pool.lost for rank in self._on):
            return
        if not self._results:
            names = [self._names[rank] for rank in sorted(self._serving)]
            raise DeadlockError(*serving_for_ever(names), [*self._doings_by_rank(time.perf_counter_ns()).values()])
        self._released = True
        for rank in self._serving:
            with contextlib.suppress(OSError):  # it has just ended, and the loop will report that
                self._members[rank].channel.send(protocol.Release())

    def died(self, member: Member) -> None:
        """See `Receiver`. A death is a failure even after the rank has answered, since others may still need it."""
        self._dead.add(member.rank)
        self._breakpoints.ended(member.rank)
        self._pool.state.spend()
        self._read_output(member)
        if member.rank in self._failures or member.rank in self._pool.lost:
            return
        now_ns = time.perf_counter_ns()
        reported_ns = member.process.reported_ns(now_ns)
        failure = self._pool.death(member, at_ns=now_ns, last=self._last_doing(member, reported_ns), ago_ns=now_ns - reported_ns)
        if self._pool.lost.take(failure, self._on):
            self._records.end(member.rank, max(reported_ns, self._start_ns))
            self._release_servers()
        else:
            self._breakpoints.close()
            self._failures |= {**self._pool.lost, member.rank: failure}

    def _read_output(self, member: Member) -> int:
        count = 0
        for data in member.printed():
            self._output.feed(member.rank, data)
            count += len(data)
        return count

    def _doings_by_rank(self, now_ns: int, *, closely: bool = False) -> dict[int, str]:
        silent = self._pool.silent(now_ns)
        found = {rank: line for rank, line in self._pool.lost.doings().items() if rank not in self._failures}
        for m in self._members:
            if m.rank in found or m.rank in self._failures or m.rank not in self._on:
                continue
            pending = self._records.pending(m.rank) if closely else m.reader.pending()
            if m.rank in self._breakpoints.texts or (m.rank in self._breakpoints.stopped and not pending):
                found[m.rank] = f"{m.name} was at a breakpoint"
                continue
            found[m.rank] = f"{m.name} was stopped by a signal (SIGSTOP)" if m.process.status().frozen else doing(
                m.name, pending, silent.get(m.rank, now_ns), returned=m.rank in self._results,
                serves=m.rank in self._serving, names=self._names, closely=closely
            )  # fmt: skip
        return dict(sorted(found.items()))

    def _doings_with_lines(self) -> list[str]:
        """What each rank is doing; of those that are in no operation, also where."""
        at, by_rank = self._monitor.lines(), self._doings_by_rank(time.perf_counter_ns(), closely=True)
        return [doing + at.get(rank, "") for rank, doing in by_rank.items()]

    def _deadlock_error(self, deadlock: Deadlock) -> LabError:
        now_ns = time.perf_counter_ns()
        doings = self._doings_by_rank(now_ns, closely=True)
        waits = self._records.numbered(deadlock.waits)
        headline, hint = deadlock_in_words(dataclasses.replace(deadlock, waits=waits), self._names)
        if deadlock.reason in PARTED and deadlock.culprit not in self._exits:  # `exit()` leaves from anywhere
            hint = self._with_parting(hint, doings, deadlock.waits, deadlock.culprit)
        if deadlock.culprit is None:
            return DeadlockError(headline, hint, list(doings.values()), tuple(op.name for _, op in deadlock.waits))
        doings.pop(deadlock.culprit, None)
        name, cause = self._names[deadlock.culprit], Cause.DEADLOCK
        failure = RankFailure(deadlock.culprit, name, headline, at_ns=now_ns, cause=cause, verb="")
        return RankError([failure], list(doings.values()), hint=hint)

    def _with_parting(
        self, hint: str, doings: dict[int, str], waits: Sequence[tuple[int, Pending]], returned: int | None = None
    ) -> str:
        """Return a hint after where the ranks parted, and add their source lines to what they were doing."""
        parting, sources = self._monitor.parting(waits, returned)
        for rank in sources.keys() & doings.keys():
            doings[rank] += f": {sources[rank]}"
        return " ".join(filter(None, (parting, hint)))

    def _error(self) -> RankError:
        now_ns = time.perf_counter_ns()
        self._records.drain()
        if all(f.consequence for f in self._failures.values()):
            self._failures |= self._pool.lost
        state = self._pool.state
        if state.spent or self._unanswered() or not may_go_on(self._failures, self._members, self._records, self._pool.kind):
            state.spend()
        # The likely cause comes first. A consequence of another rank's end is never the cause. A dead process usually
        # is, although its end is noticed a little later than the failures that it causes. An abort comes after other
        # deaths, since a library may abort its process when it finds a peer dead.
        ordered = sorted(
            self._failures.values(), key=lambda f: (f.consequence, f.rank not in self._dead, f.cause is Cause.ABORTED, f.at_ns)
        )
        causes = ordered[:1] + sorted((f for f in ordered[1:] if not f.consequence), key=lambda f: f.rank)
        # Of equal failures, the lowest rank's comes first: the output of a checked cell must be reproducible.
        causes.sort(key=lambda f: (f.headline != ordered[0].headline, f.rank))
        others = {f.rank: self._consequence(f) for f in ordered[1:] if f.consequence} | self._doings_by_rank(now_ns)
        operations = [(m.rank, p) for m in self._members for p in (*self._records.failed(m.rank), *m.reader.pending())]
        there = {(p.group, p.match) for _, p in operations}
        unequal, usual = mismatch_hint(self._records.unequal()[0])
        if not unequal:
            operations += [(m.rank, p) for m in self._members for p in self._records.done(m.rank, there)]
            sides = first_mismatch(operations) or unlike_exchange(operations, len(self._members))
            unequal, usual = mismatch_hint([(self._names[i], p) for i, p in self._records.numbered(sides)])
            usual = self._with_parting(usual, others, sides)
        if unequal:
            hint = f"{unequal[0].upper()}{unequal[1:]}. {usual}"
        else:
            hint = self._monitor.whom_it_awaited(causes[0], others)
            hint = hint or library_hint(causes[0].headline)
        return RankError(causes, [others[rank] for rank in sorted(others)], stopped=state.spent, hint=hint)

    def _consequence(self, failure: RankFailure) -> str:
        if failure.cause is not Cause.LOST_CONNECTION:  # the student's code caught that error and raised another
            return f"{failure.name}: {failure.headline}"
        last = self._records.last_wait(failure.rank)
        if last is None:
            return f"{failure.name} lost the connection"
        operation, end_ns = last
        return doing(failure.name, [operation], end_ns, names=self._names)

    def _last_doing(self, member: Member, now_ns: int) -> str:
        """Return a sentence about what a rank was doing when it died, or reported last; "" if it was idle."""
        pending = member.reader.pending()
        if member.rank in self._breakpoints.texts or (member.rank in self._breakpoints.stopped and not pending):
            return "It was at a breakpoint."
        if member.rank not in self._on or member.rank in self._results:
            served = [SERVE.function_in(p.name) for p in pending if p.type is SERVE]
            return f"It was serving {served[-1]}." if served else ""
        self._records.drain()
        words = doing("It", pending, now_ns, names=self._names)
        span = self._records.last_span(member.rank)
        return f"{words}; its last span was {span}." if span and not any(p.wait_start_ns for p in pending) else f"{words}."

    def _finish(self, stopped: str = "", *, profile: bool = False) -> Run:
        self._close(stopped)
        return self.conclude(stopped, self._pool.profiled() if profile else [])

    def _close(self, stopped: str) -> None:
        """Read all that the ranks have recorded and printed, for the last time."""
        now_ns = time.perf_counter_ns()
        silent = self._pool.silent(now_ns)
        if self._pool.state.spent:
            self._pool.kill()  # first, since drawing the picture takes a moment
        if stopped:
            self._records.cut(self._start_ns, now_ns, [(rank, self._name) for rank in self._on], list(silent.items()))
        for member in self._members:
            if member.rank not in self._results or stopped:  # otherwise its output was read with its answer
                self._read_output(member)
        self._records.freeze()

    def conclude(self, stopped: str, profiled: Sequence[list[Any]] = ()) -> Run:
        """Return the run, closed before, and leave its finished picture and its output behind."""
        names, results = tuple(self._names[i] for i in self._on), [self._results.get(i) for i in self._on]
        run = Run(self._name, names, results, self._records, profiled, dict(sorted(self._facts.items())))
        if self._picture is not None:
            self._picture.end(run.trace, stopped)
        run.output = self._output.finish()
        return run
