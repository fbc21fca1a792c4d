"""Which states of ranks, made by hand, are deadlocks, and why: without processes, and without words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from rank_states import CERTAIN, COMPUTES, RETURNED, THREADS, call, deadlock_of, future, message, op, serve, standing

from labkit.group.deadlock import RankState, Reason, find_deadlock, first_mismatch
from labkit.recording.group_keys import TENSORFLOW
from labkit.recording.operations import UNSEEN_PROMISE
from labkit.recording.schema import STREAM, TIMED, Pending

# Ranks that may still continue, and below, under the same name, others nearly like them that cannot.

SUM = standing(op("all_reduce"))
SOME = standing(op("all_reduce", group="group 3 of ranks 0,2"))
CREATE = [standing(op(name, group="new group 1 of ranks 0,1,2")) for name in ("init_device_mesh", "new_group")]
FLAT = standing(op("all_reduce", signature="float32 [4]"))
FROM_1, FROM_0 = standing(message("recv", 1, 0)), standing(message("recv", 0, 1))
ANYBODY = op("recv", 0, group="", signature="float32 [1]")
FULL = standing(message("recv", 0, 1), came={"world": 64}, uncounted=True)
SPAN, BLOCKED = op("all_reduce", 0, group=""), replace(op("TensorFlow's step", 0, group=TENSORFLOW), start_ns=2)
PART = "group 2 of ranks 0,2"
# Rank 0 waits for rank 1, and an operation that it began with rank 2 may end and call back.
BEGUN = standing(message("recv", 1, 0), op("all_reduce", group=PART, since=0))
LEFT = standing(op("all_reduce", group="group 2 of ranks 1,2", since=0), returned=True)
TWO_THREADS = standing(message("recv", 1, 0, thread=1), message("recv", 2, 0, thread=2))
A, B = "group 1 of ranks 0,1", "group 2 of ranks 0,1"
QUEUED = standing(op("all_reduce", group=A, thread=STREAM))  # on a GPU, a rank only enqueues the operation that waits
TF = standing(op("TensorFlow", 0, group=TENSORFLOW))  # TensorFlow does not say who has arrived
CALL = standing(call(0, 1), serving=THREADS)
SERVES = standing(called=False, returned=True, serving=THREADS)
PROMISED = standing(future(0, 1), returned=True, serving=THREADS)
BACKWARD = standing(op("dist_autograd.backward", 5, group="dist_autograd.backward"), serving=THREADS)
SHUT = op("rpc.shutdown", group="rendezvous at rpc.shutdown of 2 ranks")

MAY_CONTINUE: dict[str, list[RankState]] = {
    "a computing rank may arrive": [SUM, COMPUTES],
    "all have entered it": [SUM, SUM],
    "all have entered it, and one has returned": [SUM, standing(came={"world": 1}, returned=True)],
    "a rank that waits for one that may arrive may arrive itself": [SUM, standing(message("recv", 2, 1)), COMPUTES],
    "nobody waits for it": [standing(op("all_reduce", since=0)), RETURNED],
    "only the members of a group must arrive": [SOME, RETURNED, COMPUTES],
    "a sent message arrives": [FROM_1, standing(came={"p2p 1>0 tag 0": 1}, returned=True)],
    "different functions create a group": [*CREATE, COMPUTES],
    # [4] matches [2, 2]; while the third rank computes, the other two wait only for it.
    "another shape with as many elements": [FLAT, standing(op("all_reduce", signature="float32 [2, 2]")), COMPUTES],
    "a scalar and one element": [*(standing(op("all_reduce", signature=f"float32 {s}")) for s in ("[]", "[1]")), COMPUTES],
    # It has no number at the receiver before it has arrived, and a large one takes time.
    "a message to a receiver from any source": [standing(message("send", 0, 1)), standing(ANYBODY)],
    "it returned before what it takes was there": [
        standing(message("send", 0, 1)), standing(replace(ANYBODY, wait_start_ns=0), returned=True),
    ],
    "more operations than slots": [standing(op("all_reduce", 70)), FULL],
    "a computing rank may send a message from anybody": [standing(ANYBODY), COMPUTES, RETURNED],
    "the student's own communication span": [standing(op("recv", 0, group="")), RETURNED],
    "a span on another thread": [standing(replace(SPAN, start_ns=3), BLOCKED), RETURNED],
    "a time limit": [standing(op("all_reduce", thread=TIMED)), RETURNED],
    "a time limit on one thread": [standing(message("recv", 1, 0, thread=5), op("all_reduce", thread=TIMED)), FROM_0],
    "another thread of a waiting rank": [FROM_1, replace(FROM_0, free=True)],
    "another thread of a rank that returned": [FROM_1, replace(RETURNED, free=True)],
    "another thread of an uncalled rank": [FROM_1, standing(called=False, returned=True, free=True)],
    "an operation under way": [BEGUN, FROM_0, COMPUTES],
    "an operation under way is about to end": [BEGUN, FROM_0, standing(came={PART: 1}, returned=True)],
    "an operation that a rank left under way": [FROM_1, LEFT, COMPUTES],
    "one thread continues while another hangs": [TWO_THREADS, FROM_0, COMPUTES],
    "two gpus wait in different groups": [QUEUED, standing(op("all_reduce", group=B, thread=STREAM))],
    "one gpu waits in another group": [QUEUED, standing(op("all_reduce", group=B))],
    "TensorFlow": [TF, TF],
    "TensorFlow, while another computes": [TF, COMPUTES],
    "a worker of TensorFlow beside a ps has a server": [TF, standing(returned=True, serving=1)],
    "a server of TensorFlow is not called and serves": [TF, standing(called=False, returned=True)],
    "a computing call": [standing(call(0, 1)), standing(serve(0, 1), called=False, returned=True, serving=THREADS)],
    "a computing rank may call a function that sends": [replace(FROM_1, serving=THREADS), SERVES, standing(serving=THREADS)],
    "a distributed backward pass may run on hidden threads": [BACKWARD, standing(SHUT, serving=THREADS)],
    "a call under way will arrive": [standing(call(0, 1, thread=1)), SERVES],
    "another thread serves the call back": [
        standing(call(0, 1, thread=1), serve(1, 0, thread=2), serving=THREADS),
        standing(serve(0, 1, thread=7), call(1, 0, thread=7), serving=THREADS),
    ],
    "a computing rank may make the call that completes a future": [CALL, PROMISED, COMPUTES],
    "another thread may complete a future": [CALL, replace(PROMISED, free=True), RETURNED],
    "C++ may complete a future": [
        CALL, standing(future(0, 1, kind=UNSEEN_PROMISE), returned=True, serving=THREADS), RETURNED,
    ],
    "a callback may complete a future, when its own call has returned": [
        CALL, standing(future(0, 1), call(1, 2), returned=True, serving=THREADS), standing(serve(1, 2), serving=THREADS),
    ],
}  # fmt: skip
CANNOT: dict[str, tuple[list[RankState], tuple[int, ...], int | None]] = {
    "only the members of a group must arrive": ([SOME, COMPUTES, RETURNED], (0,), 2),
    "a sent message arrives": ([standing(message("recv", 1, 0, 2)), standing(came={"p2p 1>0 tag 0": 1}, returned=True)], (0,), 1),
    "a message of another tag is another one": ([FROM_1, standing(came={"p2p 1>0 tag 7": 1}, returned=True)], (0,), 1),
    "different functions create a group": ([*CREATE, RETURNED], (0, 1), 2),
    "another shape": ([FLAT, standing(op("all_reduce", signature="float32 [2, 3]")), COMPUTES], (0, 1), None),
    "a message to another receiver": (
        [standing(message("send", 0, 2)), standing(ANYBODY), standing(op("barrier"))], (0, 1, 2), None,
    ),
    "as many operations as slots": ([standing(op("all_reduce", 70)), replace(FULL, uncounted=False)], (0, 1), None),
    "a span on the same thread": ([standing(SPAN, BLOCKED), RETURNED], (0,), 1),
    "an operation under way will never end": ([BEGUN, FROM_0, RETURNED], (0, 1), None),
    "an operation that a rank left under way": ([FROM_1, LEFT, RETURNED], (0,), 1),
    "TensorFlow": ([TF, RETURNED], (0,), 1),
    "a computing rank may call a function that sends": ([replace(FROM_1, serving=THREADS), SERVES, SERVES], (0,), None),
    "a shutdown to which one never comes": ([standing(SHUT), RETURNED], (0,), 1),
    "a future that depends on one that nobody completes": (
        [
            CALL,
            standing(future(0, 1), replace(call(1, 2), wait_start_ns=0), returned=True, serving=THREADS),
            standing(future(1, 2), returned=True, serving=THREADS),
        ],
        (0,), None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MAY_CONTINUE)
def test_ranks_that_may_continue(case: str) -> None:
    assert deadlock_of(*MAY_CONTINUE[case]) is None


@pytest.mark.parametrize("case", CANNOT)
def test_ranks_nearly_like_them_that_cannot_continue(case: str) -> None:
    states, ranks, culprit = CANNOT[case]
    found = deadlock_of(*states)
    assert (found.ranks, found.culprit) == (ranks, culprit)


@pytest.mark.parametrize("case", CERTAIN)
def test_ranks_that_cannot_continue(case: str) -> None:
    states, ranks, reason, culprit, waits = CERTAIN[case]
    found = deadlock_of(*states)
    assert found is not None
    assert (found.ranks, found.reason, found.culprit) == (ranks, reason, culprit)
    assert [(rank, operation.name, operation.match) for rank, operation in found.waits] == waits
    assert found.absent == ((2, 3) if case == "three ranks not called" else ())


def waits_of(found: Any, attribute: str) -> list[tuple[int, Any]]:
    """Each wait that shows the reason: the rank, and an attribute of its operation."""
    return [(rank, getattr(operation, attribute)) for rank, operation in found.waits]


def test_two_groups_entered_in_different_order() -> None:
    found = deadlock_of(*CERTAIN["two groups"][0])
    assert waits_of(found, "group") == [(0, A), (1, B)]


def test_different_shapes_also_if_the_other_rank_has_completed() -> None:
    other = op("all_reduce", signature="float32 [4]")
    found = deadlock_of(standing(op("all_reduce", signature="float32 [5]")), standing(came={"world": 1}, done=[other]))
    assert (found.ranks, found.reason) == ((0,), Reason.MISMATCH)
    assert waits_of(found, "signature") == [(0, "float32 [5]"), (1, "float32 [4]")]


def test_many_ranks_with_many_operations() -> None:
    """64 ranks with the maximum number of operations, checked twenty times a second."""
    under_way = [op("all_reduce", n, since=0, signature="float32 [4]") for n in range(1, 60)]
    found = deadlock_of(*(standing(*under_way, op("barrier", 60)) for _ in range(63)), RETURNED)
    assert found.ranks == tuple(range(63))
    assert found.culprit == 63


# Remote procedure calls: a rank is several threads.


def waiting_threads(count: int) -> list[Pending]:
    """Threads of rank 1 that serve calls of rank 0 and wait for calls of their own, which rank 0 has answered."""
    return [p for i in range(count) for p in (serve(0, 1, i + 1, thread=i), call(1, 0, i + 1, thread=i))]


def waits_on(threads: int, **rest: Any) -> RankState:
    return standing(*waiting_threads(threads), returned=True, **{"serving": THREADS, "receiving": True, **rest})


def test_replies_that_no_thread_is_left_to_receive() -> None:
    calls = standing(*(call(0, 1, i + 1, thread=99) for i in range(THREADS)), serving=THREADS, receiving=True)
    found = deadlock_of(calls, waits_on(THREADS))
    assert (found.ranks, found.reason) == ((0, 1), Reason.NO_THREAD)
    assert waits_of(found, "thread") == [(1, thread) for thread in range(THREADS)]
    assert deadlock_of(calls, waits_on(THREADS - 1)) is None, "a thread is left"
    assert deadlock_of(calls, waits_on(THREADS, receiving=False)) is None, "another thread completes the calls"
    computing = replace(waits_on(THREADS), pending=[p for p in waits_on(THREADS).pending if p.thread or p.group == "rpc 0>1"])
    assert deadlock_of(calls, computing) is None, "a call is computed"


def test_the_calls_of_a_rank_without_a_thread_may_still_be_computed() -> None:
    """Their replies come too late; but a thread that waits for something else may be free by then."""
    receives = [*waiting_threads(THREADS)[:-1], message("recv", 2, 1, thread=THREADS - 1)]
    rank = standing(*receives, returned=True, serving=THREADS, receiving=True)
    assert deadlock_of(standing(call(0, 1, thread=99), serving=THREADS), rank, COMPUTES) is None


def test_a_returned_future_that_nobody_completes() -> None:
    assert waits_of(deadlock_of(*CERTAIN["a future"][0]), "peer") == [(0, 2), (1, 2)]


def test_a_cycle_of_calls() -> None:
    a = RankState("a", [call(0, 1, 1, thread=1), serve(1, 0, 1, thread=2), call(0, 1, 2, thread=2)], serving=THREADS)
    b = RankState("b", [serve(0, 1, 1, thread=7), call(1, 0, 1, thread=7), serve(0, 1, 2, thread=8)], serving=THREADS)
    assert find_deadlock([a, b]) is None, "the last call may be computing"


# Mismatched operations that did not block.


def test_the_first_two_sides_that_differ() -> None:
    same, longer = op("all_reduce", signature="float32 [2]"), op("all_reduce", signature="float64 [2]")
    assert first_mismatch([(0, same), (1, same)]) == ()
    assert first_mismatch([(0, same), (1, op("all_reduce", 2, signature="float32 [3]"))]) == (), "another operation"
    assert first_mismatch([(0, same), (1, same), (2, longer)]) == ((0, same), (2, longer))


def test_the_sender_of_a_mismatched_message_comes_first() -> None:
    sent, received = message("send", 1, 0, signature="float32 [8]"), message("recv", 1, 0, signature="float32 [4]")
    assert first_mismatch([(0, received), (1, sent)]) == first_mismatch([(1, sent), (0, received)]) == ((1, sent), (0, received))
