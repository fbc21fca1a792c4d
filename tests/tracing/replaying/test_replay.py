"""`replay` against times worked out by hand; all times in milliseconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from labkit.costs.link import Link
from labkit.costs.network import Network
from labkit.errors.exceptions import LabError
from labkit.recording.events import Scalar
from labkit.recording.schema import Span
from labkit.tracing.ideal_pipeline import schedule
from labkit.tracing.load import load_trace
from labkit.tracing.replaying.replay import replay
from labkit.tracing.step_times import step_ms
from labkit.tracing.trace import Trace

from replayed import MB10, ONE_GBIT, beside, blocking, waited, waited_over  # isort: skip
from synthetic import ALONE, MS, alone, data_parallel, made, master_and_workers, model_parallel, remote_calls  # isort: skip


def times(trace: Trace, rank: int, name: str) -> list[tuple[float, float]]:
    return [((s.start_ns - trace.start_ns) / MS, (s.end_ns - trace.start_ns) / MS) for s in trace.filter(rank=rank, name=name)]


def waits(trace: Trace, rank: int, name: str) -> list[float]:
    return [(s.wait_end_ns - s.wait_start_ns) / MS for s in trace.filter(rank=rank, name=name)]


@pytest.mark.parametrize(
    "trace",
    [alone(), blocking(), beside(), waited(), data_parallel(), model_parallel(), remote_calls(), master_and_workers(),
     schedule("1f1b", stages=4, micro_batches=6, communication=0.3)],
)  # fmt: skip
def test_without_a_change_the_recorded_times_come_out(trace: Trace) -> None:
    assert list(replay(trace)) == list(trace)
    assert replay(trace).end_ns == trace.end_ns


def test_a_faster_span_shortens_what_it_encloses_and_moves_what_follows() -> None:
    recorded = made([("forward", 0, 4), ("layer", 1, 3), ("backward", 5, 11)])
    recorded = Trace(recorded.columns, [Scalar(0, "loss", 8 * MS, 0.5)], ranks=recorded.ranks)
    trace = replay(recorded, faster={"forward": 2})
    assert times(trace, 0, "forward") == [(0, 2)]
    assert times(trace, 0, "layer") == [(0.5, 1.5)]
    assert times(trace, 0, "backward") == [(3, 9)]  # the gap between the two is no part of forward
    assert trace.scalars[0].time_ns == 6 * MS
    inner = replay(recorded, faster={"forward": 2, "layer": 4})
    assert times(inner, 0, "forward") == [(0, 1.5)]  # 1 + 1 outside of the layer in half the time, and 2 in a quarter


def test_a_name_also_selects_numbered_micro_batches() -> None:
    trace = replay(made([("forward 0", 0, 2), ("forward 1", 2, 4), ("forwarding", 4, 6)]), slower={"forward": 3})
    assert times(trace, 0, "forwarding") == [(12, 14)]


def test_a_collective_starts_when_its_last_rank_has_come() -> None:
    trace = replay(blocking(), faster={"forward": 4}, rank=1)
    assert times(trace, 0, "all_reduce") == [(5, 7)]  # rank 0 is the last now
    assert waits(trace, 1, "all_reduce") == [5]
    assert step_ms(trace) == 8
    assert times(replay(blocking(), slower={"forward": 2}, rank=0), 1, "optimizer") == [(12, 13)]


def test_what_else_may_change() -> None:
    assert times(replay(blocking(), like_others=1), 1, "optimizer") == [(7, 8)], "a straggler like the others"
    assert step_ms(replay(blocking(), faster={"all_reduce": 4})) == 9.5
    trace = replay(blocking(), free=("all_reduce",))
    assert times(trace, 0, "all_reduce") == [(5, 8)], "it still waits for the last rank"
    assert step_ms(trace) == 9
    assert [*replay(blocking(), free=iter(["all_reduce"]))] == [*trace]  # type: ignore[arg-type]


def test_a_run_of_centuries_is_a_trace() -> None:
    assert replay(beside(), slower={"backward": 1e11}).duration_ns == round(1e11 * 20 * MS) + 2 * MS


def test_a_link_takes_its_model_s_time_and_carries_one_collective_at_a_time() -> None:
    trace = replay(waited(), link=ONE_GBIT)
    assert times(trace, 0, "all_reduce") == [(5, 15), (10, 25)]  # 10 each; the second begins when the first has ended
    assert step_ms(trace) == 27
    assert trace.link == ONE_GBIT
    assert step_ms(replay(beside(), link=Link(gbit_per_s=0.1, latency_us=0))) == 22, "a slow link delays only who waits"


def test_another_link_replaces_the_one_of_the_run() -> None:
    over = waited_over(ONE_GBIT)
    half = replay(over, link=Link(gbit_per_s=2, latency_us=0))
    assert times(half, 0, "all_reduce") == [(5, 10), (10, 15)]
    assert step_ms(half) == 22  # the wait at 20 is over before it begins
    assert waits(half, 0, "all_reduce") == [0, 0]
    assert list(replay(over)) == list(over)
    assert list(replay(over, link=ONE_GBIT)) == list(over)


def test_a_network_has_two_levels() -> None:
    inside, between = Link(gbit_per_s=2, latency_us=0), Link(gbit_per_s=1, latency_us=0)
    trace = replay(waited(), link=Network(nodes=2, inside=inside, between=between))
    assert times(trace, 0, "all_reduce") == [(5, 15), (10, 25)]
    assert trace.nodes == (0, 1)
    together = replay(beside(), link=Network(nodes=1, inside=inside, between=between))
    assert times(together, 0, "all_reduce") == [(5, 10), (10, 15)]


def test_who_issues_first_gets_the_port() -> None:
    ranks: list[Any] = [[], [], []]
    for sender, end in ((0, 3), (1, 4)):
        key = {"group": f"p2p {sender}>2 tag 0", "match": 1, "nbytes": MB10}
        ranks[sender] = [("forward", 0, end - 2), ("send", end - 2, end, (end - 2, end), key | {"peer": 2})]
        ranks[2].append(("recv", 0.1 * (sender + 1), end, None, key | {"peer": sender}))
    both = replay(made(*ranks), link=ONE_GBIT)
    assert times(both, 0, "send") == [(1, 11)]
    assert times(both, 1, "send") == [(2, 21)]  # rank 2 receives one message after the other
    turned = replay(made(*ranks), link=ONE_GBIT, slower={"forward": 4}, rank=0)
    assert times(turned, 1, "send") == [(2, 12)]
    assert times(turned, 0, "send") == [(4, 22)]


def broadcast(nbytes: int = 8) -> Trace:
    key = {"nbytes": nbytes, "match": 1, "root": 0}
    ends = ((2.0, 3.0), (5.0, 6.0), (1.0, 3.5))
    return made(*([("forward", 0, start), ("broadcast", start, end, (start, end), key)] for start, end in ends))


def test_the_root_of_a_broadcast_does_not_wait_for_receivers() -> None:
    trace = replay(broadcast(), slower={"forward": 3}, rank=1)
    assert times(trace, 0, "broadcast") == [(2, 3)]
    assert times(trace, 1, "broadcast") == [(15, 16)]
    late = replay(broadcast(), slower={"forward": 3}, rank=0)
    assert times(late, 2, "broadcast") == [(1, 7.5)]  # 1.5 after its root, as recorded
    assert times(late, 1, "broadcast") == [(5, 7)]
    over = replay(broadcast(MB10), link=ONE_GBIT)  # a tree of two rounds, of 10 each
    assert [times(over, rank, "broadcast") for rank in range(3)] == [[(2, 22)], [(5, 25)], [(1, 22)]]


def test_a_slower_server_delays_its_callers() -> None:
    trace, recorded = replay(remote_calls(), slower={"serve shard": 2}, rank=1), remote_calls()
    served = times(recorded, 1, "serve shard")[0]
    longer = served[1] - served[0]
    before, after = times(recorded, 0, "rpc_async shard")[0], times(trace, 0, "rpc_async shard")[0]
    assert after == pytest.approx((before[0], before[1] + longer))
    assert times(trace, 2, "serve shard")[0] == times(recorded, 2, "serve shard")[0]
    assert trace.end_ns > recorded.end_ns


def test_a_remote_call_over_a_link_is_two_messages() -> None:
    trace = replay(remote_calls(), link=Link(gbit_per_s=0.1, latency_us=0))  # 200 kB take 16 ms, 40 kB take 3.2
    (call, *_), (served, *_) = times(trace, 0, "rpc_async shard"), times(trace, 1, "serve shard")
    assert served[0] == pytest.approx(call[0] + 16)
    assert call[1] == pytest.approx(served[1] + 3.2)


def test_a_thread_needs_as_long_as_recorded_to_wake_up() -> None:
    recorded = made(*([("forward", 0, ms), ("all_reduce", ms, 5, (ms, 5.5)), ("optimizer", 5.5, 6)] for ms in (2, 4)))
    trace = replay(recorded, slower={"forward": 2}, rank=1)
    assert times(trace, 0, "all_reduce") == [(2, 9)]
    assert times(trace, 0, "optimizer") == [(9.5, 10)]


def test_what_the_emulation_was_late_stays_with_another_link_and_goes_without_one() -> None:
    trace = made(*[[("all_reduce", 1, 11.5, (1, 11.5), {"nbytes": MB10})]] * 2, link=ONE_GBIT)
    assert list(replay(trace)) == list(trace)
    assert times(replay(trace, link=Link(gbit_per_s=2, latency_us=0)), 0, "all_reduce") == [(0, 5.5)]
    assert times(replay(trace, link=None), 0, "all_reduce") == [(0, 0)]  # how long the backend took is not known


def test_only_the_root_of_a_gather_counts_all_parts() -> None:
    recorded = made(*([("gather", 1, 2, (1, 2), {"nbytes": MB10 * parts, "root": 0})] for parts in (2, 1)))
    trace = replay(recorded, link=ONE_GBIT)
    assert times(trace, 0, "gather") == times(trace, 1, "gather") == [(0, 10)]  # one part travels, half of the total


CALL = {"group": "rpc 0>1", "match": 1}
SERVED = {"served": True, "automatic": True}


def test_a_kept_result_is_fetched_when_it_is_there() -> None:
    remote = ("remote f", 1, 1.5, None, {"peer": 1} | ALONE)
    caller = [remote, ("to_here", 3, 7, (3, 7), CALL | {"peer": 1}), ("call", 0, 8)]
    recorded = made(caller, [("serve f", 2, 6, SERVED), ("value f", 6, 6, None, CALL | {"peer": 0})])
    assert times(replay(recorded, slower={"serve": 2}), 0, "to_here") == [(3, 11)]
    assert times(replay(recorded, faster={"serve": 4}), 0, "to_here") == [(3, 4)]
    caller = [remote, ("to_here", 11, 12, (11, 12), CALL | {"peer": 1, "nbytes": MB10}), ("call", 0, 13)]
    recorded = made(caller, [("serve f", 2, 3, SERVED), ("value f", 3, 3, None, CALL | {"peer": 0})])
    over = replay(recorded, link=Link(gbit_per_s=1, latency_us=500))  # a result is asked for before it is sent
    assert times(over, 0, "to_here") == [(11, 22)]  # 0.5 to ask, 0.5 and 10 for the value


def test_a_call_that_returns_a_future_is_answered_when_that_completes() -> None:
    server = [("serve f", 2, 4, SERVED), ("reply f", 8, 8.1, None, CALL | {"peer": 0})]
    trace = replay(made([("rpc_sync f", 1, 9, (1, 9), CALL | {"peer": 1})], server), slower={"serve f": 3})
    assert times(trace, 0, "rpc_sync f") == [(0, 12)]  # counted from 1


def two_calls(*calls: tuple[str, float, float, float, float]) -> Trace:
    """Calls of rank 0: their function, when they are issued, when they are served, and when they end."""
    caller, server = [], []
    for match, (name, issued, served, replied, ended) in enumerate(calls, 1):
        key = {"group": "rpc 0>1", "match": match}
        caller.append((f"rpc_async {name}", issued, ended, None, key | {"peer": 1}))
        server += [(f"serve {name}", served, replied, SERVED)]
        server += [(f"reply {name}", replied, replied + 0.1, None, key | {"peer": 0})]
    return made(caller, server)


def test_replies_may_overtake_one_another() -> None:
    trace = two_calls(("f", 1, 2, 6, 6.5), ("f", 1.1, 2.1, 4, 7))
    assert list(replay(trace)) == list(trace)
    slower = times(replay(trace, slower={"serve": 2}), 0, "rpc_async f")
    assert [end for _, end in slower] == [9.5, pytest.approx(7.9)]


def test_calls_do_not_wait_for_one_another() -> None:
    trace = replay(two_calls(("f", 1, 2, 3, 6.5), ("g", 1.1, 2, 4, 7)), slower={"serve f": 3})
    assert times(trace, 0, "rpc_async f") == [(0, 7.5)]  # 2 later, counted from 1
    assert [end for _, end in times(trace, 0, "rpc_async g")] == [6]


def test_an_operation_without_its_peers_may_overtake_one_that_waits_for_them() -> None:
    casts = ((1.0, 2.0, 6.5), (5.0, 7.0, 8.0))
    trace = made(
        *(
            [("all_reduce", issued, 6, None), ("broadcast", cast, end, None, {"match": 2, "root": 0})]
            for issued, cast, end in casts
        )
    )
    assert list(replay(trace)) == list(trace)


def test_one_bucket_is_sent_when_the_last_gradient_is_there() -> None:
    trace = replay(beside(), one_bucket=True)
    (one,) = trace.filter(rank=0, name="all_reduce")
    assert (one.start_ns, one.end_ns, one.nbytes) == (10 * MS, 16 * MS, 2 * MB10)  # 3 + 3
    over = replay(waited(), one_bucket=True, link=ONE_GBIT)
    assert times(over, 1, "all_reduce") == [(10, 30)]
    assert step_ms(over) == 32


def overlapping(*, backend_ms: float = 0) -> Trace:
    """Two all-reduces that run at the same time, from 5 to 12 and from 6 to 10, beside a backward pass of 20."""
    reduced = []
    for start, end in ((5, 12), (6, 10)):
        more = {"backend_ns": int((start + backend_ms) * MS)} if backend_ms else {}
        reduced.append(("all_reduce", start, end, None, {"nbytes": MB10} | more))
    return made(*[[("backward", 0, 20), ("step", 0, 21), *reduced]] * 2)


def test_one_bucket_takes_as_long_as_the_backend_was_busy() -> None:
    assert times(replay(overlapping(), one_bucket=True), 0, "all_reduce") == [(6, 13)]  # not 7 + 4


def test_over_a_link_the_backend_needs_its_own_time_once_for_one_bucket() -> None:
    trace = Trace(list(overlapping(backend_ms=3)), ranks=["a", "b"], link=Link(gbit_per_s=100, latency_us=0))
    assert times(replay(trace, one_bucket=True), 0, "all_reduce") == [(6, 10)]  # 3, and 1 that its last one came later


def test_a_replayed_trace_is_saved_and_replayed_like_any_other(tmp_path: Path) -> None:
    trace = replay(waited(), link=ONE_GBIT)
    again = load_trace(trace.save(tmp_path / "replayed.json"))
    assert again.link == ONE_GBIT
    assert (again.replayed, waited().replayed) == (True, False)
    assert again.notes == trace.notes
    assert step_ms(replay(again, free=["all_reduce"])) == step_ms(replay(trace, free=["all_reduce"])) == 22


def test_notes_say_what_was_changed_and_how_much_steps_differ() -> None:
    (note,) = replay(alone(), faster={"forward": 2}).notes
    assert note.startswith("Replayed, not run: forward 2 times as fast. The recorded steps lasted 15.5 ms (median); half of")
    assert "on rank 1" in replay(blocking(), slower={"forward": 2}, rank=1).notes[0]


def cut() -> Trace:
    return blocking().between(6 * MS, 11 * MS)


REFUSED = {
    "lost records": (lambda: Trace(list(blocking()), ranks=["a", "b"], dropped=[0, 3]), "3 records of this run were lost"),
    "an open operation": (
        lambda: Trace([Span(0, "wait", "communication", 0, 5, group="store key x", done=False)], ranks=["a"]),
        "wait had not completed",
    ),
    "a window": (cut, "in the middle of all_reduce"),
    "a rank of two": (lambda: blocking().filter(rank=0), "some ranks of all_reduce are not in this trace"),
    "an end of two": (lambda: model_parallel().filter(rank=0), "some ranks of .* are not in this trace"),
    "TensorFlow": (lambda: Trace([Span(0, "matmul", "compute", 0, 5, measured=True)], ranks=["a"]), "TensorFlow's runs"),
    "a GPU": (lambda: Trace([Span(0, "forward", "compute", 0, 5, device="cuda")], ranks=["a"]), "runs on a GPU"),
    "nothing": (lambda: Trace(ranks=["a"]), "recorded nothing"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_replayed_is_refused_with_the_reason(name: str) -> None:
    trace, says = REFUSED[name]
    with pytest.raises(LabError, match=f"^replay: .*{says}"):
        replay(trace())


def test_records_that_contradict_each_other_are_refused() -> None:
    """Each rank waits first for what the other issues second."""
    orders = [[("all_reduce", at, at + 1, (at, at + 1), {"match": match}) for at, match in order] for order in CROSSED]
    with pytest.raises(LabError, match="contradict each other"):
        replay(made(*orders))


CROSSED = (((1, 1), (2, 2)), ((1, 2), (2, 1)))


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a misspelt span": ({"faster": {"backwrad": 2}}, ValueError, "no span is named 'backwrad'; did you mean 'backward'"),
    "no number": ({"faster": {"backward": "2"}}, TypeError, "expected the name of a span and a number above 1e-12"),
    "zero": ({"slower": {"backward": 0}}, ValueError, "number above 1e-12"),
    "too much": ({"slower": {"backward": 1e300}}, ValueError, "number above 1e-12 and below 1e12"),
    "too little": ({"faster": {"backward": 1e-320}}, ValueError, "number above 1e-12 and below 1e12"),
    "more than fits": ({"link": Link(gbit_per_s=1e-300, latency_us=0)}, LabError, "longer than 292 years"),
    "no names": ({"free": 5}, TypeError, r"replay\(free=5\)"),
    "no mapping": ({"faster": 2}, TypeError, "expected factors by name"),
    "a misspelt argument": ({"fastr": {}}, TypeError, "Did you mean 'faster'"),
    "an unknown rank": ({"faster": {"backward": 2}, "rank": 4}, ValueError, "expected the number of a rank, 0 to 1"),
    "a rank alone": ({"rank": 1}, ValueError, "belongs to faster= or slower="),
    "no rank": ({"like_others": "rank 1"}, TypeError, "expected the number of a rank"),
    "an unknown operation": ({"free": ["x"]}, ValueError, r"free=\['x'\]\): no operation is named 'x'; it has all_reduce"),
    "a string": ({"free": "all_reduce"}, TypeError, "expected names of operations"),
    "no link": ({"link": 1}, TypeError, "expected a lab.Link"),
    "a network of more nodes": ({"link": Network(nodes=3, inside=ONE_GBIT, between=ONE_GBIT)}, ValueError, "at least one rank"),
    "not a bool": ({"own_cores": 1}, TypeError, "expected True or False"),
    "no delays": ({"own_cores": True}, LabError, "did not record how long its threads waited for a core"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_one_clear_error(name: str) -> None:
    arguments, kind, says = WRONG[name]
    with pytest.raises(kind, match=says):
        replay(beside(), **arguments)


def a_step_alone() -> Trace:
    return made([("step", 0, 10)])


@pytest.mark.parametrize(
    ("trace", "arguments", "kind", "says"),
    [
        (a_step_alone(), {"faster": {"backward": 2}}, ValueError, "no span is named 'backward'; it has none"),
        (blocking(), {"one_bucket": True}, LabError, "no backward pass of this run has several all-reduces"),
        (remote_calls(), {"like_others": 0}, LabError, "the other ranks have no spans with the names"),
        (beside(), {"slower": {"backward": 9.9e11}}, LabError, "longer than 292 years"),
    ],
)
def test_what_a_trace_lacks_for_a_change(trace: Trace, arguments: dict[str, Any], kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        replay(trace, **arguments)
