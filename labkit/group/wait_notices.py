"""The notices about long waits and long silence: one line that says who waits where, and where the others are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from labkit.errors.lists import listed
from labkit.group.deadlock import RankState, missing, promised, served_by
from labkit.group.deadlock_words import operation_in_words, place
from labkit.group.output import cell_label
from labkit.launch.frames import StackFrame
from labkit.launch.thread_states import Active, RankThreads, Thread
from labkit.recording.group_keys import DIST_BACKWARD
from labkit.recording.schema import Pending

MOST_WAITS: Final = 3  # operations that are listed, and ranks that have not entered them
MOST_NAMES: Final = 4
SOURCE_CHARACTERS: Final = 60
PLURAL: Final = {"is": "are", "has": "have"}
ROUNDED_S: Final = 5  # how often the notice changes
# torch waits for a gradient of each result, and gets none for a result that the loss does not depend on.
BACKWARD: Final = "it waits for ever if the loss leaves out a result of a remote call in its context"
SHORT: Final = 0.5  # of the longest wait: shorter waits are not listed, since a healthy rank may do them all the time


def unrecorded_notice(names: Sequence[str], threads: Mapping[int, RankThreads], waited_ns: int) -> str:
    """The notice about ranks that all wait, but not in an operation that labkit records."""
    waited = f"waited in C++ or for a lock for more than {_rounded(waited_ns)} s, at"
    return "; ".join(_together((names[i], "has", f"{waited} {_where(of_rank.main)}") for i, of_rank in threads.items()))


def waiting_notice(
    ranks: Sequence[RankState], threads: Mapping[int, RankThreads], acting: Mapping[int, Active], now_ns: int
) -> str:
    """The ranks that have waited long, their operations, and the ranks they wait for; "" if no rank waits.

    `threads` has those of ranks that are not blocked, as far as they are known; `acting` has what may still act in the
    others.
    """
    longest_ns = max((now_ns - p.wait_start_ns for rank in ranks for p in (*rank.blocked, *rank.timed)), default=0)
    waits: dict[tuple[str, str], list[tuple[int, Pending]]] = {}
    for i, rank in enumerate(ranks):
        long_waits = [p for p in (*rank.blocked, *rank.timed) if now_ns - p.wait_start_ns >= SHORT * longest_ns]
        if long_waits:
            last = max(long_waits, key=lambda p: p.start_ns)
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
    if not not_waiting:  # unknown, as for TensorFlow
        not_waiting = [i for i, rank in enumerate(ranks) if not rank.blocked and not rank.timed and not rank.returned]
    parts += _elsewhere(ranks, not_waiting, threads, acting)
    parts += _serving(ranks, calls, threads)
    parts += _promised(ranks, futures)
    parts += [BACKWARD] if any(p.group == DIST_BACKWARD for p in calls) else []
    waiting = [i for who in longest_first for i, _ in who if i in acting]
    parts += [f"{ranks[i].name} {_may_act(acting[i])}" for i in waiting[:MOST_WAITS]]
    return "; ".join(parts)


def silence_notice(running: Mapping[str, RankThreads | None], silent_s: float) -> str:
    """Where ranks are that have not returned and have shown nothing for long, by their names; "" without ranks."""
    where = _together((name, "is", _place_of(threads) or "running") for name, threads in running.items())
    return "; ".join([f"nothing printed for {silent_s:.0f} s", *where]) if where else ""


def _waiters(ranks: Sequence[RankState], who: Sequence[tuple[int, Pending]], now_ns: int) -> str:
    operation = who[0][1]
    seconds = _rounded(now_ns - max(p.wait_start_ns for _, p in who))
    names = [rank.name for rank in ranks] if len({p.peer for _, p in who}) == 1 else ()
    waited = f"waited in {operation_in_words(operation, names)}{place(operation)} for more than {seconds} s"
    return _together((ranks[i].name, "has", waited) for i, _ in who)[0]


def _together(doings: Iterable[tuple[str, str, str]]) -> list[str]:
    """What ranks do, in one sentence for those that do the same: from their names, "is" or "has", and the rest."""
    by_doing: dict[tuple[str, str], list[str]] = {}
    for name, verb, rest in doings:
        by_doing.setdefault((verb, rest), []).append(name)
    return [
        f"{listed(names, most=MOST_NAMES, rest='others')} {verb if len(names) == 1 else PLURAL[verb]} {rest}"
        for (verb, rest), names in list(by_doing.items())[:MOST_WAITS]
    ]


def _rounded(waited_ns: int) -> int:
    """Seconds, which change so rarely that the notice can be read."""
    return int(waited_ns / (ROUNDED_S * 1e9)) * ROUNDED_S


def _elsewhere(
    ranks: Sequence[RankState], absent: Sequence[int], threads: Mapping[int, RankThreads], acting: Mapping[int, Active]
) -> list[str]:
    """What the ranks do that the others wait for."""
    doings = []
    for i in absent:
        if ranks[i].returned:
            doings.append((ranks[i].name, "has", "returned" + (f", and {_may_act(acting[i])}" if i in acting else "")))
        else:
            doings.append((ranks[i].name, "is", _place_of(threads.get(i)) or "computing"))
    return _together(doings)


def _place_of(threads: RankThreads | None) -> str:
    """Where the student's code is on a rank's main thread; "" if that is not known."""
    frame = threads.main.students if threads is not None and threads.main is not None else None
    return "" if frame is None else f"at {_at(frame)}"


def _serving(ranks: Sequence[RankState], calls: Sequence[Pending], threads: Mapping[int, RankThreads]) -> list[str]:
    """Where ranks are in the calls that others wait for."""
    parts = []
    for callee, served in filter(None, (served_by(ranks, call) for call in calls)):
        others = threads[callee].others if callee in threads else ()
        frame = next((thread.students for thread in others if thread.number == served.thread), None)
        if frame is not None:
            parts.append(f"{ranks[callee].name} serves it at {_at(frame)}")
    return list(dict.fromkeys(parts))[:MOST_WAITS]


def _promised(ranks: Sequence[RankState], calls: Sequence[Pending]) -> list[str]:
    """Called functions that have returned a future which is not completed yet."""
    where = dict.fromkeys((ranks[p.peer].name, p.type.function_in(p.name)) for p in calls)
    return [f"on {callee} {function} has returned a future that is not completed" for callee, function in where][:MOST_WAITS]


def _may_act(active: Active) -> str:
    if active.kind == "silent":
        return "does not say where its threads are"
    if active.kind == "child":
        return f"has a child process: {_cut(active.child or 'a fork')}"
    where = _where(active.thread)
    return f"is at {where}" if active.kind == "main" else f"has another thread, at {where}"


def _where(thread: Thread | None) -> str:
    frame = (thread.students or thread.innermost) if thread is not None else None
    return "an unknown place" if frame is None else _at(frame)


def line_of(thread: Thread | None) -> str:
    """The line of the student's code at which a thread is: ", at cell 5, line 3: while True:"; "" if it is in none."""
    return f", at {_at(thread.students)}" if thread is not None and thread.students is not None else ""


def _at(frame: StackFrame) -> str:
    where = f": {_cut(frame.source)}" if frame.source else f", in {frame.function}"
    return f"{cell_label(frame.file)}, line {frame.line}{where}"


def _cut(text: str) -> str:
    return text if len(text) <= SOURCE_CHARACTERS else f"{text[:SOURCE_CHARACTERS]}..."
