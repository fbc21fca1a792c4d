"""States of ranks made by hand: what each has under way, for tests of deadlocks without processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from labkit.group.deadlock import RankState, find_deadlock
from labkit.recording.operations import PROMISE, SERVE, OperationType
from labkit.recording.schema import Pending

THREADS = 4  # that serve calls in an RPC rank


def op(
    name: str, match: int = 1, *, group: str = "world", since: int = 1, peer: int = -1, signature: str = "", thread: int = 0
) -> Pending:
    return Pending(name, 1, since, 0, peer, group, match, f"cell 5, line {match}", signature, thread)


def message(name: str, source: int, destination: int, match: int = 1, tag: int = 0, **rest: Any) -> Pending:
    return op(name, match, group=f"p2p {source}>{destination} tag {tag}", peer=destination if name == "send" else source, **rest)


def call(caller: int, callee: int, match: int = 1, thread: int = 0) -> Pending:
    return op("rpc_sync f", match, group=f"rpc {caller}>{callee}", peer=callee, thread=thread)


def serve(caller: int, callee: int, match: int = 1, thread: int = 0) -> Pending:
    return op(SERVE.recorded("f"), match, group=f"rpc {caller}>{callee}", peer=caller, since=0, thread=thread)


def future(caller: int, callee: int, match: int = 1, kind: OperationType = PROMISE) -> Pending:
    return op(kind.recorded("f"), match, group=f"rpc {caller}>{callee}", peer=caller, since=0)


def standing(*pending: Pending, came: dict[str, int] | None = None, **rest: Any) -> RankState:
    entered = dict(came or {})
    for p in pending:
        entered[p.group] = max(entered.get(p.group, 0), p.match)
    return RankState("", pending, entered=entered, **rest)


def deadlock_of(*ranks: RankState) -> Any:
    named = [replace(rank, name=f"rank {i}") for i, rank in enumerate(ranks)]
    return find_deadlock(named)


COMPUTES = standing()
RETURNED = standing(returned=True)
