"""The critical path: where it leads, and that its pieces add up to the step; all times in milliseconds."""

from __future__ import annotations

from itertools import pairwise

import pytest

from labkit.errors.exceptions import LabError
from labkit.recording.schema import Span
from labkit.tracing.replaying.critical_path import Piece, critical_path
from labkit.tracing.replaying.replay import replay
from labkit.tracing.trace import Trace

from replayed import MB10, ONE_GBIT, beside, blocking, waited  # isort: skip
from synthetic import MS, alone, data_parallel, in_steps, made, master_and_workers, model_parallel, remote_calls  # isort: skip


def in_ms(pieces: list[Piece], trace: Trace) -> list[tuple[int, str, float, float]]:
    return [(p.rank, p.name, (p.start_ns - trace.start_ns) / MS, (p.end_ns - trace.start_ns) / MS) for p in pieces]


def test_it_leads_to_the_rank_that_came_last() -> None:
    path = critical_path(blocking())
    assert [(name, start, end) for _, name, start, end in in_ms(path, blocking())] == [
        ("forward", 0, 8), ("all_reduce", 8, 10), ("optimizer", 10, 11),
    ]  # fmt: skip
    assert path[0].rank == 1
    assert [p.kind for p in path] == ["compute", "communication", "compute"]


def in_turn(apart_ms: float, transfer_ms: float, **more: object) -> Trace:
    """Four all-reduces of two ranks, to which each comes `apart_ms` late in turn, after 10 ms of work."""
    parts = []
    for late in (0, 1, 0, 1):
        work = [10 + apart_ms * (rank == late) for rank in (0, 1)]
        parts += [("forward", tuple(work)), ("all_reduce", transfer_ms)]
    return in_steps(1, *parts, nbytes=MB10, **more)


@pytest.mark.parametrize(("apart_ms", "transfer_ms", "stays"), [
    (0.9, 5, True), (0.4, 2.1, True), (1.1, 20, False), (0.4, 1, False), (3, 5, False),
])  # fmt: skip
def test_it_stays_on_its_rank_where_ranks_arrive_together(apart_ms: float, transfer_ms: float, stays: bool) -> None:
    trace = in_turn(apart_ms, transfer_ms)
    path = critical_path(trace)
    assert (len({piece.rank for piece in path}) == 1) is stays
    assert sum(piece.duration_ns for piece in path) == trace.step(0).duration_ns
    assert all(before.end_ns == after.start_ns for before, after in pairwise(path))


def test_ranks_arrive_together_within_the_error_of_their_clocks() -> None:
    trace = in_turn(3, 5)
    trace.clock_error_ns = 4 * MS
    path = critical_path(trace)
    assert len({piece.rank for piece in path}) == 1
    assert sum(piece.duration_ns for piece in path) == trace.step(0).duration_ns


def test_an_operation_that_nobody_had_to_wait_for_is_not_on_it() -> None:
    assert {p.name for p in critical_path(beside())} == {"backward", "optimizer"}


def test_it_follows_the_operation_that_had_the_link_before() -> None:
    trace = replay(waited(), link=ONE_GBIT)
    path = [(name, start, end) for _, name, start, end in in_ms(critical_path(trace), trace)]
    assert path == [("backward", 0, 5), ("all_reduce", 5, 25), ("optimizer", 25, 27)]  # both of them: 5-15 and 15-25


def test_it_follows_messages_against_their_direction() -> None:
    trace = model_parallel(steps=2)
    path = [(rank, name) for rank, name, *_ in in_ms(critical_path(trace, step=1), trace)]
    assert path == [
        (0, "data"), (0, "forward"), (1, "recv"), (1, "forward"), (1, "backward"), (0, "recv"), (0, "backward"), (0, "optimizer"),
    ]  # fmt: skip


def test_it_leads_through_the_call_that_took_longest() -> None:
    trace = remote_calls()
    path = [(rank, name) for rank, name, *_ in in_ms(critical_path(trace), trace) if name != "train"]
    once = [(0, "forward"), (2, "rpc_async shard"), (2, "serve shard"), (0, "rpc_async shard")]
    assert path == once * 2


@pytest.mark.parametrize("trace", [alone(), blocking(), data_parallel(8), model_parallel(), master_and_workers()])
def test_its_pieces_add_up_to_the_step(trace: Trace) -> None:
    for step, (start, end) in enumerate(trace.step_bounds().tolist()):
        path = critical_path(trace, step=step)
        assert (path[0].start_ns, path[-1].end_ns) == (start, end)
        assert all(before.end_ns == after.start_ns for before, after in pairwise(path))
        assert all(piece.duration_ns > 0 for piece in path)


def test_which_part_it_leads_through() -> None:
    whole = made([("forward", 1, 3)], end_ms=4)  # without steps
    assert in_ms(critical_path(whole), whole) == [(0, "", 0, 1), (0, "forward", 1, 3), (0, "", 3, 4)]
    steps = made([("step", start, end) for start, end in ((0, 9), (9, 12), (12, 17))])
    assert in_ms(critical_path(steps), steps) == [(0, "step", 12, 17)], "the step of median length"


def test_what_cannot_be_replayed_has_none() -> None:
    with pytest.raises(LabError, match=r"^critical_path: 1 records .* were lost"):
        critical_path(Trace([Span(0, "forward", "compute", 0, 5)], ranks=["a"], dropped=[1]))
    with pytest.raises(LabError, match="step 7"):
        critical_path(blocking(), step=7)


def test_the_longest_of_several_ranks_ends_it() -> None:
    reduced = [("all_reduce", at, 3, (at, 3)) for at in (2, 1)]
    trace = made([("forward", 0, 2), reduced[0]], [reduced[1], ("optimizer", 3, 9)])
    assert [(p.rank, p.name) for p in critical_path(trace)] == [(0, "forward"), (1, "all_reduce"), (1, "optimizer")]
