"""The notice of a run in which ranks wait long: one line that says who waits in what, and where those are that have not come."""

from __future__ import annotations

import linecache
from collections.abc import Mapping, Sequence
from typing import Final

from labkit.errors.lists import listed
from labkit.group.deadlock import missing, operation_in_words, place
from labkit.group.output import cell_label
from labkit.group.rank_state import Standing
from labkit.group.remote_calls import promised, served_by
from labkit.group.stack_dump import Frame
from labkit.group.thread_states import Active, Look, Thread
from labkit.recording.schema import Pending

__all__ = ["MOST_NAMES", "waiting_notice"]

MOST_WAITS: Final = 3  # operations that are told of, and ranks that have not come to them
MOST_NAMES: Final = 4
SOURCE_CHARACTERS: Final = 60
ROUNDED_S: Final = 5  # the notice changes that often
SHORT: Final = 0.5  # of the longest wait: what has waited less is not told, for it may be what a healthy rank does all the time


def waiting_notice(ranks: Sequence[Standing], looks: Mapping[int, Look], acting: Mapping[int, Active], now_ns: int) -> str:
    """Who has waited long, in what and for whom; "" where nobody waits.

    Args:
        ranks: in rank order.
        looks: of ranks that are blocked in nothing, what their threads are in, as far as that is known.
        acting: of the others, what may still act.
        now_ns: this moment.
    """
    longest_ns = max((now_ns - p.wait_start_ns for rank in ranks for p in (*rank.blocked, *rank.timed)), default=0)
    waits: dict[tuple[str, str], list[tuple[int, Pending]]] = {}
    for i, rank in enumerate(ranks):
        in_vain = [p for p in (*rank.blocked, *rank.timed) if now_ns - p.wait_start_ns >= SHORT * longest_ns]
        if in_vain:
            last = max(in_vain, key=lambda p: p.start_ns)
            waits.setdefault((last.name, place(last)), []).append((i, last))
    longest_first = sorted(waits.values(), key=lambda who: min(p.wait_start_ns for _, p in who))
    if not longest_first:
        return ""
    parts = [_waiters(ranks, who, now_ns) for who in longest_first[:MOST_WAITS]]
    calls = [p for who in longest_first for _, p in who]
    futures = [p for p in calls if promised(ranks, p)]
    awaited = [(rank, p) for who in longest_first for rank, p in who if p not in futures]
    absent = sorted({i for rank, p in awaited for i in missing(ranks, rank, p) if i >= 0})
    not_waiting = [i for i in absent if not ranks[i].blocked and not ranks[i].timed]
    if not not_waiting:  # as with TensorFlow, which does not tell
        not_waiting = [i for i, rank in enumerate(ranks) if not rank.blocked and not rank.timed and not rank.returned]
    parts += _elsewhere(ranks, not_waiting, looks, acting)
    parts += _serving(ranks, calls, looks)
    parts += _promised(ranks, futures)
    waiting = [i for who in longest_first for i, _ in who if i in acting]
    parts += [f"{ranks[i].name} {_may_act(acting[i])}" for i in waiting[:MOST_WAITS]]
    return "; ".join(parts)


def _waiters(ranks: Sequence[Standing], who: Sequence[tuple[int, Pending]], now_ns: int) -> str:
    operation = who[0][1]
    seconds = int((now_ns - max(p.wait_start_ns for _, p in who)) / (ROUNDED_S * 1e9)) * ROUNDED_S
    names = [rank.name for rank in ranks] if len({p.peer for _, p in who}) == 1 else ()
    return (
        f"{_some([ranks[i].name for i, _ in who])} {'has' if len(who) == 1 else 'have'} waited in "
        f"{operation_in_words(operation, names)}{place(operation)} for more than {seconds} s"
    )


def _elsewhere(
    ranks: Sequence[Standing], absent: Sequence[int], looks: Mapping[int, Look], acting: Mapping[int, Active]
) -> list[str]:
    """What those do for whom the others wait."""
    by_doing: dict[tuple[bool, str], list[str]] = {}  # whether it has returned, and what it does
    for i in absent:
        look = looks.get(i)
        if ranks[i].returned:
            doing = "returned" + (f", and {_may_act(acting[i])}" if i in acting else "")
        elif look is None or look.main is None or look.main.students is None:
            doing = "computing"
        else:
            doing = f"at {_at(look.main.students)}"
        by_doing.setdefault((ranks[i].returned, doing), []).append(ranks[i].name)
    parts = []
    for (returned, doing), names in list(by_doing.items())[:MOST_WAITS]:
        verb = ("has" if len(names) == 1 else "have") if returned else ("is" if len(names) == 1 else "are")
        parts.append(f"{_some(names)} {verb} {doing}")
    return parts


def _serving(ranks: Sequence[Standing], calls: Sequence[Pending], looks: Mapping[int, Look]) -> list[str]:
    """Where the ranks are in the calls that others wait for."""
    parts = []
    for callee, served in filter(None, (served_by(ranks, call) for call in calls)):
        threads = looks[callee].others if callee in looks else ()
        frame = next((thread.students for thread in threads if thread.number == served.thread), None)
        if frame is not None:
            parts.append(f"{ranks[callee].name} serves it at {_at(frame)}")
    return list(dict.fromkeys(parts))[:MOST_WAITS]


def _promised(ranks: Sequence[Standing], calls: Sequence[Pending]) -> list[str]:
    """Whose functions have returned, but not what the callers wait for."""
    where = dict.fromkeys((ranks[p.peer].name, p.type.function_in(p.name)) for p in calls)
    return [f"on {callee} {function} has returned a future that is not completed" for callee, function in where][:MOST_WAITS]


def _may_act(active: Active) -> str:
    if active.kind == "silent":
        return "does not say where its threads are"
    if active.kind == "child":
        return f"has a child process: {_cut(active.child)}" if active.child else "has a forked child process"
    where = _where(active.thread)
    return f"is at {where}" if active.kind == "main" else f"has another thread, at {where}"


def _where(thread: Thread | None) -> str:
    frame = (thread.students or thread.innermost) if thread is not None else None
    return "an unknown place" if frame is None else _at(frame)


def _at(frame: Frame) -> str:
    source = linecache.getline(frame.file, frame.line).strip()
    return f"{cell_label(frame.file)}, line {frame.line}" + (f": {_cut(source)}" if source else f", in {frame.function}")


def _cut(text: str) -> str:
    return text if len(text) <= SOURCE_CHARACTERS else f"{text[:SOURCE_CHARACTERS]}..."


def _some(names: Sequence[str]) -> str:
    """The names, or the first of them where they are many."""
    return listed(names, most=MOST_NAMES, rest="others")
