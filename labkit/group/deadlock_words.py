"""The words of deadlocks, mismatched operations and waiting ranks: a sentence each, and a hint at the usual mistake."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from labkit.errors.lists import listed
from labkit.group.deadlock import HINTS, Deadlock, Reason, first_mismatch, hint_of
from labkit.launch.frames import Owner, StackFrame
from labkit.recording.group_keys import GroupKind, ends_of, kind_of, where_of
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
CREATED: Final = "Every rank must call {}, in the same order, also ranks that do not belong to the new group."
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
    "(`rpc.functions.async_execution`). A larger `num_worker_threads` allows more calls at once."
)
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
            where = f"{who} in {first.in_words}{place(first)}"
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
            return "; ".join(f"{name} waits in {_at(p)}" for name, p in waits), hint_of(first.group, len(names))
        case Reason.CIRCLE:
            pairs = zip(waits, [*waits[1:], waits[0]], strict=True)
            links = [f"{name} waits in {_at(p)} for {other}" for (name, p), (other, _) in pairs]
            return "; ".join(links), _unlike_tags(waits) or _usual([operation for _, operation in waits])
        case Reason.NO_SENDER:
            waiting = list(dict.fromkeys(name for name, _ in waits))
            return f"{listed(waiting)} {'waits' if len(waiting) == 1 else 'wait'} for a message that nobody will send", ""


def mismatch_in_words(operations: Sequence[tuple[str, Pending]]) -> tuple[str, str]:
    """A sentence and a hint about ranks that entered the same operation with different arguments; ("", "") if none did.

    Args:
        operations: names of ranks, each with an operation that it is in, or was in when it failed.
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
        beside = f", with {pending[0].in_words} under way" if pending else ""
        return f"{name} was computing{beside}"
    last = blocked[-1]
    seconds = max(now_ns - last.wait_start_ns, 0) / 1e9  # it may have started while the states were read
    return f"{name} was waiting in {operation_in_words(last, names, closely=closely)}{place(last)} for {seconds:.1f} s"


def frozen(name: str) -> str:
    """One line about a rank whose process does not run."""
    return f"{name} was stopped by a signal (SIGSTOP)"


def disconnected(name: str) -> str:
    """One line about a rank that lost its connection to another one."""
    return f"{name} lost the connection"


def serving_for_ever(names: Sequence[str]) -> tuple[str, str]:
    """A sentence about ranks that serve others for ever, while no other rank was called, and a hint."""
    return f"{listed(names)} {'serves' if len(names) == 1 else 'serve'} others, and no other rank was called", SERVES_OTHERS


def late_in_words(names: Sequence[str], operation: Pending) -> str:
    """A sentence about ranks that had not entered an operation when the program's own time limit ended it."""
    were = "it was" if len(names) == 1 else "they were"
    return f"{listed(names)} had not entered {operation.in_words}. If {were} only late, this is no deadlock: set a longer limit."


def left_in_words(name: str, left: Pending, call: Pending, number: int) -> str:
    """A sentence about a rank that left RPC without waiting for the others, and a call to it that it did not answer.

    `number` says which call of this function it is.
    """
    when = "while" if call.start_ns < left.start_ns else "before"
    was = "was unanswered" if when == "while" else "was made"
    of = f"call {number} of {call.type.function_in(call.name)}"
    return f"{name} left at {left.in_words}(graceful=False){place(left)}, {when} {of} {was}."


def _at(operation: Pending) -> str:
    return f"{operation_in_words(operation, ())}{place(operation)}"


def _uncompleted_future(waits: Sequence[tuple[str, Pending]], names: Sequence[str]) -> str:
    """The sentence about the first call that returned a future which no rank will complete."""
    first = waits[0][1]
    alike = [name for name, p in waits if (p.name, p.peer, p.line) == (first.name, first.peer, first.line)]
    return (
        f"{listed(list(dict.fromkeys(alike)))} {'waits' if len(alike) == 1 else 'wait'} in {first.in_words}{place(first)}: on "
        f"{names[first.peer]} it has returned a future that nobody will complete"
    )


def _usual_of_returned(operation: Pending) -> str:
    """The usual mistake if a rank returned without entering an operation."""
    match kind_of(operation.group):
        case GroupKind.TENSORFLOW:
            return ALL_OF_TENSORFLOW
        case GroupKind.CREATION:
            return CREATED.format(operation.in_words)
        case GroupKind.PAIR:
            return UNRECEIVED if operation.type is SEND else UNSENT
    return ALL


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
        return CREATED.format(created[0].in_words)
    if any(kind_of(p.group) is GroupKind.RENDEZVOUS and p.type is not RPC_SHUTDOWN for p in operations):
        return HINTS[GroupKind.RENDEZVOUS]
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
    """The sentence about a collective that two ranks entered with different arguments."""
    (first, mine), (other, theirs) = one, another
    group = "" if mine.group == "world" else f" of {mine.group}"
    return (
        f"collective number {mine.match}{group} is {_given(mine)}{place(mine)} on {first}, and {_given(theirs)}{place(theirs)} "
        f"on {other}"
    )


def _misfit(sender: tuple[str, Pending], receiver: tuple[str, Pending]) -> str:
    """The sentence about a message whose sides do not match."""
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


def origin_in_words(name: str, operation: Pending, stack: Sequence[StackFrame]) -> str:
    """A sentence about the function of torch that a rank's operation is a part of; "" if it is none of `ORIGINS`."""
    students = max((i for i, frame in enumerate(stack) if frame.own is Owner.STUDENT), default=-1)
    called = [frame.function for frame in stack[students + 1 :] if frame.own is Owner.LIBRARY]
    origin = next((ORIGINS[function] for function in called if function in ORIGINS), "")
    return f"On {name}, {operation.in_words} is {origin}." if origin else ""


def place(operation: Pending) -> str:
    """The student's line that issued an operation, as the suffix of its name."""
    return f" ({operation.line})" if operation.line else ""
