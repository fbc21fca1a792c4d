"""Finds what a run leaves unfinished: operations that others did not come to, that are still under way, or that failed.

The next run would meet them: a receive gets the message that was meant for nobody, a collective is taken for another one. So its
ranks have to be fresh ones.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from labkit.errors.exceptions import RankFailure
from labkit.errors.lists import listed
from labkit.group.collector import Records
from labkit.group.deadlock import missing, place
from labkit.group.member import Member
from labkit.group.rank_state import Standing
from labkit.recording.group_keys import GroupKind, kind_of
from labkit.recording.operations import FOR_OTHERS, RECV, RPC, SEND, TO_HERE
from labkit.recording.schema import STREAM, TIMED, Pending
from labkit.worker.runtimes.base import Runtime

__all__ = ["Unfinished", "left_unfinished", "may_go_on", "still_unfinished"]

ALONE_S: Final = 0.1  # for an operation that some ranks have not come to: a thread of theirs may, although they have returned
CALL_S: Final = 1.0  # for a remote call: the other rank may not have begun to serve it
TOGETHER_S: Final = 5.0  # for one that all have come to, and that will end by itself, if on a busy machine only in a while
LOOK_EVERY_S: Final = 0.002


class Unfinished(NamedTuple):
    """The first operation that a run has left unfinished.

    Args:
        sentence: which, on which line, and what of it.
        failed: whether it has failed, so that nothing can finish it any more.
    """

    sentence: str
    failed: bool

    def after_a_run(self) -> str:
        """What the student is told when a run has left it."""
        return f"{self.sentence}. The next run starts fresh ranks, which know nothing of it."

    def after_a_cell(self) -> str:
        """The same of a `%%ranks` cell: the ranks stay, for a later cell may receive what an earlier one has sent."""
        hope = "" if self.failed else " A later %%ranks cell may finish it."
        return f"{self.sentence}.{hope} The next `run` starts fresh ranks."

    def before_a_run(self) -> str:
        """The same when a run needs fresh ranks because a cell had left it."""
        return f"{self.sentence}. This run starts fresh ranks."


def left_unfinished(members: Sequence[Member], records: Records) -> Unfinished | None:
    """What a run has left unfinished in which all ranks have returned; None where nothing is left.

    Waits a moment for what is just coming to its end.

    Args:
        members: the ranks.
        records: what they have written down in the run.
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
    """Whether ranks may serve another run after one in which some failed, and all that were called have answered.

    They may if none had communicated. Or if all ranks failed alike in the student's own code and nothing is left unfinished: a
    name that is misspelt in the last line of a cell must not cost the model that the cells before it have trained. Nor must, in
    the only rank of a group, an argument of the wrong type that TensorFlow refuses.

    Args:
        failures: how ranks failed, by rank.
        members: all ranks.
        records: what they have written down in the run.
        kind: their runtime.
    """
    if any(m.reader.pending() for m in members):
        return False
    alike = len(failures) == len(members) and len({f.headline for f in failures.values()}) == 1
    own = alike and all(f.own and not f.consequence for f in failures.values())
    if kind.fresh_each_run:  # what TensorFlow has under way, nobody records for sure; a rank alone leaves nobody waiting
        return own or (alike and len(members) == 1 and all(f.in_python for f in failures.values()))
    return not records.communicated() or (own and not kind.serving_threads and left_unfinished(members, records) is None)


def still_unfinished(left: Unfinished | None, members: Sequence[Member]) -> Unfinished | None:
    """What cells have left unfinished, if no later one has finished it.

    Args:
        left: what one of them has left.
        members: the ranks, in no run at this moment.
    """
    return left if left is None or left.failed else _await_end(members, lambda _: {})


def _await_end(members: Sequence[Member], entered: Callable[[int], Mapping[str, int]]) -> Unfinished | None:
    began_s = time.monotonic()
    while True:
        pending = [[p for p in m.reader.pending() if _matters(p) and not _goes_on(m, p)] for m in members]
        if not any(pending):
            return None
        standings = [
            Standing(m.name, mine, returned=True, entered=_with(entered(m.rank), mine))
            for m, mine in zip(members, pending, strict=True)
        ]
        first, rank = min((p.start_ns, rank) for rank, mine in enumerate(pending) for p in mine)
        operation = next(p for p in pending[rank] if p.start_ns == first)
        absent = list(missing(standings, rank, operation))
        limit_s = CALL_S if _is_call(operation) else ALONE_S if absent else TOGETHER_S
        if time.monotonic() - began_s > limit_s:
            return Unfinished(_sentence(members, rank, operation, absent), False)
        time.sleep(LOOK_EVERY_S)


def _with(entered: Mapping[str, int], pending: Sequence[Pending]) -> Mapping[str, int]:
    """The numbers to which a rank has come, those of operations under way included."""
    found = dict(entered)
    for p in pending:
        found[p.group] = max(found.get(p.group, 0), p.match)
    return found


def _matters(operation: Pending) -> bool:
    """Whether the next run may meet it: not what a rank does for others, a wait for a key, or a span called communication."""
    kind = kind_of(operation.group)
    if operation.type in FOR_OTHERS or kind in (GroupKind.TENSORFLOW, GroupKind.STORE):
        return False
    return bool(operation.group) or operation.type is RECV or _is_call(operation)


def _is_call(operation: Pending) -> bool:
    return kind_of(operation.group) is GroupKind.CALL or operation.type in (RPC, TO_HERE)


def _goes_on(member: Member, operation: Pending) -> bool:
    """Whether a thread of the student's, which goes on beyond the run, is about it: that is meant to outlast the run."""
    pid = member.process.pid
    if operation.thread in (pid, STREAM, TIMED) or not sys.platform.startswith("linux"):
        return False
    return os.path.exists(f"/proc/{pid}/task/{operation.thread}")


def _words(operation: Pending, members: Sequence[Member]) -> str:
    with_peer = 0 <= operation.peer < len(members) and not _is_call(operation)
    towards = {SEND: " to ", RECV: " from "}.get(operation.type, " with ")
    return f"{operation.in_words}{towards}{members[operation.peer].name}" if with_peer else operation.in_words


def _sentence(members: Sequence[Member], rank: int, operation: Pending, absent: Sequence[int]) -> str:
    name, what = members[rank].name, f"{_words(operation, members)}{place(operation)}"
    if _is_call(operation):
        return f"{name} left {what} unfinished"
    if operation.type is SEND and absent:
        return f"{name} left {what} behind, which nobody has received"
    if operation.type is RECV and absent:
        return f"{name} left {what} behind, for which nobody has sent anything"
    others = listed([members[which].name for which in absent if which >= 0]) if absent else ""
    return f"{name} left {what} behind, to which {others} did not come" if others else f"{name} left {what} unfinished"
