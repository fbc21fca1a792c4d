"""`replay` uses what a trace knows of backends, of waits that were over at once, of threads and of missing cores.

All times are in milliseconds.
"""

from __future__ import annotations

import numpy as np
import pytest

from labkit.costs.link import Link
from labkit.errors.exceptions import LabError
from labkit.recording.events import WAITS
from labkit.tracing.replaying.critical_path import critical_path
from labkit.tracing.replaying.gains import gains_of
from labkit.tracing.replaying.replay import replay
from labkit.tracing.step_times import step_ms
from labkit.tracing.trace import Trace

from replayed import MB10, ONE_GBIT, beside  # isort: skip
from synthetic import ALONE, MS, Book, made  # isort: skip


def test_a_faster_link_is_not_faster_than_the_backend_was() -> None:
    book = Book()
    for rank in range(2):
        book.compute(rank, "forward", 0, 1)
        key = {"group": "world", "match": 1, "nbytes": MB10, "backend_ns": 4 * MS}
        book.travel(rank, "all_reduce", 1, 11.5, wait=(1, 11.5), **key)  # 10 over the link, and 0.5 to wake up
    trace = Trace(book.spans, ranks=["a", "b"], link=ONE_GBIT)
    assert list(replay(trace)) == list(trace)
    (twice, _) = replay(trace, link=Link(gbit_per_s=2, latency_us=0)).filter(name="all_reduce")
    assert (twice.end_ns, twice.backend_ns) == (6.5 * MS, 4 * MS)
    (fast, _) = replay(trace, link=Link(gbit_per_s=100, latency_us=0)).filter(name="all_reduce")
    assert (fast.end_ns, fast.backend_ns) == (4.5 * MS, 4 * MS)
    (none, _) = replay(trace, link=None).filter(name="all_reduce")
    assert none.end_ns == 4 * MS


def test_a_replay_over_a_link_keeps_what_the_backend_took() -> None:
    again = replay(replay(beside(), link=Link(gbit_per_s=0.5, latency_us=0)), link=None)
    ends = [[span.end_ns for span in trace.filter(name="all_reduce")] for trace in (again, beside())]
    assert ends[0] == ends[1]


def waiting_for_nothing() -> Trace:
    """`beside`, whose ranks also wait, at 18 and at 19, for the two all-reduces, which have completed already."""
    trace = beside()
    group = trace.columns.name_id("world")
    waits = [(rank, group, match, at * MS) for rank in range(2) for match, at in ((1, 18), (2, 19))]
    return Trace(trace.columns, ranks=trace.ranks, waits=np.array(waits, WAITS))


def test_a_wait_for_what_was_complete_becomes_one_over_a_slow_link() -> None:
    trace = waiting_for_nothing()
    assert list(replay(trace)) == list(trace)
    assert sorted(replay(trace).waits.tolist()) == sorted(trace.waits.tolist())
    slow = replay(trace, link=Link(gbit_per_s=0.5, latency_us=0))  # 20 each: 5 to 25, 25 to 45
    assert [(s.wait_start_ns / MS, s.wait_end_ns / MS) for s in slow.filter(rank=0, name="all_reduce")] == [(18, 25), (26, 45)]
    assert step_ms(slow) == 45 + 1 + 2
    assert not len(slow.waits)
    assert [piece.name for piece in critical_path(slow)] == ["backward", "all_reduce", "backward", "optimizer"]


def waiting_for_both() -> Trace:
    """Two ranks wait at 5 for an all-reduce until 10 and a broadcast until 7; these waits end one after the other."""
    first, second = ("broadcast", 1, 7, (5, 10.25), {"group": "other"}), ("all_reduce", 1, 10, (5, 10.5))
    return made(*[[first, second, ("optimizer", 11, 12), ("step", 0, 12)]] * 2)


def test_waits_for_several_operations_end_when_the_last_one_is_complete() -> None:
    assert list(replay(waiting_for_both())) == list(waiting_for_both())

    def ends(faster: dict[str, float]) -> list[float]:
        spans = replay(waiting_for_both(), faster=faster).filter(rank=0, kind="communication")
        return sorted(span.wait_end_ns / MS for span in spans)

    assert ends({"all_reduce": 1.8}) == [7, 7.25]  # the broadcast's end; 0.25 between the two
    assert ends({"broadcast": 6}) == [10.25, 10.5]
    assert ends({"all_reduce": 9, "broadcast": 6}) == [0, 5.25]  # at 5, the broadcast was complete


def test_a_wait_that_is_over_at_once_becomes_one_for_what_was_complete() -> None:
    slow = replay(waiting_for_nothing(), link=Link(gbit_per_s=0.5, latency_us=0))
    fast = replay(slow, link=Link(gbit_per_s=100, latency_us=0))
    assert step_ms(fast) == 22
    assert len(fast.waits) == 4


def without_cores() -> Trace:
    """Two ranks: rank 1 lacked a core for 2 of the 8 of its forward, and for 1 when its wait had ended."""
    book = Book()
    for rank, forward in enumerate((5.0, 8.0)):
        book.travel(rank, "barrier", 1, 2, wait=(1, 2), group="world", match=1, issue_delay_ns=MS, wait_delay_ns=MS)
        book.compute(rank, "forward", 2, 2 + forward)
        lacked = (MS, MS) if rank == 0 else (3 * MS, 4 * MS)
        delays = {"issue_delay_ns": lacked[0], "wait_delay_ns": lacked[1]}
        end = 12.0 + rank
        book.travel(rank, "all_reduce", 2 + forward, end, wait=(2 + forward, end), group="world", match=2, **delays)
        book.whole(rank, "step", 1, end)
    return book.trace(2)


def test_with_a_core_of_its_own_a_thread_does_not_wait_for_one() -> None:
    assert list(replay(without_cores())) == list(without_cores())
    trace = replay(without_cores(), own_cores=True)
    (forward,) = trace.filter(rank=1, name="forward")
    assert forward.duration_ns == 6 * MS
    ends = [span.end_ns / MS for span in trace.filter(name="all_reduce")]
    assert ends == [8 + 2, 8 + 2.5]  # 2 and 3 after the last issue, which is at 8 now; none takes longer than the median


@pytest.mark.parametrize("cores", [2, 64])
def test_a_run_that_had_enough_cores_stays_as_it_is(cores: int) -> None:
    recorded = beside()
    trace = Trace(recorded.columns, ranks=recorded.ranks, cores=cores)
    assert replay(trace, own_cores=True) is trace
    twice = {"backward": 2.0}
    assert list(replay(trace, own_cores=True, faster=twice)) == list(replay(trace, faster=twice))
    lossy = Trace(recorded.columns, ranks=recorded.ranks, cores=cores, dropped=[1, 0])
    assert replay(lossy, own_cores=True) is lossy


@pytest.mark.parametrize("cores", [0, 1.5])
def test_without_recorded_delays_nobody_knows_what_cores_would_change(cores: float) -> None:
    trace = Trace(beside().columns, ranks=beside().ranks, cores=cores)
    with pytest.raises(LabError, match="did not record how long its threads waited for a core"):
        replay(trace, own_cores=True)


def test_a_loader_s_thread_neither_delays_nor_is_delayed() -> None:
    batches = [("load", 10 * n, 10 * n + 9, {"own_thread": True}) for n in range(3)]
    recorded = made([*batches, *(("forward", 10 * n + 2, 10 * n + 6) for n in range(3)), ("call", 0, 30)])

    def starts(trace: Trace, name: str) -> list[int]:
        return [span.start_ns for span in trace.filter(name=name)]

    trace = replay(recorded, slower={"load": 3})
    assert starts(trace, "forward") == starts(recorded, "forward")
    assert [s.duration_ns / MS for s in trace.filter(name="load")] == [27] * 3
    assert "that other threads wait for load is not known" in trace.notes[-1]
    assert not any("load" in gain.change for gain in gains_of(recorded, "what_helps").gains)
    faster = replay(recorded, faster={"forward": 4})
    assert "other threads" not in faster.notes[-1]
    assert starts(faster, "load") == starts(recorded, "load")


def test_a_wait_may_be_over_before_the_completion_is_reported() -> None:
    """As for a future that is done while the thread that completed it still runs its callbacks."""
    spans = made(*[[("all_reduce", 0, 4, None, {"match": 1, "nbytes": MB10}), ("optimizer", 3, 6)]] * 2).columns
    waits = [(rank, spans.name_id("g"), 1, 3 * MS) for rank in range(2)]
    trace = Trace(spans, ranks=["a", "b"], waits=np.array(waits, WAITS))
    again = replay(trace)
    assert list(again) == list(trace)
    assert again.waits.tolist() == trace.waits.tolist()
    (slow, _) = replay(trace, link=ONE_GBIT).filter(name="optimizer")
    assert slow.end_ns == (10 - 1 + 3) * MS


def test_a_wait_inside_of_another_one_moves_nothing_else() -> None:
    """As in `torch.futures.collect_all`, whose waits begin one after another."""
    waits = [("all_reduce", 0, 8, (2, 8), {"nbytes": 8}), ("all_reduce", 1, 9, (4, 9), {"nbytes": 8})]
    # The reply is received by a thread of C++.
    trace = made(*([*waits, ("received reply f", 3, 3, None, {"peer": 1 - rank} | ALONE)] for rank in (0, 1)))
    assert [(s.start_ns, s.end_ns) for s in replay(trace)] == [(s.start_ns, s.end_ns) for s in trace]


CALL = {"group": "rpc 0>1", "match": 1}
SERVED = {"served": True, "automatic": True}


def test_what_other_threads_do_does_not_end_the_run_and_moves_along() -> None:
    """A server computes a remote backward pass on a thread of C++, and a loader of the caller's ends last."""
    own = {"own_thread": True}
    caller = [("forward", 0, 8), ("rpc_sync f", 8, 10, (8, 10), CALL | {"peer": 1}), ("load", 0, 10, own), ("call", 0, 10)]
    server = [("serve f", 8, 10, SERVED), ("reply f", 10, 10, None, CALL | {"peer": 0})]
    server += [("backward of f", 9, 10, own | {"automatic": True})]
    server += [("gradients", 10, 10, None, own | {"peer": 0} | ALONE)]
    recorded = made(caller, server)
    trace = replay(recorded, faster={"forward": 2})
    assert trace.duration_ns == 6 * MS
    assert [(s.start_ns / MS, s.end_ns / MS) for s in trace.filter(name="backward of f")] == [(5, 6)]
    assert [gain.saved_ns / MS for gain in gains_of(recorded, "what_helps").gains][:1] == [4]


def test_a_serving_thread_runs_beside_the_function() -> None:
    server = [("serve f", 2, 8, SERVED), ("inner", 3, 7, {"served": True}), ("reply f", 8, 8.1, None, CALL | {"peer": 0})]
    server += [("forward", 0, 10), ("call", 0, 20)]
    recorded = made([("rpc_sync f", 1, 9, (1, 9), CALL | {"peer": 1})], server)
    for slower, call_ends, forward_ends in (("inner", 13, 10), ("forward", 9, 20)):
        trace = replay(recorded, slower={slower: 2})
        assert [s.end_ns / MS for s in trace.filter(name="rpc_sync f")] == [call_ends]
        assert [s.end_ns / MS for s in trace.filter(name="forward")] == [pytest.approx(forward_ends)]
