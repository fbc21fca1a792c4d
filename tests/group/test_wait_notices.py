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


def test_a_computing_rank_is_waited_for() -> None:
    waits = op("all_reduce")
    assert notice(rank(0, waits), rank(1), rank(2, waits)) == (
        "rank 0 and rank 2 have waited in all_reduce (cell 5, line 1) for more than 20 s; rank 1 is computing"
    )


def test_a_distributed_backward_pass_may_lack_a_gradient() -> None:
    assert notice(rank(0, op(DIST_BACKWARD, group=DIST_BACKWARD)), rank(1, returned=True)) == (
        "rank 0 has waited in dist_autograd.backward (cell 5, line 1) for more than 20 s; it waits for ever if the loss leaves "
        "out a result of a remote call in its context"
    )


def test_a_short_wait_is_not_mentioned_beside_a_long_one() -> None:
    shutdown = op("rpc.shutdown", group="rpc shutdown")
    call = op("rpc_sync reward", group="rpc 1", since=23 * S, peer=0, thread=7)
    said = "rank 1 has waited in rpc.shutdown (cell 5, line 1) for more than 20 s"
    assert notice(rank(0, op("rpc_async episode", group="rpc 0", since=22 * S, peer=1)), rank(1, shutdown, call)) == said


def test_a_call_that_has_returned_a_future() -> None:
    call, promise = (
        op("rpc_sync PS.add", group="rpc 0>1", peer=1),
        op(PROMISE.recorded("PS.add"), group="rpc 0>1", since=0, peer=0),
    )
    assert notice(rank(0, call), rank(1, promise, returned=True, serving=4), rank(2)) == (
        "rank 0 has waited in rpc_sync PS.add with rank 1 (cell 5, line 1) for more than 20 s; rank 2 is computing; on rank 1 "
        "PS.add has returned a future that is not completed"
    )


def test_where_the_missing_rank_is(source: str) -> None:
    assert notice(rank(0, op("all_reduce")), rank(1), threads={1: there(source)}) == (
        "rank 0 has waited in all_reduce (cell 5, line 1) for more than 20 s; rank 1 is at own.py, line 2: time.sleep(100)"
    )
    assert notice(rank(0, op("all_reduce")), rank(1), threads={1: there("gone.py")}).endswith(
        "rank 1 is at gone.py, line 2, in load"
    )


def test_a_wait_with_a_time_limit_is_mentioned_too() -> None:
    assert notice(rank(0, op("monitored_barrier", thread=TIMED)), rank(1)).startswith("rank 0 has waited in monitored_barrier")


def test_ranks_that_wait_in_different_places() -> None:
    there_, here = op("recv", 3, group="p2p 1>0 tag 0", peer=1), op("barrier", 2, since=7 * S)
    assert notice(rank(0, there_), rank(1, here)) == (
        "rank 0 has waited in recv with rank 1 (cell 5, line 3) for more than 20 s; rank 1 has waited in barrier (cell 5, line "
        "2) for more than 15 s"
    )


def test_threads_that_may_still_act(source: str) -> None:
    waits = rank(0, op("recv", group="p2p 1>0 tag 0", peer=1))
    there_ = there(source).main
    thread, main = Active("thread", there_), Active("main", there_)
    returned = rank(1, returned=True)
    assert notice(waits, returned, acting={1: thread}).endswith(
        "; rank 1 has returned, and has another thread, at own.py, line 2: time.sleep(100)"
    )
    assert notice(waits, returned, acting={0: main}).endswith(
        "; rank 1 has returned; rank 0 is at own.py, line 2: time.sleep(100)"
    )
    assert notice(waits, returned, acting={0: Active("child", child="sleep 60")}).endswith(
        "; rank 0 has a child process: sleep 60"
    )
    assert notice(waits, returned, acting={0: Active("child")}).endswith("; rank 0 has a child process: a fork")
    assert notice(waits, returned, acting={0: Active("silent")}).endswith("; rank 0 does not say where its threads are")


def test_many_ranks_are_counted() -> None:
    ranks = [rank(i, op("barrier")) for i in range(62)]
    said = notice(*ranks, rank(62), rank(63))
    assert said == (
        "rank 0, rank 1, rank 2, rank 3 and 58 others have waited in barrier (cell 5, line 1) for more than 20 s; rank 62 and "
        "rank 63 are computing"
    )


def test_tensorflow_does_not_say_who_is_missing() -> None:
    waits = op("TensorFlow", 0, group=TENSORFLOW)
    assert notice(rank(0, waits), rank(1), rank(2, called=False, returned=True)).endswith("; rank 1 is computing")


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


def test_nobody_waits() -> None:
    assert notice(rank(0), rank(1, op("all_reduce", since=0))) == ""
