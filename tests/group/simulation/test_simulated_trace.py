"""The times of programs written by hand: what waits for what, in the order of a CPU and in that of a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import labkit as lab
from labkit.costs.device import Kernel
from labkit.group.simulation.program import (
    Communication,
    Elapsed,
    Event,
    Mark,
    Memory,
    OnStream,
    Program,
    StreamEvent,
    Value,
    Wait,
)
from labkit.group.simulation.program_graph import simulated_trace
from labkit.recording.schema import MEMORY, Span
from labkit.tracing.trace import Trace

GPU = lab.Device(tflop_per_s=1, gbyte_per_s=1000)
CPU = lab.Device(tflop_per_s=1, gbyte_per_s=1000, runs_ahead=False)
LINK = lab.Link(gbit_per_s=8, latency_us=10)  # a kilobyte takes a microsecond
BETWEEN = lab.Link(gbit_per_s=0.8, latency_us=100)


def kernel(us: float) -> Kernel:
    return Kernel("mm", round(us * 1e6), 0, 0)


def all_gather(number: int, kilobytes: int, group: Sequence[int] = (0, 1)) -> Communication:
    return Communication(number, "all_gather", kilobytes * 1000, tuple(group), "0", line="cell 1, line 2")


def message(number: int, name: str, source: int, destination: int, *, me: int) -> Communication:
    peer = destination if me == source else source
    return Communication(number, name, 1000, (source, destination), "0", peer=peer, line="cell 1, line 3")


def marked(name: str, *events: Event) -> list[Event]:
    return [Mark(name, "compute", True), *events, Mark(name, "compute", False)]


def trace_of(
    *events: Sequence[Event],
    device: lab.Device = CPU,
    link: lab.Link | lab.Network | None = LINK,
    size: int = 2,
    **options: object,
) -> Trace:
    programs = {rank: Program(rank, size, tuple(own)) for rank, own in enumerate(events)}
    return simulated_trace(programs, device, link, name="train", **options)  # type: ignore[arg-type]


def span(trace: Trace, name: str, rank: int = 0) -> Span:
    (found,) = (span for span in trace if span.name == name and span.rank == rank)
    return found


def us(ns: int) -> float:
    return ns / 1000


def test_a_kernel_takes_its_time_and_a_wait_blocks_until_the_communication_has_completed() -> None:
    events = [
        *marked("forward", kernel(100)), all_gather(0, 100), *marked("beside", kernel(30)), Wait(0),
        *marked("after", kernel(10)),
    ]  # fmt: skip
    trace = trace_of(events, [kernel(20), *events])
    gathered = span(trace, "all_gather")
    assert us(gathered.start_ns) == 100
    takes_us = 10 + 100 / 2  # the other rank's half
    assert us(gathered.end_ns) == 120 + takes_us
    assert [us(gathered.wait_start_ns), us(gathered.wait_end_ns)] == [130, 120 + takes_us]
    assert us(span(trace, "after").end_ns) == 120 + takes_us + 10
    assert us(span(trace, "train").end_ns) == us(trace.end_ns) == 190
    assert us(trace.shares()[0].exposed_ns) == pytest.approx(takes_us - 10 + 0)  # ten of it pass while rank 0 still computes


def prefetched() -> list[Event]:
    """What FSDP2 does: the second layer's parameters are gathered on another stream while the first computes."""
    return [
        *marked("first", kernel(100)),
        StreamEvent(0, 0, waits=False), OnStream(1), all_gather(0, 100), Wait(0), StreamEvent(1, 1, waits=False),
        OnStream(0), *marked("second", kernel(100)),
        StreamEvent(1, 0, waits=True), *marked("third", kernel(100)),
    ]  # fmt: skip


def test_on_a_cpu_the_program_waits_where_it_says_so() -> None:
    trace = trace_of(prefetched(), prefetched())
    assert [us(span(trace, name).start_ns) for name in ("first", "all_gather", "second", "third")] == [0, 100, 160, 260]


def test_on_a_gpu_a_stream_runs_beside_the_default_stream_until_that_waits_for_it() -> None:
    trace = trace_of(prefetched(), prefetched(), device=GPU)
    # Nothing keeps the host from issuing the all-gather at once.
    assert [us(span(trace, name).start_ns) for name in ("first", "all_gather", "second", "third")] == [0, 0, 100, 200]
    assert span(trace, "all_gather").wait_end_ns == 0


def test_on_a_gpu_a_stream_waits_for_what_it_was_told_to() -> None:
    first, recorded, *rest = prefetched()[:3], prefetched()[3], *prefetched()[4:]
    events = [*first, recorded, StreamEvent(0, 1, waits=True), *rest]
    trace = trace_of(events, events, device=GPU, link=lab.Link(gbit_per_s=8, latency_us=80))
    assert [us(span(trace, name).start_ns) for name in ("first", "all_gather", "second", "third")] == [0, 100, 100, 230]
    gathered = span(trace, "all_gather")
    assert [us(gathered.wait_start_ns), us(gathered.wait_end_ns)] == [200, 230]
    assert us(trace.shares()[0].exposed_ns) == 30


def test_a_message_needs_both_ends() -> None:
    sender = [kernel(50), message(0, "send", 0, 1, me=0), Wait(0), *marked("after", kernel(1))]
    receiver = [message(0, "recv", 0, 1, me=1), Wait(0), *marked("after", kernel(1))]
    trace = trace_of(sender, receiver)
    assert us(span(trace, "recv", 1).end_ns) == us(span(trace, "after", 1).start_ns) == 50 + 10 + 1
    assert (span(trace, "send").peer, span(trace, "recv", 1).peer) == (1, 0)


def test_a_communication_that_nobody_answers_is_refused_with_its_line() -> None:
    with pytest.raises(lab.LabError, match=r"rank 0 waits in recv \(cell 1, line 3\) for rank 1, which never takes part"):
        trace_of([message(0, "recv", 1, 0, me=0), Wait(0)], [])


def test_ranks_that_wait_for_one_another_are_refused() -> None:
    def exchange(me: int) -> list[Event]:
        ends = [message(0, "recv", 1 - me, me, me=me), message(1, "send", me, 1 - me, me=me)]
        return [ends[0], Wait(0), ends[1], Wait(1)]

    with pytest.raises(lab.LabError, match="wait for one another for ever"):
        trace_of(exchange(0), exchange(1))


NETWORK = lab.Network(nodes=2, inside=LINK, between=BETWEEN)
ACROSS = [[rank, rank + 4] for rank in range(4)]


def predicted_us(groups: int) -> float:
    return 1e6 * float(lab.predict.all_gather(100_000, ACROSS[:groups], NETWORK.of(8)))


def test_groups_along_an_axis_share_the_connections_of_their_nodes() -> None:
    """One rank of eight stands for the four of its node, each in a group of its own."""
    trace = trace_of([all_gather(0, 100, (0, 4)), Wait(0)], link=NETWORK, size=8)
    assert us(trace.end_ns) == pytest.approx(predicted_us(4))
    assert predicted_us(4) > 3 * predicted_us(1)


def test_a_group_of_all_ranks_has_the_connections_for_itself() -> None:
    trace = trace_of([all_gather(0, 100, range(8)), Wait(0)], link=NETWORK, size=8)
    assert us(trace.end_ns) == pytest.approx(1e6 * NETWORK.of(8).seconds("all_gather", 100_000))


def test_two_executed_ranks_of_a_node_stand_for_two_ranks_each() -> None:
    events = [[all_gather(0, 100, (rank, rank + 4)), Wait(0)] for rank in range(2)]
    trace = trace_of(*events, link=NETWORK, size=8)
    assert us(trace.end_ns) == pytest.approx(predicted_us(4), rel=0.05)


def all_reduce_us(device: lab.Device) -> float:
    reduced = Communication(0, "all_reduce", 4, tuple(range(1024)), "0")
    return us(trace_of([reduced, Wait(0)], device=device, size=1024).end_ns)


def test_a_small_all_reduce_on_gpus_takes_the_fastest_algorithm_and_on_cpus_the_ring_of_emulated_links() -> None:
    assert all_reduce_us(CPU) == pytest.approx(1e6 * LINK.seconds("all_reduce", 4, 1024), abs=0.01)
    assert all_reduce_us(GPU) == pytest.approx(2 * 10 * 10, rel=0.01)  # 2·log₂ 1,024 rounds of 10 µs


def test_the_trace_has_the_shown_ranks_and_counts_all() -> None:
    events = [all_gather(0, 100, range(4)), Wait(0)]
    trace = trace_of(*[events] * 3, size=4, show=[0, 2], notes=["simulated"])
    assert trace.ranks == ("rank 0", "rank 2")
    assert {one.rank for one in trace} == {0, 1}
    assert (trace.simulated, trace.origin, trace.notes) == (4, "simulated: 2 of 4 ranks", ("simulated",))
    assert lab.sent_mb(trace) == pytest.approx(0.1 * 3 / 4)


def test_a_peer_that_is_not_shown_is_one_of_the_others() -> None:
    sender = [message(0, "send", 0, 1, me=0), Wait(0)]
    receiver = [message(0, "recv", 0, 1, me=1), Wait(0)]
    trace = trace_of(sender, receiver, show=[1])
    assert trace.spans[-1].peer == 1
    sent = trace_of(sender, receiver, show=[0])
    assert lab.sent_mb(sent) == 0.001


def test_memory_is_that_of_all_tensors_of_which_the_program_may_track_kinds() -> None:
    in_forward = Memory(3_000_000), kernel(1), Memory(1_000_000), kernel(1)
    events = [Memory(500), kernel(1), *marked("forward", *in_forward), kernel(1), Memory(7)]
    trace = trace_of(events, size=1)
    points = [(us(value.time_ns), value.value) for value in trace.scalars]
    assert points == [(0, 500), (1, 3_000_000), (3, 1_000_000)]
    assert lab.memory_mb(trace) == 3
    tracked = trace_of([Value(MEMORY + "gradients", 2e6), *events, Value("loss", 0.5)], size=1)
    assert [lab.memory_mb(tracked, *kinds) for kinds in ((), ("gradients",), ("other",))] == [3, 2, 1]
    assert tracked.scalars[-1].name == "loss"


def test_measured_times_pass_and_what_a_real_rank_does_not_do_is_taken_out() -> None:
    events = [
        Elapsed(5000),
        all_gather(0, 100),
        Elapsed(20_000),
        Elapsed(-12_000),
        Wait(0),
        *marked("after", Elapsed(1000)),
    ]
    programs = {rank: Program(rank, 2, tuple(events)) for rank in range(2)}
    trace = simulated_trace(programs, None, LINK, name="train", late_ns=40_000)
    gathered = span(trace, "all_gather")
    assert [us(gathered.start_ns), us(gathered.wait_start_ns), us(gathered.end_ns)] == [5, 13, 5 + 60 + 40]
    assert us(span(trace, "after").end_ns) == 106


def test_what_was_simulated_is_not_replayed() -> None:
    with pytest.raises(lab.LabError, match="was simulated; simulate the changed program"):
        lab.replay(trace_of(prefetched(), prefetched()))
