"""What changes save, against times worked out by hand; all times in milliseconds."""

from __future__ import annotations

from typing import Any

import pytest

from labkit.costs.link import Link
from labkit.costs.network import Network
from labkit.errors.exceptions import LabError
from labkit.recording.schema import Span
from labkit.tracing.replaying.changes import ProgramChanges, rules_for
from labkit.tracing.replaying.gains import Gains, gains_of
from labkit.tracing.replaying.graph import graph_of
from labkit.tracing.replaying.replay import replay, replayed, replayed_steps
from labkit.tracing.replaying.times import measured, play
from labkit.tracing.step_times import step_lengths_ns
from labkit.tracing.trace import Trace

from replayed import MB10, ONE_GBIT, beside, blocking, sent_afterwards, tensor_parallel, waited_over  # isort: skip
from synthetic import MS, alone, data_parallel, gpu_and_cpu, in_steps, made, remote_calls  # isort: skip


def gains(trace: Trace) -> Gains:
    return gains_of(trace, "what_helps")


def saved(trace: Trace) -> dict[str, float]:
    return {gain.change: round(gain.saved_ns / MS, 3) for gain in gains(trace).gains}


def test_changes_are_sorted_by_what_they_save() -> None:
    found = saved(blocking())
    assert found == {
        "forward twice as fast": 4,
        "rank 1 as fast as the others": 3,
        "all_reduce twice as fast": 1,
        "optimizer twice as fast": 0.5,
        "communication takes no time": 2,
    }
    assert list(found.values()) == [4, 3, 1, 0.5, 2]  # the ideal stands apart
    assert [gain.ideal for gain in gains(blocking()).gains] == [False, False, False, False, True]
    assert gains(blocking()).step_ns == 11 * MS


def test_a_run_over_a_link_is_asked_about_the_link() -> None:
    trace = waited_over(Link(gbit_per_s=1, latency_us=500))  # 5 to 16, 16 to 27
    found = saved(trace)
    assert found["twice the bandwidth"] == 7  # 5 to 11, 11 to 17: the wait at 20 is over, and a step takes 22
    assert found["half the latency"] == 1
    assert found["all gradients in one bucket"] == -4  # 10 to 31
    assert "all_reduce twice as fast" not in found
    assert "half the latency" not in saved(waited_over(ONE_GBIT))


def test_the_two_levels_of_a_network_are_asked_about_one_by_one() -> None:
    trace = waited_over(Network(nodes=2, inside=ONE_GBIT, between=ONE_GBIT))
    found = saved(trace)
    assert found["twice the bandwidth between the nodes"] == 5
    assert found["twice the bandwidth inside the nodes"] == 0


def test_a_phase_of_numbered_micro_batches_is_one() -> None:
    trace = made([(f"forward {number}", number, number + 1) for number in range(4)])
    assert saved(trace) == {"forward twice as fast": 2}
    assert not gains(trace).steps


def reducing(forward: float, at: float) -> list[Any]:
    return [("forward", 0, forward), ("all_reduce", at, 21, (at, 21)), ("step", 0, 21)]


@pytest.mark.parametrize(
    "ranks",
    [
        [[("forward", at, at + 2) for at in (0, 2, 4)], [("forward", 0, 2)]],  # rank 0 only does more
        # Nobody waits for rank 1, whose forward pass takes longer: rank 0 also logs, which no other rank does.
        [[*reducing(10, 20), ("log", 10, 20)], reducing(12, 12)],
    ],
)
def test_who_is_no_straggler(ranks: list[Any]) -> None:
    assert not any("as fast as the others" in change for change in saved(made(*ranks)))


def test_a_gain_below_the_spread_of_the_steps_is_marked() -> None:
    forward = (99, 8, 10, 12, 14)  # the first is left out; half of the others last 9.5 + 2 to 12.5 + 2
    found = gains(in_steps(5, lambda step: ("forward", forward[step]), ("optimizer", 2), ranks=1))
    assert (found.low_ns, found.step_ns, found.high_ns) == (11.5 * MS, 13 * MS, 14.5 * MS)
    marked = {gain.change: gain.in_spread for gain in found.gains}
    assert marked == {"forward twice as fast": False, "optimizer twice as fast": True}  # saves 1 of 13


def test_at_most_a_dozen_are_kept() -> None:
    for trace in (data_parallel(8), alone(), remote_calls()):
        assert 1 <= len(gains(trace).gains) <= 12
    assert "a core for each rank" not in saved(blocking()), "each had one"
    with pytest.raises(LabError, match=r"^what_helps: runs on a GPU"):
        gains(gpu_and_cpu())


@pytest.mark.parametrize("trace", [blocking(), beside(), waited_over(ONE_GBIT), data_parallel(), remote_calls(), alone()])
@pytest.mark.parametrize("factor", [1, 3])
def test_the_steps_alone_are_those_of_the_whole_trace(trace: Trace, factor: int) -> None:
    graph = graph_of(trace, "what_helps")
    first = next(span.name for span in trace if span.kind == "compute")
    rules = rules_for(graph, measured(graph), ProgramChanges(slower={first: factor}))
    times = play(graph, rules)
    steps, whole = replayed_steps(graph, times), replayed(graph, rules, times, "")
    assert step_lengths_ns(steps).tolist() == step_lengths_ns(whole).tolist()
    assert steps.duration_ns == whole.duration_ns


def test_gradients_may_travel_beside_a_backward_pass_but_not_longer_than_it_lasts() -> None:
    assert saved(sent_afterwards())["gradients travel beside backward, at best"] == 5  # of 12
    longer = replay(sent_afterwards(), slower={"backward": 4})
    assert saved(longer)["gradients travel beside backward, at best"] == 12
    assert not any("beside backward" in change for change in saved(beside()))


def in_a_row(gap: float = 0.0, nbytes: int = 4_000, lines: tuple[str, str] = ("line 3", "line 3"), around: str = "") -> Trace:
    """Steps of 1 ms of computing, then two all-reduces of 5 ms each, with some work between them."""
    first, second = (("all_reduce", 5, {"line": line}) for line in lines)
    trace, length = in_steps(4, ("forward", 1), first, ("", gap), second, nbytes=nbytes), int(11 + gap) * MS
    begins = [length * step + MS for step in range(4)] if around else []
    spans = [Span(rank, around, "compute", begin, begin + length - MS) for rank in range(2) for begin in begins]
    return Trace([*trace, *spans], ranks=trace.ranks)


@pytest.mark.parametrize(
    ("trace", "known"),
    [
        (in_a_row(), True),
        (in_a_row(gap=1), True),
        (in_a_row(gap=4), False),  # the second may need what the rank made of the first's result
        (in_a_row(lines=("line 3", "line 4")), False),
        (in_a_row(nbytes=1_000_000), False),  # without a link, nobody knows what their bytes take
        (in_a_row(around="optimizer"), True),
        (in_a_row(around="backward"), False),
        (tensor_parallel(), False),
    ],
)
def test_consecutive_collectives_of_one_line_may_be_one_message(trace: Trace, known: bool) -> None:
    found = saved(trace)
    assert ("consecutive messages as one" in found) is known
    assert found.get("consecutive messages as one", 5) == 5


@pytest.mark.parametrize(("nbytes", "saves"), [(125_000, 5), (MB10, 0)])
def test_one_message_has_the_bytes_of_all(nbytes: int, saves: float) -> None:
    """Over a link where the bytes of each take 1 or 10, and an operation takes at least 5."""
    assert saved(replay(in_a_row(nbytes=nbytes), link=ONE_GBIT))["consecutive messages as one"] == saves
