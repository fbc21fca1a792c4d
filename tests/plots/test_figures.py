"""The figures: the position and style of every bar, and that the numbers add up. No processes, no clock."""

import functools
import random
import subprocess
import sys

import matplotlib.pyplot as plt
import numpy as np
import pytest
import synthetic
from bar_ends import ends_of
from matplotlib.collections import PolyCollection
from matplotlib.legend import Legend

from labkit.errors.exceptions import LabError
from labkit.plots.bars import (
    COMMUNICATION_LANE,
    COMPUTE_LANE,
    STYLES,
    Bars,
    blend,
    caption,
    captioned,
    coverage,
    lanes,
    style_of,
)
from labkit.plots.breakdown import breakdown, compare
from labkit.plots.memory import memory
from labkit.plots.scaling import scaling
from labkit.plots.timeline import timeline
from labkit.plots.traffic import traffic
from labkit.plots.view import view_of
from labkit.plots.what_helps import what_helps
from labkit.recording.schema import READING, UNKNOWN, Span
from labkit.tracing import step_times
from labkit.tracing.ideal_pipeline import schedule
from labkit.tracing.replaying.replay import replay
from labkit.tracing.step_times import median_step
from labkit.tracing.trace import Trace

from synthetic import MS, Book, alone, data_parallel, in_steps, lasting, many, model_parallel, run_of, sharded  # isort: skip


COMPUTING = ("data", "forward", "backward", "optimizer", "compute", "unlabelled")  # the styles of the compute lane


def drawn(ax, style):
    """The bars of one style on the Axes, as (left, right, top, bottom), ascending."""
    found = [c for c in ax.collections if isinstance(c, PolyCollection) and c.get_label() == style]
    assert len(found) <= 1
    corners = [path.vertices for c in found for path in c.get_paths()]
    return sorted((*np.round([*ends_of(ax, p), p[:, 1].min(), p[:, 1].max()], 6).tolist(),) for p in corners)


def spans_of(ax, style, row=0):
    """Left and right ends of the bars of one style in one row; asserts that they are in their lane."""
    top, height = COMPUTE_LANE if style in COMPUTING else COMMUNICATION_LANE
    bars = [bar for bar in drawn(ax, style) if row <= bar[2] < row + 1]
    assert all(bar[2:] == pytest.approx((row + top, row + top + height)) for bar in bars)
    return [bar[:2] for bar in bars]


def texts_of(ax):
    return {t.get_text() for t in ax.texts}


def title_of(ax):
    return ax.get_title(loc="left")


def bold_in(ax):
    return [t.get_text() for t in ax.texts if t.get_weight() == "bold"]


def rows_of(ax):
    return [t.get_text() for t in ax.get_yticklabels()]


made = functools.partial(synthetic.made, end_ms=20)


# Geometry


def test_a_span_is_a_bar_in_the_compute_lane_of_its_rank():
    ax = timeline(made([("forward", 2, 5)], [("backward", 4, 10)]))
    assert spans_of(ax, "forward", 0) == [(2, 5)]
    assert spans_of(ax, "backward", 1) == [(4, 10)]
    assert not spans_of(ax, "forward", 1)
    assert rows_of(ax) == ["rank 0", "rank 1"]
    assert ax.get_xlim() == (0, 20)


OVERLAPS = {  # one rank's spans (with a wait: communication), and the bars of each style
    "nested spans show the innermost, and the outer one continues after it": (
        [("epoch", 0, 20), ("forward", 2, 8), ("data", 4, 5)],
        {"compute": [(0, 2), (8, 20)], "forward": [(2, 4), (5, 8)], "data": [(4, 5)]},
    ),
    "of spans that begin together, the shorter is the inner one": (
        [("forward", 2, 4), ("epoch", 2, 8)],
        {"forward": [(2, 4)], "compute": [(4, 8)]},
    ),
    "of spans that overlap without nesting, the one that ends first is shown": (
        [("forward", 0, 6), ("backward", 4, 10), ("data", 12, 13)],
        {"forward": [(0, 6)], "backward": [(6, 10)], "data": [(12, 13)]},
    ),
    "a call on another thread that waits for the lock does not hide a computing one": (
        [("serve step", 0, 14), ("forward", 1, 13), ("serve step", 5, 19), ("forward", 15, 18)],
        {"forward": [(1, 13), (15, 18)], "compute": [(0, 1), (13, 14), (14, 15), (18, 19)]},
    ),
    "communication is hidden by compute, and exposed while the rank is blocked, which is not computing": (
        [("backward", 0, 12), ("all_reduce", 4, 12, (9, 12))],
        {"backward": [(0, 9)], "hidden": [(4, 9)], "exposed": [(9, 12)]},
    ),
    "the rest of the call is pale, and idle is blank": (
        [("call", 1, 15), ("forward", 2, 5), ("barrier", 6, 8, (6, 8))],
        {"unlabelled": [(1, 2), (5, 6), (8, 15)], "forward": [(2, 5)], "exposed": [(6, 8)]},
    ),
    "without spans, the call still hides communication": (
        [("call", 0, 20), ("all_reduce", 4, 12, (9, 12))],
        {"unlabelled": [(0, 9), (12, 20)], "hidden": [(4, 9)], "exposed": [(9, 12)]},
    ),
}


@pytest.mark.parametrize(("spans", "bars"), OVERLAPS.values(), ids=OVERLAPS)
def test_overlapping_spans_become_disjoint_bars(spans, bars):
    ax = timeline(made(spans))
    assert {style: spans_of(ax, style) for style in STYLES if drawn(ax, style)} == bars
    assert "train" not in texts_of(ax)  # the function's name would label unnamed time


def test_waiting_lasts_until_the_last_rank_has_arrived():
    first = [("forward", 0, 3), ("backward", 3, 5), ("all_reduce", 3, 10, (5, 10))]
    ax = timeline(made(first, [("forward", 0, 8), ("all_reduce", 8, 10, (8, 10))]))
    found = {style: [spans_of(ax, style, row) for row in (0, 1)] for style in ("issued", "waiting", "exposed")}
    assert found == {"issued": [[(3, 5)], []], "waiting": [[(5, 8)], []], "exposed": [[(8, 10)], [(8, 10)]]}


def test_an_operation_that_never_completed_has_waited():
    spans = [Span(0, "recv", "communication", 2 * MS, 20 * MS, 2 * MS, 20 * MS, done=False, group="1→0", match=1)]
    ax = timeline(Trace(spans, ranks=["rank 0"], start_ns=0, end_ns=20 * MS))
    assert spans_of(ax, "waiting") == [(2, 20)]
    assert not spans_of(ax, "exposed")


def step_lines(ax):
    return [segment[0, 0] for c in ax.collections if c.get_label() == "step" for segment in c.get_segments()]


def test_steps_are_bounded_by_thin_lines_and_numbered():
    ax = timeline(made([("forward", 0, 20), ("step", 0, 10), ("step", 10, 20)]))
    assert step_lines(ax) == [0, 10, 20]
    assert {"step 0", "step 1"} <= texts_of(ax)


@pytest.mark.parametrize(
    ("lengths", "shown_from", "places"),
    [
        ([10, 4], 0, (5, 15)),  # above the first rank's own steps: rank 1 finishes long before rank 0
        ([10], 4, (3, 11)),  # of a step that is partly shown, above that part
        ([0, 10], 0, (5, 15)),  # the first rank has no steps
    ],
)
def test_step_numbers_are_above_the_steps(lengths, shown_from, places):
    steps = [[("step", n * length, (n + 1) * length) for n in (0, 1) if length] for length in lengths]
    trace = made([("serve", 0, 20), *steps[0]], *steps[1:])
    found = {t.get_text(): round(t.get_position()[0], 6) for t in timeline(trace.between(shown_from * MS, 20 * MS)).texts}
    assert (found["step 0"], found["step 1"]) == places


def test_step_lines_stay_inside_the_time_shown():
    """Rank 1 is late: its step 1 continues after all have ended step 0."""
    late = [[(name, at + 10 * n, at + 10 * n + 10) for n in (0, 1) for name in ("step", "forward")] for at in (0, 4)]
    run = made(*late, end_ms=24)
    assert 0 < max(step_lines(timeline(run, run, step=range(1)))) <= 14


@pytest.mark.parametrize("seed", range(12))
def test_the_bars_add_up_to_the_shares(seed):
    rng = random.Random(seed)
    b = Book()
    for rank in range(2):
        b.whole(rank, "call", 0, 95)
        for _ in range(rng.choice([0, 5, 25])):
            start = rng.uniform(0, 90)
            b.compute(rank, rng.choice(["forward", "data", "x"]), start, start + rng.uniform(0, 20))
        for match in range(rng.choice([0, 4, 12])):
            start = rng.uniform(0, 80)
            wait = start + rng.uniform(0, 5)
            end = wait + rng.uniform(0, 10)
            b.travel(rank, "all_reduce", start, end, wait=(wait, end) if rng.random() < 0.7 else None, group="g", match=match)
    trace = b.trace(2, start_ns=3 * MS, end_ns=90 * MS)
    for share in trace.shares():
        compute, communication = lanes(trace, share.rank)
        for bars in (compute, communication):
            assert (bars.end_ns > bars.start_ns).all()
            assert (bars.start_ns[1:] >= bars.end_ns[:-1]).all()
        total = {
            style: int((bars.end_ns - bars.start_ns).sum())
            for style in STYLES
            for bars in (compute.of(style), communication.of(style))
            if len(bars)
        }
        labelled = sum(total.get(s, 0) for s in ("data", "forward", "backward", "optimizer", "compute"))
        assert (labelled or total.get("unlabelled", 0)) == share.compute_ns + share.data_ns
        assert total.get("exposed", 0) == share.exposed_ns
        assert total.get("hidden", 0) == share.overlap_ns
        assert total.get("waiting", 0) == share.waiting_ns


# Looks


def test_one_colour_per_kind():
    names = ("data", "forward", "backward", "optimizer", "tokenize")
    ax = timeline(made([*((name, 2 * i, 2 * i + 1) for i, name in enumerate(names)), ("send", 12, 14, (12, 14))]))
    for style in ("data", "forward", "backward", "optimizer", "compute", "exposed"):
        (bars,) = [c for c in ax.collections if c.get_label() == style]
        assert bars.get_facecolor()[0].tolist() == pytest.approx(STYLES[style].rgba)
    opaque = [s.colour for s in STYLES.values() if s.alpha == 1]
    assert len(set(opaque)) == len(opaque) == 7
    ax = timeline(data_parallel())
    hatches = {c.get_label(): c.get_hatch() for c in ax.collections if isinstance(c, PolyCollection) and c.get_hatch()}
    assert hatches == {"waiting": "//////", "issued": "...."}


@pytest.mark.parametrize(
    ("name", "style"),
    [
        ("forward", "forward"),
        ("forward 3", "forward"),
        ("Backward_stage1", "backward"),
        ("optimizer.step", "optimizer"),
        ("serve Decoder.forward", "forward"),
        ("serve optimizer.step", "compute"),
        ("dataset", "compute"),
        ("", "compute"),
        ("μ", "compute"),
    ],
)
def test_a_span_is_coloured_by_the_first_word_of_its_name(name, style):
    assert style_of(name) == style


def test_pieces_of_one_span_around_a_sliver_have_one_caption() -> None:
    exposed, hidden = (list(STYLES).index(style) for style in ("exposed", "hidden"))
    start, end = np.array([0, 100, 103, 400, 1000]), np.array([100, 103, 400, 410, 1100])
    bars = Bars(start, end, np.array([exposed, hidden, exposed, hidden, exposed], np.uint8), np.array([7, 7, 7, 8, 7]))
    assert captioned(bars, 1.0).tolist() == [False, True, True, True, True]
    assert captioned(bars, 3.0).all()  # here 3 ns are 9 px


REDUCED = {"nbytes": 4_190_000, "group": ""}
OF_A_MESH = {"nbytes": 4_190_000, "group": "group 3 mesh_tp of ranks 0,1"}


@pytest.mark.parametrize(
    ("name", "more", "captions"),
    [
        ("all_reduce", REDUCED, {5: "", 9: "all_redu…", 10: "all_reduce", 17: "all_reduce", 18: "all_reduce 4.19 MB"}),
        (
            "all_reduce",
            OF_A_MESH,
            {1: "", 2: "tp", 12: "tp", 13: "all_reduce tp", 20: "all_reduce tp", 21: "all_reduce tp 4.19 MB"},
        ),
        ("前向传播第一层", {}, {8: "", 9: "前向传播…", 13: "前向传播第一…", 14: "前向传播第一层"}),  # these are as wide as two
    ],
    ids=["bytes", "the axis of a mesh", "wide characters"],
)
def test_a_bar_is_labelled_if_there_is_room(name, more, captions):
    trace = made([("forward", 0, 4), (name, 5, 9, None, more)])
    compute, communication = lanes(trace, 0)
    assert {n: caption(trace, 0, communication, n) for n in captions} == captions
    assert caption(trace, 0, compute, 7) == "forward"
    assert texts_of(timeline(trace)) >= {"forward", captions[max(captions)]}


def test_texts_are_left_out_where_rows_are_too_low():
    assert "forward" not in texts_of(timeline(data_parallel(24, 1)))


def legend_of(ax):
    return [t.get_text() for a in ax.get_children() if isinstance(a, Legend) for t in a.get_texts()]


def test_the_legend_explains_only_what_is_shown():
    compute = ["waiting for data", "forward", "backward", "optimizer", "in the function, in no span", "step boundary"]
    assert legend_of(timeline(alone())) == compute
    assert "waiting for another rank" in legend_of(timeline(model_parallel()))
    assert "hidden behind compute" not in legend_of(timeline(model_parallel()))
    nearly = made([("call", 0, 20), ("forward", 0, 10), ("forward", 10.001, 20)])
    assert legend_of(timeline(nearly)) == ["forward"], "a microsecond of the function is in no span"


@pytest.mark.parametrize(("length_ms", "unit"), [(0.0012, "ns"), (0.9, "µs"), (900, "ms"), (5000, "s")])
def test_the_unit_fits_the_duration(length_ms, unit):
    ax = timeline(synthetic.made([("forward", 0, length_ms)]))
    assert f"[{unit}]" in ax.get_xlabel()
    assert ax.get_xlim()[1] == pytest.approx(length_ms * {"ns": 1e6, "µs": 1e3, "ms": 1, "s": 1e-3}[unit])


def test_the_style_does_not_leak_out_of_the_figure(tmp_path):
    before = dict(plt.rcParams)
    timeline(data_parallel()).figure.savefig(tmp_path / "a.png")
    assert dict(plt.rcParams) == before


def test_given_axes_are_used():
    figure, axes = plt.subplots(2)
    assert timeline(alone(), ax=axes[1]) is axes[1]
    assert breakdown(alone(), ax=axes[0]) is axes[0]
    assert scaling({1: alone(), 2: alone()}, ax=axes[0]) is axes[0]
    assert compare(a=alone(), b=alone(), ax=axes[1]) is axes[1]
    assert what_helps(data_parallel(2), ax=axes[0]) is axes[0]
    assert memory(sharded(), ax=axes[1]) is axes[1]
    figure.canvas.draw()


# Steps


def test_the_line_at_the_end_of_the_last_step_is_as_dark_as_the_others():
    figure = timeline(schedule("gpipe", stages=2, micro_batches=1)).figure
    figure.canvas.draw()
    picture = np.asarray(figure.canvas.buffer_rgba())[..., :3]
    box = figure.axes[0].get_window_extent()
    row = picture.shape[0] - int(box.y0 + 0.97 * box.height)  # in the first row, near its upper edge: above the bars
    ends = [picture[row, int(x) - 3 : int(x) + 4].sum(axis=1).min() for x in (box.x0, box.x1)]
    assert max(ends) < 600  # INK is 360, the page 765
    clipped = {lines.get_clip_on() for lines in figure.axes[0].collections}
    assert clipped == {True}


def test_the_step_shown_of_many_is_one_without_labkits_own_reading():
    reading = lambda step: (READING, 2 if step != 3 else 0)  # noqa: E731
    assert view_of(in_steps(15, ("", 2), reading, ("", 7), ranks=1), None, "").chosen == range(3, 4)
    # If every step has one: the median of all.
    assert view_of(in_steps(15, ("", 2), (READING, 2), ("", 6), ranks=1), None, "").chosen == range(7, 8)


def test_a_run_of_many_steps_shows_one_of_median_length_below_the_whole():
    trace = data_parallel(steps=40)
    ax = timeline(trace)
    bounds = trace.step_bounds()
    lengths = np.diff(bounds[:, 1], prepend=bounds[0, 0])
    number = int(np.argsort(lengths, kind="stable")[20])
    window_ns = bounds[number, 1] - bounds[number, 0]
    assert f"step {number} ({lengths[number] / MS:.1f} ms) of the steps 0 to 39" in title_of(ax)
    assert ax.get_xlim()[1] == pytest.approx(window_ns / MS)
    (strip,) = ax.child_axes
    assert len(strip.images) == 8  # two lanes for each of four ranks
    (mark,) = strip.patches
    assert mark.get_x() == pytest.approx((bounds[number, 0] - trace.start_ns) / trace.duration_ns)
    assert mark.get_width() == pytest.approx(window_ns / trace.duration_ns)


@pytest.mark.parametrize(("step", "first", "last"), [(1, 1, 1), (-1, 4, 4), (range(1, 3), 1, 2)])
def test_steps_can_be_chosen(step, first, last):
    trace = data_parallel(steps=5)
    bounds = trace.step_bounds() / MS
    ax = timeline(trace, step=step)
    assert ax.get_xlim()[1] == pytest.approx(bounds[last, 1] - bounds[first, 0])
    assert ("steps 1 to 2 " in title_of(ax)) == (first != last)


def test_all_steps_few_steps_and_the_median_step():
    assert not timeline(data_parallel(steps=40), step="all").child_axes
    assert not timeline(data_parallel(steps=12)).child_axes, "few steps are shown whole"
    trace = data_parallel(steps=5)
    assert view_of(trace, "median", "").chosen == range(median_step(trace), median_step(trace) + 1)


@pytest.mark.parametrize(("steps", "stopped", "shown"), [(40, False, "median"), (40, True, "end"), (12, True, "all")])
def test_a_long_run_that_was_stopped_is_shown_from_the_last_whole_step_to_its_end(steps, stopped, shown):
    made = data_parallel(steps=steps)
    calls = [Span(rank, "train", "call", made.start_ns, made.end_ns + 300 * MS, done=not stopped) for rank in (0, 1)]
    trace = Trace([*made, *calls], ranks=made.ranks)
    default, chosen = view_of(trace, None, ""), view_of(trace, shown, "")
    assert (default.chosen, default.to_end, default.shown.duration_ns) == (chosen.chosen, chosen.to_end, chosen.shown.duration_ns)
    end = view_of(trace, "end", "")
    assert (end.shown.start_ns, end.shown.end_ns) == (trace.step_bounds()[-1, 0], trace.end_ns)
    assert end.bounds_of_ranks()[:, 1].tolist() == [trace.end_ns] * len(trace.ranks)
    if shown == "end":
        ax = timeline(trace)
        assert "the end, from step 39 on (" in title_of(ax)
        assert len(ax.child_axes) == 1, "the strip"


WRONG_STEP = r"expected a step number, a range such as range\(3, 6\), 'median', 'end' or 'all'"


@pytest.mark.parametrize(
    ("trace", "steps", "error", "said"),
    [
        (data_parallel(steps=3), (3, -4, range(2, 5)), LabError, "has the steps 0 to 2"),
        (many(40), (0, "median", "end"), LabError, r"no steps; wrap its loop: `for batch in lab.steps\(batches\):`"),
        (data_parallel(steps=3), ("last", 1.5, range(0), range(0, 3, 2)), TypeError, WRONG_STEP),
    ],
)
def test_a_missing_step_is_an_error_that_lists_the_steps(trace, steps, error, said):
    for step in steps:
        with pytest.raises(error, match=said):
            timeline(trace, step=step)


# Several runs


def test_several_runs_are_stacked_on_one_scale():
    class Run:
        trace = model_parallel()

    ax = timeline(alone(), Run(), labels=["one process", "two stages"])
    assert ax.get_xlim()[1] == pytest.approx(69.6)  # of the longer one
    assert rows_of(ax) == ["rank 0", "rank 0", "rank 1"]
    assert bold_in(ax) == ["one process:  rank 0, 4 steps, 63.5 ms", "two stages:  2 ranks, 2 steps, 69.6 ms"]
    assert min(bar[0] for bar in drawn(ax, "data")) == 0  # each begins at its own start


# Many spans


@pytest.mark.slow
def test_a_million_spans_become_pixels():
    trace = many(1_000_000)
    ax = timeline(trace)
    assert len(ax.images) == 8
    assert not [c for c in ax.collections if isinstance(c, PolyCollection)]
    assert "their colours mix" in ax.get_xlabel()
    pixels = ax.images[0].get_array()
    assert pixels.shape[1] < 2500
    # Of every 30 µs, 9 are forward and 9 backward: the colour is halfway between, and covers 60 % of the page.
    middle = (np.array(STYLES["forward"].rgba[:3]) + STYLES["backward"].rgba[:3]) / 2
    assert pixels[0].mean(axis=0).tolist() == pytest.approx([*middle, 0.6], abs=0.01)
    ax.figure.canvas.draw()


def test_coverage_is_exact():
    bars = Bars(np.array([0, 10, 25]), np.array([5, 25, 40]), np.array([1, 2, 1], np.uint8), np.arange(3))
    covered = coverage(bars, np.array([0, 4, 12, 30, 50]))
    assert covered[1].tolist() == [4, 1, 5, 10]
    assert covered[2].tolist() == [0, 2, 13, 0]
    assert covered.sum() == 35


def test_blended_colours_keep_their_shares():
    covered = np.zeros((len(STYLES), 2))
    covered[list(STYLES).index("forward"), 0] = 10
    covered[list(STYLES).index("waiting"), 1] = 5
    mixed = blend(covered, 10)
    assert mixed[0].tolist() == pytest.approx(STYLES["forward"].rgba)
    assert mixed[1].tolist() == pytest.approx([*STYLES["waiting"].rgba[:3], STYLES["waiting"].alpha / 2])


# Where the time went


def parts_of(ax):
    """Per part, the widths of its bars from top to bottom."""
    shown = [container for container in ax.containers if not container.get_label().startswith("_")]
    return {container.get_label(): [patch.get_width() for patch in container] for container in shown}


def test_breakdown_of_a_hand_worked_case():
    first = [("backward", 0, 12), ("all_reduce", 4, 14, (9, 14))]
    ax = breakdown(made(first, [("backward", 0, 11), ("all_reduce", 11, 14, (11, 14))]))
    parts = parts_of(ax)
    assert parts["compute"] == pytest.approx([45, 55, 50])
    assert parts["exposed communication"] == pytest.approx([15, 15, 15])
    assert parts["waiting"] == pytest.approx([10, 0, 5])
    assert rows_of(ax) == ["rank 0", "rank 1", "all ranks"]
    assert {"45 %", "55 %", "50 %", "10 %", "30 %"} <= texts_of(ax)
    assert ax.get_xlabel() == "share of the time [%]"


def test_breakdown_shows_what_hides_communication():
    parts = parts_of(breakdown(made([("backward", 0, 12), ("all_reduce", 4, 12, None)])))
    assert parts["compute"] == pytest.approx([20, 20])
    assert parts["compute that hides communication"] == pytest.approx([40, 40])
    assert "step 2 " in title_of(breakdown(data_parallel(), step=2))


@pytest.mark.parametrize("trace", [data_parallel(), model_parallel(), alone()], ids=["data", "model", "alone"])
def test_the_parts_add_up_to_one_hundred(trace):
    ax = breakdown(trace)
    outlines = [c for c in ax.containers if c.get_label().startswith("_") and c[0].get_facecolor()[3] == 0]
    assert len(outlines) == 7
    totals = np.sum([[patch.get_width() for patch in container] for container in outlines], axis=0)
    assert totals == pytest.approx(np.full(len(trace.ranks) + 1, 100))
    lefts = np.array([[patch.get_x() for patch in container] for container in outlines])
    assert (np.diff(lefts, axis=0) >= -1e-9).all()


def test_the_time_in_which_a_machine_does_not_answer_is_a_part_of_its_own():
    spans = [Span(0, "forward", "compute", 0, 5 * MS), Span(0, UNKNOWN, "call", 5 * MS, 20 * MS, done=False)]
    trace = Trace(spans, ranks=["rank 0"])
    assert parts_of(breakdown(trace))["unknown"] == pytest.approx([75, 75])
    assert "unknown: its machine does not answer" in legend_of(timeline(trace))


# Scaling


def lines_of(ax):
    return {line.get_label().split(":")[0].split(",")[0]: np.array(line.get_xydata()) for line in ax.get_lines()}


def test_strong_scaling_compares_times():
    ax = scaling({1: lasting(8), 4: lasting(2.5), 2: lasting(5)})
    lines = lines_of(ax)
    assert set(lines) == {"ideal", "measured"}
    assert lines["measured"].tolist() == pytest.approx(np.array([[1, 1], [2, 1.6], [4, 3.2]]))
    assert lines["ideal"].tolist() == pytest.approx(np.array([[1, 1], [2, 2], [4, 4]]))
    assert [t.get_text() for t in ax.texts] == ["100 %", "80 %", "80 %"]
    assert ax.get_ylabel() == "speed-up over 1 rank"
    assert "the same work (strong scaling)" in title_of(ax)
    ax = scaling({1: lasting(64), 16: lasting(5), 64: lasting(2)})
    assert ax.get_xscale() == ax.get_yscale() == "log"
    assert [t.get_text() for t in ax.get_xticklabels()] == ["1", "16", "64"]


def test_scaling_says_which_runs_were_simulated():
    simulated = lasting(5)
    simulated.simulated = 1024
    for first, said in ((simulated, "simulated"), (lasting(8), "measured and simulated")):
        labels = [line.get_label() for line in scaling({1: first, 1024: simulated}).get_lines()]
        assert f"{said}, with its efficiency" in labels


def test_a_prediction_is_relative_to_the_run_with_the_fewest_ranks():
    ax = scaling({1: lasting(8), 2: lasting(5)}, predicted={1: 7.5, 2: 4, 4: 2.5})
    lines = lines_of(ax)
    assert lines["predicted"].tolist() == pytest.approx(np.array([[1, 8 / 7.5], [2, 2], [4, 3.2]]))
    assert lines["ideal"].tolist() == pytest.approx(np.array([[1, 1], [2, 2], [4, 4]]))
    assert lines["measured"].tolist() == pytest.approx(np.array([[1, 1], [2, 1.6]]))
    assert ax.get_ylim()[1] > 4


@pytest.mark.parametrize(
    ("runs", "predicted", "error", "said"),
    [
        ({1: 1}, None, LabError, "1 run given, at least two are needed"),
        ([1, 2], None, TypeError, "expected runs by number of ranks"),
        ({0: 1, 1: 1}, None, ValueError, "whole numbers from 1"),
        ({1: 2, 2: 1}, {0: 1.0}, ValueError, r"predictions for \[0\] ranks; expected whole numbers from 1"),
        ({1: 2, 2: 1}, {1: 0}, ValueError, "expected seconds, more than 0"),
        ({1: 2, 2: 1}, [1, 2], TypeError, "expected predictions by number of ranks"),
    ],
)
def test_scaling_says_what_it_expects(runs, predicted, error, said):
    runs = {n: lasting(s) for n, s in runs.items()} if isinstance(runs, dict) else runs
    with pytest.raises(error, match=said):
        scaling(runs, predicted=predicted)


# Several runs compared


def test_compare_of_a_hand_worked_case():
    exposed = made([("backward", 0, 12), ("all_reduce", 12, 20, (12, 20))])
    ax = compare(naive=exposed, overlapped=made([("backward", 0, 12), ("all_reduce", 5, 13, None)], end_ms=14))
    parts = parts_of(ax)
    assert parts["compute"] == pytest.approx([12, 5])
    assert parts["compute that hides communication"] == pytest.approx([0, 7])
    assert parts["exposed communication"] == pytest.approx([8, 1])
    assert ax.get_xlabel() == "time, mean of the ranks [ms]"
    assert rows_of(ax) == ["naive\n1 rank", "overlapped\n1 rank"]
    assert bold_in(ax) == ["20.0 ms", "14.0 ms, 1.43 × as fast"]
    two = made([("forward", 0, 20)], [("forward", 0, 10)])
    assert parts_of(compare(a=two, b=two))["compute"] == pytest.approx([15, 15]), "the mean of the ranks"


@pytest.mark.parametrize(
    ("second", "words"), [(10, "10.0 s, as long"), (15, "15.0 s, 1.50 × as long"), (4, "4.00 s, 2.50 × as fast")]
)
def test_compare_says_how_much_faster_or_slower(second, words):
    assert bold_in(compare({"1 rank": lasting(10), "2 ranks": lasting(second)})) == ["10.0 s", words]


def test_compare_says_what_is_too_close_to_call_and_that_the_machine_was_busy(monkeypatch):
    monkeypatch.setattr(step_times, "usable_cores", lambda: 2)

    def said(*runs):
        ax = compare({str(number): run for number, run in enumerate(runs)})
        return [words.split(", ")[-1] for words in bold_in(ax)][1:], ax.get_xlabel()

    noisy, clear = run_of(70, 100, 140), run_of(190, 200, 210)
    assert said(noisy, run_of(80, 110, 130), clear)[0] == ["too close to call", "1.81 × as long"]
    assert said([run_of(100), run_of(300)], [run_of(200)])[0] == ["too close to call"]
    assert said([run_of(100), run_of(110)], [run_of(300), run_of(310)])[0] == ["2.48 × as long"]
    assert "busy" not in said(noisy, clear)[1]
    assert said(noisy, run_of(190, load=6.2))[1].endswith("This machine was busy (load 6 on 2 cores): measure again")


def test_compare_of_the_same_steps_of_each():
    ax = compare(slow=data_parallel(steps=5), fast=data_parallel(steps=3), step=range(1, 3))
    assert rows_of(ax) == ["slow\n4 ranks, steps 1 to 2", "fast\n4 ranks, steps 1 to 2"]
    with pytest.raises(LabError, match="has the steps 0 to 2"):
        compare(slow=data_parallel(steps=5), fast=data_parallel(steps=3), step=4)


@pytest.mark.parametrize("step", ["all", 1])
def test_figures_of_a_replayed_run_say_that_it_was_not_run(step):
    run = data_parallel()
    predicted = replay(run, faster={"backward": 2})
    for trace, said in ((run, 0), (predicted, 3)):
        figures = [draw(trace, step=step).figure for draw in (timeline, breakdown, traffic)]
        assert sum("replayed" in title_of(ax) for figure in figures for ax in figure.axes) == said
        assert ["replayed" in label for label in rows_of(compare(a=run, b=trace, step=step))] == [False, bool(said)]


# What can go wrong


@pytest.mark.parametrize("figure", [timeline, breakdown, traffic, memory, what_helps])
def test_an_object_that_is_not_a_run_is_refused(figure):
    with pytest.raises(TypeError, match=r"expected a run, as group\.run and group\.watch return it, or a trace"):
        figure(3)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: timeline(), TypeError, "expected at least one run"),
        (lambda: timeline(alone(), labels=["a", "b"]), ValueError, "expected one for each of the 1 runs"),
        (lambda: compare(naive=alone()), LabError, "1 run given, at least two are needed"),
        (lambda: compare([alone(), alone()]), TypeError, r"expected runs by name, as in compare\(naive=a, overlapped=b\)"),
        (lambda: compare(a=alone(), b=3), TypeError, "expected a run"),
    ],
)
def test_wrong_runs_are_refused(call, error, said):
    with pytest.raises(error, match=said):
        call()


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for figure in (timeline, breakdown, traffic, lambda t: compare(a=t, b=t), lambda t: scaling({1: t, 2: t})):
        with pytest.raises(LabError, match="matplotlib is not installed; the extra 'plot' brings it"):
            figure(alone())


@pytest.mark.processes
def test_importing_the_figures_does_not_import_matplotlib():
    code = "import labkit.plots.scaling, labkit.plots.live.live, sys; assert 'matplotlib' not in sys.modules, 'imported'"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_style_sheet_is_installed_and_works_in_a_lesson():
    from matplotlib_inline.backend_inline import _fetch_figure_metadata

    with plt.style.context("labkit.plots.labkit"):
        figure = plt.figure()
        assert figure.get_size_inches().tolist() == [9.0, 3.6]
        assert figure.get_facecolor()[3] == 0  # the page of either theme
        figure.subplots()
        assert _fetch_figure_metadata(figure) is None  # otherwise Jupyter puts a white page behind it
        plt.close(figure)
