"""The chaos bench: a dozen rounds with a fixed seed, and a judge that is not deceived."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
PARTS = ("chaos", "judge", "leftovers", "faults", "healthy", "machine", "table")
LIMIT_S = 250


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The modules of the bench, which are scripts beside one another."""
    monkeypatch.syspath_prepend(str(BENCH))
    yield importlib.import_module
    for part in PARTS:
        sys.modules.pop(part, None)


@pytest.fixture
def turn(bench: Any) -> Any:
    """A round in which rank 1 of three raises."""
    return bench("faults").Round(7, 0, "raise", "bare", "fork", 3, 1, 0.1)


def told(kind: str, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "rank": None, "text": "", "sentence": "", "results": None} | fields


# The judge


def test_the_right_rank(bench: Any, turn: Any) -> None:
    named = bench("judge").named
    assert named(turn, told("RankError", rank=1))
    assert not named(turn, told("RankError", rank=2))
    assert not named(turn, told("LabError", rank=None))
    assert not named(turn, told("NoneType")), "the fault went by unseen"


def test_the_ranks_that_wait_for_one_another(bench: Any, turn: Any) -> None:
    named, two = bench("judge").named, replace(turn, fault="two send", runtime="torch")
    assert named(two, told("DeadlockError", sentence="rank 1 waits in send for rank 2; rank 2 waits in send for rank 1"))
    assert not named(two, told("DeadlockError", sentence="rank 0 waits in send for rank 2; rank 2 waits in send for rank 0"))
    assert not named(two, told("DeadlockError", sentence="rank 1 waits for a message that nobody will send"))
    other = replace(two, fault="another shape")
    assert named(other, told("DeadlockError", sentence="is all_reduce on rank 0, and all_reduce on rank 1"))
    assert not named(other, told("DeadlockError", sentence="is all_reduce on rank 0, and all_reduce on rank 2"))


def test_stop_and_a_rank_that_is_frozen(bench: Any, turn: Any) -> None:
    named, stop, frozen = bench("judge").named, replace(turn, fault="interrupt"), replace(turn, fault="freeze")
    assert named(stop, told("Stopped"))
    assert not named(stop, told("RankError", rank=1))
    assert named(frozen, told("Stopped", text="    rank 1 was stopped by a signal (SIGSTOP)"))
    assert not named(frozen, told("Stopped", text="    rank 1 was computing"))
    assert not named(frozen, told("Stopped", text="    rank 2 was stopped by a signal (SIGSTOP)"))


def test_a_healthy_run_that_is_said_to_be_stuck(bench: Any, turn: Any) -> None:
    named, healthy = bench("judge").named, replace(turn, fault="healthy: DDP")
    assert named(healthy, told("NoneType", results=[1.0, 1.0, 1.0]))
    assert not named(healthy, told("NoneType", results=[1.0, 1.0, 0.5]))
    assert not named(healthy, told("DeadlockError", text="Deadlock"))


def test_a_group_that_did_not_recover_and_what_is_left_count(bench: Any, turn: Any) -> None:
    judge = bench("judge")
    good = judge.Outcome(turn, "", True, 0.1, [])
    outcomes = [good, replace(good, problem="LabError: no"), replace(good, left=["process 1"]), replace(good, named=False)]
    assert [outcome.good for outcome in outcomes] == [True, False, False, False]
    line = "3 of 4 recovered, the right rank named (or the right thing said) in 3 of 4, 1 left behind"
    assert judge.closing_line(outcomes) == line
    assert judge.rows(outcomes).splitlines()[-1].split("|")[1:-1] == [
        " raise ", " 4      ", " 3         ", " 3          ", " 100 ms                ", " 100 ms ", " 1           ",
    ]  # fmt: skip


def test_a_process_that_was_left_is_found(bench: Any, tmp_path: Path) -> None:
    leftovers = bench("leftovers")
    traces = leftovers.Traces("a mark", tmp_path)
    left_behind = subprocess.Popen(["sleep", "100"], env=os.environ | {leftovers.MARK: "a mark"})
    others = subprocess.Popen(["sleep", "100"], env=os.environ | {leftovers.MARK: "another mark"})
    try:
        left, _ = traces.left((), (), 0.0)
        assert left == [f"process {left_behind.pid}: sleep 100"]
        assert traces.left([left_behind.pid], (), 0.0)[0] == []
        (tmp_path / "forgotten").touch()
        assert traces.left([left_behind.pid], (), 0.0)[0] == ["forgotten"]
        assert traces.left([left_behind.pid], ["forgotten"], 0.0)[0] == []
    finally:
        for process in (left_behind, others):
            process.kill()
            process.wait()


# The rounds


def test_a_round_is_drawn_from_its_seed_and_number(bench: Any) -> None:
    faults = bench("faults")
    of = faults.Round.of
    assert of(7, 3) == of(7, 3)
    drawn = [of(7, number) for number in range(300)]
    assert {turn.fault for turn in drawn} == set(faults.FAULTS), "300 rounds meet every fault"
    assert {turn.runtime for turn in drawn} == set(faults.RUNTIMES)
    assert {turn.start for turn in drawn} == {"fork", "spawn"}
    assert {turn.fault for turn in drawn} != {turn.fault for turn in map(of, [8] * 30, range(30))}


ROUNDS = [
    ("raise", "bare"), ("SIGSEGV", "bare"), ("flood", "bare"), ("unpicklable argument", "bare"), ("interrupt", "bare"),
    ("kernel killed", "bare"), ("freeze", "torch"), ("os._exit", "torch"), ("early return", "torch"), ("another root", "torch"),
    ("two receive", "torch"), ("healthy: threads", "torch"),
]  # fmt: skip


@pytest.mark.slow
def test_a_dozen_rounds(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    chaos, faults = bench("chaos"), bench("faults")
    monkeypatch.setattr(chaos, "GONE_LIMIT_S", 60.0)  # the promise is 2 s; a busy machine may take longer
    monkeypatch.setattr(chaos, "SAID_S", 5.0)
    monkeypatch.setattr(chaos, "ANSWER_LIMIT_S", 200.0)
    turns = [faults.Round(7, i, fault, runtime, "fork", 3, i % 3, 0.05) for i, (fault, runtime) in enumerate(ROUNDS)]
    outcomes = chaos.play(turns)
    assert [(o.turn.fault, o.problem, o.named, o.left, o.told) for o in outcomes if not o.good] == []
    assert len(outcomes) == len(ROUNDS)


@pytest.mark.slow
def test_the_command_tells_how_to_repeat_a_round_that_failed(bench: Any, tmp_path: Path) -> None:
    """Its judge is made to expect another rank than the one that fails."""
    program = tmp_path / "deceived.py"
    program.write_text(
        f"import sys; sys.path.insert(0, {str(BENCH)!r})\n"
        "import chaos\n"
        "chaos.named = lambda *_: False\n"
        "chaos.main()\n"
    )  # fmt: skip
    number = next(n for n in range(300) if (t := bench("faults").Round.of(7, n)).runtime == "bare" and t.start == "fork")
    answer = subprocess.run(
        [sys.executable, str(program), "--seed", "7", "--round", str(number)],
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert answer.returncode == 1, answer.stdout + answer.stderr
    assert f"FAILED --seed 7 --round {number}: " in answer.stdout
    assert "1 of 1 recovered, the right rank named (or the right thing said) in 0 of 1, 0 left behind" in answer.stdout
