"""Who waits for whom, and since when: what a rank is doing in words, and which ranks can never go on, and why.

A rank that is blocked needs others to come to the same operation. One that computes may still come; one that has returned, or is
itself blocked for ever, will not. So "for ever" is not a matter of time: it follows from what each rank is blocked in.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from labkit.ring import SERVE, STREAM, TENSORFLOW, TIMED, Pending

__all__ = ["Standing", "Verdict", "amount", "circle_of_calls", "doing", "mismatch", "stuck", "waiting_for"]

SAME: Final = "All ranks of a group must call the same collectives, in the same order, on tensors of the same shape and type."
ALL: Final = (
    "What one rank of a group takes part in, all must, equally often: look for a loop of another length, an early return, or a "
    "collective inside `if rank == 0`."
)
FITTING: Final = "A receive needs a tensor of the size and type that is sent."
CALLED: Final = "`group[0].run(f)` calls f on rank 0 alone; what ranks do together needs `group.run(f)`."


@dataclass(frozen=True, slots=True)
class Standing:
    """How a rank stands at one moment.

    Args:
        name: its name.
        pending: its operations that are issued and not completed, oldest first.
        called: whether it was to call the function.
        returned: whether it takes part in nothing any more: its function has returned, or it was not called.
        serving: how many of its threads do others' calls all the same (RPC).
        entered: by process group or pair of ranks, the number of the last operation that it came to.
        done: of the operations in which others are blocked, those that it has completed.
        uncounted: whether it has had more under way than it can note down, so that it may have come to anything.
    """

    name: str
    pending: Sequence[Pending] = ()
    called: bool = True
    returned: bool = False
    serving: int = 0
    entered: Mapping[str, int] = field(default_factory=dict)
    done: Sequence[Pending] = ()
    uncounted: bool = False

    @property
    def blocked(self) -> list[Pending]:
        """What it is blocked in until that completes, oldest first."""
        return [p for p in self.pending if p.wait_start_ns and p.thread not in (STREAM, TIMED)]

    @property
    def queued(self) -> list[Pending]:
        """What its GPU waits for, while it goes on itself."""
        return [p for p in self.pending if p.wait_start_ns and p.thread == STREAM]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Ranks that can never go on.

    Args:
        ranks: their numbers.
        headline: why, in one sentence.
        hint: what is usually wrong then; "" where nothing is usual.
        culprit: the rank that all wait for in vain, where it is one alone; its name does not stand in the headline.
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
    """One line: what a rank is doing at this moment.

    Args:
        name: the rank's name.
        pending: its operations that are issued and not completed.
        now_ns: this moment.
        returned: whether its function has returned.
        names: the names of all ranks, to name a peer.
        closely: with the number of an operation within its group, and with what the rank gives to it.
    """
    if returned:
        return f"{name} had returned"
    blocked = [p for p in pending if p.wait_start_ns]
    if not blocked:
        beside = f", with {pending[0].name} under way" if pending else ""
        return f"{name} was computing{beside}"
    last = blocked[-1]
    seconds = (now_ns - last.wait_start_ns) / 1e9
    return f"{name} was waiting in {_operation(last, names, closely=closely)}{_place(last)} for {seconds:.1f} s"


def stuck(ranks: Sequence[Standing]) -> Verdict | None:
    """Which ranks can never go on, and why; None where all still can.

    Args:
        ranks: in rank order, all looked at in one moment.
    """
    unequal = _unequal(ranks)
    hopeless = {i for i, rank in enumerate(ranks) if rank.blocked}
    while True:
        # Whoever waits for a rank that may still come may still go on itself.
        hopeful = {i for i in hopeless - unequal if all(_may_end(ranks, hopeless, i, op) for op in ranks[i].blocked)}
        if not hopeful:
            break
        hopeless -= hopeful
    # A rank whose GPU waits is not blocked, and may still do anything; but the others of that operation must not have returned.
    hopeless |= {i for i, rank in enumerate(ranks) if any(_absent(ranks, i, op) for op in rank.queued)}
    if not hopeless:
        return None
    return Verdict(tuple(sorted(hopeless)), *_why(ranks, hopeless))


def circle_of_calls(ranks: Sequence[Standing]) -> str:
    """Calls of RPC ranks that wait for one another in a circle, in one sentence; "" where there is none.

    The last of them is being computed, for all we know: it may come to its end, unless it waits for a lock that the first holds.
    """
    for start, rank in enumerate(ranks):
        for first in rank.blocked:
            links, at, call = [rank.name], start, first
            passed = {start}
            while call.group.startswith("rpc "):
                at = call.peer
                links.append(ranks[at].name)
                served = next((p for p in ranks[at].pending if _serves(p, call)), None)
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


def waiting_for(ranks: Sequence[Standing], now_ns: int) -> str:
    """Who has waited long, and for whom: a line for a run in which ranks still can go on; "" where nobody computes."""
    computing = [rank.name for rank in ranks if not rank.returned and not rank.blocked]
    waiting = [rank for rank in ranks if rank.blocked]
    if not computing or not waiting:
        return ""
    operation = waiting[0].blocked[-1]
    seconds = int((now_ns - max(rank.blocked[-1].wait_start_ns for rank in waiting)) / 5e9) * 5
    return (
        f"{_listed(computing)} {'computes' if len(computing) == 1 else 'compute'}; {_listed([rank.name for rank in waiting])} "
        f"{'has' if len(waiting) == 1 else 'have'} waited in {operation.name}{_place(operation)} for more than {seconds} s"
    )


def mismatch(operations: Sequence[tuple[str, Pending]]) -> tuple[str, str]:
    """Where ranks have come to the same operation of a group with something different: a sentence about it, and a hint; else "".

    Args:
        operations: the name of a rank, and what it is in, or was in when it failed.
    """
    by_number: dict[tuple[str, int], list[tuple[str, Pending]]] = {}
    for name, operation in operations:
        if operation.group and operation.match and not operation.group.startswith("rpc "):
            by_number.setdefault((operation.group, operation.match), []).append((name, operation))
    for together in by_number.values():
        (first, mine), *others = together
        for other, theirs in others:
            if _differs(mine, theirs):
                if mine.group.startswith("p2p "):
                    return _misfit(*sorted([(first, mine), (other, theirs)], key=lambda side: side[1].name != "send")), FITTING
                return _contrast(first, mine, other, theirs), SAME
    return "", ""


def _may_end(ranks: Sequence[Standing], hopeless: set[int], me: int, operation: Pending) -> bool:
    return all(_may_come(ranks, hopeless, which, operation) for which in _missing(ranks, me, operation))


def _missing(ranks: Sequence[Standing], me: int, operation: Pending) -> Iterator[int]:
    """The ranks that have not come to an operation. -1: somebody, whoever it is."""
    yield from (which for which in _not_entered(ranks, me, operation) if which < 0 or not ranks[which].uncounted)


def _not_entered(ranks: Sequence[Standing], me: int, operation: Pending) -> Iterator[int]:
    group = operation.group
    if group.startswith("rpc "):
        callee = ranks[operation.peer]
        served = [p for p in callee.pending if _serves(p, operation)]
        if all(_thread_blocked(callee, p) for p in served):
            yield operation.peer
    elif group.startswith("p2p "):
        peer = ranks[operation.peer]
        # What comes from anybody has no number before it has come.
        takes_any = operation.name == "send" and any(p.name == "recv" and not p.group for p in peer.pending)
        if peer.entered.get(group, 0) < operation.match and not takes_any:
            yield operation.peer
    elif group == TENSORFLOW:  # those that are not called may serve, as a "ps" does
        yield from (i for i, rank in enumerate(ranks) if rank.returned and rank.called and not rank.serving)
    elif group:
        for other in _members(group, len(ranks)):
            if other != me and ranks[other].entered.get(group, 0) < operation.match:
                yield other
    elif operation.name == "recv" and operation.what:  # from whoever sends; without a tensor it is a span of the student's own
        sent = [p for rank in ranks for p in rank.pending if p.name == "send" and p.peer == me]
        if all(ranks[me].entered.get(p.group, 0) >= p.match for p in sent):
            yield -1


def _serves(pending: Pending, call: Pending) -> bool:
    return pending.name.startswith(SERVE) and (pending.group, pending.match) == (call.group, call.match)


def _absent(ranks: Sequence[Standing], me: int, operation: Pending) -> list[int]:
    """The ranks that have not come to an operation and take part in nothing any more."""
    return [i for i in _missing(ranks, me, operation) if i >= 0 and ranks[i].returned and not ranks[i].serving]


def _may_come(ranks: Sequence[Standing], hopeless: set[int], which: int, operation: Pending) -> bool:
    """Whether a rank may still come to an operation that it has not come to."""
    if which == -1:
        return any(_may_come(ranks, hopeless, i, operation) for i in range(len(ranks)) if operation not in ranks[i].pending)
    rank = ranks[which]
    if operation.group.startswith("rpc "):
        return _may_answer(rank, which in hopeless)
    return which not in hopeless and not rank.returned


def _may_answer(rank: Standing, hopeless: bool) -> bool:
    """Whether an RPC rank may still answer a call: unless all its threads are blocked for ever."""
    served = [p for p in rank.pending if p.name.startswith(SERVE)]
    if any(not _thread_blocked(rank, p) for p in served):
        return True
    return not hopeless or len(served) < rank.serving


def _thread_blocked(rank: Standing, served: Pending) -> bool:
    return any(p.thread == served.thread for p in rank.blocked)


def _members(group: str, size: int) -> Sequence[int]:
    listed = re.search(r" of ranks ([\d,]+)$", group)
    return [int(number) for number in listed[1].split(",")] if listed else range(size)


def _unequal(ranks: Sequence[Standing]) -> set[int]:
    """The ranks that are blocked in an operation to which others have come with something different."""
    found = set()
    for i, rank in enumerate(ranks):
        for operation in rank.blocked:
            for j, other in enumerate(ranks):
                if i != j and any(_together(operation, p) and _differs(operation, p) for p in (*other.pending, *other.done)):
                    found.add(i)
    return found


def _together(a: Pending, b: Pending) -> bool:
    return bool(a.group) and (a.group, a.match) == (b.group, b.match) and not a.group.startswith("rpc ")


def _differs(a: Pending, b: Pending) -> bool:
    names_differ = a.name != b.name and not a.group.startswith("p2p ")
    return names_differ or amount(a.what) != amount(b.what)


def amount(what: str) -> str:
    """The same words for tensors of as many elements: a backend sends elements, and [4] goes well with [2, 2]."""
    return re.sub(r"\[([\d, ]*)\]", lambda shape: str(math.prod(int(n) for n in re.findall(r"\d+", shape[1]))), what)


def _why(ranks: Sequence[Standing], hopeless: set[int]) -> tuple[str, str, int | None]:
    """The first cause, and what is usually wrong then."""
    blocked = [(ranks[i].name, p) for i in sorted(hopeless) for p in ranks[i].blocked]
    unequal, hint = mismatch([*blocked, *((rank.name, p) for rank in ranks for p in (*rank.pending, *rank.done))])
    if unequal:
        return unequal, hint, None
    for i in sorted(hopeless):
        for operation in (*ranks[i].blocked, *ranks[i].queued):
            for gone in _absent(ranks, i, operation):
                return _deserted(ranks, hopeless, gone)
    circle = _circle(ranks, hopeless)
    if not circle:
        names = _listed([ranks[i].name for i in sorted(hopeless)])
        verb = "waits" if len(hopeless) == 1 else "wait"
        return f"{names} {verb} for a message that nobody will send", "", None
    links = [
        f"{ranks[i].name} waits in {_operation(operation, ())}{_place(operation)} for {ranks[which].name}"
        for (i, operation), (which, _) in zip(circle, [*circle[1:], circle[0]], strict=True)
    ]
    return "; ".join(links), _usual([operation for _, operation in circle]), None


def _deserted(ranks: Sequence[Standing], hopeless: set[int], gone: int) -> tuple[str, str, int]:
    waiting = [
        (ranks[i].name, op) for i in sorted(hopeless) for op in (*ranks[i].blocked, *ranks[i].queued)
        if gone in _missing(ranks, i, op)
    ]  # fmt: skip
    operation = waiting[0][1]
    who = f"{_listed([name for name, _ in waiting])} still {'waits' if len(waiting) == 1 else 'wait'} for it"
    if not ranks[gone].called:
        return f"was not called, and {who} in {operation.name}{_place(operation)}", CALLED, gone
    return f"returned while {who} in {operation.name}{_place(operation)}", ALL, gone


def _circle(ranks: Sequence[Standing], hopeless: set[int]) -> list[tuple[int, Pending]]:
    """The smallest circle of ranks each of which waits for the next, with what it waits in."""
    waits: dict[int, dict[int, Pending]] = {
        i: {q: op for op in ranks[i].blocked for q in _missing(ranks, i, op) if q in hopeless} for i in sorted(hopeless)
    }
    circle = min(filter(None, (_way_back(i, waits) for i in waits)), key=len, default=[])
    return [(i, waits[i][q]) for i, q in zip(circle, [*circle[1:], *circle[:1]], strict=True)]


def _way_back(start: int, waits: Mapping[int, Mapping[int, Pending]]) -> list[int]:
    """The shortest way from a rank to one that waits for it; empty where no way leads back."""
    paths, seen = [[start]], set()
    for path in paths:  # which grows meanwhile, the shortest first
        for which in waits[path[-1]]:
            if which == start:
                return path
            if which not in seen:
                seen.add(which)
                paths.append([*path, which])
    return []


def _usual(operations: Sequence[Pending]) -> str:
    kinds = {p.name.split()[0] for p in operations}
    if kinds == {"send"}:
        return "A send ends only when the other side receives: one of them must receive first, or use isend."
    if kinds == {"recv"}:
        return "Both wait for a message before they send one: one of them must send first."
    if kinds & {"rpc_sync", "rpc_async", "to_here"}:
        return "Calls wait for one another: return a future (`rpc.functions.async_execution`), or do not wait inside a call."
    if kinds & {"send", "recv"}:
        return "The order of messages and collectives must fit on both sides."
    return "Ranks that belong to several groups must enter their collectives in the same order."


def _contrast(first: str, mine: Pending, other: str, theirs: Pending) -> str:
    group = "" if mine.group == "world" else f" of {mine.group}"
    return (
        f"collective number {mine.match}{group} is {_given(mine)}{_place(mine)} on {first}, and {_given(theirs)}{_place(theirs)} "
        f"on {other}"
    )


def _misfit(sender: tuple[str, Pending], receiver: tuple[str, Pending]) -> str:
    """Of a message."""
    (source, sent), (destination, received) = sender, receiver
    return f"{source} sends {sent.what}{_place(sent)}, and {destination} receives it as {received.what}{_place(received)}"


def _given(operation: Pending) -> str:
    return f"{operation.name} of {operation.what}" if operation.what else operation.name


def _operation(operation: Pending, names: Sequence[str], *, closely: bool = False) -> str:
    details = []
    if closely and operation.match:
        details.append(f"number {operation.match}")
    if closely and operation.what:
        details.append(f"of {operation.what}")
    if 0 <= operation.peer < len(names):
        details.append(f"with {names[operation.peer]}")
    return " ".join([operation.name, *details])


def _place(operation: Pending) -> str:
    return f" ({operation.line})" if operation.line else ""


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
