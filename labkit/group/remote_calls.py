"""Remote calls between ranks: who computes which, whether a thread is left for another, and calls that wait in a circle."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.group.rank_state import Standing
from labkit.recording.group_keys import GroupKind, kind_of
from labkit.recording.operations import PROMISE, SERVE, UNSEEN_PROMISE
from labkit.recording.schema import Pending

__all__ = ["circle_of_calls", "has_thread", "promised", "served_by", "serves", "thread_blocked"]


def circle_of_calls(ranks: Sequence[Standing]) -> str:
    """Calls of RPC ranks that wait for one another in a circle, in one sentence; "" where there is none.

    The last of them is being computed, for all we know: it may come to its end, unless it waits for a lock that the first holds.
    """
    for start, rank in enumerate(ranks):
        for first in rank.blocked:
            links, at, call = [rank.name], start, first
            passed = {start}
            while kind_of(call.group) is GroupKind.CALL:
                at = call.peer
                links.append(ranks[at].name)
                served = next((p for p in ranks[at].pending if serves(p, call)), None)
                if served is None:
                    break
                deeper = next((p for p in ranks[at].blocked if p.thread == served.thread), None)
                if deeper is None:
                    if at in passed:
                        return f"calls wait for one another in a circle: {' → '.join(links)}"
                    break
                passed.add(at)
                call = deeper
    return ""


def served_by(ranks: Sequence[Standing], call: Pending) -> tuple[int, Pending] | None:
    """Which rank computes an RPC at this moment, not being blocked in it, and its own note of that."""
    if kind_of(call.group) is not GroupKind.CALL:
        return None
    callee = ranks[call.peer]
    served = next((p for p in callee.pending if serves(p, call)), None)
    return None if served is None or thread_blocked(callee, served) else (call.peer, served)


def serves(pending: Pending, call: Pending) -> bool:
    """Whether this is what a rank has noted down while it computes that call."""
    return pending.type is SERVE and (pending.group, pending.match) == (call.group, call.match)


def promised(ranks: Sequence[Standing], call: Pending) -> Pending | None:
    """The callee's note of a future, not completed yet, that a called function has returned under `async_execution`."""
    if kind_of(call.group) is not GroupKind.CALL:
        return None
    futures = (p for p in ranks[call.peer].pending if p.type in (PROMISE, UNSEEN_PROMISE))
    return next((p for p in futures if (p.group, p.match) == (call.group, call.match)), None)


def has_thread(rank: Standing) -> bool:
    """Whether an RPC rank has a thread that may answer a call: all of them may be blocked."""
    served = [p for p in rank.pending if p.type is SERVE]
    return len(served) < rank.serving or any(not thread_blocked(rank, p) for p in served)


def thread_blocked(rank: Standing, served: Pending) -> bool:
    """Whether the thread that computes a call is itself blocked in something."""
    return any(p.thread == served.thread for p in rank.blocked)
