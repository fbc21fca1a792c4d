"""Finds operations that a run leaves unfinished: not entered by all ranks, still pending, or failed.

They would disturb the next run: a receive could get a stale message, a collective could match another one. So the next
run needs new ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from labkit.errors.exceptions import RankFailure
from labkit.errors.lists import listed
from labkit.group.collector import Records
from labkit.group.deadlock import RankState, missing
from labkit.group.deadlock_words import place
from labkit.group.pool_state import Member
from labkit.recording.group_keys import GroupKind, kind_of
from labkit.recording.operations import FOR_OTHERS, RECV, RPC, SEND, TO_HERE
from labkit.recording.schema import Pending
from labkit.worker.runtimes.base import Runtime

# Time limits for pending operations to complete.
INCOMPLETE_S: Final = 0.1  # not entered by all ranks: a thread of a rank that has returned may still enter it
CALL_S: Final = 1.0  # a remote call: the other rank may not have started to serve it
COMPLETE_S: Final = 5.0  # entered by all ranks: it will complete, but that may take long on a busy machine
CHECK_EVERY_S: Final = 0.002


class Unfinished(NamedTuple):
    """The first operation that a run has left unfinished."""

    sentence: str  # the operation, its line, and its state
    failed: bool  # whether it has failed, so that it cannot complete any more

    def after_a_run(self) -> str:
        """Return the message after a run that has left it."""
        return f"{self.sentence}. The next run starts fresh ranks, which know nothing of it."

    def after_a_cell(self) -> str:
        """Return the message after a `%%ranks` cell.

        The cell's ranks are kept: a later cell may receive what an earlier one has sent.
        """
        hope = "" if self.failed else " A later %%ranks cell may finish it."
        return f"{self.sentence}.{hope} The next `run` starts fresh ranks."

    def before_a_run(self) -> str:
        """Return the message before a run that needs new ranks because a cell has left it."""
        return f"{self.sentence}. This run starts fresh ranks."


def left_unfinished(members: Sequence[Member], records: Records) -> Unfinished | None:
    """Return the first unfinished operation of a run in which all ranks have returned; None if there is none.

    Waits up to `COMPLETE_S` for operations that are about to complete.
    """
    records.drain()
    failed = [(m, p) for m in members for p in records.failed(m.rank) if _matters(p)]
    if failed:
        member, operation = min(failed, key=lambda one: one[1].start_ns)
        return Unfinished(f"{_words(operation, members)}{place(operation)} did not complete on {member.name}", True)

    def entered(rank: int) -> Mapping[str, int]:
        records.drain()
        return records.entered(rank)

    return _await_end(members, entered)


def may_go_on(failures: Mapping[int, RankFailure], members: Sequence[Member], records: Records, kind: type[Runtime]) -> bool:
    """Whether ranks may be kept after a run in which some failed, and all that were called have answered.

    They may if none had communicated, or if all ranks failed with the same error in the student's code and no operation
    is unfinished. Otherwise a typo in the last line of a cell would cost the model that earlier cells have trained.
    """
    if any(m.reader.pending() for m in members):
        return False
    alike = len(failures) == len(members) and len({f.headline for f in failures.values()}) == 1
    own = alike and all(f.own and not f.consequence for f in failures.values())
    if kind.fresh_each_run:  # TensorFlow's pending operations are not recorded reliably
        return own
    return not records.communicated() or (own and not kind.serving_threads and left_unfinished(members, records) is None)


def still_unfinished(left: Unfinished | None, members: Sequence[Member]) -> Unfinished | None:
    """Return the operation that a cell has left unfinished; None once a later cell has completed it."""
    return left if left is None or left.failed else _await_end(members, lambda _: {})


def _await_end(members: Sequence[Member], entered: Callable[[int], Mapping[str, int]]) -> Unfinished | None:
    began_s = time.monotonic()
    while True:
        # An operation of a living thread of the student's may outlast the run on purpose.
        pending = [[p for p in m.reader.pending() if _matters(p) and not m.process.has_thread(p.thread)] for m in members]
        if not any(pending):
            return None
        states = [
            RankState(m.name, mine, returned=True, entered=_with(entered(m.rank), mine))
            for m, mine in zip(members, pending, strict=True)
        ]
        first, rank = min((p.start_ns, rank) for rank, mine in enumerate(pending) for p in mine)
        operation = next(p for p in pending[rank] if p.start_ns == first)
        absent = list(missing(states, rank, operation))
        limit_s = CALL_S if _is_call(operation) else INCOMPLETE_S if absent else COMPLETE_S
        if time.monotonic() - began_s > limit_s:
            return Unfinished(_sentence(members, rank, operation, absent), False)
        time.sleep(CHECK_EVERY_S)


def _with(entered: Mapping[str, int], pending: Sequence[Pending]) -> Mapping[str, int]:
    found = dict(entered)
    for p in pending:
        found[p.group] = max(found.get(p.group, 0), p.match)
    return found


def _matters(operation: Pending) -> bool:
    """Whether an operation may disturb the next run; served calls and the student's spans do not."""
    if operation.type in FOR_OTHERS or kind_of(operation.group) is GroupKind.TENSORFLOW:
        return False
    return bool(operation.group) or operation.type is RECV or _is_call(operation)


def _is_call(operation: Pending) -> bool:
    return kind_of(operation.group) is GroupKind.CALL or operation.type in (RPC, TO_HERE)


def _words(operation: Pending, members: Sequence[Member]) -> str:
    with_peer = 0 <= operation.peer < len(members) and not _is_call(operation)
    towards = {SEND: " to ", RECV: " from "}.get(operation.type, " with ")
    return f"{operation.name}{towards}{members[operation.peer].name}" if with_peer else operation.name


def _sentence(members: Sequence[Member], rank: int, operation: Pending, absent: Sequence[int]) -> str:
    name, left = members[rank].name, f"{_words(operation, members)}{place(operation)}"
    if _is_call(operation):
        return f"{name} left {left} unfinished"
    if operation.type is SEND and absent:
        return f"{name} left {left} behind, which nobody has received"
    if operation.type is RECV and absent:
        return f"{name} left {left} behind, for which nobody has sent anything"
    others = listed([members[which].name for which in absent if which >= 0]) if absent else ""
    return f"{name} left {left} behind, to which {others} did not come" if others else f"{name} left {left} unfinished"
