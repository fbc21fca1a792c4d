"""A dozen rounds with fixed faults, and the command's answer when one fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.chaos import rounds
from bench.chaos.faults import Round

pytestmark = pytest.mark.processes

LIMIT_S = 250

ROUNDS = [
    ("raise", "bare"), ("SIGSEGV", "bare"), ("flood", "bare"), ("unpicklable argument", "bare"), ("interrupt", "bare"),
    ("kernel killed", "bare"), ("freeze", "torch"), ("os._exit", "torch"), ("early return", "torch"), ("another root", "torch"),
    ("two receive", "torch"), ("healthy: threads", "torch"),
]  # fmt: skip


@pytest.mark.slow
def test_a_dozen_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(rounds, "GONE_LIMIT_S", 60.0)  # the promise is 2 s; a busy machine may take longer
    monkeypatch.setattr(rounds, "SAID_S", 5.0)
    monkeypatch.setattr(rounds, "ANSWER_LIMIT_S", 200.0)
    turns = [Round(7, i, fault, runtime, "fork", 3, i % 3, 0.05) for i, (fault, runtime) in enumerate(ROUNDS)]
    outcomes = rounds.play(turns)
    assert [(o.turn.fault, o.problem, o.named, o.left, o.reported) for o in outcomes if not o.good] == []
    assert len(outcomes) == len(ROUNDS)


@pytest.mark.slow
def test_the_command_says_how_to_repeat_a_failed_round(tmp_path: Path) -> None:
    """Its judge expects another rank than the one that fails."""
    program = tmp_path / "deceived.py"
    program.write_text(
        "from bench.chaos import rounds\n"
        "rounds.named = lambda *_: False\n"
        "rounds.GONE_LIMIT_S, rounds.ANSWER_LIMIT_S = 60.0, 200.0\n"  # as above
        "rounds.main()\n"
    )  # fmt: skip
    number = next(n for n in range(300) if (t := Round.of(7, n)).runtime == "bare" and t.start == "fork")
    answer = subprocess.run(
        [sys.executable, str(program), "--seed", "7", "--round", str(number)],
        capture_output=True, text=True, timeout=LIMIT_S, check=False, env=os.environ | {"PYTHONPATH": str(rounds.ROOT)},
    )  # fmt: skip
    assert answer.returncode == 1, answer.stdout + answer.stderr
    assert f"FAILED --seed 7 --round {number}: " in answer.stdout
    assert "1 of 1 recovered, 0 of 1 reported correctly, 0 left behind" in answer.stdout
