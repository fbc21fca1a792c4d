"""Which states of ranks, made by hand, are deadlocks, and why: without processes, and without words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from rank_states import COMPUTES, RETURNED, THREADS, call, deadlock_of, future, message, op, serve, standing

from labkit.group.deadlock import RankState, Reason, find_deadlock, first_mismatch
from labkit.recording.group_keys import TENSORFLOW
from labkit.recording.operations import UNSEEN_PROMISE
from labkit.recording.schema import STREAM, TIMED, Pending


def waits_of(found: Any) -> list[tuple[int, str, int]]:
    """Each wait that shows the reason: rank, operation and number."""
    return [(rank, operation.name, operation.match) for rank, operation in found.waits]


# Ranks that may still continue.


def test_a_computing_rank_may_arrive() -> None:
    assert deadlock_of(standing(op("all_reduce")), COMPUTES) is None


def test_an_operation_that_all_have_entered_may_end() -> None:
    assert deadlock_of(standing(op("all_reduce")), standing(op("all_reduce"))) is None
    assert deadlock_of(standing(op("all_reduce")), standing(came={"world": 1}, returned=True)) is None


def test_a_rank_that_waits_for_one_that_may_arrive_may_arrive_itself() -> None:
    assert deadlock_of(standing(op("all_reduce")), standing(message("recv", 2, 1)), COMPUTES) is None


def test_an_operation_that_nobody_waits_for_blocks_nobody() -> None:
    assert deadlock_of(standing(op("all_reduce", since=0)), RETURNED) is None


def test_only_the_members_of_a_group_must_arrive() -> None:
    some = "group 3 of ranks 0,2"
    assert deadlock_of(standing(op("all_reduce", group=some)), RETURNED, COMPUTES) is None
    assert deadlock_of(standing(op("all_reduce", group=some)), COMPUTES, RETURNED).culprit == 2


def test_a_sent_message_arrives() -> None:
    assert deadlock_of(standing(message("recv", 1, 0)), standing(came={"p2p 1>0 tag 0": 1}, returned=True)) is None
    assert deadlock_of(standing(message("recv", 1, 0, 2)), standing(came={"p2p 1>0 tag 0": 1}, returned=True)).culprit == 1


def test_a_group_may_be_created_by_different_functions() -> None:
    ranks = [standing(op(name, group="new group 1 of ranks 0,1,2")) for name in ("init_device_mesh", "new_group")]
    assert deadlock_of(*ranks, COMPUTES) is None
    assert deadlock_of(*ranks, RETURNED).culprit == 2


def test_a_message_of_another_tag_is_another_one() -> None:
    assert deadlock_of(standing(message("recv", 1, 0)), standing(came={"p2p 1>0 tag 7": 1}, returned=True)).culprit == 1


def test_another_shape_with_as_many_elements_is_not_a_mismatch() -> None:
    """[4] matches [2, 2]; while the third rank computes, the other two wait only for it."""
    flat, square = op("all_reduce", signature="float32 [4]"), op("all_reduce", signature="float32 [2, 2]")
    assert deadlock_of(standing(flat), standing(square), COMPUTES) is None
    assert deadlock_of(standing(flat), standing(op("all_reduce", signature="float32 [2, 3]")), COMPUTES).ranks == (0, 1)
    scalar, one = op("all_reduce", signature="float32 []"), op("all_reduce", signature="float32 [1]")
    assert deadlock_of(standing(scalar), standing(one), COMPUTES) is None


def test_a_message_to_a_receiver_from_any_source_arrives() -> None:
    """It has no number at the receiver before it has arrived, and a large one takes time."""
    assert deadlock_of(standing(message("send", 0, 1)), standing(op("recv", 0, group="", signature="float32 [1]"))) is None
    taken = standing(op("recv", 0, group="", signature="float32 [1]", since=0), returned=True)
    assert deadlock_of(standing(message("send", 0, 1)), taken) is None, "it returned before what it takes was there"
    other_way = (
        standing(message("send", 0, 2)),
        standing(op("recv", 0, group="", signature="float32 [1]")),
        standing(op("barrier")),
    )
    assert deadlock_of(*other_way).ranks == (0, 1, 2)


def test_a_rank_with_more_operations_than_slots_may_have_arrived() -> None:
    assert (
        deadlock_of(standing(op("all_reduce", 70)), standing(message("recv", 0, 1), came={"world": 64}, uncounted=True)) is None
    )
    assert deadlock_of(standing(op("all_reduce", 70)), standing(message("recv", 0, 1), came={"world": 64})) is not None


# Ranks that cannot.

UNCALLED = standing(called=False, returned=True)
ANYBODY = op("recv", 0, group="", signature="float32 [5]")
SUM = op("all_reduce", signature="float32 [3]")
RENDEZVOUS = "rendezvous at localhost:29500 of {} ranks"
BOTH = standing(message("recv", 2, 0, thread=1), message("recv", 1, 0, thread=2))
CERTAIN: dict[str, tuple[list[RankState], tuple[int, ...], Reason, int | None, list[tuple[int, str, int]]]] = {
    "one returned": (
        [standing(op("all_reduce", 3)), RETURNED, standing(op("all_reduce", 3))],
        (0, 2), Reason.RETURNED, 1, [(0, "all_reduce", 3), (2, "all_reduce", 3)],
    ),
    "a gpu waits for one that returned": (
        [standing(op("all_reduce", 2, thread=STREAM)), RETURNED], (0,), Reason.RETURNED, 1, [(0, "all_reduce", 2)],
    ),
    "one waits for one that waits for one that returned": (
        [standing(op("all_reduce")), standing(message("recv", 2, 1)), RETURNED],
        (0, 1), Reason.RETURNED, 2, [(0, "all_reduce", 1), (1, "recv", 1)],
    ),
    "a rank not called": ([standing(op("barrier")), UNCALLED], (0,), Reason.NOT_CALLED, 1, [(0, "barrier", 1)]),
    "several were not called": (
        [standing(op("barrier")), UNCALLED, UNCALLED, standing(op("barrier"))],
        (0, 3), Reason.NOT_CALLED, 1, [(0, "barrier", 1), (3, "barrier", 1)],
    ),
    "two collectives in another order": (
        [standing(SUM), standing(op("broadcast", signature="float32 [3], root 0"))],
        (0, 1), Reason.MISMATCH, None, [(0, "all_reduce", 1), (1, "broadcast", 1)],
    ),
    "messages of different sizes": (
        [standing(message("send", 0, 1, signature="float32 [5]")), standing(message("recv", 0, 1, signature="float32 [9]"))],
        (0, 1), Reason.MISMATCH, None, [(0, "send", 1), (1, "recv", 1)],
    ),
    "two sends to each other": (
        [standing(message("send", 0, 1)), standing(message("send", 1, 0))],
        (0, 1), Reason.CIRCLE, None, [(0, "send", 1), (1, "send", 1)],
    ),
    "two receives, while another rank computes": (
        [standing(message("recv", 1, 0)), standing(message("recv", 0, 1)), COMPUTES],
        (0, 1), Reason.CIRCLE, None, [(0, "recv", 1), (1, "recv", 1)],
    ),
    "two receives, while a thread of another rank may act": (
        [standing(message("recv", 1, 0)), standing(message("recv", 0, 1)), standing(op("all_reduce"), free=True)],
        (0, 1), Reason.CIRCLE, None, [(0, "recv", 1), (1, "recv", 1)],
    ),
    "a ring of sends": (
        [standing(message("send", i, (i + 1) % 3)) for i in range(3)],
        (0, 1, 2), Reason.CIRCLE, None, [(i, "send", 1) for i in range(3)],
    ),
    "a message and a collective": (
        [standing(message("recv", 1, 0)), standing(op("barrier"))],
        (0, 1), Reason.CIRCLE, None, [(0, "recv", 1), (1, "barrier", 1)],
    ),
    "a rank uses another's number": (
        [standing(op("all_gather")), standing(op("init_process_group", group=RENDEZVOUS.format(2)))],
        (0, 1), Reason.CIRCLE, None, [(0, "all_gather", 1), (1, "init_process_group", 1)],
    ),
    "the smaller of two cycles": (
        [BOTH, standing(message("recv", 0, 1)), standing(message("recv", 1, 2))],
        (0, 1, 2), Reason.CIRCLE, None, [(0, "recv", 1), (1, "recv", 1)],
    ),
    "a path into a cycle is not part of it": (
        [*[standing(message("recv", i, j)) for i, j in ((1, 0), (2, 1), (1, 2))], standing(op("barrier"))],
        (0, 1, 2, 3), Reason.CIRCLE, None, [(1, "recv", 1), (2, "recv", 1)],
    ),
    "a rendezvous of too many ranks": (
        [standing(op("init_process_group", group=RENDEZVOUS.format(4))) for _ in range(2)],
        (0, 1), Reason.RENDEZVOUS, None, [(0, "init_process_group", 1), (1, "init_process_group", 1)],
    ),
    "a message from anybody when all have returned": (
        [standing(ANYBODY), RETURNED, RETURNED], (0,), Reason.NO_SENDER, None, [(0, "recv", 0)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CERTAIN)
def test_ranks_that_cannot_continue(case: str) -> None:
    states, ranks, reason, culprit, waits = CERTAIN[case]
    found = deadlock_of(*states)
    assert found is not None
    assert (found.ranks, found.reason, found.culprit) == (ranks, reason, culprit)
    assert waits_of(found) == waits
    assert found.absent == ((2,) if case == "several were not called" else ())


def test_two_groups_entered_in_different_order() -> None:
    a, b = "group 1 of ranks 0,1", "group 2 of ranks 0,1"
    found = deadlock_of(standing(op("all_reduce", group=a)), standing(op("all_reduce", group=b)))
    assert found.reason is Reason.CIRCLE
    assert [(rank, operation.group) for rank, operation in found.waits] == [(0, a), (1, b)]


def test_different_shapes_also_if_the_other_rank_has_completed() -> None:
    other = op("all_reduce", signature="float32 [4]")
    found = deadlock_of(standing(op("all_reduce", signature="float32 [5]")), standing(came={"world": 1}, done=[other]))
    assert found.ranks == (0,)
    assert found.reason is Reason.MISMATCH
    assert [(rank, operation.signature) for rank, operation in found.waits] == [(0, "float32 [5]"), (1, "float32 [4]")]


def test_a_computing_rank_may_send_a_message_from_anybody() -> None:
    assert deadlock_of(standing(ANYBODY), COMPUTES, RETURNED) is None


def test_nothing_is_known_of_the_students_own_communication_spans() -> None:
    assert deadlock_of(standing(op("recv", 0, group="")), RETURNED) is None


def test_a_span_around_a_blocked_operation_changes_nothing() -> None:
    span = op("all_reduce", 0, group="")
    blocked = replace(op("TensorFlow's step", 0, group=TENSORFLOW), start_ns=2)
    assert deadlock_of(standing(span, blocked), RETURNED).culprit == 1
    assert deadlock_of(standing(replace(span, start_ns=3), blocked), RETURNED) is None, "on another thread, it may end"


def test_a_rank_with_a_time_limit_continues_by_itself() -> None:
    assert deadlock_of(standing(op("all_reduce", thread=TIMED)), RETURNED) is None


def test_a_rank_with_a_time_limit_on_one_thread_may_act() -> None:
    waits = standing(message("recv", 1, 0, thread=5), op("all_reduce", thread=TIMED))
    assert deadlock_of(waits, standing(message("recv", 0, 1))) is None


# Ranks that may act besides what they are blocked in.


def test_another_thread_may_send_what_all_wait_for() -> None:
    assert deadlock_of(standing(message("recv", 1, 0)), standing(message("recv", 0, 1), free=True)) is None
    assert deadlock_of(standing(message("recv", 1, 0)), standing(returned=True, free=True)) is None
    assert deadlock_of(standing(message("recv", 1, 0)), standing(called=False, returned=True, free=True)) is None


def test_an_operation_under_way_may_have_a_callback() -> None:
    """Two wait for each other, but an operation that one of them began with a third, computing rank may end and
    call back."""
    begun, third = op("all_reduce", group="group 2 of ranks 0,2", since=0), standing()
    one, other = standing(message("recv", 1, 0), begun), standing(message("recv", 0, 1))
    assert deadlock_of(one, other, third) is None
    assert deadlock_of(one, other, RETURNED).ranks == (0, 1), "it will never end"
    came = standing(came={"group 2 of ranks 0,2": 1}, returned=True)
    assert deadlock_of(one, other, came) is None, "it is about to end"


def test_an_operation_that_a_rank_has_left_under_way_may_have_a_callback_too() -> None:
    left = standing(op("all_reduce", group="group 2 of ranks 1,2", since=0), returned=True)
    assert deadlock_of(standing(message("recv", 1, 0)), left, COMPUTES) is None
    assert deadlock_of(standing(message("recv", 1, 0)), left, RETURNED).culprit == 1


def test_one_thread_continues_while_another_hangs() -> None:
    both = standing(message("recv", 1, 0, thread=1), message("recv", 2, 0, thread=2))
    assert deadlock_of(both, standing(message("recv", 0, 1)), COMPUTES) is None


def test_many_ranks_with_many_operations() -> None:
    """64 ranks with the maximum number of operations, checked twenty times a second."""
    under_way = [op("all_reduce", n, since=0, signature="float32 [4]") for n in range(1, 60)]
    found = deadlock_of(*(standing(*under_way, op("barrier", 60)) for _ in range(63)), RETURNED)
    assert found.ranks == tuple(range(63))
    assert found.culprit == 63


# On GPUs a rank only enqueues the operation that waits.


def queued(name: str, match: int = 1, *, group: str = "world") -> Pending:
    return op(name, match, group=group, thread=STREAM)


def test_a_rank_whose_gpu_waits_may_still_enter_anything() -> None:
    a, b = "group 1 of ranks 0,1", "group 2 of ranks 0,1"
    assert deadlock_of(standing(queued("all_reduce", group=a)), standing(queued("all_reduce", group=b))) is None
    assert deadlock_of(standing(queued("all_reduce", group=a)), standing(op("all_reduce", group=b))) is None


# TensorFlow, which does not say who has arrived.


def test_tensorflow_waits_for_ever_only_if_a_rank_has_returned() -> None:
    waits = standing(op("TensorFlow", 0, group=TENSORFLOW))
    assert deadlock_of(waits, waits) is None
    assert deadlock_of(waits, COMPUTES) is None
    assert deadlock_of(waits, RETURNED).culprit == 1
    assert deadlock_of(waits, standing(returned=True, serving=1)) is None, "a worker beside a ps has a server"


# Remote procedure calls: a rank is several threads.


def test_a_computing_call_ends() -> None:
    assert (
        deadlock_of(standing(call(0, 1, thread=1)), standing(serve(0, 1, thread=7), called=False, returned=True, serving=THREADS))
        is None
    )


def test_a_computing_rank_may_call_a_function_that_sends() -> None:
    served = standing(called=False, returned=True, serving=THREADS)
    waits = standing(message("recv", 1, 0), serving=THREADS)
    assert deadlock_of(waits, served, standing(serving=THREADS)) is None
    assert deadlock_of(waits, served, served).ranks == (0,)


def test_a_distributed_backward_pass_may_run_on_hidden_threads() -> None:
    shut = op("rpc.shutdown", group="rendezvous at rpc.shutdown of 2 ranks")
    backward = op("dist_autograd.backward", 5, group="dist_autograd.backward")
    serving = standing(shut, serving=THREADS)
    assert deadlock_of(standing(backward, serving=THREADS), serving) is None
    assert deadlock_of(standing(shut), replace(RETURNED, name="")) is not None, "a shutdown to which one never comes"


def test_a_call_under_way_will_arrive() -> None:
    assert deadlock_of(standing(call(0, 1, thread=1)), standing(called=False, returned=True, serving=THREADS)) is None


def test_a_call_back_is_served_by_another_thread() -> None:
    master = standing(call(0, 1, thread=1), serve(1, 0, thread=2), serving=THREADS)
    worker = standing(serve(0, 1, thread=7), call(1, 0, thread=7), serving=THREADS)
    assert deadlock_of(master, worker) is None


def test_calls_that_wait_for_each_other_until_no_thread_is_left() -> None:
    there = [p for i in range(THREADS) for p in (serve(1, 0, i + 1, thread=i), call(0, 1, i + 2, thread=i))]
    back = [p for i in range(THREADS) for p in (serve(0, 1, i + 1, thread=i), call(1, 0, i + 1, thread=i))]
    found = deadlock_of(standing(call(0, 1, 1, thread=99), *there, serving=THREADS), standing(*back, serving=THREADS))
    assert found is not None
    assert found.ranks == (0, 1)
    assert found.reason is Reason.CIRCLE


def waits_on(threads: int, **rest: Any) -> RankState:
    """A rank whose serving threads wait for calls of their own, which the caller has answered."""
    pending = [p for i in range(threads) for p in (serve(0, 1, i + 1, thread=i), call(1, 0, i + 1, thread=i))]
    return standing(*pending, returned=True, **{"serving": THREADS, "receiving": True, **rest})


def test_replies_that_no_thread_is_left_to_receive() -> None:
    calls = standing(*(call(0, 1, i + 1, thread=99) for i in range(THREADS)), serving=THREADS, receiving=True)
    found = deadlock_of(calls, waits_on(THREADS))
    assert found.ranks == (0, 1)
    assert found.reason is Reason.NO_THREAD
    assert [(rank, p.thread) for rank, p in found.waits] == [(1, thread) for thread in range(THREADS)]
    assert deadlock_of(calls, waits_on(THREADS - 1)) is None, "a thread is left"
    assert deadlock_of(calls, waits_on(THREADS, receiving=False)) is None, "another thread completes the calls"
    computing = replace(waits_on(THREADS), pending=[p for p in waits_on(THREADS).pending if p.thread or p.group == "rpc 0>1"])
    assert deadlock_of(calls, computing) is None, "a call is computed"


def test_the_calls_of_a_rank_without_a_thread_may_still_be_computed() -> None:
    """Their replies come too late; but a thread that waits for something else may be free by then."""
    receives = [p for i in range(THREADS) for p in (serve(0, 1, i + 1, thread=i), call(1, 0, i + 1, thread=i))][:-1]
    rank = standing(*receives, message("recv", 2, 1, thread=THREADS - 1), returned=True, serving=THREADS, receiving=True)
    assert deadlock_of(standing(call(0, 1, thread=99), serving=THREADS), rank, COMPUTES) is None


def test_a_returned_future_that_nobody_completes() -> None:
    owner = standing(future(0, 2), future(1, 2), returned=True, serving=THREADS)
    found = deadlock_of(standing(call(0, 2), serving=THREADS), standing(call(1, 2), serving=THREADS), owner)
    assert found is not None
    assert found.ranks == (0, 1)
    assert found.reason is Reason.FUTURE
    assert [(rank, operation.peer) for rank, operation in found.waits] == [(0, 2), (1, 2)]


@pytest.mark.parametrize(
    "others",
    [
        (standing(future(0, 1), returned=True, serving=THREADS), COMPUTES),  # which may make the call that is missing
        (standing(future(0, 1), returned=True, serving=THREADS, free=True), RETURNED),  # by another thread
        (standing(future(0, 1, kind=UNSEEN_PROMISE), returned=True, serving=THREADS), RETURNED),  # by C++
        # By a callback, when its own call has returned.
        (standing(future(0, 1), call(1, 2), returned=True, serving=THREADS), standing(serve(1, 2, thread=7), serving=THREADS)),
    ],
)  # fmt: skip
def test_a_future_that_somebody_may_complete(others: tuple[RankState, RankState]) -> None:
    assert deadlock_of(standing(call(0, 1), serving=THREADS), *others) is None


def test_a_future_that_depends_on_one_that_nobody_completes() -> None:
    first = standing(future(0, 1), replace(call(1, 2), wait_start_ns=0), returned=True, serving=THREADS)
    found = deadlock_of(standing(call(0, 1), serving=THREADS), first, standing(future(1, 2), returned=True, serving=THREADS))
    assert found is not None
    assert found.ranks == (0,)


def test_a_cycle_of_calls() -> None:
    a = RankState("a", [call(0, 1, 1, thread=1), serve(1, 0, 1, thread=2), call(0, 1, 2, thread=2)], serving=THREADS)
    b = RankState("b", [serve(0, 1, 1, thread=7), call(1, 0, 1, thread=7), serve(0, 1, 2, thread=8)], serving=THREADS)
    assert find_deadlock([a, b]) is None, "the last call may be computing"


def test_a_server_of_tensorflow_is_not_called_and_serves() -> None:
    waits = standing(op("TensorFlow", 0, group=TENSORFLOW))
    assert deadlock_of(waits, standing(called=False, returned=True)) is None


# Mismatched operations that did not block.


def test_the_first_two_sides_that_differ() -> None:
    same, longer = op("all_reduce", signature="float32 [2]"), op("all_reduce", signature="float64 [2]")
    assert first_mismatch([(0, same), (1, same)]) == ()
    assert first_mismatch([(0, same), (1, op("all_reduce", 2, signature="float32 [3]"))]) == (), "another operation"
    assert first_mismatch([(0, same), (1, same), (2, longer)]) == ((0, same), (2, longer))


def test_the_sender_of_a_mismatched_message_comes_first() -> None:
    sent, received = message("send", 1, 0, signature="float32 [8]"), message("recv", 1, 0, signature="float32 [4]")
    assert first_mismatch([(0, received), (1, sent)]) == first_mismatch([(1, sent), (0, received)]) == ((1, sent), (0, received))
