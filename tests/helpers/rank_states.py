"""States of ranks made by hand: what each has under way, for tests of deadlocks without processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from labkit.group.deadlock import RankState, Reason, find_deadlock
from labkit.recording.group_keys import TENSORFLOW
from labkit.recording.operations import PROMISE, SERVE, OperationType
from labkit.recording.schema import STREAM, Pending

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


# States that are deadlocks: the ranks that hang, the reason, the culprit, and each wait that shows the reason, as rank,
# operation and number.

UNCALLED = standing(called=False, returned=True)
ANYBODY = op("recv", 0, group="", signature="float32 [5]")
SUM = op("all_reduce", signature="float32 [3]")
RENDEZVOUS = "rendezvous at h:1 of {} ranks"
BOTH = standing(message("recv", 2, 0, thread=1), message("recv", 1, 0, thread=2))
THERE = [p for i in range(THREADS) for p in (serve(1, 0, i + 1, thread=i), call(0, 1, i + 2, thread=i))]
BACK = [p for i in range(THREADS) for p in (serve(0, 1, i + 1, thread=i), call(1, 0, i + 1, thread=i))]
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
    "one of TensorFlow returned": (
        [standing(op("TensorFlow's train", group=TENSORFLOW)), RETURNED],
        (0,), Reason.RETURNED, 1, [(0, "TensorFlow's train", 1)],
    ),
    "one returned and creates no group": (
        [standing(op("new_group", group="new group 1 of ranks 0,1")), RETURNED],
        (0,), Reason.RETURNED, 1, [(0, "new_group", 1)],
    ),
    "the receiver returned": ([standing(message("send", 0, 1)), RETURNED], (0,), Reason.RETURNED, 1, [(0, "send", 1)]),
    "the sender returned": ([standing(message("recv", 1, 0)), RETURNED], (0,), Reason.RETURNED, 1, [(0, "recv", 1)]),
    "a rank not called": ([standing(op("barrier")), UNCALLED], (0,), Reason.NOT_CALLED, 1, [(0, "barrier", 1)]),
    "three ranks not called": (
        [standing(op("barrier")), *[UNCALLED] * 3], (0,), Reason.NOT_CALLED, 1, [(0, "barrier", 1)],
    ),
    "two collectives in another order": (
        [standing(SUM), standing(op("broadcast", signature="float32 [3], root 0"))],
        (0, 1), Reason.MISMATCH, None, [(0, "all_reduce", 1), (1, "broadcast", 1)],
    ),
    "messages of different sizes": (
        [standing(message("send", 0, 1, signature="float32 [5]")), standing(message("recv", 0, 1, signature="float32 [9]"))],
        (0, 1), Reason.MISMATCH, None, [(0, "send", 1), (1, "recv", 1)],
    ),
    "two groups": (
        [standing(op("all_reduce", group=f"group {number} of ranks 0,1")) for number in (1, 2)],
        (0, 1), Reason.CIRCLE, None, [(0, "all_reduce", 1), (1, "all_reduce", 1)],
    ),
    "two groups are created": (
        [
            standing(op("init_device_mesh", group="new group 1 of ranks 0,1")),
            standing(op("new_group", group="new group 2 of ranks 0,1")),
        ],
        (0, 1), Reason.CIRCLE, None, [(0, "init_device_mesh", 1), (1, "new_group", 1)],
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
    "two tags": (
        [standing(message("send", 0, 1)), standing(message("recv", 0, 1, tag=7))],
        (0, 1), Reason.CIRCLE, None, [(0, "send", 1), (1, "recv", 1)],
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
    "a future": (
        [
            standing(call(0, 2), serving=THREADS),
            standing(call(1, 2), serving=THREADS),
            standing(future(0, 2), future(1, 2), returned=True, serving=THREADS),
        ],
        (0, 1), Reason.FUTURE, None, [(0, "rpc_sync f", 1), (1, "rpc_sync f", 1)],
    ),
    "calls that wait for each other until no thread is left": (
        [standing(call(0, 1, 1, thread=99), *THERE, serving=THREADS), standing(*BACK, serving=THREADS)],
        (0, 1), Reason.CIRCLE, None, [(0, "rpc_sync f", 5), (1, "rpc_sync f", 4)],
    ),
}  # fmt: skip
