"""Messages as arrows in the timeline: which are drawn, where they begin and end, and when they are left out."""

from __future__ import annotations

import dataclasses

import pytest
from matplotlib.legend import Legend
from matplotlib.patches import FancyArrowPatch

import labkit as lab
from labkit.plots.flows import MessageArrow, messages
from labkit.plots.timeline import timeline
from labkit.recording.schema import Span
from labkit.tracing.ideal_pipeline import schedule
from labkit.tracing.trace import Trace

from synthetic import MS, Book, chrome, data_parallel, gpu_and_cpu, made, master_and_workers  # isort: skip
from synthetic import model_parallel, remote_calls  # isort: skip


def arrows(ax):
    """The ends of the arrows: x and y of each."""
    found = [patch for patch in ax.patches if isinstance(patch, FancyArrowPatch)]
    return sorted(tuple(round(c, 3) for end in patch._posA_posB for c in end) for patch in found)


def test_a_message_goes_from_the_time_both_ranks_are_ready_to_its_arrival():
    assert messages(model_parallel(1)) == [
        MessageArrow(0, int(6.8 * MS), 1, int(7.8 * MS), span=7),
        MessageArrow(1, int(21.8 * MS), 0, int(22.8 * MS), span=11),
    ]
    # from the middle of one rank's communication lane to that of the other
    assert arrows(timeline(model_parallel(1))) == [(6.8, 0.75, 7.8, 1.75), (21.8, 1.75, 22.8, 0.75)]
    late = made([("send", 1, 8, None, {"peer": 1})], [("recv", 6, 8, None, {"peer": 0})], start_ns=0)
    assert arrows(timeline(late)) == [(6, 0.75, 8, 1.75)]


def test_a_call_arrives_when_it_is_served_and_its_result_at_the_end_of_the_call():
    found = messages(remote_calls())
    calls, replies = [m for m in found if m.call], [m for m in found if not m.call]
    assert [(m.source, m.destination) for m in calls] == [(0, 1), (0, 2)] * 2
    assert [(m.arrived_ns - m.sent_ns) / MS for m in calls] == pytest.approx([0.7] * 4, abs=1e-5)
    assert [(m.source, m.destination) for m in replies] == [(1, 0), (2, 0)] * 2
    ends = arrows(timeline(remote_calls()))
    assert (2.3, 0.75, 3.0, 1.35) in ends  # into the compute lane
    assert (7.3, 1.75, 8.2, 0.75) in ends


def test_where_the_function_returned_a_future_it_is_not_known_which_span_served_a_call():
    spans = [
        call := Span(0, "rpc_async f", "communication", 0, 40, peer=2, nbytes=4, group="rpc 0>2", match=1),
        dataclasses.replace(call, rank=1, group="rpc 1>2"),
        Span(2, "serve f", "compute", 10, 20), Span(2, "serve f", "compute", 12, 22),
        reply := Span(2, "reply f", "communication", 30, 31, peer=0, nbytes=4, group="rpc 0>2", match=1),
        dataclasses.replace(reply, peer=1, group="rpc 1>2"),
    ]  # fmt: skip
    found = messages(Trace(spans, ranks=["a", "b", "c"]))
    assert [(m.source, m.destination, m.call) for m in found] == [(2, 0, False), (2, 1, False)]


def test_what_has_no_arrows():
    assert messages(data_parallel()) == [], "collectives"
    assert messages(master_and_workers()) == [], "calls of which one end is unknown"
    spans = [dataclasses.replace(s, done=False) if s.name == "recv" else s for s in model_parallel()]
    assert messages(Trace(spans, ranks=["rank 0", "rank 1"])) == [], "messages that never arrived"


def test_only_messages_in_the_shown_interval_are_drawn():
    trace = schedule("1f1b", stages=2, micro_batches=4, communication=0.5)
    assert 0 < len(messages(trace.between(0, trace.end_ns // 2))) < len(messages(trace))


def test_the_legend_explains_arrows_only_where_there_are_any():
    def words(trace):
        return [t.get_text() for a in timeline(trace).artists if isinstance(a, Legend) for t in a.get_texts()]

    assert "message" in words(model_parallel())
    assert "message" not in words(gpu_and_cpu())


def test_in_several_runs_arrows_stay_in_their_own_run():
    ends = arrows(timeline(model_parallel(1), model_parallel(1)))
    assert [round(end[1] - 0.75, 3) for end in ends] == [0.95, 3.9, 1.95, 4.9]  # under a heading of 0.95 rows each


def test_between_gpus_messages_go_from_gpu_row_to_gpu_row():
    gpu = {"device": "cuda"}
    computing = [("data", 0, 2), ("forward", 2, 6, gpu)]
    sender, receiver = ("send", 6, 8, None, {"peer": 1} | gpu), ("recv", 5, 8, None, {"peer": 0} | gpu)
    trace = made([*computing, sender], [*computing, receiver])
    assert arrows(timeline(trace)) == [(6, 0.75, 8, 2.75)]


def two_stages_of_four_ranks(micro_batches: int) -> Trace:
    """A mesh of eight ranks, whose first four send each micro-batch to the last four."""
    book = Book()
    for rank in range(4):
        group = f"p2p {rank}>{rank + 4} tag 0 group 1 mesh_pp of ranks {rank},{rank + 4}"
        for i in range(micro_batches):
            book.travel(rank, "send", 4 * i, 4 * i + 3, peer=rank + 4, group=group, match=i)
            book.travel(rank + 4, "recv", 4 * i, 4 * i + 3, peer=rank, group=group, match=i)
    return book.trace(8, start_ns=0)


def gpipe(stages: int, micro_batches: int) -> Trace:
    return schedule("gpipe", stages=stages, micro_batches=micro_batches, communication=0.5)


@pytest.mark.parametrize(
    ("trace", "drawn"),
    [
        (data_parallel(), 0),
        (gpipe(2, 8), 16),
        (gpipe(2, 60), 0),  # too close to distinguish them
        (gpipe(24, 2), 0),  # the rows are too low
        (gpipe(8, 8), 112),  # between neighbours
        (two_stages_of_four_ranks(3), 12),  # few may pass over the rows of other ranks,
        (two_stages_of_four_ranks(8), 0),  # but not 24; 8 per pair would do
    ],
)
def test_arrows_are_drawn_where_they_can_be_distinguished(trace: Trace, drawn: int):
    assert len(arrows(timeline(trace))) == drawn


@pytest.mark.parametrize(("error_ms", "drawn"), [(0, 0), (1, 0), (2, 1)])
def test_a_message_that_arrives_before_it_was_sent_is_drawn_as_it_is_if_the_clocks_explain_it(error_ms, drawn):
    def message(sent, received):
        ends = ("send", *sent, None, {"peer": 1, "match": 1}), ("recv", *received, None, {"peer": 0, "match": 1})
        return made([ends[0]], [ends[1]], start_ns=0, clock_error_ns=error_ms * MS)

    trace = message((6, 8), (1, 4.5))  # it arrived 1.5 ms before it was sent
    assert arrows(timeline(trace)) == [(6, 0.75, 4.5, 1.75)][:drawn]
    assert messages(trace) == [MessageArrow(0, 6 * MS, 1, int(4.5 * MS), span=1)][:drawn]
    for other in (trace.between(0, 5 * MS), trace.between(5 * MS, 8 * MS)):
        assert messages(other) == [], "one of its ends is outside"
    trace = message((1, 4), (1, 8))
    assert len(messages(trace)) == 1
    assert messages(trace.between(0, 5 * MS)) == messages(trace.between(3 * MS, 8 * MS)) == []


def test_a_call_that_is_served_before_it_is_issued_does_no_harm():
    trace = remote_calls()
    spans = [dataclasses.replace(s, start_ns=s.start_ns - 2 * MS, end_ns=s.end_ns - 2 * MS) if s.rank == 1 else s for s in trace]
    early = Trace(spans, ranks=trace.ranks, clock_error_ns=3 * MS)
    assert len(messages(early)) == 8
    assert any(m.arrived_ns < m.sent_ns for m in messages(early))
    assert len(arrows(timeline(early))) == 8
    assert lab.traffic(early)
    assert chrome(early)
    assert len(messages(Trace(spans, ranks=trace.ranks))) == 6
