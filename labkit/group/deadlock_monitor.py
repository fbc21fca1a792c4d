"""Looks at a run that is under way: whether its ranks can still go on, and what the student should know of those that wait."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Final

import psutil

from labkit.errors.lists import listed
from labkit.group.collector import Records
from labkit.group.deadlock import Deadlock, stuck
from labkit.group.member import Member
from labkit.group.processes import RankPool
from labkit.group.rank_state import Standing
from labkit.group.remote_calls import circle_of_calls, served_by
from labkit.group.stack_dump import ask
from labkit.group.thread_states import Active, Look, active, children_of, look
from labkit.group.wait_notices import MOST_NAMES, waiting_notice
from labkit.recording.group_keys import GroupKind, kind_of
from labkit.recording.schema import Pending

__all__ = ["Watchdog"]

CONFIRM_NS: Final = 400_000_000  # between two looks that must see the same before ranks are said to hang for ever
CIRCLE_NS: Final = 1_500_000_000  # calls that wait so long for one another, while nobody computes, are told
RESTING_SHARE: Final = 0.05  # of one core, all ranks together
LOOK_FOR_FROZEN_EVERY_NS: Final = 500_000_000
SLOW_NS: Final = 10_000_000_000  # a wait for a rank that computes is told after that
LONGEST_PAUSE_NS: Final = 5_000_000_000  # between two looks at the threads of ranks that seem to hang, while one may still act
PLACES_FOR_NS: Final = 5_000_000_000  # so long it is told where a rank was when it was looked at


@dataclasses.dataclass(frozen=True, slots=True)
class _Suspicion:
    """Ranks that seemed to hang when their threads were looked at.

    Args:
        under_way: the rank, name and start of every operation that was pending then.
        looks: by rank, what its threads were in.
        acting: what of a rank might still act.
        seemed_certain: whether ranks hang for ever if nothing moves from then on.
        pause_ns, next_ns: how long until the next look, and when that is.
    """

    under_way: tuple[tuple[int, str, int], ...]
    looks: Mapping[int, Look]
    acting: Mapping[int, Active]
    seemed_certain: bool
    pause_ns: int
    next_ns: int


class Watchdog:
    """Tells ranks in a deadlock from those that only wait long.

    Args:
        pool: the processes.
        on: the numbers of the ranks that call the function.
        records: what the ranks write down.
        results, failures: by the number of a rank, how it has answered so far; they grow while the run is under way.
        serving: the numbers of ranks that were called and only serve others now.

    Attributes:
        notice: what the student should know at this moment: a line, or "".
    """

    def __init__(
        self,
        pool: RankPool,
        on: Sequence[int],
        records: Records,
        results: Collection[int],
        failures: Collection[int],
        serving: Collection[int] = (),
    ) -> None:
        self._members, self._plan, self._on = pool.members, pool.plan, on
        self._records, self._results, self._failures, self._serving = records, results, failures, serving
        self._suspicion: _Suspicion | None = None
        self._places: dict[int, Look] = {}  # where the threads of ranks are that have not come
        self._places_until_ns = 0
        self._computed = 0, 0.0, False  # when the ranks' processor time was looked at last, what it was, whether they rested
        self._frozen: list[Member] = []
        self._frozen_look_ns = 0
        self._unnoted = [m.reader.unnoted for m in self._members]
        self.notice = ""

    def look(self, now_ns: int) -> Deadlock | None:
        """Which ranks are in a deadlock, once that is certain.

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
        seeming = stuck(standings)
        hanging = [p for i in seeming.ranks for p in (*standings[i].blocked, *standings[i].queued)] if seeming is not None else []
        deadlock = None
        if seeming is None:
            self._suspicion = None
        elif all(now_ns - p.wait_start_ns >= kind.certain_after_s * 1e9 for p in hanging):
            deadlock = self._confirmed(standings, now_ns)
        if deadlock is None:
            self.notice = self._word(standings, waited_ns, now_ns)
        return deadlock

    def _confirmed(self, standings: Sequence[Standing], now_ns: int) -> Deadlock | None:
        """The verdict on ranks that seem to hang, once it is certain: none of their threads can act, and nothing has moved."""
        under_way = tuple((i, p.name, p.start_ns) for i, rank in enumerate(standings) for p in rank.pending)
        before = self._suspicion
        if before is not None and now_ns < before.next_ns:
            return None
        if before is not None and before.under_way != under_way:
            before = None
        looks = self._looks_at_threads(range(len(self._members)), with_children=True)
        earlier = {} if before is None else before.looks
        found = {i: self._active(i, standings[i], now, earlier.get(i)) for i, now in looks.items()}
        acting = {i: active for i, active in found.items() if active is not None}
        deadlock = stuck([dataclasses.replace(rank, free=i in acting) for i, rank in enumerate(standings)])
        if deadlock is not None and before is not None and before.seemed_certain:
            return deadlock  # no thread could act, neither then nor now, and none has moved: so there was none that could
        pause_ns = CONFIRM_NS if deadlock is not None or before is None else min(2 * before.pause_ns, LONGEST_PAUSE_NS)
        end_ns = time.perf_counter_ns()
        self._suspicion = _Suspicion(under_way, looks, acting, deadlock is not None, pause_ns, end_ns + pause_ns)
        return None

    def _active(self, rank: int, standing: Standing, now: Look, before: Look | None) -> Active | None:
        """What of a rank may still act beside what it is blocked in."""
        # TensorFlow's waits are noted by a thread that looks at the main one; a server's main thread is one of those that serve.
        unknown = rank in self._serving or any(kind_of(p.group) is GroupKind.TENSORFLOW for p in standing.blocked)
        blocked = None if unknown else {p.thread for p in standing.blocked}
        return active(now, before, blocked=blocked, idle_main=standing.returned and not unknown)

    def _looks_at_threads(self, ranks: Collection[int], *, with_children: bool) -> dict[int, Look]:
        """What the threads of some ranks are in, as far as these live."""
        living = [self._members[i] for i in ranks if i not in self._failures]
        processes = [m.process for m in living]
        children = children_of([p.pid for p in processes]) if with_children else {}
        stacks = ask(processes)
        return {m.rank: look(raw, m.process.pid, children.get(m.process.pid, ())) for m, raw in zip(living, stacks, strict=True)}

    def _word(self, standings: Sequence[Standing], waited_ns: int, now_ns: int) -> str:
        """What to say while nothing is certain: who waits, and for whom."""
        circle = circle_of_calls(standings) if waited_ns > CIRCLE_NS else ""
        if circle and self._rests(now_ns):
            return f"{circle}, and nobody computes: does one of them hold a lock? Stop ends the run."
        if waited_ns <= SLOW_NS:
            return ""
        acting = self._suspicion.acting if self._suspicion is not None else {}
        elsewhere = {i for i, rank in enumerate(standings) if not rank.blocked and not rank.timed and not rank.returned}
        calls = (served_by(standings, p) for rank in standings for p in (*rank.blocked, *rank.timed))
        elsewhere |= {served[0] for served in calls if served is not None}
        if elsewhere and (elsewhere - self._places.keys() or now_ns > self._places_until_ns):
            self._places = self._looks_at_threads(elsewhere, with_children=False)
            self._places_until_ns = time.perf_counter_ns() + PLACES_FOR_NS
        return waiting_notice(standings, self._places, acting, now_ns)

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
            names = listed((m.name for m in self._frozen), most=MOST_NAMES, rest="others")
            self.notice = f"stopped by a signal (SIGSTOP): {names}; `kill -CONT {ids}` lets the run go on"
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
        serves = member.rank in self._serving
        serving = member.reader.serving or self._plan.kind.serves(self._plan.jobs, member.rank) or int(serves)
        return Standing(
            member.name, pending, called=called, returned=not called or serves or member.rank in self._results,
            serving=serving, entered=entered, done=self._records.done(member.rank, blocked_in),
            uncounted=member.reader.unnoted > self._unnoted[member.rank],
        )  # fmt: skip
