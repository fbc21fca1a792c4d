"""Each wait of a program is in the trace: as a wait of its operation, or as one for what was complete already."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import comm_cases as cases
import pytest
import torch
import torch.distributed as dist

import labkit as lab
from labkit.group.group import Group
from labkit.group.run import Run
from labkit.recording.cores import RUN_QUEUE

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module", params=[None, lab.Link(gbit_per_s=1, latency_us=50)], ids=["no link", "a link"])
def pair(request: pytest.FixtureRequest) -> Iterator[Group]:
    with Group(2, link=request.param, timeout_s=200) as group:
        yield group


def marked(run: Run, rank: int = 0) -> list[tuple[str, int]]:
    """The operations for which a rank waited when they were complete, in order of these waits."""
    waits = run.trace.waits[run.trace.waits["rank"] == rank]
    return [(run.trace.columns.names[wait["group"]], int(wait["match"])) for wait in waits]


def operations(run: Run, rank: int = 0) -> list[tuple[str, int]]:
    """The operations of a rank."""
    return [(s.group, s.match) for s in run.trace.filter(rank=rank, kind="communication")]


def never_waited_for(run: Run) -> list[str]:
    """The operations for which no rank has waited in any way."""
    found = []
    for rank in (0, 1):
        known = marked(run, rank)
        for s in run.trace.filter(rank=rank, kind="communication"):
            if not s.wait_start_ns and (s.group, s.match) not in known:
                found.append(s.name)
    return found


def all_reduce() -> Any:
    work = dist.all_reduce(torch.ones(1), async_op=True)
    assert work is not None
    return work


def complete(work: Any) -> Any:
    while not work.is_completed():
        pass
    return work


PROGRAMS = cases.PROGRAMS | {"late_wait": (cases.late_wait, (), "", 1)}


@pytest.mark.parametrize("program", PROGRAMS)
def test_each_operation_that_is_waited_for(pair: Group, program: str) -> None:
    case, given, _, least = PROGRAMS[program]
    run = pair.run(cases.watched_and_bare, case, *given)
    assert len(operations(run)) >= least
    assert never_waited_for(run) == []


def by_work() -> None:
    complete(all_reduce()).wait()


def by_future() -> None:
    work = all_reduce()
    future = work.get_future()
    while not future.done():
        pass
    complete(work)
    future.wait()


def by_derived_future() -> None:
    work = all_reduce()
    future = work.get_future().then(lambda done: done.value()[0])
    while not future.done():
        pass
    complete(work)
    future.wait()


def fails(waits: Callable[[Any], object]) -> str:
    """Rank 0 closes the group's connection instead of taking part."""
    two = dist.new_group([0, 1])
    dist.barrier(two)
    if dist.get_rank() == 0:
        dist.destroy_process_group(two)
        return "closed"
    work = dist.all_reduce(torch.ones(1), group=two, async_op=True)
    try:
        waits(work)
    except RuntimeError:
        return "failed"
    return "completed"


FAILING: dict[str, Callable[[Any], object]] = {
    "work": lambda work: work.wait(),
    "future": lambda work: work.get_future().wait(),
    "derived future": lambda work: work.get_future().then(lambda done: done.value()).wait(),
}


@pytest.mark.parametrize("waits", FAILING)
def test_an_operation_that_fails_is_not_done(pair: Group, waits: str) -> None:
    run = pair.run(fails, FAILING[waits])
    assert run.results == ["closed", "failed"]
    assert [s.done for s in run.trace.filter(rank=1, name="all_reduce")] == [False]


def by_message() -> None:
    other = 1 - dist.get_rank()
    received = dist.irecv(torch.zeros(1), other)
    sent = dist.isend(torch.ones(1), other)
    while cases.pending():
        pass
    for work in (received, sent):
        assert work is not None
        work.wait()


@pytest.mark.parametrize("waits", [by_work, by_future, by_derived_future, by_message], ids=lambda f: f.__name__)
def test_a_wait_for_what_is_complete(pair: Group, waits: Callable[[], None]) -> None:
    run = pair.run(waits)
    for rank in (0, 1):
        spans = run.trace.filter(rank=rank, kind="communication").spans
        assert {s.wait_start_ns for s in spans} == {0}
        assert sorted(marked(run, rank)) == sorted(operations(run, rank))
        assert min(run.trace.filter(rank=rank).waits["time_ns"]) >= min(s.end_ns for s in spans)


def test_a_bucket_that_is_complete_before_the_pass_ends(pair: Group) -> None:
    def train() -> None:
        layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        model = torch.nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=0.001)
        for _ in range(3):  # the second pass has the buckets that the first one has led to
            x = torch.ones(1, 64, requires_grad=True)
            x.register_hook(finish)  # called when the last layer's bucket is under way
            model(x).sum().backward()

    def finish(_: Any) -> None:
        while "all_reduce" in cases.pending():
            pass

    run = pair.run(train)
    buckets = [s for s in run.trace.filter(rank=0, name="all_reduce") if not s.wait_start_ns]
    assert len(buckets) >= 2
    assert all((s.group, s.match) in marked(run) for s in buckets)


def test_what_is_no_wait_of_the_program(pair: Group) -> None:
    """Polling is none; nor is what another thread waits for."""

    def polls() -> None:
        complete(all_reduce())
        work = complete(all_reduce())
        thread = threading.Thread(target=work.wait)
        thread.start()
        thread.join()

    run = pair.run(polls)
    assert len(operations(run)) == 2
    assert marked(run) == []


@pytest.mark.parametrize("cores", [1, 64])
def test_delays_are_recorded_where_ranks_outnumber_cores(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def train() -> None:
        cases.collectives(None)
        cases.asynchronous(None)
        cases.ring_of_messages(None)
        cases.data_parallel(None, "plain")
        for _ in lab.steps(range(2)):
            pass

    monkeypatch.setattr("labkit.group.processes.usable_cores", lambda: cores)
    with Group(2, timeout_s=200) as group:
        run = group.run(train)
    assert run.trace.cores == cores
    for rank in (0, 1):
        spans = run.trace.filter(rank=rank, kind="communication").spans
        issued = [s.issue_delay_ns for s in spans]
        (call,) = run.trace.filter(rank=rank, kind="call")
        ends = [step.wait_delay_ns for step in run.trace.filter(rank=rank, kind="step")]
        if cores == 64 or not os.path.exists(RUN_QUEUE):
            assert {(s.issue_delay_ns, s.wait_delay_ns) for s in [call, *spans]} == {(0, 0)}
            assert set(ends) == {0}
            continue
        assert 0 < call.issue_delay_ns <= issued[0] <= issued[-1] <= ends[-2] <= ends[-1] <= call.wait_delay_ns
        assert issued[0] > 0
        assert issued == sorted(issued), "a thread's delay does not shrink"
        waited = [s for s in spans if s.wait_start_ns]
        assert waited
        assert all(s.wait_delay_ns >= s.issue_delay_ns for s in waited)
        assert {s.wait_delay_ns for s in spans if not s.wait_start_ns} <= {0}


def test_operations_of_a_thread_of_the_program(pair: Group) -> None:
    def work() -> None:
        dist.all_reduce(torch.ones(1))
        thread = threading.Thread(target=lambda: (dist.all_reduce(torch.ones(1)), all_reduce().wait()))
        thread.start()
        thread.join()
        all_reduce().wait()

    spans = sorted(pair.run(work).trace.filter(rank=0, name="all_reduce"), key=lambda s: s.match)
    assert [s.own_thread for s in spans] == [False, True, True, False]
