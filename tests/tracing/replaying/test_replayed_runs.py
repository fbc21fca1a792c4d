"""`replay` of real runs: without a change it gives them back, and with another link what such a run really does.

Compute is `time.sleep`, which other programs on the machine hardly disturb. Nothing depends on how long anything took.
"""

from __future__ import annotations

import time
from typing import Any

import comm_cases as cases
import comm_rpc_cases as rpc_cases
import pytest
import simulated_programs as programs
import torch
import torch.distributed as dist

import labkit as lab
from labkit.tracing.trace import Trace

pytestmark = pytest.mark.processes

FAST, SLOW = lab.Link(gbit_per_s=1, latency_us=50), lab.Link(gbit_per_s=0.1, latency_us=50)
STEPS = 4


def overlapped() -> None:
    rank = dist.get_rank()
    large, small = torch.zeros(1_000_000), torch.zeros(25_000)  # 32 and 0.8 ms over the fast link, ten times that over the other
    for _ in lab.steps(range(STEPS)):
        with lab.span("forward"):
            time.sleep(0.004 + 0.004 * rank)
        with lab.span("backward"):
            first = dist.all_reduce(large, async_op=True)
            time.sleep(0.002)
            second = dist.all_reduce(small, async_op=True)
            first.wait(), second.wait()
        with lab.span("optimizer"):
            time.sleep(0.002)


def doubled(x: torch.Tensor) -> torch.Tensor:
    with lab.span("double"):
        return 2 * x


def calls() -> None:
    from torch.distributed import rpc

    if rpc.get_worker_info().id:
        return
    for _ in lab.steps(range(STEPS)):
        futures = [rpc.rpc_async(name, doubled, (torch.ones(1000),)) for name in ("first", "second")]
        torch.futures.wait_all(futures)
        rpc.remote("first", doubled, (torch.ones(10),)).to_here()
        rpc.rpc_sync("second", torch.add, (torch.ones(10), 1))


PROGRAMS = (
    overlapped, programs.ddp, programs.fsdp, programs.gpipe, programs.one_f_one_b, programs.tensor_parallel,
)  # fmt: skip


def check_given_back(trace: Trace) -> None:
    """Its own replay has the same operations, and each of its events at the recorded time."""
    again = lab.replay(trace)
    assert [(s.rank, s.name, s.group, s.match) for s in again] == [(s.rank, s.name, s.group, s.match) for s in trace]
    assert [(s.start_ns, s.end_ns, s.wait_end_ns) for s in again] == [(s.start_ns, s.end_ns, s.wait_end_ns) for s in trace]


@pytest.mark.parametrize("link", [None, FAST], ids=["no link", "link"])
def test_an_unchanged_replay_gives_the_run_back(link: lab.Link | None) -> None:
    with lab.Group(2, link=link) as group:
        for program in PROGRAMS:
            check_given_back(group.run(program).trace)
    with lab.Group(["master", "first", "second"], runtime="rpc", link=link) as group:
        trace = group.run(calls).trace
        check_given_back(trace)
        slower = lab.replay(trace, slower={"double": 1000}, rank=1)  # inside of the calls that rank 1 serves
        assert slower.step_bounds()[-1, 1] > trace.step_bounds()[-1, 1]
        assert list(slower.filter(rank=2, name="double"))


@pytest.mark.parametrize("link", [None, FAST], ids=["no link", "link"])
def test_collectives_and_calls_of_every_kind_are_given_back(link: lab.Link | None) -> None:
    with lab.Group(2, link=link) as group:
        for case in (cases.collectives, cases.objects, cases.asynchronous, cases.functional, cases.ring_of_messages):
            check_given_back(group.run(lambda case=case: case(dist.group.WORLD) and None).trace)
    with lab.Group(["master", "worker"], runtime="rpc", link=link) as group:
        for call in (rpc_cases.calls, rpc_cases.by_reference, rpc_cases.both_ways):
            check_given_back(group["master"].run(lambda call=call: call() and None).trace)


def operations(trace: Trace, rank: int) -> list[Any]:
    return [(s.name, s.match, s.nbytes) for s in trace.filter(rank=rank, kind="communication")]


def test_a_slower_link_is_replayed_as_a_run_over_it_really_is() -> None:
    with lab.Group(2, link=FAST) as fast, lab.Group(2, link=SLOW) as slow:
        recorded, real = fast.run(overlapped).trace, slow.run(overlapped).trace
    assert (recorded.link, real.link) == (FAST, SLOW)
    replayed = lab.replay(recorded, link=SLOW)
    for rank in range(2):
        assert operations(replayed, rank) == operations(real, rank)
        for trace in (replayed, real):
            large, small = ([*trace.filter(rank=rank, kind="communication")][i::2] for i in range(2))
            for first, second in zip(large, small, strict=True):
                alone, both = (SLOW.seconds("all_reduce", nbytes) * 1e9 for nbytes in (first.nbytes, 4_100_000))
                assert first.end_ns - first.start_ns >= alone - 1
                assert second.end_ns - first.start_ns >= both - 1  # one after the other
                assert first.wait_end_ns > first.wait_start_ns
    much_ms = 1e3 * (SLOW.seconds("all_reduce", 4e6) - FAST.seconds("all_reduce", 4e6))
    assert lab.step_ms(replayed) > lab.step_ms(recorded) + 0.9 * much_ms
