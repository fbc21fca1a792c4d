"""What limits a run: each kind of loss is found in traces made by hand, with its numbers."""

import pytest
from synthetic import Book, data_parallel, in_steps, made, master_and_workers, model_parallel

from labkit.costs.link import Link
from labkit.costs.network import Network
from labkit.recording.schema import READING, Span
from labkit.tracing.limits import Limit, limit_of
from labkit.tracing.trace import Trace


@pytest.mark.parametrize(
    ("data_ms", "gap_ms", "limit"),
    [(50, 0, Limit.DATA), (5, 0, Limit.DATA), (1, 0, Limit.COMPUTE), (5, 20, Limit.UNRECORDED), (5, 6, Limit.COMPUTE)],
)
def test_a_rank_waits_for_data(data_ms, gap_ms, limit):
    """In each step it waits for data, computes for 10 ms, then does nothing for a while."""
    found = limit_of(in_steps(6, ("data", data_ms), ("forward", 10), ("", gap_ms), ranks=1))
    assert found.limit is limit
    assert (found.data, found.compute) == pytest.approx([ms / (data_ms + 10 + gap_ms) for ms in (data_ms, 10)])


@pytest.mark.parametrize(("slow", "limit"), [((0, 1), Limit.DATA), ((1,), Limit.LATE_RANK)], ids=["all ranks", "one rank"])
def test_ranks_that_communicate_wait_for_data(slow, limit):
    data_ms = tuple(20 if rank in slow else 0 for rank in (0, 1))
    found = limit_of(in_steps(6, ("forward", 10), ("data", data_ms), ("all_reduce", 1), nbytes=1 << 20))
    assert found.limit is limit
    assert found.data == pytest.approx(len(slow) / 2 * 20 / 31)
    assert found.late_data == pytest.approx(20 / 31)


def test_steps_in_which_labkit_reads_the_profiler_do_not_count():
    def found(reading_ms):
        reading = lambda step: (READING, (reading_ms if step == 2 else 0, 0))  # noqa: E731
        return limit_of(in_steps(8, ("forward", 10), reading, ("all_reduce", 6), nbytes=8 << 20))

    disturbed, usual = found(50), found(0)
    assert disturbed.steps == 5  # after the disturbed one
    shares = [(each.compute, each.exposed, each.waiting) for each in (disturbed, usual)]
    assert shares[0] == pytest.approx(shares[1])


@pytest.mark.parametrize(
    ("count", "nbytes", "ms", "limit"), [(1, 8 << 20, 6, Limit.BANDWIDTH), (15, 40_000, 0.55, Limit.OVERHEAD)]
)
def test_large_operations_beside_a_small_one(count, nbytes, ms, limit):
    """They take no longer than the small one, or much longer."""
    large = [("all_reduce", ms, {"nbytes": nbytes})] * count
    found = limit_of(in_steps(6, ("forward", 2), ("all_reduce", 0.5, {"nbytes": 40}), *large))
    assert (found.limit, found.operation_ns, found.latency_ns) == (limit, 500_000, 0)


@pytest.mark.parametrize(
    ("gbit_per_s", "latency_us", "limit"), [(2, 2500, Limit.LATENCY), (2, 500, Limit.BANDWIDTH), (20, 500, Limit.OVERHEAD)]
)
@pytest.mark.parametrize("nodes", [1, 2])
def test_over_a_link_its_model_tells_latency_bandwidth_and_overhead_apart(gbit_per_s, latency_us, limit, nodes):
    trace = in_steps(6, ("forward", 10), *[("all_reduce", 6)] * 2, nbytes=1 << 20)  # 6 ms for two rounds
    link = Link(gbit_per_s=gbit_per_s, latency_us=latency_us)
    over = link if nodes == 1 else Network(nodes=2, inside=link, between=link, ranks=2)
    found = limit_of(Trace(trace.columns, ranks=trace.ranks, link=over))
    assert (found.limit, found.latency_ns) == (limit, 2 * latency_us * 1000)


def test_operations_that_wait_for_one_another_on_a_link_have_no_overhead():
    """Six at once, each of which takes 2 ms when its turn comes."""

    spans = []
    for start in range(2, 86, 14):
        spans += [("forward", start - 2, start), ("step", start - 2, start + 12)]
        for i in range(6):
            wait = (start, start + 12) if i == 5 else None
            spans.append(("all_reduce", start, start + 2 * (i + 1), wait, {"nbytes": 1 << 20}))
    trace = made(spans, spans)
    assert limit_of(Trace(trace.columns, ranks=trace.ranks, link=Link(gbit_per_s=4.5, latency_us=0))).limit is Limit.BANDWIDTH


def test_ranks_come_late_in_turns():
    slow = lambda step: ("forward", (8, 0) if step % 2 == 0 else (0, 8))  # noqa: E731
    found = limit_of(in_steps(9, ("forward", 2), slow, ("all_reduce", 0.2), nbytes=40))
    assert found.limit is Limit.UNEVEN_RANKS
    assert found.late_share == pytest.approx(0.5)


@pytest.mark.parametrize("trace", [model_parallel(), master_and_workers()], ids=["messages", "calls"])
def test_ranks_work_in_turns(trace):
    found = limit_of(trace)
    assert found.limit is Limit.TURNS
    assert 1 <= found.working < len(trace.ranks) * 0.6


def calls(under_way, served, computed=0.0):
    """Ten calls of a master, one after another: on the way to the worker, served there, and back in no time."""
    book, t = Book(), 0.0
    for number in range(10):
        t = book.compute(0, "forward", t, t + computed) if computed else t
        done = book.compute(1, "serve shard", t + under_way, t + under_way + served)
        shared = {"group": "rpc 0>1", "match": number + 1}
        book.travel(1, "reply shard", done, done + 0.01, nbytes=40, peer=0, **shared)
        book.travel(0, "rpc_sync shard", t, done + 0.01, wait=(t, done + 0.01), nbytes=40, peer=1, **shared)
        t = done + 0.01
    book.whole(0, "call", 0, t)
    return book.trace(("master", "worker"))


def calls_without_record(nbytes=40, computed=1.0, pause=0.0):
    """Ten calls of one of torch's functions, such as `torch.add`: the callee runs it in C++ and records nothing."""
    book, t = Book(), 0.0
    for number in range(10):
        done = book.compute(0, "forward", t + pause, t + pause + computed)
        t = done + 9.0
        book.travel(0, "rpc_sync add", done, t, wait=(done, t), nbytes=nbytes, peer=1, group="rpc 0>1", match=number + 1)
    book.whole(0, "call", 0, t)
    return book.trace(("master", "worker"))


UNSEEN = {"call_ns": 9_000_000, "call_bytes": 50_000, "under_way": 0.9, "standing": 0.1 / 2, "absent": 0.9 / 2}
ALONE = {"waiting": 0, "standing": 0, "messages": 0, "unrecorded": 0.15}
LIMITS = {
    "computing": (
        in_steps(6, ("forward", 10), ("all_reduce", 0.5), nbytes=1 << 20), Limit.COMPUTE,
        {"compute": 10 / 10.5, "exposed": 0.5 / 10.5},
    ),
    "small operations": (
        in_steps(6, ("forward", 10), *[("all_reduce", 0.5)] * 8, nbytes=40), Limit.OVERHEAD,
        {"steps": 5, "messages": 40, "nbytes": 1600, "operation_ns": 500_000},
    ),
    "bytes": (
        in_steps(6, ("forward", 10), ("all_reduce", 6), nbytes=8 << 20), Limit.BANDWIDTH,
        {"nbytes": 5 * (8 << 20), "transfer_ns": 5 * 6_000_000},
    ),
    "a late rank": (
        in_steps(6, ("forward", (3, 10)), ("all_reduce", 0.5), nbytes=40), Limit.LATE_RANK,
        {"late_rank": 1, "late_share": 1, "late_ns": 7_000_000, "waiting": 7 / 10.5 / 2},
    ),
    "calls under way": (calls(under_way=5.0, served=0.5), Limit.CALLS, {"under_way": 5.01 / 5.51, "call_ns": 5_510_000}),
    "calls that are served": (calls(under_way=0.5, served=5.0), Limit.TURNS, {"under_way": 0.51 / 5.51}),
    "a callee that records nothing": (calls_without_record(nbytes=50_000), Limit.CALLS, UNSEEN),
    "calls between which nobody records anything": (
        calls_without_record(pause=2.0), Limit.CALLS, {"under_way": 9 / 12, "unrecorded": 2 / 12},
    ),
    "calls beside which ranks mostly compute": (calls_without_record(computed=60.0), Limit.TURNS, {}),
    "nothing recorded": (
        in_steps(6, ("", 8), ("forward", 2), ("all_reduce", 0.2), nbytes=40), Limit.UNRECORDED, {"unrecorded": 8 / 10.2},
    ),
    "ranks that do not communicate": (in_steps(6, ("forward", (10, 7))), Limit.COMPUTE, ALONE),
    # Without steps, as in Keras's fit, no part without a reading can be chosen.
    "a profiler is read": (
        made(*[[("forward", 0, 60), (READING, 50, 100)]] * 2), Limit.COMPUTE, {"compute": 0.6, "reading": 0.4},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LIMITS)
def test_what_limits_a_run_and_its_numbers(case):
    trace, limit, numbers = LIMITS[case]
    found = limit_of(trace)
    assert found.limit is limit
    assert {name: getattr(found, name) for name in numbers} == pytest.approx(numbers)


def test_messages_that_nobody_computes_for_are_no_calls():
    """The trace of `calls`, with the call's time in a receive."""
    own, other = {"nbytes": 40, "peer": 1}, {"nbytes": 40, "peer": 0}
    sent = [("send", at + 9, at + 9.1, None, own) for at in range(0, 50, 10)]
    computed = [("forward", at + 9.1, at + 10) for at in range(0, 50, 10)]
    found = limit_of(made(sent + computed, [("recv", at, at + 9.1, (at, at + 9.1), other) for at in range(0, 50, 10)]))
    assert (found.under_way, found.call_ns) == (0, 0)
    assert found.limit is not Limit.CALLS


def test_the_first_step_does_not_count():
    found = limit_of(in_steps(5, lambda step: ("forward", 5 if step else 100), lambda step: ("", 5 if step else 0), ranks=1))
    assert (found.steps, found.duration_ns, found.compute) == (4, 40_000_000, 0.5)


def test_the_shares_are_those_of_the_whole_time():
    found = limit_of(data_parallel(steps=10))
    losses = found.data + found.exposed + found.waiting + found.standing + found.absent + found.unrecorded
    assert found.compute + losses == pytest.approx(1, abs=1e-6)
    assert 0 < found.overlap < found.compute


PARTS = (("step", 10), ("forward", 9))


def test_ranks_that_begin_apart_have_the_steps_that_they_measured():
    spans = [[(name, at, at + ms) for at in range(begin, begin + 60, 10) for name, ms in PARTS] for begin in (0, 300)]
    found = limit_of(made(*spans))
    assert (found.steps, found.mean_step_ns, found.step_ns) == (5, 10_000_000, 10_000_000)


@pytest.mark.parametrize("apart_ms", [5, 50])
def test_a_rank_that_records_nothing_while_the_others_wait_comes_late(apart_ms):
    """Its own code is outside of spans: neither do the others work meanwhile, nor does it wait for their results."""
    found = limit_of(in_steps(6, ("", (0, apart_ms)), ("all_reduce", 2), nbytes=8))
    waits = pytest.approx(apart_ms / (apart_ms + 2) / 2)
    assert (found.limit, found.late_rank) == (Limit.LATE_RANK, 1)
    assert (found.waiting, found.absent, found.standing, found.unrecorded) == (waits, waits, 0, 0)


@pytest.mark.parametrize("waits_in", ["rpc.shutdown", "dist_autograd.backward"])
def test_waiting_for_the_end_of_the_other_programs_is_not_waiting_in_a_collective(waits_in):
    """The workers have nothing to do but to serve, and wait for the master in the meantime."""
    trace, waits = master_and_workers(), []
    for rank in range(len(trace.ranks)):
        since, until = trace.start_ns if rank else trace.end_ns - 1, trace.end_ns
        waits.append(Span(rank, waits_in, "communication", since, until, since, until, group="shutdown"))
    found, usual = limit_of(Trace([*trace, *waits], ranks=trace.ranks)), limit_of(trace)
    assert (found.limit, found.late_rank) == (usual.limit, usual.late_rank)
    assert found.limit in (Limit.TURNS, Limit.CALLS)


@pytest.mark.parametrize(("error_ms", "late_rank", "share"), [(0, 1, 1.0), (6.9, 1, 1.0), (7.1, 0, 0.0)])
def test_a_rank_that_is_later_by_less_than_the_clocks_error_is_not_late(error_ms, late_rank, share):
    trace = in_steps(6, ("forward", (3, 10)), ("all_reduce", 1), nbytes=1 << 20)
    found = limit_of(Trace(list(trace), ranks=trace.ranks, clock_error_ns=int(error_ms * 1e6)))
    assert (found.late_rank, found.late_share) == (late_rank, share)
    assert (found.waiting > 0, found.limit is Limit.LATE_RANK) == (bool(share), bool(share))
