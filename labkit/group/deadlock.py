"""Deadlocks: which ranks wait for which others, why none of them can continue, and what each rank is doing.

A blocked rank needs others to enter the same operation. A rank that computes may still do so; a rank that has returned,
or is itself blocked for ever, will not. So a deadlock is not a matter of time: it follows from the operations in which
ranks are blocked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from labkit.errors.lists import listed
from labkit.group.rank_state import RankState
from labkit.group.remote_calls import has_thread, promised, serves, thread_blocked
from labkit.group.rendezvous import HINTS, absent_ranks, hint_of
from labkit.recording.group_keys import GroupKind, kind_of, ranks_of, where_of
from labkit.recording.operations import (
    FOR_OTHERS,
    RECV,
    RPC,
    RPC_SHUTDOWN,
    SEND,
    TO_HERE,
    UNSEEN_PROMISE,
    Traffic,
)  # fmt: skip
from labkit.recording.schema import Pending
from labkit.recording.signatures import with_elements

__all__ = [
    "SERVES_OTHERS",
    "Deadlock",
    "doing",
    "find_deadlock",
    "mismatch",
    "missing",
    "operation_in_words",
    "place",
    "serving_for_ever",
]  # fmt: skip

SAME: Final = "All ranks of a group must call the same collectives, in the same order, on tensors of the same shape and type."
ALL: Final = (
    "All ranks of a group must call the same collectives, equally often: look for a loop of another length, an early return, or "
    "a collective inside `if rank == 0`."
)
ALL_OF_TENSORFLOW: Final = (
    "All ranks of a strategy must run the same steps: look for a dataset or a loop of another length, or an early return. A rank "
    "whose server others still need calls `server.join()` at its end, not `return`."
)
CREATED: Final = "Every rank must call new_group, in the same order, also ranks that do not belong to the new group."
FITTING: Final = "A receive needs a tensor of the size and type that is sent."
USUALLY: Final = {GroupKind.TENSORFLOW: ALL_OF_TENSORFLOW, GroupKind.CREATION: CREATED}  # else `ALL`
SERVES_OTHERS: Final = (
    "`join()` of a server returns when the others have returned: also call the rank that they serve, such as the chief."
)
PROMISED: Final = (
    "A future that a function under `rpc.functions.async_execution` returns needs a call of `set_result`: look for a count "
    "of calls that is never reached, or an early return before it."
)
CALLED: Final = "`group[0].run(f)` calls f on rank 0 only; operations between ranks need `group.run(f)`."


@dataclass(frozen=True, slots=True)
class Deadlock:
    """A deadlock: ranks that wait for one another, or for ranks that will never enter their operations.

    Args:
        ranks: the numbers of the waiting ranks.
        headline: the cause, in one sentence.
        hint: the usual mistake behind it; "" if there is none.
        culprit: the only rank that the others wait for, if there is one; the headline does not contain its name.
    """

    ranks: tuple[int, ...]
    headline: str
    hint: str = ""
    culprit: int | None = None


def doing(
    name: str,
    pending: Sequence[Pending],
    now_ns: int,
    *,
    returned: bool = False,
    names: Sequence[str] = (),
    closely: bool = False,
) -> str:
    """One line about what a rank is doing.

    Args:
        name: the rank's name.
        pending: its pending operations.
        now_ns: the current time.
        returned: whether its function has returned.
        names: the names of all ranks, to name a peer.
        closely: whether to add the operation's number within its group, and its signature.
    """
    if returned:
        return f"{name} had returned"
    blocked = [p for p in pending if p.wait_start_ns]
    if not blocked:
        beside = f", with {pending[0].in_words} under way" if pending else ""
        return f"{name} was computing{beside}"
    last = blocked[-1]
    seconds = max(now_ns - last.wait_start_ns, 0) / 1e9  # it may have started while the states were read
    return f"{name} was waiting in {operation_in_words(last, names, closely=closely)}{place(last)} for {seconds:.1f} s"


def find_deadlock(ranks: Sequence[RankState]) -> Deadlock | None:
    """The deadlock that ranks are in; None if all of them can still continue.

    Args:
        ranks: the states of all ranks at the same moment, in rank order.
    """
    unequal = _unequal(ranks)
    inactive = {i for i, rank in enumerate(ranks) if (rank.blocked or rank.returned) and not (rank.free or rank.timed)}
    while may_act := {i for i in inactive if (i not in unequal or not ranks[i].blocked) and _may_act(ranks, inactive, i)}:
        inactive -= may_act
    # A rank whose GPU waits is not blocked and may do anything; but that operation needs ranks that have not returned.
    queued = {i for i, rank in enumerate(ranks) if any(_absent(ranks, inactive, i, op) for op in rank.queued)}
    inactive |= queued
    waiting = tuple(i for i in sorted(inactive) if i in queued or ranks[i].blocked)
    return Deadlock(waiting, *_why(ranks, waiting, inactive)) if waiting else None


def serving_for_ever(names: Sequence[str]) -> str:
    """A sentence about ranks that serve others for ever, while no other rank was called."""
    return f"{listed(names)} {'serves' if len(names) == 1 else 'serve'} others, and no other rank was called"


def mismatch(operations: Sequence[tuple[str, Pending]]) -> tuple[str, str]:
    """A sentence and a hint about ranks that entered the same operation with different arguments; ("", "") if none did.

    Args:
        operations: names of ranks, each with an operation that it is in, or was in when it failed.
    """
    by_number: dict[tuple[str, int], list[tuple[str, Pending]]] = {}
    for name, operation in operations:
        if operation.group and operation.match and kind_of(operation.group) is not GroupKind.CALL:
            by_number.setdefault((operation.group, operation.match), []).append((name, operation))
    for together in by_number.values():
        (first, mine), *others = together
        for other, theirs in others:
            if _differs(mine, theirs):
                if kind_of(mine.group) is GroupKind.PAIR:
                    return _misfit(*sorted([(first, mine), (other, theirs)], key=lambda side: side[1].type is not SEND)), FITTING
                return _contrast(first, mine, other, theirs), SAME
    return "", ""


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
    elif kind in HINTS:
        yield from absent_ranks(group, operation.match, [rank.entered.get(group, 0) for rank in ranks])
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
    """The ranks that have not entered an operation and never will, since they have returned."""
    not_here = (i for i in missing(ranks, me, operation) if i in inactive)
    apart = kind_of(operation.group) is GroupKind.RENDEZVOUS  # serving calls does not enter a rendezvous
    return [i for i in not_here if ranks[i].returned and (apart or not ranks[i].serving)]


def _may_come(ranks: Sequence[RankState], inactive: set[int], which: int, operation: Pending) -> bool:
    """Whether a rank may still enter an operation."""
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
    names_differ = a.name != b.name and kind_of(a.group) is not GroupKind.PAIR
    if a.type.traffic is Traffic.PAIRWISE:  # ranks may give different amounts; see `group.mismatches`
        return names_differ
    return names_differ or with_elements(a.signature) != with_elements(b.signature)


def _why(ranks: Sequence[RankState], waiting: Sequence[int], inactive: set[int]) -> tuple[str, str, int | None]:
    """The headline, the hint and the culprit of a deadlock: see `Deadlock`."""
    blocked = [(ranks[i].name, p) for i in waiting for p in ranks[i].blocked]
    unequal, hint = mismatch([*blocked, *((rank.name, p) for rank in ranks for p in (*rank.pending, *rank.done))])
    if unequal:
        return unequal, hint, None
    for i in waiting:
        for operation in (*ranks[i].blocked, *ranks[i].queued):
            for gone in _absent(ranks, inactive, i, operation):
                return _deserted(ranks, waiting, gone)
    for_futures = [(ranks[i].name, p) for i in waiting for p in ranks[i].blocked if promised(ranks, p)]
    if for_futures:
        return _uncompleted_future(ranks, for_futures), PROMISED, None
    circle = _circle(ranks, waiting)
    apart = [(ranks[i].name, p) for i in waiting for p in ranks[i].blocked if kind_of(p.group) in HINTS]
    if apart and (not circle or all(kind_of(p.group) is GroupKind.RENDEZVOUS for _, p in circle)):
        hint = hint_of(apart[0][1].group, len(ranks))
        return "; ".join(f"{name} waits in {operation_in_words(p, ())}{place(p)}" for name, p in apart), hint, None
    if not circle:
        names = listed([ranks[i].name for i in waiting])
        verb = "waits" if len(waiting) == 1 else "wait"
        return f"{names} {verb} for a message that nobody will send", "", None
    links = [
        f"{ranks[i].name} waits in {operation_in_words(operation, ())}{place(operation)} for {ranks[which].name}"
        for (i, operation), (which, _) in zip(circle, [*circle[1:], circle[0]], strict=True)
    ]
    return "; ".join(links), _usual([operation for _, operation in circle]), None


def _deserted(ranks: Sequence[RankState], waiting: Sequence[int], gone: int) -> tuple[str, str, int]:
    for_it = [
        (ranks[i].name, op) for i in waiting for op in (*ranks[i].blocked, *ranks[i].queued) if gone in missing(ranks, i, op)
    ]
    operation = for_it[0][1]
    who = f"{listed([name for name, _ in for_it])} still {'waits' if len(for_it) == 1 else 'wait'} for it"
    if not ranks[gone].called:
        return f"was not called, and {who} in {operation.in_words}{place(operation)}", CALLED, gone
    usual = USUALLY.get(kind_of(operation.group), ALL)
    return f"returned while {who} in {operation.in_words}{place(operation)}", usual, gone


def _uncompleted_future(ranks: Sequence[RankState], waiting: Sequence[tuple[str, Pending]]) -> str:
    """The headline for the first call that returned a future which no rank will complete."""
    first = waiting[0][1]
    alike = [name for name, p in waiting if (p.name, p.peer, p.line) == (first.name, first.peer, first.line)]
    return (
        f"{listed(list(dict.fromkeys(alike)))} {'waits' if len(alike) == 1 else 'wait'} in {first.in_words}{place(first)}: on "
        f"{ranks[first.peer].name} it has returned a future that nobody will complete"
    )


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


def _usual(operations: Sequence[Pending]) -> str:
    types = {p.type for p in operations}
    if any(kind_of(p.group) is GroupKind.CREATION for p in operations):
        return CREATED
    if any(kind_of(p.group) is GroupKind.RENDEZVOUS and p.type is not RPC_SHUTDOWN for p in operations):
        return HINTS[GroupKind.RENDEZVOUS]
    if types == {SEND}:
        return "A send ends only when the other side receives: one of them must receive first, or use isend."
    if types == {RECV}:
        return "Both wait for a message before they send one: one of them must send first."
    if types & {RPC, TO_HERE}:
        return "Calls wait for one another: return a future (`rpc.functions.async_execution`), or do not wait inside a call."
    if types & {SEND, RECV}:
        return "The order of messages and collectives must fit on both sides."
    return "Ranks that belong to several groups must enter their collectives in the same order."


def _contrast(first: str, mine: Pending, other: str, theirs: Pending) -> str:
    group = "" if mine.group == "world" else f" of {mine.group}"
    return (
        f"collective number {mine.match}{group} is {_given(mine)}{place(mine)} on {first}, and {_given(theirs)}{place(theirs)} "
        f"on {other}"
    )


def _misfit(sender: tuple[str, Pending], receiver: tuple[str, Pending]) -> str:
    """The headline for a message whose sides do not match."""
    (source, sent), (destination, received) = sender, receiver
    return f"{source} sends {sent.signature}{place(sent)}, and {destination} receives it as {received.signature}{place(received)}"


def _given(operation: Pending) -> str:
    return f"{operation.in_words} of {operation.signature}" if operation.signature else operation.in_words


def operation_in_words(operation: Pending, names: Sequence[str], *, closely: bool = False) -> str:
    """An operation's name, group and peer (if `names` are given); with `closely`, also its number and its signature."""
    details = [where_of(operation.group)] if operation.type is not RPC_SHUTDOWN else []
    if closely and operation.match and kind_of(operation.group) not in HINTS:
        details.append(f"number {operation.match}")
    if closely and operation.signature:
        details.append(f"of {operation.signature}")
    if 0 <= operation.peer < len(names):
        details.append(f"with {names[operation.peer]}")
    return " ".join(filter(None, [operation.in_words, *details]))


def place(operation: Pending) -> str:
    """The student's line that issued an operation, as the suffix of its name."""
    return f" ({operation.line})" if operation.line else ""
