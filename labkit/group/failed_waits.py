"""For whom a rank waited when its wait failed: ranks that were late for the program's time limit, or had left RPC."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.errors.exceptions import RankFailure
from labkit.errors.exit_reasons import Cause
from labkit.group.collector import Records
from labkit.group.deadlock_monitor import DeadlockMonitor
from labkit.group.deadlock_words import late_in_words, left_in_words
from labkit.recording.operations import RPC


def whom_it_awaited(
    failure: RankFailure, others: dict[int, str], records: Records, monitor: DeadlockMonitor, names: Sequence[str]
) -> str:
    """Say why a wait failed, in sentences; "" if another error has ended the rank, or it is not certain.

    The lines of late ranks are added to `others`, which says what other ranks were doing.
    """
    if failure.own_limit:
        ended = records.failed(failure.rank)[-1:]
        late = monitor.late(failure.rank, ended[0]) if ended else {}
        words = late_in_words([names[rank] for rank in late], ended[0]) if late else ""
        for rank, line in late.items():
            others[rank] += line
        return " ".join(filter(None, (failure.own_limit, words)))
    return _who_left(failure.rank, records, names) if failure.cause is Cause.LOST_CONNECTION else ""


def _who_left(caller: int, records: Records, names: Sequence[str]) -> str:
    """Return a sentence about the rank that left RPC without answering the call that failed; "" if none has."""
    call, end_ns = records.last_wait(caller) or (None, 0)
    if call is None or call.type is not RPC:
        return ""
    left, replies = records.left_rpc(call.peer), records.done(call.peer, {(call.group, call.match)})
    if left is None or left.start_ns > end_ns or any(reply.start_ns < left.start_ns for reply in replies):
        return ""
    return left_in_words(names[call.peer], left, call, records.count_calls(caller, call))
