"""Remote calls between ranks: which rank executes a call, whether it has a free thread, and cycles of waiting calls."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.group.rank_state import RankState
from labkit.recording.group_keys import GroupKind, kind_of
from labkit.recording.operations import PROMISE, SERVE, UNSEEN_PROMISE
from labkit.recording.schema import Pending


def cycle_of_calls(ranks: Sequence[RankState]) -> list[int]:
    """The ranks along a cycle of calls that wait for one another, from the first caller on; [] if there is none.

    The innermost call is being executed as far as labkit knows, and may complete, unless it waits for a lock that the
    outermost caller holds.
    """
    for start, rank in enumerate(ranks):
        for first in rank.blocked:
            links, at, call = [start], start, first
            visited = {start}
            while kind_of(call.group) is GroupKind.CALL:
                at = call.peer
                links.append(at)
                served = next((p for p in ranks[at].pending if serves(p, call)), None)
                if served is None:
                    break
                inner = next((p for p in ranks[at].blocked if p.thread == served.thread), None)
                if inner is None:
                    if at in visited:
                        return links
                    break
                visited.add(at)
                call = inner
    return []


def served_by(ranks: Sequence[RankState], call: Pending) -> tuple[int, Pending] | None:
    """The rank that is executing an RPC without being blocked in it, and its record of serving it."""
    if kind_of(call.group) is not GroupKind.CALL:
        return None
    callee = ranks[call.peer]
    served = next((p for p in callee.pending if serves(p, call)), None)
    return None if served is None or thread_blocked(callee, served) else (call.peer, served)


def serves(pending: Pending, call: Pending) -> bool:
    """Whether this is what a rank has noted down while it computes that call."""
    return pending.type is SERVE and (pending.group, pending.match) == (call.group, call.match)


def promised(ranks: Sequence[RankState], call: Pending) -> Pending | None:
    """The callee's record of an uncompleted future that the called function returned under `async_execution`."""
    if kind_of(call.group) is not GroupKind.CALL:
        return None
    futures = (p for p in ranks[call.peer].pending if p.type in (PROMISE, UNSEEN_PROMISE))
    return next((p for p in futures if (p.group, p.match) == (call.group, call.match)), None)


def has_thread(rank: RankState) -> bool:
    """Whether an RPC rank has a thread that may answer a call: all of them may be blocked."""
    served = [p for p in rank.pending if p.type is SERVE]
    return len(served) < rank.serving or any(not thread_blocked(rank, p) for p in served)


def unreceived(ranks: Sequence[RankState], me: int) -> list[Pending]:
    """The calls in which all serving threads of a rank wait, so that none receives the replies; [] if one may do so.

    Calls that the other rank has not answered, and may never answer, do not count.
    """
    rank = ranks[me]
    if not rank.receiving or has_thread(rank):
        return []
    own = {p.thread for p in rank.pending if p.type is SERVE}
    calls = [p for p in rank.blocked if p.thread in own and kind_of(p.group) is GroupKind.CALL]
    return [p for p in calls if has_thread(ranks[p.peer]) and not any(serves(s, p) for s in ranks[p.peer].pending)]


def thread_blocked(rank: RankState, served: Pending) -> bool:
    """Whether the thread that serves a call is blocked in an operation."""
    return any(p.thread == served.thread for p in rank.blocked)
