"""Notices about ranks that wait long, on states made by hand, without processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from labkit.group.deadlock import RankState
from labkit.group.deadlock_words import silence_notice, waiting_notice
from labkit.launch.frames import frame_at
from labkit.launch.thread_states import Active, RankThreads, Thread
from labkit.recording.group_keys import DIST_BACKWARD, TENSORFLOW
from labkit.recording.operations import PROMISE
from labkit.recording.schema import TIMED, Pending

S = 1_000_000_000


def op(name: str, match: int = 1, *, group: str = "world", since: int = 1 * S, peer: int = -1, thread: int = 0) -> Pending:
    return Pending(name, 1, since, 0, peer, group, match, f"cell 5, line {match}", "float32 [1]", thread)


def rank(number: int, *pending: Pending, **rest: Any) -> RankState:
    return RankState(f"rank {number}", pending, entered={p.group: p.match for p in pending}, **rest)


@pytest.fixture
def source(tmp_path: Path) -> str:
    file = tmp_path / "own.py"
    file.write_text("def load():\n    time.sleep(100)\n")
    return str(file)


def there(file: str, line: int = 2, function: str = "load") -> RankThreads:
    return RankThreads(Thread((frame_at(os.__file__, 1, "run"), frame_at(file, line, function, innermost=True))))


def notice(
    *ranks: RankState, threads: Mapping[int, RankThreads] | None = None, acting: Mapping[int, Active] | None = None
) -> str:
    return waiting_notice(ranks, threads or {}, acting or {}, 23 * S)


SUM = op("all_reduce")
FUTURE = op(PROMISE.recorded("PS.add"), group="rpc 0>1", since=0, peer=0)
LONG = "(cell 5, line 1) for more than 20 s"
IF_LEFT_OUT = "if the loss leaves out a result of a remote call in its context"
NOT_COMPLETED = "PS.add has returned a future that is not completed"
NOTICES = {
    "a computing rank": (
        [rank(0, SUM), rank(1), rank(2, SUM)], f"rank 0 and rank 2 have waited in all_reduce {LONG}; rank 1 is computing",
    ),
    "a distributed backward pass may lack a gradient": (
        [rank(0, op(DIST_BACKWARD, group=DIST_BACKWARD)), rank(1, returned=True)],
        f"rank 0 has waited in dist_autograd.backward {LONG}; it waits for ever {IF_LEFT_OUT}",
    ),
    "a short wait is not mentioned beside a long one": (
        [
            rank(0, op("rpc_async episode", group="rpc 0", since=22 * S, peer=1)),
            rank(1, op("rpc.shutdown", group="rpc shutdown"), op("rpc_sync reward", group="rpc 1", since=23 * S, thread=7)),
        ],
        f"rank 1 has waited in rpc.shutdown {LONG}",
    ),
    "a call that has returned a future": (
        [rank(0, op("rpc_sync PS.add", group="rpc 0>1", peer=1)), rank(1, FUTURE, returned=True, serving=4), rank(2)],
        f"rank 0 has waited in rpc_sync PS.add with rank 1 {LONG}; rank 2 is computing; on rank 1 {NOT_COMPLETED}",
    ),
    "a time limit": (
        [rank(0, op("monitored_barrier", thread=TIMED)), rank(1)],
        f"rank 0 has waited in monitored_barrier {LONG}; rank 1 is computing",
    ),
    "different places": (
        [rank(0, op("recv", group="p2p 1>0 tag 0", peer=1)), rank(1, op("barrier", 2, since=7 * S))],
        f"rank 0 has waited in recv with rank 1 {LONG}; rank 1 has waited in barrier (cell 5, line 2) for more than 15 s",
    ),
    "many ranks are counted": (
        [*(rank(i, op("barrier")) for i in range(62)), rank(62), rank(63)],
        f"rank 0, rank 1, rank 2, rank 3 and 58 others have waited in barrier {LONG}; rank 62 and rank 63 are computing",
    ),
    "TensorFlow does not say who is missing": (
        [rank(0, op("TensorFlow", 0, group=TENSORFLOW)), rank(1), rank(2, called=False, returned=True)],
        "rank 0 has waited in TensorFlow (cell 5, line 0) for more than 20 s; rank 1 is computing",
    ),
    "nobody waits": ([rank(0), rank(1, op("all_reduce", since=0))], ""),
}  # fmt: skip


@pytest.mark.parametrize("case", NOTICES)
def test_a_notice(case: str) -> None:
    ranks, words = NOTICES[case]
    assert notice(*ranks) == words


def test_where_the_missing_rank_is(source: str) -> None:
    assert notice(rank(0, op("all_reduce")), rank(1), threads={1: there(source)}) == (
        "rank 0 has waited in all_reduce (cell 5, line 1) for more than 20 s; rank 1 is at own.py, line 2: time.sleep(100)"
    )
    assert notice(rank(0, op("all_reduce")), rank(1), threads={1: there("gone.py")}).endswith(
        "rank 1 is at gone.py, line 2, in load"
    )


def test_threads_that_may_still_act(source: str) -> None:
    waits = rank(0, op("recv", group="p2p 1>0 tag 0", peer=1))
    at, where = there(source).main, "at own.py, line 2: time.sleep(100)"
    for number, active, words in (
        (1, Active("thread", at), f"; rank 1 has returned, and has another thread, {where}"),
        (0, Active("main", at), f"; rank 1 has returned; rank 0 is {where}"),
        (0, Active("child", child="sleep 60"), "; rank 0 has a child process: sleep 60"),
        (0, Active("child"), "; rank 0 has a child process: a fork"),
        (0, Active("silent"), "; rank 0 does not say where its threads are"),
    ):
        assert notice(waits, rank(1, returned=True), acting={number: active}).endswith(words)


def test_where_a_call_is_served(source: str) -> None:
    call = op("rpc_sync f", group="rpc 0>1", peer=1)
    serve = op("serve f", group="rpc 0>1", peer=0, since=0, thread=8)
    serving = Thread(there(source).main.frames, 5, 8)  # type: ignore[union-attr]
    said = notice(rank(0, call), rank(1, serve, returned=True), threads={1: RankThreads(Thread(()), (serving,))})
    assert said == (
        "rank 0 has waited in rpc_sync f with rank 1 (cell 5, line 1) for more than 20 s; rank 1 serves it at own.py, line 2: "
        "time.sleep(100)"
    )


def test_ranks_that_have_printed_nothing_for_long(source: str) -> None:
    at = "at own.py, line 2: time.sleep(100)"
    assert silence_notice({"a": there(source), "b": there(source)}, 20.4) == f"nothing printed for 20 s; a and b are {at}"
    assert silence_notice({"a": there(source), "b": None}, 41.0) == f"nothing printed for 41 s; a is {at}; b is running"
    assert silence_notice({}, 20.0) == ""
