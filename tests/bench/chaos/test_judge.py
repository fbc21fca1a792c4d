"""The judge of the chaos rounds is not deceived."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bench.chaos.faults import Round
from bench.chaos.judge import Outcome, closing_line, named, rows


@pytest.fixture
def turn() -> Round:
    """A round in which rank 1 of three raises."""
    return Round(7, 0, "raise", "bare", "fork", 3, 1, 0.1)


def reported(kind: str, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "rank": None, "text": "", "sentence": "", "results": None} | fields


def test_the_right_rank(turn: Round) -> None:
    assert named(turn, reported("RankError", rank=1))
    assert not named(turn, reported("RankError", rank=2))
    assert not named(turn, reported("LabError", rank=None))
    assert not named(turn, reported("NoneType")), "the fault went by unseen"


def test_the_ranks_that_wait_for_each_other(turn: Round) -> None:
    two = replace(turn, fault="two send", runtime="torch")
    assert named(two, reported("DeadlockError", sentence="rank 1 waits in send for rank 2; rank 2 waits in send for rank 1"))
    assert not named(two, reported("DeadlockError", sentence="rank 0 waits in send for rank 2; rank 2 waits in send for rank 0"))
    assert not named(two, reported("DeadlockError", sentence="rank 1 waits for a message that nobody will send"))
    other = replace(two, fault="another shape")
    assert named(other, reported("DeadlockError", sentence="is all_reduce on rank 0, and all_reduce on rank 1"))
    assert not named(other, reported("DeadlockError", sentence="is all_reduce on rank 0, and all_reduce on rank 2"))


def test_stop_and_a_rank_that_is_frozen(turn: Round) -> None:
    stop, frozen = replace(turn, fault="interrupt"), replace(turn, fault="freeze")
    assert named(stop, reported("Stopped"))
    assert not named(stop, reported("RankError", rank=1))
    assert named(frozen, reported("Stopped", text="    rank 1 was stopped by a signal (SIGSTOP)"))
    assert not named(frozen, reported("Stopped", text="    rank 1 was computing"))
    assert not named(frozen, reported("Stopped", text="    rank 2 was stopped by a signal (SIGSTOP)"))


def test_a_healthy_run_reported_as_a_deadlock(turn: Round) -> None:
    healthy = replace(turn, fault="healthy: DDP")
    assert named(healthy, reported("NoneType", results=[1.0, 1.0, 1.0]))
    assert not named(healthy, reported("NoneType", results=[1.0, 1.0, 0.5]))
    assert not named(healthy, reported("DeadlockError", text="Deadlock"))


def test_a_group_that_did_not_recover_and_leftovers_count(turn: Round) -> None:
    good = Outcome(turn, "", True, 0.1, [])
    outcomes = [good, replace(good, problem="LabError: no"), replace(good, left=["process 1"]), replace(good, named=False)]
    assert [outcome.good for outcome in outcomes] == [True, False, False, False]
    line = "3 of 4 recovered, 3 of 4 reported correctly, 1 left behind"
    assert closing_line(outcomes) == line
    assert rows(outcomes).splitlines()[-1].split("|")[1:-1] == [
        " raise ", " 4      ", " 3         ", " 3                  ", " 100 ms                     ", " 100 ms ", " 1           ",
    ]  # fmt: skip
