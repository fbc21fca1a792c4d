"""Looks at a run that is under way: whether its ranks can still go on, and what the student should know of those that wait."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from typing import Final

import psutil

from labkit.crew import Crew, Member
from labkit.records import Records
from labkit.ring import Pending
from labkit.stacks import ask, helpers
from labkit.stuck import Standing, Verdict, circle_of_calls, stuck, waiting_for

__all__ = ["Watchdog"]

CONFIRM_NS: Final = 400_000_000  # between two looks that must see the same before ranks are said to hang for ever
CIRCLE_NS: Final = 1_500_000_000  # calls that wait so long for one another, while nobody computes, are told
RESTING_SHARE: Final = 0.05  # of one core, all ranks together
LOOK_FOR_FROZEN_EVERY_NS: Final = 500_000_000
SLOW_NS: Final = 10_000_000_000  # a wait for a rank that computes is told after that


class Watchdog:
    """Tells ranks that can never go on from those that only wait long.

    Args:
        crew: the processes.
        on: the numbers of the ranks that call the function.
        records: what the ranks write down.
        results, failures: by the number of a rank, how it has answered so far; they grow while the run is under way.

    Attributes:
        notice: what the student should know at this moment: a line, or "".
    """

    def __init__(
        self, crew: Crew, on: Sequence[int], records: Records, results: Collection[int], failures: Collection[int]
    ) -> None:
        self._members, self._plan, self._on = crew.members, crew.plan, on
        self._records, self._results, self._failures = records, results, failures
        self._suspicion: tuple[tuple[tuple[str, int], ...], int] | None = None  # what ranks seem to hang in, and since when
        self._computed = 0, 0.0, False  # when the ranks' processor time was looked at last, what it was, whether they rested
        self._frozen: list[Member] = []
        self._frozen_look_ns = 0
        self._unnoted = [m.reader.unnoted for m in self._members]
        self.notice = ""

    def look(self, now_ns: int) -> Verdict | None:
        """Which ranks can never go on, once that is certain.

        What each rank does is looked at one after the other. A verdict counts if it holds, in the very same operations, some time
        later: then nothing moved in between.

        Args:
            now_ns: this moment, on `time.perf_counter_ns`.
        """
        if self._somebody_is_frozen(now_ns):
            return None
        kind = self._plan.kind
        pending = [m.reader.pending() for m in self._members]
        waited_ns = max((now_ns - p.wait_start_ns for of_rank in pending for p in of_rank if p.wait_start_ns), default=0)
        if waited_ns < kind.certain_after_s * 1e9:
            self._suspicion = None
            self.notice = ""
            return None
        blocked_in = {(p.group, p.match) for of_rank in pending for p in of_rank if p.wait_start_ns and p.match}
        standings = [self._standing(m, p, blocked_in) for m, p in zip(self._members, pending, strict=True)]
        verdict = stuck(standings)
        if verdict is None:
            self._suspicion = None
            circle = circle_of_calls(standings) if waited_ns > CIRCLE_NS else ""
            if circle and self._rests(now_ns):
                self.notice = f"{circle}, and nobody computes: does one of them hold a lock? Stop ends the run."
            elif waited_ns > SLOW_NS:
                self.notice = waiting_for(standings, now_ns)
            return None
        hanging = [p for rank in verdict.ranks for p in (*standings[rank].blocked, *standings[rank].queued)]
        if any(now_ns - p.wait_start_ns < kind.certain_after_s * 1e9 for p in hanging):
            return None
        evidence = tuple((p.name, p.start_ns) for p in hanging)
        if self._suspicion is None or self._suspicion[0] != evidence:
            self._suspicion = evidence, now_ns
        elif now_ns - self._suspicion[1] > CONFIRM_NS:
            if self._other_threads():
                self._suspicion = None  # look again later
            else:
                return verdict
        return None

    def _other_threads(self) -> bool:
        """Whether a rank may still do something while its main thread is blocked, or after it has returned: on a thread.

        Not asked of RPC ranks, whose threads serve calls and are counted.
        """
        living = [m.process for m in self._members if m.rank not in self._failures]
        return not self._plan.kind.serving_threads and any(not raw or helpers(raw) for raw in ask(living))

    def _somebody_is_frozen(self, now_ns: int) -> bool:
        """Whether a signal has stopped a rank's process, so that all that wait for it hang until another one lets it go on."""
        if now_ns - self._frozen_look_ns < LOOK_FOR_FROZEN_EVERY_NS:
            return bool(self._frozen)
        self._frozen_look_ns = now_ns
        before = self._frozen
        self._frozen = [
            m for m in self._members if m.rank not in self._results and m.rank not in self._failures and m.process.frozen
        ]
        if self._frozen:
            self._suspicion = None
            ids = " ".join(str(m.process.pid) for m in self._frozen)
            self.notice = f"stopped by a signal (SIGSTOP): {_names(self._frozen)}; `kill -CONT {ids}` lets the run go on"
        elif before:
            self.notice = ""
        return bool(self._frozen)

    def _rests(self, now_ns: int) -> bool:
        """Whether the ranks have hardly computed since they were looked at last, which is long enough ago."""
        cpu_s = 0.0
        for member in self._members:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended, which will be seen elsewhere
                cpu_s += sum(psutil.Process(member.process.pid).cpu_times()[:2])
        before_ns, before_s, rests = self._computed
        if now_ns - before_ns > CIRCLE_NS / 2:
            rests = cpu_s - before_s < RESTING_SHARE * (now_ns - before_ns) / 1e9
            self._computed = now_ns, cpu_s, rests and before_ns > 0
        return self._computed[2]

    def _standing(self, member: Member, pending: list[Pending], blocked_in: set[tuple[str, int]]) -> Standing:
        entered = dict(self._records.entered(member.rank))
        for p in pending:
            entered[p.group] = max(entered.get(p.group, 0), p.match)
        called = member.rank in self._on
        serving = self._plan.kind.serves(self._plan.jobs, member.rank)
        return Standing(
            member.name, pending, called=called, returned=not called or member.rank in self._results, serving=serving,
            entered=entered, done=self._records.done(member.rank, blocked_in),
            uncounted=member.reader.unnoted > self._unnoted[member.rank],
        )  # fmt: skip


def _names(members: Sequence[Member]) -> str:
    return " and ".join(m.name for m in members) if len(members) < 4 else f"{len(members)} others"
