"""Finds deadlocks: which ranks wait for which others, and why none of them can continue.

A blocked rank needs others to enter the same operation. A rank that computes may still do so; a rank that has returned,
or is itself blocked for ever, will not. So a deadlock is not a matter of time: it follows from the operations in which
ranks are blocked. `group.deadlock_words` describes what is found here.

A remote call needs a free thread of the rank that executes it. A rendezvous, or a wait for a store's key, needs the
ranks that are missing.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from labkit.recording.group_keys import GroupKind, kind_of, ranks_of, size_of, with_elements
from labkit.recording.operations import FOR_OTHERS, PROMISE, RECV, SEND, SERVE, UNSEEN_PROMISE, Traffic
from labkit.recording.schema import STREAM, TIMED, Pending


@dataclass(frozen=True, slots=True)
class RankState:
    """The state of a rank at one moment."""

    name: str  # the rank's name
    pending: Sequence[Pending] = ()  # its operations that are issued and not completed, oldest first
    called: bool = True  # whether it was called to run the function
    returned: bool = False  # whether its function has returned, or it was not called: it enters no more operations by itself
    serving: int = 0  # the number of its threads that serve calls of others (RPC)
    receiving: bool = False  # whether only these threads receive the replies to its own calls
    # The number of the last operation that it entered, by process group or pair of ranks.
    entered: Mapping[str, int] = field(default_factory=dict)
    done: Sequence[Pending] = ()  # its completed operations among those in which others are blocked
    # Whether it had more pending operations than can be recorded, so that it may have entered any operation.
    uncounted: bool = False
    free: bool = False  # whether something else in it may still act, such as another thread

    @property
    def blocked(self) -> list[Pending]:
        """The operations in which it is blocked until they complete, oldest first."""
        return [p for p in self.pending if p.wait_start_ns and p.thread not in (STREAM, TIMED)]

    @property
    def timed(self) -> list[Pending]:
        """The operations in which it is blocked until they complete or a time limit expires."""
        return [p for p in self.pending if p.wait_start_ns and p.thread == TIMED]

    @property
    def queued(self) -> list[Pending]:
        """The operations that its GPU waits for, while the rank itself continues."""
        return [p for p in self.pending if p.wait_start_ns and p.thread == STREAM]


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


_Who = TypeVar("_Who")  # a rank's number or its name


class Reason(enum.Enum):
    """Why ranks cannot continue."""

    MISMATCH = enum.auto()  # two ranks entered the same operation with different arguments
    RETURNED = enum.auto()  # a rank has returned without entering the operation
    NOT_CALLED = enum.auto()  # a rank was not called
    NO_THREAD = enum.auto()  # no thread of a rank is left to receive the replies to its calls
    FUTURE = enum.auto()  # a call has returned a future that no rank will complete
    RENDEZVOUS = enum.auto()  # too few ranks come to a rendezvous, or no rank sets a store's key
    CIRCLE = enum.auto()  # each rank waits for the next one
    NO_SENDER = enum.auto()  # nobody will send a message that is received from any rank


PARTED: Final = (Reason.MISMATCH, Reason.RETURNED, Reason.CIRCLE)  # in which ranks took different branches


@dataclass(frozen=True, slots=True)
class Deadlock:
    """A deadlock: ranks that wait for one another, or for ranks that will never enter their operations."""

    ranks: tuple[int, ...]  # the numbers of the waiting ranks
    reason: Reason  # why they cannot continue
    # The ranks and operations that show the reason. Of a mismatch, the two sides, a message's sender first; of a
    # circle, each rank waits for the next; else the ranks that wait, in rank order.
    waits: tuple[tuple[int, Pending], ...]
    culprit: int | None = None  # the rank that the others wait for, if there is one
    absent: tuple[int, ...] = ()  # where the reason is that a rank was not called: the further ranks of which the same is true


def find_deadlock(ranks: Sequence[RankState]) -> Deadlock | None:
    """The deadlock that ranks are in; None if all of them can still continue. Their states are of the same moment."""
    unequal = _unequal(ranks)
    inactive = {i for i, rank in enumerate(ranks) if (rank.blocked or rank.returned) and not (rank.free or rank.timed)}
    while may_act := {i for i in inactive if (i not in unequal or not ranks[i].blocked) and _may_act(ranks, inactive, i)}:
        inactive -= may_act
    # A rank whose GPU waits is not blocked and may do anything; but that operation needs ranks that have not returned.
    queued = {i for i, rank in enumerate(ranks) if any(_absent(ranks, inactive, i, op) for op in rank.queued)}
    inactive |= queued
    waiting = tuple(i for i in sorted(inactive) if i in queued or ranks[i].blocked)
    return _explained(ranks, waiting, inactive) if waiting else None


def first_mismatch(operations: Sequence[tuple[_Who, Pending]]) -> tuple[tuple[_Who, Pending], ...]:
    """The two sides of the first operation that ranks entered with different arguments; () if there is none.

    Given are operations in which ranks are, or were when they failed. Of a message, the sender comes first.
    """
    by_number: dict[tuple[str, int], list[tuple[_Who, Pending]]] = {}
    for who, operation in operations:
        if operation.group and operation.match and kind_of(operation.group) is not GroupKind.CALL:
            by_number.setdefault((operation.group, operation.match), []).append((who, operation))
    for first, *others in by_number.values():
        for other in others:
            if _differs(first[1], other[1]):
                message = kind_of(first[1].group) is GroupKind.PAIR
                return (other, first) if message and first[1].type is not SEND else (first, other)
    return ()


def _may_act(ranks: Sequence[RankState], inactive: set[int], me: int) -> bool:
    """Whether a blocked or returned rank may still act because of another rank that may."""
    rank = ranks[me]
    if rank.serving and has_thread(rank) and len(inactive) < len(ranks):
        return True  # another rank may call it
    # It continues when an operation completes in which one of its threads is blocked. Other pending operations may have
    # callbacks, which may do anything.
    return any(
        _may_end(ranks, inactive, me, op) for op in rank.pending if not (op.type in FOR_OTHERS or _encloses(op, rank.blocked))
    )


def _encloses(span: Pending, blocked: Sequence[Pending]) -> bool:
    """Whether it is a span that the student marked as communication, around a blocked operation."""
    return not (span.group or span.signature) and any(op.start_ns > span.start_ns for op in blocked)


def _may_end(ranks: Sequence[RankState], inactive: set[int], me: int, operation: Pending) -> bool:
    if ranks[me].receiving and kind_of(operation.group) is GroupKind.CALL and not has_thread(ranks[me]):
        return False
    return all(_may_come(ranks, inactive, which, operation) for which in missing(ranks, me, operation))


def missing(ranks: Sequence[RankState], me: int, operation: Pending) -> Iterator[int]:
    """The ranks that have not entered an operation; -1 stands for any rank."""
    yield from (which for which in _not_entered(ranks, me, operation) if which < 0 or not ranks[which].uncounted)


def _not_entered(ranks: Sequence[RankState], me: int, operation: Pending) -> Iterator[int]:
    group, kind = operation.group, kind_of(operation.group)
    if kind is GroupKind.CALL:
        callee = ranks[operation.peer]
        served = [p for p in callee.pending if serves(p, operation)]
        if all(thread_blocked(callee, p) for p in served):
            yield operation.peer
    elif kind is GroupKind.PAIR:
        peer = ranks[operation.peer]
        # A receive from any rank has no number before the message arrives.
        takes_any = operation.type is SEND and any(p.type is RECV and not p.group for p in peer.pending)
        if peer.entered.get(group, 0) < operation.match and not takes_any:
            yield operation.peer
    elif kind is GroupKind.RENDEZVOUS:
        absent, size = [i for i, rank in enumerate(ranks) if rank.entered.get(group, 0) < operation.match], size_of(group)
        if size == len(ranks):
            yield from absent
        elif len(ranks) - len(absent) < size:
            yield -1
    elif kind is GroupKind.TENSORFLOW:  # ranks that are not called may serve, such as a "ps"
        yield from (i for i, rank in enumerate(ranks) if rank.returned and not rank.free and rank.called and not rank.serving)
    elif kind in (GroupKind.COLLECTIVE, GroupKind.CREATION):
        members = ranks_of(group)
        for other in range(len(ranks)) if members is None else members:
            if other != me and ranks[other].entered.get(group, 0) < operation.match:
                yield other
    elif (
        kind is GroupKind.ALONE and operation.type is RECV and operation.signature
    ):  # from whoever sends; without a tensor it is a span of the student's own
        sent = [p for rank in ranks for p in rank.pending if p.type is SEND and p.peer == me]
        if all(ranks[me].entered.get(p.group, 0) >= p.match for p in sent):
            yield -1


def _absent(ranks: Sequence[RankState], inactive: Collection[int], me: int, operation: Pending) -> list[int]:
    not_here = (i for i in missing(ranks, me, operation) if i in inactive)
    apart = kind_of(operation.group) is GroupKind.RENDEZVOUS  # serving calls does not enter a rendezvous
    return [i for i in not_here if ranks[i].returned and (apart or not ranks[i].serving)]


def _may_come(ranks: Sequence[RankState], inactive: set[int], which: int, operation: Pending) -> bool:
    if which == -1:
        return any(_may_come(ranks, inactive, i, operation) for i in range(len(ranks)) if operation not in ranks[i].pending)
    if kind_of(operation.group) is GroupKind.CALL:
        future = promised(ranks, operation)
        may_be_answered = has_thread(ranks[which]) if future is None else future.type is UNSEEN_PROMISE
        return which not in inactive or may_be_answered
    return which not in inactive


def _unequal(ranks: Sequence[RankState]) -> set[int]:
    """The ranks that are blocked in an operation that others entered with different arguments."""
    came: dict[tuple[str, int], list[tuple[int, Pending]]] = {}
    for i, rank in enumerate(ranks):
        for operation in (*rank.pending, *rank.done):
            if operation.group and kind_of(operation.group) is not GroupKind.CALL:
                came.setdefault((operation.group, operation.match), []).append((i, operation))
    return {
        i for i, rank in enumerate(ranks) for operation in rank.blocked
        if any(i != j and _differs(operation, other) for j, other in came.get((operation.group, operation.match), ()))
    }  # fmt: skip


def _differs(a: Pending, b: Pending) -> bool:
    # A group may be created by one function on one rank, and by another one on the next.
    names_differ = a.name != b.name and kind_of(a.group) not in (GroupKind.PAIR, GroupKind.CREATION)
    if a.type.traffic is Traffic.PAIRWISE:  # ranks may give different amounts; see `group.mismatches`
        return names_differ
    return names_differ or with_elements(a.signature) != with_elements(b.signature)


def _explained(ranks: Sequence[RankState], waiting: tuple[int, ...], inactive: set[int]) -> Deadlock:
    blocked = [(i, p) for i in waiting for p in ranks[i].blocked]
    unequal = first_mismatch([*blocked, *((i, p) for i, rank in enumerate(ranks) for p in (*rank.pending, *rank.done))])
    if unequal:
        return Deadlock(waiting, Reason.MISMATCH, unequal)
    for i in waiting:
        for operation in (*ranks[i].blocked, *ranks[i].queued):
            if never := _absent(ranks, inactive, i, operation):
                gone = never[0]
                both = ((j, op) for j in waiting for op in (*ranks[j].blocked, *ranks[j].queued))
                for_it = tuple((j, op) for j, op in both if gone in missing(ranks, j, op))
                if ranks[gone].called:
                    return Deadlock(waiting, Reason.RETURNED, for_it, gone)
                return Deadlock(waiting, Reason.NOT_CALLED, for_it, gone, tuple(j for j in never[1:] if not ranks[j].called))
    for i in waiting:
        if calls := unreceived(ranks, i):
            return Deadlock(waiting, Reason.NO_THREAD, tuple((i, p) for p in calls))
    if for_futures := tuple((i, p) for i, p in blocked if promised(ranks, p)):
        return Deadlock(waiting, Reason.FUTURE, for_futures)
    circle = _circle(ranks, waiting)
    apart = tuple((i, p) for i, p in blocked if kind_of(p.group) is GroupKind.RENDEZVOUS)
    if apart and (not circle or all(kind_of(p.group) is GroupKind.RENDEZVOUS for _, p in circle)):
        return Deadlock(waiting, Reason.RENDEZVOUS, apart)
    return Deadlock(waiting, Reason.CIRCLE, tuple(circle)) if circle else Deadlock(waiting, Reason.NO_SENDER, tuple(blocked))


def _circle(ranks: Sequence[RankState], waiting: Sequence[int]) -> list[tuple[int, Pending]]:
    """The shortest cycle of ranks each of which waits for the next, with the operations in which they wait."""
    waits: dict[int, dict[int, Pending]] = {
        i: {q: op for op in ranks[i].blocked for q in missing(ranks, i, op) if q in waiting} for i in waiting
    }
    circle = min(filter(None, (_way_back(i, waits) for i in waits)), key=len, default=[])
    return [(i, waits[i][q]) for i, q in zip(circle, [*circle[1:], *circle[:1]], strict=True)]


def _way_back(start: int, waits: Mapping[int, Mapping[int, Pending]]) -> list[int]:
    """The shortest path from a rank back to itself along the waits; [] if there is none."""
    paths, seen = [[start]], set()
    for path in paths:  # grows during the loop, in order of length
        for which in waits[path[-1]]:
            if which == start:
                return path
            if which not in seen:
                seen.add(which)
                paths.append([*path, which])
    return []
