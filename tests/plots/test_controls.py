"""The controls above the timeline that can be explored, without a browser: what they offer, and what a move answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from synthetic import data_parallel, in_steps, made, master_and_workers

import labkit as lab
from labkit.costs.link import Link
from labkit.costs.network import Network
from labkit.errors.exceptions import LabError
from labkit.errors.units import time_in_words
from labkit.plots.explorer.controls import Replays, Schedules
from labkit.plots.view import view_of
from labkit.recording.schema import Span
from labkit.tracing.trace import Trace

ipywidgets = pytest.importorskip("ipywidgets")
pytest.importorskip("anywidget", reason="anywidget is not installed: the extra 'hosted' brings it")

LINK = Link(gbit_per_s=0.2, latency_us=2000)
NETWORK = Network(nodes=2, inside=Link.ethernet_10g, between=Link.ethernet_1g).of(2)


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    ipywidgets.Widget.close_all()


def trained(link: Any = LINK, ranks: int = 2) -> Trace:
    """Four steps: rank 1 is slower in its backward pass; then gradients of 25 kB travel over a link."""
    rules = {"nbytes": 25_000}
    spans = in_steps(4, ("forward", 3), ("backward", (5, 7)), ("all_reduce", 5), ("optimizer", 1), ranks=ranks, **rules)
    return Trace(spans.columns, ranks=spans.ranks, link=link)


def controls_of(trace: Trace, step: Any = None) -> Replays:
    return Replays(view_of(trace, step, ""))


def moved(controls: Any, **texts: str | bool) -> Any:
    """The answer after moves to the stops with these texts, by the first word of a control's name."""
    stops = controls.as_given
    for name, text in texts.items():
        (control,) = (one for one in controls.all if one["name"].strip().replace(" ", "_") == name)
        stops[control["name"]] = int(text) if isinstance(text, bool) else control["texts"].index(text)
    return controls.ask(stops)


def recorded_texts(controls: Any) -> dict[str, Any]:
    """What each control shows of the run as it is."""
    return {one["label"]: one["texts"][one["at"]] if one["texts"] else bool(one["at"]) for one in controls.all}


def same_times(a: Trace, b: Trace) -> bool:
    return all(np.array_equal(a.columns.data[name], b.columns.data[name]) for name in ("start_ns", "end_ns", "wait_end_ns"))


# What can be changed


def test_the_controls_begin_with_the_run_as_it_is() -> None:
    assert recorded_texts(controls_of(trained())) == {
        "emulated link": True, "latency": "2 ms", "bandwidth": "0.2 Gbit/s", "speed": "× 1", "of": "all computing",
        "on": "all ranks", "communication takes no time": False,
    }  # fmt: skip


def test_a_recorded_link_between_two_stops_has_a_stop_of_its_own() -> None:
    found = recorded_texts(controls_of(trained(Link(gbit_per_s=252.06, latency_us=0))))
    assert (found["latency"], found["bandwidth"]) == ("0 µs", "252.1 Gbit/s")


def test_a_network_has_sliders_for_both_of_its_links() -> None:
    found = recorded_texts(controls_of(trained(NETWORK)))
    assert {label: found[label] for label in found if "nodes" in label} == {
        "latency inside nodes": "30 µs", "bandwidth inside nodes": "10 Gbit/s",
        "latency between nodes": "50 µs", "bandwidth between nodes": "1 Gbit/s",
    }  # fmt: skip
    assert "emulated link" not in found


def test_without_communication_there_is_no_link_and_with_one_rank_no_choice_of_ranks() -> None:
    assert list(recorded_texts(controls_of(in_steps(3, ("", 1), ("forward", 2), ("", 1), ranks=1)))) == ["speed", "of"]


def test_only_phases_that_take_noticeable_time_can_be_chosen() -> None:
    trace = in_steps(3, ("forward", 50), ("backward", 100), ("log", 0.1), ("all_reduce", 3, {"nbytes": 8}))
    (phases,) = (one["texts"] for one in controls_of(trace).all if one["label"] == "of")
    assert phases == ["all computing", "backward", "forward"]


def test_a_core_for_each_rank_is_offered_only_if_waits_for_cores_were_recorded() -> None:
    trace = trained()
    assert "a core for each rank" not in recorded_texts(controls_of(trace))
    trace.columns.data["issue_delay_ns"] = 1000
    assert "a core for each rank" in recorded_texts(controls_of(trace))


# What a move answers


@pytest.mark.parametrize(
    ("move", "change"),
    [
        ({"latency": "10 ms"}, {"link": Link(gbit_per_s=0.2, latency_us=10_000)}),
        ({"bandwidth": "0.02 Gbit/s"}, {"link": Link(gbit_per_s=0.02, latency_us=2000)}),
        ({"link": False}, {"link": None}),
        ({"speed": "× 2"}, {"faster": {"forward": 2, "backward": 2, "optimizer": 2}}),
        ({"speed": "× 0.5", "phase": "backward", "rank": "rank 0"}, {"slower": {"backward": 2}, "rank": 0}),
        ({"free": True}, {"free": ("all_reduce",)}),
        ({"free": True, "latency": "10 ms"}, {"free": ("all_reduce",)}),
    ],
)
def test_a_move_shows_what_replay_predicts(move: dict[str, Any], change: dict[str, Any]) -> None:
    trace = trained()
    view, said, path = moved(controls_of(trace, 2), **move)
    expected = lab.replay(trace, **change)
    assert same_times(view.whole, expected)
    assert view.whole.replayed
    before, after = (1e6 * lab.step_ms(one) for one in (trace, expected))
    assert said[0] == f"The median step takes {time_in_words(after)}, predicted by replay."
    words = "saves" if after < before else "costs"
    assert said[1].startswith(f"As recorded: {time_in_words(before)}. The change {words} {time_in_words(abs(after - before))} (")
    assert path == lab.critical_path(expected, step=2)
    assert (view.shown.start_ns, view.shown.end_ns) == tuple(expected.step_bounds()[2].tolist())


def test_a_network_is_changed_link_by_link() -> None:
    trace = trained(NETWORK)
    view, _, _ = moved(controls_of(trace), latency_between="10 ms")
    slower = Network(nodes=2, inside=Link.ethernet_10g, between=Link(gbit_per_s=1, latency_us=10_000)).of(2)
    assert same_times(view.whole, lab.replay(trace, link=slower))


def test_a_run_without_a_link_can_get_one() -> None:
    trace = trained(None)
    controls = controls_of(trace)
    assert recorded_texts(controls)["emulated link"] is False
    (latency,) = (one for one in controls.all if one["label"] == "latency")
    assert latency["needs"] == {"free": 0, "link": 1}, "without a link, the slider has no effect"
    assert moved(controls, latency="10 ms")[0].whole is trace
    view, _, _ = moved(controls, link=True, latency="10 ms")
    assert same_times(view.whole, lab.replay(trace, link=Link(gbit_per_s=1, latency_us=10_000)))


def test_own_cores_are_those_of_replay() -> None:
    trace = trained()
    trace.columns.data["issue_delay_ns"] = trace.columns.data["wait_delay_ns"] = np.arange(len(trace)) * 100_000
    view, _, _ = moved(controls_of(trace), own_cores=True)
    assert same_times(view.whole, lab.replay(trace, own_cores=True))


def test_without_a_move_the_run_is_the_recorded_one_with_its_path() -> None:
    trace = trained()
    controls = controls_of(trace, 1)
    view, said, path = controls.ask(controls.as_given)
    assert view.whole is trace
    assert said[0] == "The median step took 16.0 ms."
    assert "predicted" not in said[0]
    assert path == lab.critical_path(trace, step=1)


def test_a_gain_within_the_spread_is_called_that() -> None:
    trace = in_steps(8, lambda step: ("forward", 10 + step), ("optimizer", 1), ranks=2)
    said = moved(controls_of(trace), speed="× 2", phase="optimizer")[1]
    assert said[1].endswith("The recorded steps differ by more than that.")
    assert moved(controls_of(trained()), speed="× 2")[1][1].endswith(" %).")


def test_a_run_without_steps_is_changed_as_a_whole() -> None:
    trace = made(*([("forward", 0, 10), ("all_reduce", 10, 12, (10, 12), {"nbytes": 8})] for _ in range(2)), end_ms=12)
    said = moved(controls_of(trace), speed="× 2")[1]
    assert said == ("The run takes 7.00 ms, predicted by replay.", "As recorded: 12.0 ms. The change saves 5.00 ms (42 %).")


# Schedules


def test_a_schedule_is_computed_again_for_the_same_work() -> None:
    controls = Schedules(lab.schedule("1f1b", stages=4, micro_batches=8, forward=2e-3, backward=4e-3))
    assert recorded_texts(controls) == {"schedule": "1F1B", "ranks": "4", "micro-batches": "8", "cost per call": "0"}
    view, said, _ = moved(controls, micro_batches="16", cost="0.20 ms", ranks="8")
    expected = lab.schedule("1f1b", stages=8, micro_batches=16, forward=0.7e-3, backward=1.2e-3)
    assert same_times(view.whole, expected)
    step = time_in_words(expected.duration_ns)
    assert said[0] == f"A step takes {step}, bubble {100 * expected.bubble:.0f} %."
    assert said[1].startswith("As given: 66.0 ms. The change saves ")


@pytest.mark.parametrize(("kind", "kept"), [("GPipe", "8"), ("1F1B", "4"), ("interleaved 1F1B, 2 stages per rank", "5.5")])
def test_what_a_rank_keeps_tells_the_schedules_apart(kind: str, kept: str) -> None:
    said = moved(Schedules(lab.schedule("gpipe", stages=4, micro_batches=8)), kind=kind)[1]
    assert f"A rank keeps the activations of at most {kept} of 8 micro-batches." in said[1]


def test_interleaving_takes_the_next_smaller_multiple_of_the_ranks_and_says_so() -> None:
    given = lab.schedule("interleaved 1f1b", stages=12, ranks=4, micro_batches=8, communication=0.5)
    controls = Schedules(given)
    assert controls.ask(controls.as_given)[0].whole is given
    view, said, _ = moved(controls, micro_batches="6")
    expected = lab.schedule("interleaved 1f1b", stages=12, ranks=4, micro_batches=4, forward=2, backward=4, communication=0.5)
    assert same_times(view.whole, expected)
    assert "Interleaving needs a multiple of 4 micro-batches: here 4." in said[1]


# What the page is told


def asked(what: Any, *queries: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The headers of the kernel's answers to a page's queries."""
    explorer, sent = lab.explore(what), []
    monkeypatch.setattr(explorer, "send", lambda content, _: sent.append(json.loads(json.dumps(content))))
    for query in queries:
        explorer._handle_custom_msg(query, [])
    return sent


WHOLE = {"whole": True, "start": 0, "end": 1, "columns": 700, "rank": None}


def test_a_page_that_opens_gets_the_recorded_run_and_the_changed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = trained()
    controls = controls_of(trace)
    move = {"stops": controls.as_given | {"free": 1}}
    recorded, first, changed, recorded_again, later = asked(trace, WHOLE, move, WHOLE, monkeypatch=monkeypatch)
    assert recorded == recorded_again
    assert (first["stops"], first["about"]["changed"]) == (controls.as_given, False)
    assert later == changed, "as the page before has left it"
    assert changed["stops"]["free"] == 1
    about = changed["about"]
    assert (about["changed"], about["zoomed"], about["duration"]) == (True, False, trace.duration_ns - 4 * 5_000_000)
    assert [about["path"][0][2], about["path"][-1][3]] == [0, about["duration"]]


def test_details_after_a_move_are_those_of_the_changed_run(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = trained()
    detail = WHOLE | {"whole": False, "end": trace.duration_ns}
    move = {"stops": controls_of(trace).as_given | {"free": 1}}
    before, _, after = asked(trace, detail, move, detail, monkeypatch=monkeypatch)
    assert (before["end"], after["end"]) == (trace.duration_ns, trace.duration_ns - 4 * 5_000_000)


@pytest.mark.parametrize(
    ("what", "note"),
    [
        (Trace([Span(0, "forward", "compute", 0, 9, device="cuda")], ranks=["rank 0"]), "No controls: runs on a GPU cannot"),
        (Trace(trained().columns, ranks=["rank 0", "rank 1"], dropped=[3, 0]), "No controls: 3 records of this run were lost"),
        (
            lab.schedule("1f1b", stages=2, micro_batches=2, forward=[1, 2]),
            "No controls: the stages of this schedule are not equal",
        ),
    ],
)
def test_a_run_that_cannot_be_replayed_has_no_controls_and_one_line_why(
    what: Trace, note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = asked(what, WHOLE, monkeypatch=monkeypatch)[1]
    assert (told["controls"], told["stops"]) == ([], {})
    assert told["note"].startswith(note)


def test_runs_of_all_kinds_have_controls_or_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    for what in (data_parallel(), master_and_workers(), lab.replay(trained(), free=["all_reduce"])):
        told = asked(what, WHOLE, monkeypatch=monkeypatch)[1]
        assert told["about"]["changed"] is False
        assert told["controls"]
    with pytest.raises(LabError):
        Replays(view_of(Trace(trained().columns, ranks=["rank 0", "rank 1"], dropped=[1, 1]), None, ""))
