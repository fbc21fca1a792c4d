"""Deadlocks of real ranks: each is explained within a moment, and the next run works."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from reported import Reported  # noqa: E402
from time_limits import some_limit_does  # noqa: E402
from torch.distributed import rpc  # noqa: E402

import labkit as lab  # noqa: E402
from labkit.errors.exceptions import DeadlockError, MismatchError  # noqa: E402
from labkit.group.deadlock import Reason  # noqa: E402
from labkit.group.deadlock_monitor import DeadlockMonitor  # noqa: E402
from labkit.group.deadlock_words import mismatch_in_words  # noqa: E402
from labkit.group.output import Output  # noqa: E402
from labkit.worker.runtimes.registry import RUNTIMES  # noqa: E402

pytestmark = pytest.mark.processes


def returns_early() -> None:
    if dist.get_rank() == 1:
        return
    dist.all_reduce(torch.ones(3))


def only_on_rank_0() -> None:
    if dist.get_rank() == 0:
        dist.barrier()
    dist.all_reduce(torch.ones(2))


def another_order() -> None:
    mine = [dist.all_reduce, lambda x: dist.broadcast(x, 0)]
    for collective in mine if dist.get_rank() == 0 else reversed(mine):
        collective(torch.ones(3))


def other_shapes() -> None:
    dist.all_reduce(torch.ones(4 if dist.get_rank() else 5))


def other_roots() -> None:
    dist.broadcast(torch.ones(4), src=dist.get_rank() % 2)


def two_send() -> None:
    me = dist.get_rank()
    if me < 2:
        dist.send(torch.ones(5), 1 - me)
        dist.recv(torch.ones(5), 1 - me)


def two_receive() -> None:
    me = dist.get_rank()
    if me < 2:
        dist.recv(torch.ones(5), 1 - me)


def nobody_sends() -> None:
    if dist.get_rank() == 0:
        dist.recv(torch.ones(5), 1)
    else:
        dist.barrier()


def a_ring_of_sends() -> None:
    me, size = dist.get_rank(), dist.get_world_size()
    dist.send(torch.ones(5), (me + 1) % size)


def waits_for_an_asynchronous_one() -> None:
    if dist.get_rank() != 2:
        dist.all_reduce(torch.ones(2), async_op=True).wait()


def ddp_with_a_batch_less() -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    for _ in range(3 - (dist.get_rank() == 1)):
        model(torch.ones(2, 4)).sum().backward()


STUCK: dict[Callable[[], None], tuple[Reason, list[tuple[int, str]]]] = {
    only_on_rank_0: (Reason.MISMATCH, [(0, "barrier"), (1, "all_reduce")]),
    another_order: (Reason.MISMATCH, [(0, "all_reduce"), (1, "broadcast")]),
    other_shapes: (Reason.MISMATCH, [(0, "all_reduce"), (1, "all_reduce")]),
    other_roots: (Reason.MISMATCH, [(0, "broadcast"), (1, "broadcast")]),
    two_send: (Reason.CIRCLE, [(0, "send"), (1, "send")]),
    two_receive: (Reason.CIRCLE, [(0, "recv"), (1, "recv")]),
    nobody_sends: (Reason.CIRCLE, [(0, "recv"), (1, "barrier")]),
    a_ring_of_sends: (Reason.CIRCLE, [(0, "send"), (1, "send"), (2, "send")]),
}
DESERTED: dict[Callable[[], None], tuple[int, list[tuple[int, str]]]] = {
    returns_early: (1, [(0, "all_reduce"), (2, "all_reduce")]),
    waits_for_an_asynchronous_one: (2, [(0, "all_reduce"), (1, "all_reduce")]),
    ddp_with_a_batch_less: (1, [(0, "all_reduce"), (2, "all_reduce")]),
}


def total() -> float:
    one = torch.ones(1)
    dist.all_reduce(one)
    return float(one)


@pytest.mark.parametrize("function", STUCK, ids=lambda f: f.__name__)
def test_ranks_that_wait_for_each_other(three: lab.Group, function: Callable[[], None], reported: Reported) -> None:
    with pytest.raises(DeadlockError) as caught:
        three.run(function)
    assert reported.deadlock() == STUCK[function]
    assert list(caught.value.operations) == [name for _, name in STUCK[function][1]]
    assert all("test_deadlock_run.py, line" in line for line in reported.lines())
    assert [" ".join(line.split()[:2]) for line in caught.value.doings] == ["rank 0", "rank 1", "rank 2"]
    assert three.run(total).results == [3.0] * 3


@pytest.mark.parametrize("function", DESERTED, ids=lambda f: f.__name__)
def test_ranks_that_wait_for_a_rank_that_returned(
    three: lab.Group, function: Callable[[], None], monkeypatch: pytest.MonkeyPatch, reported: Reported
) -> None:
    culprit, waits = DESERTED[function]

    def all_have_come(certain_after_s: float) -> bool:
        """Otherwise only one of them is reported as waiting."""
        monkeypatch.setattr(RUNTIMES["torch"], "certain_after_s", certain_after_s)
        with pytest.raises(lab.RankError) as caught:
            three.run(function)
        assert caught.value.rank == culprit
        return reported.deadlock() == (Reason.RETURNED, waits)

    assert some_limit_does(all_have_come, (0.5, 5.0, 30.0))
    assert three.run(total).results == [3.0] * 3


def test_a_collective_on_one_rank_alone(three: lab.Group, reported: Reported) -> None:
    with pytest.raises(lab.RankError) as caught:
        three[0].run(total)
    assert caught.value.rank == 1
    assert reported.deadlock() == (Reason.NOT_CALLED, [(0, "all_reduce")])
    assert three.run(total).results == [3.0] * 3


def other_types() -> None:
    dist.all_reduce(torch.ones(4, dtype=[torch.float32, torch.float64][dist.get_rank() % 2]))


def test_a_mismatch_that_crashes_is_explained(three: lab.Group, reported: Reported) -> None:
    with pytest.raises(lab.LabError) as caught:
        three.run(other_types)
    sides = reported.mismatches[-1]
    assert {(p.name, p.signature) for _, p in sides} == {("all_reduce", "float32 [4]"), ("all_reduce", "float64 [4]")}
    assert mismatch_in_words(sides)[1] in " ".join(str(caught.value).split())


def slow(path: str) -> float:
    if dist.get_rank() == 1:
        next(there for there in iter(lambda: os.path.exists(path), None) if there)
    return total()


def test_waiting_for_a_computing_rank_prints_a_notice_and_stops_nothing(
    three: lab.Group, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = f" {slow.__code__.co_firstlineno + 2}: next(there for "
    enough = tmp_path / "enough"

    def say(_: Output, word: str) -> None:
        waiting, *rest = word.split("; ")
        both = all(part in waiting for part in ("rank 0", "rank 2", "all_reduce (test_deadlock_run.py, line"))
        if both and any("rank 1" in part and place in part for part in rest):  # one waits first: another line is printed then
            enough.touch()

    monkeypatch.setattr("labkit.group.deadlock_monitor.SLOW_NS", 600_000_000)
    monkeypatch.setattr(Output, "say", say)
    assert three.run(slow, str(enough)).results == [3.0] * 3, "rank 1 goes on when the word has been said"


def call_back(name: str, depth: int) -> int:
    from torch.distributed import rpc

    if depth == 0:
        return 0
    other = "b" if name == "a" else "a"
    return rpc.rpc_sync(other, call_back, args=(other, depth - 1)) + 1


def test_calls_that_wait_for_each_other_without_a_free_thread(reported: Reported) -> None:
    with lab.Group(["a", "b"], runtime="rpc", timeout_s=200) as group:
        assert group["a"].run(call_back, "a", 8).results == [8]
        with pytest.raises(DeadlockError):
            group["a"].run(call_back, "a", 200)
        reason, waits = reported.deadlock()
        assert reason is Reason.CIRCLE
        assert (0, "rpc_sync call_back") in waits
        with pytest.raises(DeadlockError):
            group["a"].run(call_back, "a", 32)  # the last call is answered, and all threads of its caller wait
        reason, waits = reported.deadlock()
        assert reason is Reason.NO_THREAD
        assert waits == [(1, "rpc_sync call_back")] * len(waits)
        assert group["a"].run(call_back, "a", 2).results == [2]


CAME: list[Any] = []  # of the server: a future for each trainer that has arrived
COUNTING = threading.Lock()  # two threads of the server may run `add` at once


@rpc.functions.async_execution
def add() -> Any:
    """Answers when two trainers have arrived, as a parameter server with batched updates does."""
    with COUNTING:
        CAME.append(torch.futures.Future())
        answer = CAME[-1].then(lambda future: future.wait() + 1)
        if len(CAME) == 2:
            for future in CAME:
                future.set_result(1)
            CAME.clear()
    return answer


def train(**times: int) -> int:
    mine = times.get(rpc.get_worker_info().name, 0)
    return sum(rpc.rpc_sync("server", add) for _ in range(mine))


def test_a_future_that_nobody_completes(reported: Reported) -> None:
    with lab.Group(["a", "b", "server"], runtime="rpc", timeout_s=60) as group:
        assert group.run(train, a=3, b=3).results == [6, 6, 0]
        with pytest.raises(DeadlockError):
            group.run(train, a=3, b=2)
        assert reported.deadlock() == (Reason.FUTURE, [(0, "rpc_sync add")])
        assert reported.lines() == [f"test_deadlock_run.py, line {train.__code__.co_firstlineno + 2}"]
        assert [operation.peer for _, operation in reported.deadlocks[-1].waits] == [2]
        assert group.run(train, a=1, b=1).results == [2, 2, 0]


LOCK = threading.Lock()


def locked(other: str, depth: int) -> int:
    """Takes the lock of its rank and calls the other rank back: the third call waits for the first for ever."""
    from torch.distributed import rpc

    with LOCK:
        return rpc.rpc_sync(other, call_locked, args=(other, depth)) if depth else 0


def call_locked(me: str, depth: int) -> int:
    from torch.distributed import rpc

    other = "b" if me == "a" else "a"
    return rpc.rpc_sync(other, locked, args=(me, depth - 1))


def test_the_line_of_the_lock_in_a_cycle_of_calls_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def say_and_stop(_: Output, word: str) -> None:
        if "b serves it" in word and not said:
            said.append(word)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("labkit.group.deadlock_monitor.SLOW_NS", 300_000_000)
    monkeypatch.setattr(Output, "say", say_and_stop)
    with lab.Group(["a", "b"], runtime="rpc", timeout_s=200) as group:
        assert group["a"].run(call_locked, "a", 1).results == [0]
        with pytest.raises(KeyboardInterrupt):
            group["a"].run(call_locked, "a", 3)
    line = locked.__code__.co_firstlineno + 4
    assert f"b serves it at test_deadlock_run.py, line {line}: with LOCK:" in said[0]


def test_a_deadlock_that_does_not_last_is_not_reported(three: lab.Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are read one after the other: one that seems to hang may have moved meanwhile."""
    looks = []
    look = DeadlockMonitor.check

    def look_and_forget(watchdog: DeadlockMonitor, now_ns: int, silent_s: float) -> Any:
        looks.append(now_ns)
        if len(looks) % 3 == 0 and watchdog._suspicion is not None:
            watchdog._suspicion = dataclasses.replace(
                watchdog._suspicion, pending=()
            )  # as if another operation had been under way
        if len(looks) == 60:
            monkeypatch.setattr(DeadlockMonitor, "check", look)
        return look(watchdog, now_ns, silent_s)

    monkeypatch.setattr(DeadlockMonitor, "check", look_and_forget)
    with pytest.raises(DeadlockError):
        three.run(two_receive)
    assert len(looks) == 60


def a_world_of_its_own() -> float:
    """Its first collective is number 1, as in the previous world."""
    dist.all_reduce(torch.ones(3))
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        threading.Event().wait(1.5)
    one = torch.ones(2)
    dist.broadcast(one, 0)
    return float(one[0])


def test_a_world_that_is_initialised_again_starts_counting_again() -> None:
    with lab.Group(3, timeout_s=200) as group:
        assert group.run(a_world_of_its_own).results == [1.0] * 3


def test_a_suspended_rank_is_reported_and_can_continue(three: lab.Group, monkeypatch: pytest.MonkeyPatch) -> None:
    pids = three.run(os.getpid).results
    said: list[str] = []

    def say(_: Output, word: str) -> None:
        said.append(word)
        if word:
            os.kill(pids[1], signal.SIGCONT)

    monkeypatch.setattr(Output, "say", say)
    assert three.run(stop_itself).results == [3.0] * 3
    words = [word for word in said if word]
    assert words[0] == f"stopped by a signal (SIGSTOP): rank 1; `kill -CONT {pids[1]}` resumes the run"


def stop_itself() -> float:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return total()


# Mismatched messages. gloo copies bytes: a receive that is too large, or of another type, completes without an error.


def sends(*given: torch.Tensor) -> None:
    if dist.get_rank() == 0:
        dist.send(torch.ones(2), 1)
        dist.send(given[0], 1)
    elif dist.get_rank() == 1:
        dist.recv(torch.ones(2, 1), 0)
        dist.recv(given[1], 0)


@pytest.mark.parametrize(
    ("given", "sent", "received", "error"),
    [
        ((torch.ones(4), torch.ones(8)), "float32 [4]", "float32 [8]", MismatchError),
        ((torch.ones(4), torch.ones(4, dtype=torch.int32)), "float32 [4]", "int32 [4]", MismatchError),
        ((torch.ones(8), torch.ones(4)), "float32 [8]", "float32 [4]", lab.RankError),  # it ends the rank
    ],
    ids=["too large", "another type", "too small"],
)
def test_a_message_that_is_received_as_something_else_is_an_error(
    three: lab.Group, given: tuple[torch.Tensor, ...], sent: str, received: str, error: type[lab.RunError], reported: Reported
) -> None:
    with pytest.raises(error) as caught:
        three.run(sends, *given)
    first = sends.__code__.co_firstlineno
    sides = [(name, p.name, p.signature, p.line) for name, p in reported.mismatches[-1]]
    assert sides == [
        ("rank 0", "send", sent, f"test_deadlock_run.py, line {first + 3}"),
        ("rank 1", "recv", received, f"test_deadlock_run.py, line {first + 6}"),
    ]
    if isinstance(caught.value, lab.RankError):
        assert caught.value.rank == 1
        assert caught.value.hint


def test_a_message_may_be_received_in_another_shape(three: lab.Group) -> None:
    three.run(sends, torch.ones(4), torch.ones(2, 2))


def test_numbers_count_from_the_start_of_the_run(three: lab.Group) -> None:
    def second_is_missing() -> None:
        dist.all_reduce(torch.ones(1))
        if dist.get_rank():
            dist.all_reduce(torch.ones(1))

    for _ in range(3):
        three.run(total)
    with pytest.raises(lab.RankError) as caught:
        three.run(second_is_missing)
    assert str(caught.value).count(" all_reduce number 2 ") == 2
