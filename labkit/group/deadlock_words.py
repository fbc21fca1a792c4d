"""Who waits where, and why, in words: deadlocks, mismatched operations, long waits, and the stacks of ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from labkit.errors.lists import listed
from labkit.group.deadlock import Deadlock, RankState, Reason, first_mismatch, missing, promised, served_by
from labkit.group.output import cell_label
from labkit.launch.frames import Owner, StackFrame
from labkit.launch.rank_process import Status
from labkit.launch.thread_states import ANSWER_LIMIT_S, Active, RankThreads, Thread
from labkit.recording.group_keys import DIST_BACKWARD, GroupKind, ends_of, kind_of, size_of, where_of
from labkit.recording.operations import RECV, RPC, RPC_SHUTDOWN, SEND, TO_HERE
from labkit.recording.schema import Pending

SAME: Final = "All ranks of a group must call the same collectives, in the same order, on tensors of the same shape and type."
ALL: Final = (
    "All ranks of a group must call the same collectives, equally often: look for a loop of another length, an early return, or "
    "a collective inside `if rank == 0`."
)
ALL_OF_TENSORFLOW: Final = (
    "All ranks of a strategy must run the same steps: look for a dataset or a loop of another length, or an early return. A rank "
    "whose server others still need calls `server.join()` at its end, not `return`."
)
CREATED: Final = "Every rank must call {}, in the same order, including ranks that do not belong to the new group."
UNRECEIVED: Final = (
    "A send ends only when the other side receives: look for a receive that is missing there, or that has another source or tag."
)
UNSENT: Final = "Look for a send that is missing on the other rank, or that has another destination or tag."
TAGS: Final = "A message is received with the tag that it is sent with: {}."
FITTING: Final = "A receive needs a tensor of the size and type that is sent."
SERVES_OTHERS: Final = (
    "`join()` of a server returns when the others have returned: also call the rank that they serve, such as the chief."
)
PROMISED: Final = (
    "A future that a function under `rpc.functions.async_execution` returns needs a call of `set_result`: look for a count "
    "of calls that is never reached, or an early return before it."
)
NO_THREAD: Final = (
    "The threads that serve calls also receive replies: do not wait for a call inside a call, or return a future "
    "(`rpc.functions.async_execution`). A larger `num_worker_threads` in the options of `init_rpc` allows more calls at once."
)
MEETING: Final = "Ranks meet where address, port and world size agree, and each must come with a rank of its own."
CALLED: Final = "`group[0].run(f)` and `%%ranks --on 0` call rank 0 only; operations between ranks need all of their ranks."

# Functions of torch that are made of other operations, as they are seen on a stack; what to say about them.
ORIGINS: Final = {
    "_sync_buffers": "DDP's broadcast of buffers before a forward pass; to validate on one rank, call `model.module`",
    "_sync_module_states": "the broadcast of parameters in the constructor of DDP or FSDP",
    "full_tensor": "a part of `full_tensor()`, which all ranks of the mesh must call",
    "redistribute": "a part of DTensor's `redistribute()`",
} | {
    name: f"a part of `{name}()`"
    for name in ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "monitored_barrier")
}  # fmt: skip


def deadlock_in_words(deadlock: Deadlock, names: Sequence[str]) -> tuple[str, str]:
    """The cause of a deadlock in one sentence, and a hint at the usual mistake behind it; "" if there is none.

    If the deadlock has a culprit, the sentence does not contain its name.
    """
    waits = [(names[i], operation) for i, operation in deadlock.waits]
    first = waits[0][1]
    match deadlock.reason:
        case Reason.MISMATCH:
            return mismatch_in_words(waits)
        case Reason.RETURNED | Reason.NOT_CALLED:
            it = "them" if deadlock.absent else "it"
            who = f"{listed([name for name, _ in waits])} still {'waits' if len(waits) == 1 else 'wait'} for {it}"
            where = f"{who} in {first.name}{place(first)}"
            if deadlock.reason is Reason.NOT_CALLED:
                nor = f", nor was {' or '.join(names[i] for i in deadlock.absent)}" if deadlock.absent else ""
                return f"was not called{nor}, and {where}", CALLED
            return f"returned while {where}", _usual_of_returned(first)
        case Reason.NO_THREAD:
            where = listed(list(dict.fromkeys(_at(p) for _, p in waits)))
            return f"{waits[0][0]} waits in {where} on every thread that serves calls: none is left to receive a reply", NO_THREAD
        case Reason.FUTURE:
            return _uncompleted_future(waits, names), PROMISED
        case Reason.RENDEZVOUS:
            return "; ".join(f"{name} waits in {_at(p)}" for name, p in waits), _usual_of_rendezvous(
                size_of(first.group), len(names)
            )
        case Reason.CIRCLE:
            pairs = zip(waits, [*waits[1:], waits[0]], strict=True)
            links = [f"{name} waits in {_at(p)} for {other}" for (name, p), (other, _) in pairs]
            return "; ".join(links), _unlike_tags(waits) or _usual([operation for _, operation in waits])
        case Reason.NO_SENDER:
            waiting = list(dict.fromkeys(name for name, _ in waits))
            return f"{listed(waiting)} {'waits' if len(waiting) == 1 else 'wait'} for a message that nobody will send", ""


def mismatch_in_words(operations: Sequence[tuple[str, Pending]]) -> tuple[str, str]:
    """A sentence and a hint about ranks that entered the same operation with different arguments; ("", "") if none did.

    Given are operations in which ranks are, or were when they failed.
    """
    sides = first_mismatch(operations)
    if not sides:
        return "", ""
    if kind_of(sides[0][1].group) is GroupKind.PAIR:
        return _misfit(*sides), FITTING
    return _contrast(*sides), SAME


def doing(
    name: str,
    pending: Sequence[Pending],
    now_ns: int,
    *,
    returned: bool = False,
    serves: bool = False,
    names: Sequence[str] = (),
    closely: bool = False,
) -> str:
    """One line about what a rank is doing.

    `serves` says whether it only serves others. `names` are those of all ranks, to name a peer. `closely` adds the
    operation's number within its group, and its signature.
    """
    if returned:
        return f"{name} had returned"
    if serves:
        return f"{name} was serving the others"
    blocked = [p for p in pending if p.wait_start_ns]
    if not blocked:
        beside = f", with {pending[0].name} under way" if pending else ""
        return f"{name} was computing{beside}"
    last = blocked[-1]
    seconds = max(now_ns - last.wait_start_ns, 0) / 1e9  # it may have started while the states were read
    return f"{name} was waiting in {operation_in_words(last, names, closely=closely)}{place(last)} for {seconds:.1f} s"


def serving_for_ever(names: Sequence[str]) -> tuple[str, str]:
    """A sentence about ranks that serve others for ever, while no other rank was called, and a hint."""
    return f"{listed(names)} {'serves' if len(names) == 1 else 'serve'} others, and no other rank was called", SERVES_OTHERS


def late_in_words(names: Sequence[str], operation: Pending) -> str:
    """A sentence about ranks that had not entered an operation when the program's own time limit ended it."""
    were = "it was" if len(names) == 1 else "they were"
    return f"{listed(names)} had not entered {operation.name}. If {were} only late, this is no deadlock: set a longer limit."


def _at(operation: Pending) -> str:
    return f"{operation_in_words(operation, ())}{place(operation)}"


def _uncompleted_future(waits: Sequence[tuple[str, Pending]], names: Sequence[str]) -> str:
    first = waits[0][1]
    alike = [name for name, p in waits if (p.name, p.peer, p.line) == (first.name, first.peer, first.line)]
    return (
        f"{listed(list(dict.fromkeys(alike)))} {'waits' if len(alike) == 1 else 'wait'} in {first.name}{place(first)}: on "
        f"{names[first.peer]} it has returned a future that nobody will complete"
    )


def _usual_of_returned(operation: Pending) -> str:
    match kind_of(operation.group):
        case GroupKind.TENSORFLOW:
            return ALL_OF_TENSORFLOW
        case GroupKind.CREATION:
            return CREATED.format(operation.name)
        case GroupKind.PAIR:
            return UNRECEIVED if operation.type is SEND else UNSENT
    return ALL


def _usual_of_rendezvous(asked: int, size: int) -> str:
    if asked <= size:
        return MEETING
    return f"It asks for {asked} ranks, and this group has {size}: give it world_size {size}, or make a lab.Group of {asked}."


def _unlike_tags(waits: Sequence[tuple[str, Pending]]) -> str:
    """A hint at a message that is sent with one tag and received with another; "" if there is none."""
    messages = [(name, p, ends_of(p.group)) for name, p in waits if kind_of(p.group) is GroupKind.PAIR]
    for source, sent, ends in messages:
        for destination, received, others in messages:
            if sent.type is SEND and received.type is RECV and ends[:2] == others[:2] and ends != others:
                return TAGS.format(f"{source} sends with tag {ends[2]}, and {destination} receives with tag {others[2]}")
    return ""


def _usual(operations: Sequence[Pending]) -> str:
    types = {p.type for p in operations}
    if created := [p for p in operations if kind_of(p.group) is GroupKind.CREATION]:
        return CREATED.format(created[0].name)
    if any(kind_of(p.group) is GroupKind.RENDEZVOUS and p.type is not RPC_SHUTDOWN for p in operations):
        return MEETING
    if types == {SEND}:
        return "A send ends only when the other side receives: one of them must receive first, or use isend."
    if types == {RECV}:
        return "Each waits for a message that the other has not sent: is a send missing, or must one of them send first?"
    if types & {RPC, TO_HERE}:
        return "Calls wait for one another: return a future (`rpc.functions.async_execution`), or do not wait inside a call."
    if types & {SEND, RECV}:
        return "The order of messages and collectives must fit on both sides."
    return "Ranks that belong to several groups must enter their collectives in the same order."


def _contrast(one: tuple[str, Pending], another: tuple[str, Pending]) -> str:
    (first, mine), (other, theirs) = one, another
    group = "" if mine.group == "world" else f" of {mine.group}"
    return (
        f"collective number {mine.match}{group} is {_given(mine)}{place(mine)} on {first}, and {_given(theirs)}{place(theirs)} "
        f"on {other}"
    )


def _misfit(sender: tuple[str, Pending], receiver: tuple[str, Pending]) -> str:
    (source, sent), (destination, received) = sender, receiver
    return f"{source} sends {sent.signature}{place(sent)}, and {destination} receives it as {received.signature}{place(received)}"


def _given(operation: Pending) -> str:
    return f"{operation.name} of {operation.signature}" if operation.signature else operation.name


def operation_in_words(operation: Pending, names: Sequence[str], *, closely: bool = False) -> str:
    """An operation's name, group and peer (if `names` are given); with `closely`, also its number and its signature."""
    details = [where_of(operation.group)] if operation.type is not RPC_SHUTDOWN else []
    if closely and operation.match and kind_of(operation.group) is not GroupKind.RENDEZVOUS:
        details.append(f"number {operation.match}")
    if closely and operation.signature:
        details.append(f"of {operation.signature}")
    if 0 <= operation.peer < len(names):
        details.append(f"with {names[operation.peer]}")
    return " ".join(filter(None, [operation.name, *details]))


def origin_in_words(name: str, operation: Pending, stack: Sequence[StackFrame]) -> str:
    """A sentence about the function of torch that a rank's operation is a part of; "" if it is none of `ORIGINS`."""
    students = max((i for i, frame in enumerate(stack) if frame.own is Owner.STUDENT), default=-1)
    called = [frame.function for frame in stack[students + 1 :] if frame.own is Owner.LIBRARY]
    origin = next((ORIGINS[function] for function in called if function in ORIGINS), "")
    return f"On {name}, {operation.name} is {origin}." if origin else ""


def place(operation: Pending) -> str:
    """The student's line that issued an operation, as the suffix of its name."""
    return f" ({operation.line})" if operation.line else ""


# Long waits

MOST_WAITS: Final = 3  # operations that are listed, and ranks that have not entered them
MOST_NAMES: Final = 4
SOURCE_CHARACTERS: Final = 60
PLURAL: Final = {"is": "are", "has": "have"}
ROUNDED_S: Final = 5  # how often the notice changes
# torch waits for a gradient of each result, and gets none for a result that the loss does not depend on.
BACKWARD: Final = "it waits for ever if the loss leaves out a result of a remote call in its context"
SHORT: Final = 0.5  # of the longest wait: shorter waits are not listed, since a healthy rank may do them all the time


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
    doings = []
    for i in absent:
        if ranks[i].returned:
            doings.append((ranks[i].name, "has", "returned" + (f", and {_may_act(acting[i])}" if i in acting else "")))
        else:
            doings.append((ranks[i].name, "is", _place_of(threads.get(i)) or "computing"))
    return _together(doings)


def _place_of(threads: RankThreads | None) -> str:
    """Where the student's code is on a rank's main thread; "" if that is not known."""
    return "" if threads is None else line_of(threads.main).removeprefix(", ")


def _serving(ranks: Sequence[RankState], calls: Sequence[Pending], threads: Mapping[int, RankThreads]) -> list[str]:
    parts = []
    for callee, served in filter(None, (served_by(ranks, call) for call in calls)):
        others = threads[callee].others if callee in threads else ()
        frame = next((thread.students for thread in others if thread.number == served.thread), None)
        if frame is not None:
            parts.append(f"{ranks[callee].name} serves it at {_at_frame(frame)}")
    return list(dict.fromkeys(parts))[:MOST_WAITS]


def _promised(ranks: Sequence[RankState], calls: Sequence[Pending]) -> list[str]:
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
    return "an unknown place" if frame is None else _at_frame(frame)


def line_of(thread: Thread | None) -> str:
    """The line of the student's code at which a thread is: ", at cell 5, line 3: while True:"; "" if it is in none."""
    return f", at {_at_frame(thread.students)}" if thread is not None and thread.students is not None else ""


def _at_frame(frame: StackFrame) -> str:
    where = f": {_cut(frame.source)}" if frame.source else f", in {frame.function}"
    return f"{cell_label(frame.file)}, line {frame.line}{where}"


def _cut(text: str) -> str:
    return text if len(text) <= SOURCE_CHARACTERS else f"{text[:SOURCE_CHARACTERS]}..."


# Stacks


class Stacks(dict[str, str]):
    """The stacks by rank name; printed, a report."""

    def __repr__(self) -> str:
        return "\n\n".join(f"{name} {text}" for name, text in self.items())


def crash(frames: Sequence[StackFrame]) -> str:
    """Where the student's code was when a rank crashed in C code, as a traceback; "" if it did not run."""
    half = re.sub(r"^ +", lambda spaces: spaces[0][::2], _stack(frames), flags=re.MULTILINE)  # a traceback is indented by two
    return f"Traceback (most recent call last):\n{half}" if half else ""


def readable(threads: RankThreads, status: Status) -> str:
    """A rank's stacks as a report in the form of tracebacks: the student's frames, and the frame that they called.

    The state of its process is reported if it did not answer.
    """
    if threads.main is None:
        return f"does not answer: {_state(status)}"
    stacks = [text for thread in (threads.main, *threads.others) if (text := _stack(thread.frames))]
    return (
        "is idle: no function of yours is running" if not stacks else "is here:\n" + "\n  and on another thread:\n".join(stacks)
    )


def _state(status: Status) -> str:
    if status.state == "gone":
        return "its process is gone"
    if status.frozen:
        return "its process was stopped by a signal (SIGSTOP); SIGCONT resumes it"
    return f"its process is {status.state}, and did not answer within {ANSWER_LIMIT_S:.0f} s"


def _stack(frames: Sequence[StackFrame]) -> str:
    """One stack; "" if it contains none of the student's frames."""
    last = max((i for i, frame in enumerate(frames) if frame.own is Owner.STUDENT), default=-1)
    lines = []
    for i, frame in enumerate(frames):
        students = frame.own is Owner.STUDENT
        if students or 0 <= last == i - 1:
            lines.append(f'    File "{cell_label(frame.file)}", line {frame.line}, in {frame.function}')
            lines += [f"        {frame.source}"] if students and frame.source else []
    return "\n".join(lines)
