"""Ideal pipelines: their bubbles match the papers, every pass runs once, and none begins before its input has
arrived."""

from __future__ import annotations

import itertools

import pytest

from labkit.errors.exceptions import LabError
from labkit.tracing.ideal_pipeline import schedule
from labkit.tracing.trace import Trace

S = 1_000_000_000  # ns


def passes(trace: Trace) -> dict[tuple[str, int, int], tuple[int, int, int]]:
    """By direction, stage and micro-batch: rank, start and end in ns."""
    found = {}
    for span in trace.filter(kind="compute"):
        words = span.name.split()
        key = (words[0], int(words[-1]) if "stage" in words else span.rank, int(words[1]))
        assert key not in found, f"{key} twice"
        found[key] = span.rank, span.start_ns, span.end_ns
    return found


def in_order(trace: Trace, rank: int) -> str:
    return " ".join(s.name[0].upper() + s.name.split()[1] for s in trace.filter(rank=rank, kind="compute"))


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "1F1B", "interleaved 1f1b"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (1, 5), (2, 2), (4, 4), (4, 8), (3, 9)])
def test_the_bubble_matches_the_papers(kind, stages, micro_batches):
    trace = schedule(kind, stages=stages, micro_batches=micro_batches)
    assert trace.bubble == pytest.approx((stages - 1) / (micro_batches + stages - 1))
    assert trace.duration_ns == 3 * S * (micro_batches + stages - 1)


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
def test_fewer_micro_batches_than_stages(kind):
    assert schedule(kind, stages=4, micro_batches=2).bubble == pytest.approx(3 / 5)


@pytest.mark.parametrize(("ranks", "chunks", "micro_batches"), [(2, 2, 2), (2, 3, 6), (4, 2, 8), (4, 4, 4), (1, 3, 2)])
def test_several_stages_per_rank_make_the_bubble_smaller(ranks, chunks, micro_batches):
    trace = schedule("interleaved 1f1b", stages=ranks * chunks, ranks=ranks, micro_batches=micro_batches)
    assert trace.bubble == pytest.approx((ranks - 1) / (chunks * micro_batches + ranks - 1))
    assert len(trace.ranks) == ranks


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "gpipe", "stages": 3, "micro_batches": 4},
        {"kind": "1f1b", "stages": 4, "micro_batches": 6, "communication": 0.25},
        {"kind": "1f1b", "stages": 3, "micro_batches": 5, "forward": [1, 3, 2], "backward": [2, 2, 5], "communication": 0.5},
        {"kind": "interleaved 1f1b", "stages": 6, "ranks": 2, "micro_batches": 4, "communication": 0.1},
    ],
    ids=lambda o: o["kind"],
)
def test_every_pass_runs_once_and_begins_when_its_input_has_arrived(options):
    trace = schedule(**options)
    stages, travel = options["stages"], int(options.get("communication", 0) * S)
    done = passes(trace)
    every = itertools.product(("forward", "backward"), range(stages), range(options["micro_batches"]))
    assert set(done) == set(every)
    for (direction, stage, microbatch), (rank, start, _) in done.items():
        if direction == "forward":
            needs = ("forward", stage - 1, microbatch) if stage else None
        else:
            needs = ("backward", stage + 1, microbatch) if stage < stages - 1 else ("forward", stage, microbatch)
        if needs:
            assert start >= done[needs][2] + (travel if done[needs][0] != rank else 0)
    for rank in range(len(trace.ranks)):
        times = sorted((start, end) for where, start, end in done.values() if where == rank)
        assert all(one[1] <= two[0] for one, two in itertools.pairwise(times)), "two passes at once on one rank"


def test_the_order_of_passes():
    trace = schedule("gpipe", stages=2, micro_batches=3)
    assert in_order(trace, 0) == in_order(trace, 1) == "F0 F1 F2 B0 B1 B2"
    trace = schedule("1f1b", stages=3, micro_batches=4)  # as many activations are kept as stages follow
    assert in_order(trace, 0) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert in_order(trace, 1) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert in_order(trace, 2) == "F0 B0 F1 B1 F2 B2 F3 B3"


def test_stages_with_different_times():
    trace = schedule("gpipe", stages=2, micro_batches=1, forward=[1, 2], backward=[3, 4])
    assert (trace.duration_ns, trace.bubble) == (10 * S, pytest.approx(1 / 2))


def test_interleaved_1f1b_in_the_order_of_megatron():
    trace = schedule("interleaved 1f1b", stages=4, ranks=2, micro_batches=4)
    stage = [f"{s.name[0].upper()}{s.name.split()[1]}.{s.name.split()[-1]}" for s in trace.filter(rank=0, kind="compute")]
    warm_up = "F0.0 F1.0 F0.2 F1.2"
    assert " ".join(stage).startswith(f"{warm_up} F2.0 B0.2 F3.0 B1.2 F2.2 B0.0 F3.2 B1.0")


def test_messages_have_two_ends_and_a_duration():
    trace = schedule("1f1b", stages=2, micro_batches=2, communication=0.5)
    messages = {}
    for span in trace.filter(kind="communication"):
        messages.setdefault((span.group, span.match), []).append(span)
    assert len(messages) == 4
    for send, recv in messages.values():
        assert (send.name, recv.name) == ("send", "recv")
        assert (send.rank, send.peer) == (recv.peer, recv.rank)
        assert (send.start_ns, send.end_ns) == (recv.start_ns, recv.end_ns)
        assert send.duration_ns == S // 2
    assert not len(schedule("1f1b", stages=2, micro_batches=2).filter(kind="communication"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "zigzag"}, "kind='zigzag': expected 'gpipe', '1f1b' or 'interleaved 1f1b'"),
        ({"stages": 0}, "stages=0: expected a whole number from 1"),
        ({"micro_batches": 1.5}, "micro_batches=1.5: expected a whole number"),
        ({"ranks": 2}, "ranks=2, stages=4: only 'interleaved 1f1b'"),
        ({"kind": "interleaved 1f1b", "ranks": 3}, "ranks=3 has to divide stages=4 and micro_batches=8"),
        ({"forward": [1, 2]}, "forward has 2 times for 4 stages"),
        ({"backward": 0}, "backward=0: expected seconds, more than 0"),
        ({"communication": -1}, "communication=-1: expected seconds, 0 or more"),
    ],
)
def test_inconsistent_arguments_are_reported(options, words):
    with pytest.raises((TypeError, ValueError), match=words):
        schedule(**({"kind": "1f1b", "stages": 4, "micro_batches": 8} | options))


def test_a_trace_without_duration_has_no_bubble():
    with pytest.raises(LabError, match="no duration"):
        _ = Trace(ranks=["rank 0"]).bubble
