"""When a deadlock is certain, on thread states made by hand, without processes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from labkit.group.deadlock import RankState
from labkit.group.deadlock_monitor import CONFIRM_NS, LONGEST_PAUSE_NS, DeadlockMonitor
from labkit.launch.frames import frame_at
from labkit.launch.rank_process import Status
from labkit.launch.thread_states import RankThreads, Thread
from labkit.recording.schema import Pending

S = 1_000_000_000
MAIN = 1  # the number of a main thread


def waits_for(other: int, *, start: int = 1) -> RankState:
    receive = Pending("recv", start, start, 0, other, f"p2p {other}>{1 - other} tag 0", 1, "cell 1, line 2", "", MAIN)
    return RankState(f"rank {1 - other}", [receive], entered={receive.group: 1})


def thread(*, endless: bool, cpu_ns: int = 3) -> Thread:
    return Thread((frame_at(os.__file__, 1, "wait"),), 7, 7, endless, cpu_ns)


def look(*others: Thread) -> RankThreads:
    return RankThreads(Thread((frame_at("/own.py", 1, "train"),), MAIN, MAIN), others)


ASLEEP, AWAKE = thread(endless=True), thread(endless=False)
FACING = [waits_for(1), waits_for(0)]


class Looked:
    """A deadlock monitor of two ranks whose threads are given by the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        reader = SimpleNamespace(unnoted=0, dropped=0, pending=list)
        process = SimpleNamespace(status=lambda: Status("sleeping", exiting=False, cpu_s=0.0))
        members = [SimpleNamespace(rank=i, name=f"rank {i}", reader=reader, process=process) for i in (0, 1)]
        pool: Any = SimpleNamespace(members=members, kind=SimpleNamespace(certain_after_s=0.5), options=None, lost={})
        self._monitor = DeadlockMonitor(pool, [0, 1], None, {}, {})  # type: ignore[arg-type]
        self._next: list[RankThreads] = []
        self._now_ns = 0
        self.looks = 0
        monkeypatch.setattr(self._monitor, "_threads_of", self._threads_of)
        monkeypatch.setattr("labkit.group.deadlock_monitor.time", SimpleNamespace(perf_counter_ns=lambda: self._now_ns))

    def _threads_of(self, ranks: Sequence[int], *, insist: bool = True, with_children: bool = False) -> dict[int, RankThreads]:
        assert with_children is insist, "a silent rank is only asked gently"
        self.looks += 1
        return {i: threads for i, threads in enumerate(self._next) if i in ranks}

    def certain(
        self, zero: RankThreads, one: RankThreads, standings: list[RankState] = FACING, *, after_ns: int = LONGEST_PAUSE_NS
    ) -> bool:
        """Whether a deadlock is reported, given the time since the previous look."""
        self._next = [zero, one]
        self._now_ns += after_ns
        return self._monitor._confirmed(standings, self._now_ns) is not None

    def silent(self, *seconds: float) -> list[str]:
        """The notices after so many seconds of silence each, while no rank waits."""
        self._next = [look(), look()]
        notices = []
        for silent_s in seconds:
            assert self._monitor.check(self._now_ns, silent_s) is None
            notices.append(self._monitor.silence)
        return notices


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Looked:
    return Looked(monkeypatch)


def test_two_equal_looks(group: Looked) -> None:
    assert [group.certain(look(), look(ASLEEP)) for _ in range(2)] == [False, True]


def test_pending_operations_have_changed(group: Looked) -> None:
    assert not group.certain(look(), look())
    assert not group.certain(look(), look(), [waits_for(1, start=5), waits_for(0)])
    assert group.certain(look(), look(), [waits_for(1, start=5), waits_for(0)])


def test_a_thread_that_may_act_postpones_the_report(group: Looked) -> None:
    assert not any(group.certain(look(), look(AWAKE)) for _ in range(5))


def test_a_thread_that_has_ended_may_have_acted_before(group: Looked) -> None:
    """Pending operations are read first: the thread may send and end before the threads are read."""
    assert not group.certain(look(), look(AWAKE))
    assert not group.certain(look(), look())
    assert not group.certain(look(), look()), "nothing could act from now on: but has it?"
    assert group.certain(look(), look())


def test_a_new_thread_may_act(group: Looked) -> None:
    assert not group.certain(look(), look())
    assert not group.certain(look(), look(ASLEEP))


def test_a_thread_that_was_woken_meanwhile(group: Looked) -> None:
    moved = thread(endless=True, cpu_ns=4)
    assert [group.certain(look(), look(t)) for t in (ASLEEP, moved, moved, moved)] == [False, False, False, True]


def test_a_rank_that_does_not_answer_is_unknown(group: Looked) -> None:
    assert not any(group.certain(look(), RankThreads(None)) for _ in range(3))
    assert group._monitor._suspicion is not None
    assert {i: active.kind for i, active in group._monitor._suspicion.acting.items()} == {1: "silent"}
    assert [group.certain(look(), look()) for _ in range(2)] == [False, True]


def test_looks_become_less_frequent(group: Looked) -> None:
    for pause_ns in (CONFIRM_NS, 2 * CONFIRM_NS, 4 * CONFIRM_NS):
        before = group.looks
        assert not group.certain(look(), look(AWAKE), after_ns=pause_ns)
        assert group.looks == before + 1
        assert not group.certain(look(), look(AWAKE), after_ns=pause_ns - 1)
        assert group.looks == before + 1, "it is not time yet"


def test_long_silence_is_noted_and_renewed_after_twice_as_long(group: Looked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("labkit.group.deadlock_monitor.SLOW_S", 20.0)
    monkeypatch.setattr(group._monitor, "_next_silence_s", 20.0)
    none, first, same, longer = group.silent(19.0, 20.0, 39.0, 40.0)
    assert none == ""
    assert "20 s" in first
    assert "rank 0 and rank 1 are at own.py, line 1" in first
    assert same == first
    assert "40 s" in longer
    assert group.looks == 2
    assert group.silent(0.1, 30.0, 80.0) == ["", "", longer.replace("40 s", "80 s")], "a run that prints now and then"
