"""The timeline of pipelines, of several runs by name, and of ranks with a GPU."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from bar_ends import ends_of
from matplotlib.collections import PolyCollection

from labkit.plots.bars import caption, lanes
from labkit.plots.timeline import timeline
from labkit.plots.view import is_pipeline, rows_of
from labkit.tracing.ideal_pipeline import schedule

from synthetic import ALONE, alone, data_parallel, gpu_and_cpu, made, model_parallel  # isort: skip


def bars_of(ax, style, row):
    (found,) = [c for c in ax.collections if isinstance(c, PolyCollection) and c.get_label() == style]
    corners = [path.vertices for path in found.get_paths()]
    return sorted(tuple(np.round(ends_of(ax, c), 3).tolist()) for c in corners if row <= c[:, 1].min() < row + 1)


def rows(ax):
    return [t.get_text() for t in ax.get_yticklabels()]


def texts(ax):
    return [t.get_text() for t in ax.texts]


def test_a_micro_batch_has_its_number():
    trace = schedule("gpipe", stages=2, micro_batches=12)
    compute, _ = lanes(trace, 0)
    assert [caption(trace, 10, compute, n) for n in (1, 2, 9, 10)] == ["", "10", "10", "10"]
    assert [t for t in texts(timeline(trace)) if t.isdigit()] == [str(i) for i in range(12)] * 4
    trace = schedule("interleaved 1f1b", stages=4, ranks=2, micro_batches=2)
    compute, _ = lanes(trace, 1)  # the number is not the stage's
    assert [caption(trace, 0, compute, n) for n in (4, 40)] == ["0", "forward 0 of stage 1"]


def test_the_title_of_a_pipeline_shows_its_bubble():
    ideal = schedule("1f1b", stages=4, micro_batches=8)
    assert timeline(ideal).get_title(loc="left") == "4 ranks, 33.0 s, bubble 27 %"
    assert "GPipe:  2 ranks, 9.00 s, bubble 33 %" in texts(
        timeline({"GPipe": schedule("gpipe", stages=2, micro_batches=2), "a": ideal})
    )
    for kind, more in itertools.product(("gpipe", "1f1b"), ({}, {"communication": 0.25})):
        one = schedule(kind, stages=4, micro_batches=1, **more)
        assert timeline(one).get_title(loc="left").endswith(f", bubble {100 * one.bubble:.0f} %")
    assert "bubble" not in timeline(schedule("gpipe", stages=1, micro_batches=4)).get_title(loc="left")
    for trace in (model_parallel(), data_parallel(), alone()):
        assert not is_pipeline(trace)
        assert "bubble" not in timeline(trace).get_title(loc="left")


def numbered(later=0, *more):
    """A rank's two numbered micro-batches, and more spans."""
    return [*((f"forward {i}", later + i, later + i + 1) for i in range(2)), *more]


def test_numbers_alone_do_not_make_a_pipeline():
    reduced = ("all_reduce", 2, 3, None)  # gradients over two micro-batches, on one rank or on several
    assert not is_pipeline(made(numbered(0, reduced), numbered(0, reduced)))
    assert is_pipeline(made(numbered(0, reduced, ("send", 1, 2, None, {"peer": 1} | ALONE)), numbered(0, reduced)))
    assert not is_pipeline(made(numbered()))
    assert not is_pipeline(made(numbered(), numbered())), "both work on one number at once"
    apart = made(numbered(0, ("call", 0, 2)), numbered(2, ("call", 2, 4)))
    assert not is_pipeline(apart), "one begins when the other has finished"


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (("backward of NetShard1.forward", "backward of NetShard2.forward"), False),
        (("forward of conv1d", "forward of conv2d"), False),
        (("forward_0", "forward_1"), True),
        (("forward of micro-batch 0", "forward of micro-batch 1"), True),
        (("Forward0", "backward1"), True),
    ],
)
def test_a_number_inside_a_name_is_not_a_micro_batch(names, found):
    sent = ("send", 1, 2, None, {"peer": 1} | ALONE)
    assert is_pipeline(made([(names[0], 0, 1), sent], [(names[1], 1, 2)])) == found


def test_runs_can_be_given_by_their_titles():
    ax = timeline({"one process": alone(), "two stages": model_parallel()})
    headings = [t.get_text() for t in ax.texts if t.get_weight() == "bold"]
    assert headings == ["one process:  rank 0, 4 steps, 63.5 ms", "two stages:  2 ranks, 2 steps, 69.6 ms"]
    assert timeline({"alone": alone()}).get_title(loc="left").startswith("alone  ·  ")
    with pytest.raises(TypeError, match="expected at least one run"):
        timeline({})


def test_a_step_cut_out_of_a_run_is_one_step_though_its_neighbours_reach_into_it():
    trace = data_parallel(steps=3)  # whose ranks begin a step at different times
    assert timeline(trace.step(1)).get_title(loc="left") == "4 ranks, 22.8 ms"


def test_a_rank_with_gpu_and_cpu_has_a_row_for_each():
    ax = timeline(gpu_and_cpu())
    assert rows(ax) == ["rank 0 GPU", "CPU", "rank 1 GPU", "CPU"]
    assert bars_of(ax, "forward", 0) == [(3, 9), (33, 39)]
    assert bars_of(ax, "backward", 0) == [(9, 21), (39, 51)]  # data was loaded from 10 to 13
    assert bars_of(ax, "data", 1) == [(0.5, 2.5), (10, 13), (30.5, 32.5), (40, 43)]
    assert bars_of(ax, "hidden", 0) == [(12, 21), (42, 51)]  # after the GPU's own work
    assert bars_of(ax, "exposed", 1) == [(25, 28), (55, 58)]  # from the arrival of rank 1
    assert bars_of(ax, "waiting", 1) == [(24, 25), (54, 55)]
    assert bars_of(ax, "forward", 1) == bars_of(ax, "data", 0) == []


def test_a_rank_with_only_cpu_calls_has_one_row():
    call = ("call", 0, 6)
    trace = made([("forward", 1, 5, {"device": "cuda"}), call], [("forward", 1, 5), call])
    assert [row.name for row in rows_of(trace)] == ["rank 0", "rank 1"]


def test_the_strip_has_all_rows():
    (strip,) = timeline(gpu_and_cpu(20)).child_axes
    assert len(strip.images) == 8
    assert strip.get_ylim() == (4, 0)
