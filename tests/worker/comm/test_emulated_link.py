"""Ranks over a slow link: results are right, and nothing ends sooner than over that link; it may end later."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import comm_cases as cases
import comm_rpc_cases as rpc_cases
import pytest
import torch
import torch.distributed as dist
from link_starts import link_starts

import labkit as lab
from labkit.errors.exit_reasons import Cause
from labkit.group.group import Group
from labkit.group.run import Run
from labkit.recording.schema import Span

pytestmark = pytest.mark.processes

LINK = lab.Link(gbit_per_s=0.1, latency_us=300)
FROM_ANYONE = 3  # the number of that message in `comm_cases.ring_of_messages` which is received from whoever sends
LONG = lab.Link(gbit_per_s=0.1, latency_us=600_000)


@pytest.fixture(scope="module")
def pair() -> Iterator[Group]:
    with Group(2, link=LINK) as group:
        yield group


def model_ns(name: str, nbytes: int, ranks: int, link: lab.Link = LINK) -> int:
    return int(link.seconds(name, nbytes, ranks) * 1e9)


def check_not_early(span: Span, begun_ns: int, ranks: int) -> None:
    """It ended no sooner than the link allows, counted from the arrival of the last rank that it needs."""
    assert span.done
    if span.name == "send" and span.match == FROM_ANYONE:
        begun_ns = span.start_ns  # its sender finishes before the receiver knows who it was
    assert span.end_ns - begun_ns >= model_ns(span.name, span.nbytes, ranks), span
    assert span.start_ns < span.backend_ns <= span.end_ns, "the backend had completed it by then"


def nothing_was_early(run: Run, ranks: int = 2) -> list[str]:
    """The names of the communications, none of which ended too soon."""
    seen = []
    for span, begun_ns in zip(run.trace, link_starts(run.trace), strict=True):
        if span.kind == "communication":
            seen.append(span.name)
            check_not_early(span, begun_ns, ranks)
    return seen


@pytest.mark.parametrize("program", cases.PROGRAMS)
def test_the_results_are_right_and_nothing_is_early(pair: Group, program: str) -> None:
    case, given, operation, least = cases.PROGRAMS[program]
    run = pair.run(cases.watched_and_bare, case, *given)
    for over_link, bare in run.results:
        assert cases.same(over_link, bare)
    seen = nothing_was_early(run)
    assert (seen.count(operation) if operation else len(seen)) >= least


def test_the_parts_that_a_root_gathers_are_counted_together(pair: Group) -> None:
    def both() -> None:
        x = torch.ones(1000)
        dist.gather(x, [torch.zeros(1000), torch.zeros(1000)] if dist.get_rank() == 0 else None)
        dist.scatter(x, [x, x] if dist.get_rank() == 0 else None)

    run = pair.run(both)
    for name in ("gather", "scatter"):
        spans = run.trace.filter(name=name)
        assert {s.nbytes for s in spans} == {4000, 8000}
        assert max(s.end_ns for s in spans) - max(s.start_ns for s in spans) >= model_ns(name, 8000, 2)


def test_operations_queue_for_the_link(pair: Group) -> None:
    def three() -> None:
        works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(3)]
        for work in works:
            assert work is not None
            work.wait()

    run = pair.run(three)
    one_ns = model_ns("all_reduce", 4000, 2)
    for rank in (0, 1):
        spans = sorted(run.trace.filter(rank=rank, name="all_reduce"), key=lambda s: s.match)
        begin_ns = max(s.start_ns for s in run.trace.filter(name="all_reduce") if s.match == spans[0].match)
        for place, span in enumerate(spans, 1):
            assert span.end_ns - begin_ns >= place * one_ns


def test_a_future_completes_no_sooner(pair: Group) -> None:
    def ends() -> list[int]:
        work = dist.all_reduce(torch.ones(1000), async_op=True)
        assert work is not None
        future = work.get_future()
        assert future is work.get_future()
        after = future.then(lambda done: (done.value(), time.perf_counter_ns())[1])
        return [after.wait(), time.perf_counter_ns()]

    run = pair.run(ends)
    issued_ns = max(s.start_ns for s in run.trace.filter(name="all_reduce"))
    assert all(end_ns - issued_ns >= model_ns("all_reduce", 4000, 2) for ends in run.results for end_ns in ends)


def test_a_rank_computes_while_the_link_is_busy(pair: Group) -> None:
    def beside() -> int:
        work = dist.all_reduce(torch.ones(1000), async_op=True)
        assert work is not None
        with lab.span("compute"):
            while not work.is_completed():
                torch.ones(10).sum()
        work.wait()
        return time.perf_counter_ns()

    run = pair.run(beside)
    assert nothing_was_early(run) == ["all_reduce"] * 2
    for rank in (0, 1):
        (reduced,), (computed,) = run.trace.filter(rank=rank, name="all_reduce"), run.trace.filter(rank=rank, name="compute")
        assert reduced.wait_start_ns == 0  # it was never waited for
        assert reduced.start_ns < computed.start_ns
        assert computed.end_ns >= reduced.end_ns


def test_a_message_that_nobody_waits_for_yet(pair: Group) -> None:
    run = pair.run(cases.watched_and_bare, cases.late_wait)
    assert run.results[1][0][1] == "[1.0, 1.0]"
    assert sorted(nothing_was_early(run)) == ["recv", "send"]


def test_a_callback_may_wait_for_a_further_operation(pair: Group) -> None:
    """As torch's PowerSGD hook does: `then` issues a collective and waits for it."""

    def twice() -> float:
        def again(done: Any) -> Any:
            work = dist.all_reduce(done.value()[0], async_op=True)
            assert work is not None
            return work.get_future().wait()[0]

        first = dist.all_reduce(torch.ones(4), async_op=True)
        assert first is not None
        return float(first.get_future().then(again).wait()[0])

    for _ in range(3):
        run = pair.run(twice)
        assert run.results == [4.0, 4.0]
        assert nothing_was_early(run) == ["all_reduce"] * 4


def test_a_refused_operation_does_not_occupy_the_link(pair: Group) -> None:
    def refused() -> float:
        x = torch.ones(2)
        with pytest.raises(RuntimeError):
            dist.all_gather([torch.zeros(1)], x)
        with pytest.raises(RuntimeError):
            dist.isend(x.to_sparse(), 1 - dist.get_rank())
        dist.all_reduce(x)
        return x[0].item()

    run = pair.run(refused)
    assert run.results == [2.0, 2.0]
    assert nothing_was_early(run) == ["all_reduce"] * 2


def test_waiting_uses_no_processor_and_is_not_a_deadlock() -> None:
    def wait() -> float:
        begin = time.process_time()
        dist.barrier()
        work = dist.barrier(async_op=True)
        assert work is not None
        work.get_future().wait()
        return time.process_time() - begin

    with Group(2, link=LONG) as group:
        run = group.run(wait)
    waited_s = 2 * LONG.seconds("barrier", 0, 2)
    assert run.trace.duration_ns >= waited_s * 1e9
    assert max(run.results) < waited_s / 4


def test_part_of_the_ranks(pair: Group) -> None:
    def among_two() -> None:
        group = dist.new_group([0, 2])
        if dist.get_rank() != 1:
            dist.all_reduce(torch.ones(1000), group=group)
            cases.ring_of_messages(group)
        dist.barrier()
        dist.monitored_barrier()

    with Group(3, link=LINK) as trio:
        run = trio.run(among_two)
    for span, begun_ns in zip(run.trace, link_starts(run.trace), strict=True):
        if span.kind == "communication":
            check_not_early(span, begun_ns, 2 if "of ranks 0,2" in span.group else 3)


def test_a_deadlock_is_still_reported(pair: Group) -> None:
    def one_too_many() -> None:
        work = dist.all_reduce(torch.ones(4), async_op=True)
        assert work is not None
        work.get_future().wait()  # the thread that reports completions runs from here on
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(4))

    with pytest.raises(lab.RankError) as caught:
        pair.run(one_too_many)
    assert [(failure.rank, failure.cause) for failure in caught.value.failures] == [(1, Cause.DEADLOCK)]


def test_an_error_of_one_rank_is_still_reported(pair: Group) -> None:
    def fail() -> None:
        work = dist.all_reduce(torch.ones(100_000), async_op=True)
        if dist.get_rank() == 1:
            raise KeyError("mine")
        assert work is not None
        work.wait()

    with pytest.raises(lab.RankError, match="mine"):
        pair.run(fail)
    assert pair.run(lambda: 1).results == [1, 1]


def at_once(pair: Any, other: int) -> None:
    dist.all_reduce(torch.ones(1), group=pair)


def by_its_work(pair: Any, other: int) -> None:
    work = dist.all_reduce(torch.ones(1), group=pair, async_op=True)
    assert work is not None
    with contextlib.suppress(RuntimeError):
        work.wait()
        return
    work.wait()  # it still has failed


def by_its_future(pair: Any, other: int) -> None:
    work = dist.all_reduce(torch.ones(1), group=pair, async_op=True)
    assert work is not None
    work.get_future().wait()


def by_a_message(pair: Any, other: int) -> None:
    (dist.recv if other else dist.send)(torch.ones(1), other, group=pair)


def limited(waits: Callable[..., None], limit_s: float) -> str:
    """If the ranks do not even create the group within the limit, gloo raises the same error."""
    try:
        waits(dist.new_group([0, 1], timeout=timedelta(seconds=limit_s)), 1 - dist.get_rank())
    except RuntimeError as error:
        return type(error).__name__
    return "completed"


@pytest.mark.parametrize("waits", [at_once, by_its_work, by_its_future, by_a_message], ids=lambda f: f.__name__)
def test_a_time_limit_of_the_program_is_shorter_than_the_transfer(waits: Callable[..., None]) -> None:
    with Group(2, link=lab.Link(gbit_per_s=1, latency_us=100e6), timeout_s=90) as group:  # one message takes longer
        run = group.run(limited, waits, 1.0)
    assert run.results == ["RuntimeError"] * 2
    assert not any(span.done for span in run.trace if span.kind == "communication")


def test_remote_calls() -> None:
    with Group(["master", "worker"], runtime="rpc", link=LINK) as group:
        run = group["master"].run(rpc_cases.calls)
    expected = [3, 4, 1, 2, 6, 6, 2, 1, 4]
    assert [t.unique().tolist() for t in run.results[0]] == [[float(value)] for value in expected]
    calls = [s for s in run.trace.filter(rank=0, kind="communication") if s.name.startswith("rpc_")]
    assert len(calls) > 6
    for call in calls:  # request and a reply of the same size
        assert call.end_ns - call.start_ns >= 2 * model_ns("send", 4000, 2)
        assert call.start_ns < call.backend_ns <= call.end_ns
    for fetched in run.trace.filter(rank=0, name="to_here"):
        assert fetched.start_ns < fetched.backend_ns <= fetched.end_ns
        assert fetched.end_ns - fetched.start_ns >= model_ns("send", fetched.nbytes, 2)
    # The called function begins when the call has arrived: the call and its function are one operation.
    served = sorted(s.start_ns for s in run.trace.filter(rank=1, name="serve add"))
    sent = sorted(s.start_ns for s in calls if s.name.endswith(" add"))
    assert served[0] - sent[0] >= model_ns("send", 4000, 2)
