"""Monitors a run for deadlocks, and tells the student which ranks have waited long."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from labkit.errors.exceptions import RankFailure
from labkit.errors.lists import counted, listed
from labkit.group.collector import Records
from labkit.group.deadlock import Deadlock, RankState, find_deadlock, missing, served_by
from labkit.group.deadlock_words import (
    MOST_NAMES,
    late_in_words,
    line_of,
    origin_in_words,
    silence_notice,
    waiting_notice,
)
from labkit.group.parting import Side, frames_at, parting_in_words, source_of
from labkit.group.pool_state import Member
from labkit.group.processes import SLOW_S, RankPool
from labkit.launch.frames import StackFrame
from labkit.launch.rank_process import command_to_resume
from labkit.launch.thread_states import Active, RankThreads, Threads, active
from labkit.recording.group_keys import GroupKind, kind_of
from labkit.recording.schema import Pending

CONFIRM_NS: Final = 400_000_000  # between the two checks that must agree before a deadlock is reported
CHECK_FROZEN_EVERY_NS: Final = 500_000_000
SLOW_NS: Final = 10_000_000_000  # a wait for a rank that computes is announced after this time
LONGEST_PAUSE_NS: Final = 5_000_000_000  # between two checks of the threads of ranks that seem deadlocked
PLACES_FOR_NS: Final = 5_000_000_000  # how long the place where a rank was seen is shown


@dataclasses.dataclass(frozen=True, slots=True)
class _Suspicion:
    """Ranks that seemed deadlocked when their threads were last checked."""

    pending: tuple[tuple[int, str, int], ...]  # rank, name and start of every operation that was pending
    threads: Mapping[int, RankThreads]  # by rank
    acting: Mapping[int, Active]  # by rank, what might still act
    seemed_certain: bool  # whether it was a deadlock if no thread has moved since
    pause_ns: int  # until the next check
    next_ns: int  # when that is due


class DeadlockMonitor:
    """Distinguishes a deadlock from ranks that only wait long.

    Ranks `on` call the function; those of `serving` now only serve others. Results and failures grow during the run.
    """

    def __init__(
        self,
        pool: RankPool,
        on: Sequence[int],
        records: Records,
        results: Collection[int],
        failures: Collection[int],
        serving: Collection[int] = (),
        called: StackFrame | None = None,
    ) -> None:
        self._pool, self._members, self._kind, self._options = pool, pool.members, pool.kind, pool.options
        self._on, self._lost, self._called = on, pool.lost, called
        self._records, self._results, self._failures, self._serving = records, results, failures, serving
        self._suspicion: _Suspicion | None = None
        self._places: dict[int, RankThreads] = {}  # the threads of ranks that others wait for
        self._places_until_ns = 0
        self._frozen: list[Member] = []
        self._frozen_check_ns = 0
        self._next_silence_s = SLOW_S
        self._uncounted = [(m.reader.unnoted, m.reader.dropped) for m in self._members]
        self.notice = ""  # of a long wait, or of a suspended rank: one line
        self.silence = ""  # the line that says where ranks are that have shown nothing for long

    def check(self, now_ns: int, silent_s: float = 0.0) -> Deadlock | None:
        """The deadlock that the ranks are in, once it is certain; else None.

        The states of ranks are read one after the other, so a deadlock is only certain if a later check finds the same
        operations pending: then nothing moved in between.

        `silent_s` is for how long the student has seen nothing of the run.
        """
        if self._any_frozen(now_ns):
            return None
        # The second check must see what ranks on other machines have done since the first one looked at their threads.
        if self._suspicion is not None and now_ns >= self._suspicion.next_ns and not self._pool.catch_up():
            return None
        kind = self._kind
        pending = [[] if m.rank in self._lost else m.reader.pending() for m in self._members]
        waited_ns = max((now_ns - p.wait_start_ns for of_rank in pending for p in of_rank if p.wait_start_ns), default=0)
        if waited_ns < kind.certain_after_s * 1e9:
            self._suspicion = None
            self.notice = ""
            self._look_into_silence(silent_s)
            return None
        blocked_in = {(p.group, p.match) for of_rank in pending for p in of_rank if p.wait_start_ns and p.match}
        states = [self._state_of(m, p, blocked_in) for m, p in zip(self._members, pending, strict=True)]
        seeming = find_deadlock(states)
        hanging = [p for i in seeming.ranks for p in (*states[i].blocked, *states[i].queued)] if seeming is not None else []
        deadlock = None
        if seeming is None:
            self._suspicion = None
        elif all(now_ns - p.wait_start_ns >= kind.certain_after_s * 1e9 for p in hanging):
            deadlock = self._confirmed(states, now_ns)
        if deadlock is None:
            self.notice = self._notice_of(states, waited_ns, now_ns)
            self._look_into_silence(silent_s)
        return deadlock

    def _confirmed(self, states: Sequence[RankState], now_ns: int) -> Deadlock | None:
        """The deadlock, once it is certain: no thread of the ranks can act, and none has moved since the last check."""
        pending = tuple((i, p.name, p.start_ns) for i, rank in enumerate(states) for p in rank.pending)
        before = self._suspicion
        if before is not None and now_ns < before.next_ns:
            return None
        if before is not None and before.pending != pending:
            before = None
        threads = self._threads_of(range(len(self._members)), with_children=True)
        earlier = {} if before is None else before.threads
        found = {i: self._active(i, states[i], now, earlier.get(i)) for i, now in threads.items()}
        acting = {i: active for i, active in found.items() if active is not None}
        deadlock = find_deadlock([dataclasses.replace(rank, free=i in acting) for i, rank in enumerate(states)])
        if deadlock is not None and before is not None and before.seemed_certain:
            return deadlock  # no thread could act in either check, and none has moved in between
        pause_ns = CONFIRM_NS if deadlock is not None or before is None else min(2 * before.pause_ns, LONGEST_PAUSE_NS)
        end_ns = time.perf_counter_ns()
        self._suspicion = _Suspicion(pending, threads, acting, deadlock is not None, pause_ns, end_ns + pause_ns)
        return None

    def _active(self, rank: int, state: RankState, now: RankThreads, before: RankThreads | None) -> Active | None:
        # TensorFlow's waits are recorded by another thread; a server's main thread is one of those that serve.
        unknown = rank in self._serving or any(kind_of(p.group) is GroupKind.TENSORFLOW for p in state.blocked)
        blocked = None if unknown else {p.thread for p in state.blocked}
        return active(now, before, blocked=blocked, idle_main=state.returned and not unknown)

    def _look_into_silence(self, silent_s: float) -> None:
        """Say where the ranks are if the student has seen nothing for long, and no notice of a wait either."""
        if self.notice or silent_s < SLOW_S:
            self.silence = ""
        elif silent_s >= self._next_silence_s:
            self._next_silence_s = 2 * silent_s
            running = [i for i in self._on if i not in self._results and i not in self._failures and i not in self._serving]
            threads = self._threads_of(running, insist=False)
            self.silence = silence_notice({self._members[i].name: threads.get(i) for i in running}, silent_s)

    def _threads_of(self, ranks: Collection[int], *, with_children: bool = False, insist: bool = True) -> dict[int, RankThreads]:
        living = [self._members[i] for i in ranks if i not in self._failures and i not in self._lost]
        threads = self._pool.ask(Threads(children=with_children, insist=insist), living)
        return {member.rank: of_rank for member, of_rank in zip(living, threads, strict=True)}

    def lines(self) -> dict[int, str]:
        """The line, in words, of each rank that still runs the student's function and is in no operation."""
        late = [i for i in self._on if i not in self._results and not self._members[i].process.status().frozen]
        threads = self._threads_of([i for i in late if not self._members[i].reader.pending()])
        return {rank: line_of(of_rank.main) for rank, of_rank in threads.items()}

    def whom_it_awaited(self, failure: RankFailure, others: dict[int, str]) -> str:
        """Say for whom a rank waited when the program's own time limit ended that, in sentences; "" if none did.

        The lines of late ranks are added to `others`, which says what other ranks were doing.
        """
        if not failure.own_limit:
            return ""
        words = ""
        for operation in self._records.failed(failure.rank)[-1:]:
            states = [self._state_of(m, m.reader.pending(), set()) for m in self._members]
            lines = self.lines()
            late = [rank for rank in missing(states, failure.rank, operation) if rank in lines]
            words = late_in_words([self._members[rank].name for rank in late], operation) if late else ""
            for rank in late:
                others[rank] += lines[rank]
        return " ".join(filter(None, (failure.own_limit, words)))

    def parting(self, waits: Sequence[tuple[int, Pending]], returned: int | None = None) -> tuple[str, dict[int, str]]:
        """Where ranks parted, and what torch made their operations of, in sentences; and source lines by rank.

        Given are the operations of two sides, or of ranks that wait for one that has returned.
        """
        collectives = [(i, p) for i, p in waits if kind_of(p.group) in (GroupKind.COLLECTIVE, GroupKind.CREATION)]
        if not collectives or not (len(waits) == 2 or returned is not None):
            return "", {}
        group = collectives[0][1].group
        threads = self._threads_of([i for i in self._on if i not in self._results])
        stacks = {i: of_rank.main.frames for i, of_rank in threads.items() if of_rank.main is not None}
        sides, sources = [], {}
        for rank, operation in collectives[:1] if returned is not None else waits:
            frames = frames_at(operation.line, stacks.get(rank, ()), self._called)
            there = [i for i in stacks if self._is_in(i, operation)]
            alike = [i for i in there if frames_at(operation.line, stacks[i], None) == frames]
            before = self._records.lines_before(operation.start_ns, rank, group)
            sides.append(Side([self._members[i].name for i in sorted({rank, *alike})], frames, before))
            sources[rank] = source_of(frames[-1]) if frames else ""
        sides += [Side([self._members[returned].name], [])] if returned is not None else []
        parted = parting_in_words(*sides) if all(sources.values()) else ""
        if parted:
            parted += self._steps_in_words([*sources, *([returned] if returned is not None else [])])
        here = [(i, p, stacks[i]) for i, p in waits if i in stacks and frames_at(p.line, stacks[i], None)]
        made_of = [origin_in_words(self._members[i].name, p, stack) for i, p, stack in here]
        return " ".join(filter(None, [parted, *made_of])), sources if parted else {}

    def _steps_in_words(self, ranks: Sequence[int]) -> str:
        """A sentence on how many optimizer steps ranks have done; "" for none."""
        done = {self._members[i].name: self._records.optimizer_steps(i) for i in ranks}
        if not any(done.values()):
            return ""
        (name, steps), *others = [(name, counted(number, "optimizer step")) for name, number in done.items()]
        if all(number == steps for _, number in others):
            return f" Each has done {steps}."
        return f" So far, {listed([f'{name} has done {steps}', *(f'{other} {number}' for other, number in others)])}."

    def _is_in(self, rank: int, operation: Pending) -> bool:
        return any((p.group, p.match) == (operation.group, operation.match) for p in self._members[rank].reader.pending())

    def _notice_of(self, states: Sequence[RankState], waited_ns: int, now_ns: int) -> str:
        if waited_ns <= SLOW_NS:
            return ""
        acting = self._suspicion.acting if self._suspicion is not None else {}
        elsewhere = {i for i, rank in enumerate(states) if not rank.blocked and not rank.timed and not rank.returned}
        calls = (served_by(states, p) for rank in states for p in (*rank.blocked, *rank.timed))
        elsewhere |= {served[0] for served in calls if served is not None}
        if elsewhere and (elsewhere - self._places.keys() or now_ns > self._places_until_ns):
            self._places = self._threads_of(elsewhere)
            self._places_until_ns = time.perf_counter_ns() + PLACES_FOR_NS
        return waiting_notice(states, self._places, acting, now_ns)

    def _any_frozen(self, now_ns: int) -> bool:
        """Whether a signal has stopped a rank's process, so that ranks that wait for it are not in a deadlock."""
        if now_ns - self._frozen_check_ns < CHECK_FROZEN_EVERY_NS:
            return bool(self._frozen)
        self._frozen_check_ns = now_ns
        self._frozen = [
            m for m in self._members if m.rank not in self._results and m.rank not in self._failures and m.process.status().frozen
        ]
        if self._frozen:
            self._suspicion = None
            command = command_to_resume([m.process for m in self._frozen])
            names = listed((m.name for m in self._frozen), most=MOST_NAMES, rest="others")
            self.notice = f"stopped by a signal (SIGSTOP): {names}; `{command}` resumes the run"
        return bool(self._frozen)

    def _state_of(self, member: Member, pending: list[Pending], blocked_in: set[tuple[str, int]]) -> RankState:
        entered = dict(self._records.entered(member.rank))
        for p in pending:
            entered[p.group] = max(entered.get(p.group, 0), p.match)
        called, ended = member.rank in self._on, member.rank in self._lost
        serves = member.rank in self._serving
        serving = member.reader.serving or self._kind.serves(self._options.jobs, member.rank) or int(serves)
        serving = 0 if ended else serving
        # An emulated link completes a call on a thread of its own, some time after torch has received the reply.
        receiving = self._kind.serving_threads > 0 and self._options.link is None
        return RankState(
            member.name, pending, called=called, returned=ended or not called or serves or member.rank in self._results,
            serving=serving, receiving=receiving, entered=entered, done=self._records.done(member.rank, blocked_in),
            uncounted=(member.reader.unnoted, member.reader.dropped) != self._uncounted[member.rank]
        )  # fmt: skip
