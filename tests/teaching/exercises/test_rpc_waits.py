"""Limits of exercises on RPC: between two turns of a wait, all processes answer, so that a stall costs one at most."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from labkit.teaching.exercises import rpc_waits
from labkit.teaching.exercises.rpc_waits import TURNS, happens_within


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The processes that were called, in order; there are two."""
    called: list[str] = []
    rpc = SimpleNamespace(rpc_sync=lambda rank, _, timeout: called.append(f"rank {rank}, timeout {timeout}"))
    monkeypatch.setattr(rpc_waits, "rpc", rpc)
    monkeypatch.setenv("WORLD_SIZE", "2")
    return called


def test_what_happens_at_once_needs_no_call(calls: list[str]) -> None:
    assert happens_within(5.0, lambda _: True)
    assert calls == []


def test_all_processes_answer_before_each_further_turn(calls: list[str]) -> None:
    turns: list[float] = []

    def wait(turn_s: float) -> bool:
        assert len(calls) == 2 * len(turns)
        turns.append(turn_s)
        return False

    assert not happens_within(5.0, wait)
    assert turns == [5.0 / TURNS] * TURNS
    assert set(calls) == {"rank 0, timeout 0", "rank 1, timeout 0"}, "however long the answer takes"


def test_what_happens_when_a_process_runs_again_is_in_time(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    happened = threading.Event()
    monkeypatch.setattr(rpc_waits.rpc, "rpc_sync", lambda *_, **__: happened.set())
    assert happens_within(1e-6, happened.wait)
