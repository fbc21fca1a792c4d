"""The live picture: what it remembers, what it shows, what it leaves behind. Fake clocks, no ranks."""

import base64
import io
import itertools
import re
import sys
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from PIL import Image

from labkit.errors.units import time_in_words
from labkit.launch.resource_usage import Load
from labkit.plots import timeline as gantt
from labkit.plots.bars import COMPUTE_LANE, STYLES, coverage, lanes
from labkit.plots.live import live as live_module
from labkit.plots.live import recent as recent_module
from labkit.plots.live.curves import Curves, draw_below
from labkit.plots.live.drawing import CURVE, HEAD, STILL, svg
from labkit.plots.live.drawing import page as html_of
from labkit.plots.live.live import Live
from labkit.plots.live.recent import Progress, Recent
from labkit.recording.events import Scalar
from labkit.recording.schema import ENDED, MEMORY, STEPS_IN_ALL, Pending, Span
from labkit.tracing.trace import Trace

from synthetic import MS, Book, alone, data_parallel, feed, in_steps, made, many, model_parallel  # isort: skip

SVG = "{http://www.w3.org/2000/svg}"


class Album:
    """A screen that keeps its frames."""

    def __init__(self):
        self.frames, self.pages, self.alt_text, self.left = [], [], None, None

    def begin(self, alt_text):
        self.alt_text = alt_text

    def show(self, frame):
        self.frames.append(frame)
        self.pages.append(svg(frame, "labkit-x"))

    def end(self, trace, title):
        self.left = (trace, title)


def begun(ranks=("rank 0", "rank 1"), title="f on 2 ranks", start_ns=0, *, clock=lambda: 0, called=None):
    """An album and the live picture that it keeps."""
    album = Album()
    live = Live(album, clock)
    live.begin(ranks, title, start_ns, called)
    return album, live


def watched(trace, moments, *, title="train on 4 ranks", clock=lambda: 0):
    """An album of the run that left this trace, with an update at each moment (ms)."""
    album, live = begun(trace.ranks, title, trace.start_ns, clock=clock)
    for now_ns, new, pending in feed(trace, moments):
        live.update(now_ns, new, pending)
        assert not live._failed
    return album


def one_frame(trace=None, operations=((), ()), *, at_ms=400):
    """The page of a run on two ranks after one update."""
    album, live = begun()
    live.update(at_ms * MS, part() if trace is None else trace, operations)
    assert not live._failed
    return album.pages[-1]


def drawing(page):
    return ET.fromstring(page)


def texts(page):
    return [t.text for t in drawing(page).iter(f"{SVG}text")]


def boxes(page, style, *, of_legend=False):
    """The rectangles of one style, as (x, y, width, height); the legend has the last one."""
    look = STYLES[style]
    fill = f"url(#labkit-x-{style})" if look.hatch else look.colour
    found = []
    for path in drawing(page).iter(f"{SVG}path"):
        if path.get("fill") == fill and float(path.get("fill-opacity", 1)) == pytest.approx(1 if look.hatch else look.alpha):
            for box in re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)h", path.get("d")):
                found.append(tuple(map(float, box)))
    return [b for b in found if (b[2:] == (14, 9)) == of_legend]


def pending(name, start_ms, wait_ms=0, **more):
    values = {"nbytes": 0, "peer": -1, "group": "", "match": 0, "line": ""} | more
    return Pending(name=name, start_ns=int(start_ms * MS), wait_start_ns=int(wait_ms * MS), **values)


def part(*spans, scalars=(), ranks=2):
    return Trace(spans, scalars, ranks=[f"rank {i}" for i in range(ranks)])


def step(rank, start_ms, end_ms):
    return Span(rank, "step", "step", int(start_ms * MS), int(end_ms * MS))


# Frames


def crosses(page):
    """The places of the marks of ended processes, each drawn on a wider one that sets it off."""
    paths = [path.get("d") for path in drawing(page).iter(f"{SVG}path") if path.get("fill") == "none"]
    return [tuple(map(float, re.match(r"M([\d.]+) ([\d.]+)l([\d.]+)", d).groups())) for d in paths[::2]]


def test_the_end_of_a_process_is_marked_where_the_others_go_on():
    book = Book()
    for rank in (0, 1):
        book.compute(rank, "forward", 0, 100)
    book.travel(1, "recv", 100, 900, wait=(100, 900), peer=0, group="0→1", match=1)
    book.scalar(1, ENDED, 300, 1.0)
    album = watched(book.trace(2), (200, 400))
    before, after = album.frames[-2:]
    assert [row.blocked for row in before.rows] == [False, True]
    assert [row.blocked for row in after.rows] == [False, False], "nobody waits in an ended process"
    assert [row.ended_ns for row in after.rows] == [None, 300 * MS]
    assert crosses(album.pages[-2]) == []
    ((left, _, size),) = crosses(album.pages[-1])
    first, y, wide, _ = max(boxes(album.pages[-1], "forward"), key=lambda box: box[1])
    assert left + size / 2 == pytest.approx(first + 3 * wide, abs=3)
    assert [box[1] == y for box in boxes(album.pages[-1], "unlabelled")] == [False], "only rank 0 is still in its function"
    assert not [text for text in after.progress if ENDED in text], "no value of the program's"


def test_the_end_of_a_process_before_the_step_that_is_shown_is_only_written():
    trace = data_parallel(steps=40)
    trace.scalars += (Scalar(1, ENDED, 1 * MS, 1.0),)
    album = watched(trace, range(50, int(trace.duration_ns / MS), 50))
    assert album.frames[-1].detail.marked is not None
    assert crosses(album.pages[-1]) == []
    assert album.frames[-1].rows[1].status in texts(album.pages[-1])


def test_text_on_stripes_has_a_plain_background():
    received = ("recv", 200, 400, (200, 400), {"peer": 1})
    trace = made([("forward", 0, 200), received], [("send", 390, 400, (390, 400), {"peer": 0})])
    page = watched(trace, [410]).pages[-1]
    halos = [(t.text, "stroke" in (t.get("paint-order") or "")) for t in drawing(page).iter(f"{SVG}text")]
    assert [halo for text, halo in halos if text == "recv"] == [True]
    assert [halo for text, halo in halos if text == "forward"] == [False, False]  # in its bar and in the legend


@pytest.mark.parametrize(
    ("name", "values", "shown"),
    [
        ("loss", (2.3, 0.4), {"2.3", "0.4"}),
        ("loss", (0.00133, 0.00127), {"0.00133", "0.00127"}),
        ("loss", (5, 5), {"5"}),
        ("loss", (0.69314, 0.69312), {"0.69314", "0.69312"}),
        ("accuracy_of_the_validation_set", (0.5, 0.5), {"accuracy_o…ation_set 0.5", "accuracy_of…dation_set"}),
    ],
)
def test_the_ends_of_a_curve_have_different_labels_and_shortened_text_says_so(name, values, shown):
    scalars = [Scalar(0, name, at * MS, value) for at, value in zip((1, 300), values, strict=True)]
    assert shown <= set(texts(one_frame(part(scalars=scalars))))


def test_every_frame_is_well_formed_and_as_high_as_the_first():
    album = watched(data_parallel(steps=60), range(50, 1500, 50))
    assert len(album.pages) == 30
    assert len({drawing(page).get("viewBox") for page in album.pages}) == 1


def test_the_first_frame_is_legible_before_anything_has_happened_and_a_stale_one_fades():
    """In pure SVG, without a script, so that a saved notebook shows it too."""
    album = watched(data_parallel(), [])
    (page,) = album.pages
    assert {"train on 4 ranks", "0.0 s", "rank 0", "rank 3", "time since the start of the run [ms]"} <= set(texts(page))
    assert album.alt_text == "timeline of train on 4 ranks"
    shown, hidden = drawing(page).findall(f"{SVG}g")
    assert "train on 4 ranks" in [t.text for t in shown.iter(f"{SVG}text")]
    assert hidden.get("visibility") == "hidden"
    assert tuple(t.text for t in hidden.iter(f"{SVG}text")) == STILL
    changes = [shown.find(f"{SVG}animate"), hidden.find(f"{SVG}set")]
    said = [(c.get("attributeName"), c.get("to"), c.get("begin")) for c in changes]
    assert said == [("opacity", ".2", "10s"), ("visibility", "visible", "10s")]


def test_the_frame_at_a_debuggers_prompt_stays_and_says_who_is_asked():
    """No frame follows while the student thinks, for longer than any other frame stays."""
    trace, album = data_parallel(), Album()
    live = Live(album, itertools.count(0, 50 * MS).__next__)  # drawing costs so much that no frame is due soon
    live.begin(trace.ranks, "train on 4 ranks", trace.start_ns)
    live.update(trace.start_ns + MS, part(ranks=4), [()] * 4)
    live.update(trace.start_ns + 3 * MS, part(ranks=4), [()] * 4)
    live.hold({0})
    live.update(trace.start_ns + 10_000 * MS, part(ranks=4), [()] * 4)
    assert [frame.held for frame in album.frames] == [False, False, True, False]
    moving = [bool([*drawing(page).iter(f"{SVG}animate")]) for page in album.pages]
    assert moving == [True, True, False, True]
    assert STILL[0] not in texts(album.pages[2])
    assert album.frames[2].rows[0].status == "breakpoint"


def test_colours_and_lanes_are_those_of_the_timeline():
    page = watched(made([("forward", 100, 200), ("backward", 200, 250)], end_ms=400), [300]).pages[-1]
    (x, y, width, height), (x_2, y_2, _, _) = boxes(page, "forward") + boxes(page, "backward")
    axis = [float(t.get("x")) for t in drawing(page).iter(f"{SVG}text") if t.text in ("0", "500")]
    scale = (axis[1] - axis[0]) / 500  # the axis begins with half a second
    assert x == pytest.approx(axis[0] + 100 * scale, abs=0.1)
    assert x + width == pytest.approx(axis[0] + 200 * scale, abs=0.9)
    assert x_2 == pytest.approx(axis[0] + 200 * scale, abs=0.1)
    assert height == pytest.approx(40 * COMPUTE_LANE[1])
    assert y == y_2


def test_operations_under_way_reach_up_to_now():
    trace = part(Span(0, "forward", "compute", 0, 100 * MS), ranks=2)
    page = one_frame(trace, [[pending("recv", 100, 100, group="a")], [pending("send", 300, group="b")]])
    ((x, _, width, _),) = boxes(page, "waiting")
    ((x_0, _, before, _),) = boxes(page, "forward")
    assert (x, width) == pytest.approx((x_0 + before + 0.7, 3 * (before + 0.7) - 0.7), abs=0.15)
    ((x_2, _, width_2, _),) = boxes(page, "issued")
    assert (x_2, width_2) == pytest.approx((x_0 + 3 * (before + 0.7), before), abs=0.15)
    assert len(boxes(page, "unlabelled")) == 1  # the function of rank 1
    assert {"recv", "send"} <= set(texts(page))


def test_the_words_beside_a_rank():
    group = "p2p 1>0 tag 0 group 3 mesh_pp of ranks 0,1"
    assert "recv pp" in texts(one_frame(operations=[[pending("recv", 100, 100, group=group)], []]))  # the axis of a mesh
    page = one_frame(operations=[[pending("all_reduce", 400, 500), pending("recv", 100)], []], at_ms=4000)
    assert "all_reduce · 3.50 s" in [t.text for t in drawing(page).iter(f"{SVG}text") if t.get("font-weight")]
    assert "returned" in texts(one_frame(part(Span(0, "f", "call", 0, 4100 * MS)), at_ms=4200))


def test_a_rank_of_a_silent_machine_is_unknown_since_its_last_report():
    (album, live), recv = begun(), pending("recv", 100, 100, group="a")
    for now_ms in (200, 400):
        live.update(now_ms * MS, part(step(0, 0, now_ms / 2)), [[recv], [recv]], silent={1: 200 * MS})
    page = album.pages[-1]
    (waits, other), (unknown,) = boxes(page, "waiting"), boxes(page, "unknown")
    assert waits[2] + 0.7 == pytest.approx(3 * (other[2] + 0.7), abs=0.15)
    assert unknown[0] == pytest.approx(other[0] + other[2] + 0.7, abs=0.15)
    assert "unknown · 200 ms" in texts(page)
    assert [row.blocked for row in album.frames[-1].rows] == [True, False]
    assert [ns_of(live._recent, 1, 0, style) for style in ("unlabelled", "unknown")] == [200 * MS, 0]
    live.update(600 * MS, part(step(0, 200, 600)), [[recv], [recv]], silent={1: 200 * MS})
    assert [ns_of(live._recent, 1, 0, style) for style in ("unlabelled", "unknown")] == [200 * MS, 200 * MS]


def test_a_rank_that_is_not_called_is_idle():
    album, live = begun(("master", "worker"), "f on master", called=[0])
    live.update(400 * MS, part(Span(1, "forward", "compute", 100 * MS, 200 * MS)), [[], []])
    assert len(boxes(album.pages[-1], "unlabelled")) == 1
    assert "returned" not in texts(album.pages[-1])
    for now_ms in (600, 800):
        live.update(now_ms * MS, part(), [[], []])
    assert not ns_of(live._recent, 1, 0, "unlabelled")
    assert ns_of(live._recent, 0, 0, "unlabelled")


def test_names_cannot_break_the_drawing():
    book = Book()
    book.compute(0, 'a <b> & "c"', 0, 400)
    page = watched(book.trace(("<&>",), start_ns=0), [450], title="<lambda> on <&>").pages[-1]
    assert {'a <b> & "c"', "<&>", "<lambda> on <&>"} <= set(texts(page))


def test_text_takes_the_colours_of_the_theme_and_without_its_style_a_frame_is_hidden():
    """JupyterLab removes the style and the drawing in a notebook that is not trusted, and keeps the drawing's texts."""
    album = watched(alone(), [30])
    html = html_of(album.frames[-1], "a")
    assert "color:var(--jp-ui-font-color1" in html
    assert drawing(album.pages[-1]).get("fill") == "currentColor"
    assert "black" not in album.pages[-1]
    hidden = re.search(r'<div class="labkit-live" hidden="hidden">.*</div>', html)[0]
    assert "<svg" not in html.replace(hidden, "")
    assert f'<p class="labkit-not-live">{" ".join(STILL)}</p>' in html


def test_the_legend_explains_what_is_visible_and_nothing_else():
    album = watched(made([("forward", 0, 200), ("optimizer", 200, 250)]), [410])
    known = {style.legend for style in STYLES.values()}
    assert known & set(texts(album.pages[0])) == set()
    assert known & set(texts(album.pages[1])) == {"forward", "optimizer", "in the function, in no span"}


# Texts, curve, memory


def polylines(page):
    return list(drawing(page).iter(f"{SVG}polyline"))


def ns_of(recent, rank, lane, style):
    """How long a style is shown in one of a rank's lanes (0: compute, 1: communication)."""
    return recent.binned(rank)[lane][list(STYLES).index(style)].sum()


def test_the_recorded_value_is_a_curve_for_each_rank_and_their_mean():
    album = watched(data_parallel(4, 60), [5, 600, 1200])
    assert polylines(album.pages[0]) == polylines(album.pages[1]) == []
    *each, mean = polylines(album.pages[-1])
    assert len(each) == 4
    assert mean.get("stroke-width") == "1.8"
    x, y = np.array([point.split(",") for point in mean.get("points").split()], float).T
    assert (np.diff(x) > 0).all()
    assert y[-1] > y[0]  # it falls
    assert "loss" in texts(album.pages[-1])
    assert len(polylines(watched(data_parallel(9, 20), [300]).pages[-1])) == 1  # of many ranks the mean


def test_labkits_own_values_are_not_a_curve():
    scalars = [Scalar(0, STEPS_IN_ALL, 0, 5.0), Scalar(0, f"{MEMORY}activations", 0, 5.0)]
    curves = Curves(1, 0)
    curves.add(scalars, 500 * MS)
    assert curves.names == []
    progress = Progress(1)
    progress.add(part(scalars=scalars, ranks=1))
    assert progress.parts() == ("0 of 5 steps", "", "")


def test_the_memory_of_a_curve_is_bounded():
    curves = Curves(2, 0)
    for i in range(20):
        curves.add([Scalar(rank, f"a{k}", i * 100 * MS, i) for rank in (0, 1) for k in range(40)], (500 << max(i // 5, 0)) * MS)
    assert len(curves.names) == 16
    means = curves.means("a0")
    assert means.shape == (3, 128)
    assert np.nanmin(means) >= 0
    assert np.nanmax(means) == 19
    assert (np.diff(means[-1][~np.isnan(means[-1])]) > 0).all()


def recorded(several):
    """Values of two ranks: a size, recorded once each, and a loss with the given values."""
    losses = [Scalar(rank, "loss", (20 + 10 * i) * MS, 2.3 - i) for i in range(several) for rank in (0, 1)]
    return [Scalar(rank, "size", 10 * MS, 1.724) for rank in (0, 1)] + losses


def below(trace):
    """What the finished picture of a trace has beneath the timeline."""
    figure = gantt.figure_of(trace, "f")
    draw_below(figure, trace)
    return figure.axes[1:]


@pytest.mark.parametrize(("several", "lines", "drawn"), [(0, 0, []), (1, 0, []), (3, 3, ["loss"])])
def test_a_value_recorded_once_is_not_a_curve(several, lines, drawn):
    page = one_frame(part(scalars=recorded(several)))
    assert len(polylines(page)) == lines
    assert "size 1.724" in texts(page)  # the line above shows the last value
    assert [text for text in texts(page) if text in ("size", "loss")] == drawn
    trace = data_parallel(2, 5)
    finished = below(Trace(trace.columns, recorded(several), ranks=trace.ranks))
    assert [panel.get_title("left") for panel in finished] == drawn
    assert below(Trace(trace.columns, [], ranks=trace.ranks)) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, 7.0])
def test_a_curve_of_any_value_can_be_drawn(value):
    page = one_frame(part(scalars=[Scalar(rank, "loss", ms * MS, value) for ms in (10, 20) for rank in (0, 1)]))
    assert "nan" not in "".join(p.get("points") for p in polylines(page))
    assert f"loss {value:.4g}" in texts(page)


@pytest.mark.parametrize(
    ("loads", "shown"),
    [
        ((Load(412_000_000), Load(1_230_000_000)), {"412 MB", "1.23 GB", "own memory"}),
        ((Load(8_000_000_000, 97), Load(1, 5)), {"97 %", "8.00 GB", "5 %", "GPU busy, its memory"}),
    ],
)
def test_what_a_rank_uses_is_shown_beside_it(loads, shown):
    album, live = begun()
    live.update(400 * MS, part(), [[], []], loads)
    live.update(600 * MS, part(), [[], []], ())  # not read again
    assert shown < set(texts(album.pages[-1]))
    assert "own memory" not in texts(album.pages[0])


def test_the_finished_picture_has_the_curve_beneath():
    (panel,) = below(data_parallel(3, 5))
    assert (panel.get_title("left"), panel.get_xlabel()) == ("loss", "time since the start of the run [ms]")
    *each, mean = (line.get_ydata() for line in panel.lines)
    assert len(each) == 3
    assert mean == pytest.approx(np.mean(each, axis=0))
    assert mean == pytest.approx([2.3 * 0.9**i + 0.01 for i in range(5)])


@pytest.mark.parametrize(("of", "title"), [(1, ""), (1e-2, ""), (1e-3, "  [10⁻³]"), (2e9, "  [10⁹]"), (0, "")])
def test_the_power_of_ten_of_the_curve_stands_in_its_title(of, title):
    scalars = [Scalar(0, "cross entropy", i * MS, of * (1.3251 + 0.0001 * i)) for i in range(5)]
    (panel,) = below(Trace(data_parallel(2, 5).columns, scalars, ranks=("0", "1")))
    panel.figure.canvas.draw()
    assert panel.get_title("left") == "cross entropy" + title


def test_a_rank_that_recorded_once_is_not_in_the_mean():
    trace = data_parallel(2, 5)
    scalars = [Scalar(0, "loss", i * MS, float(i)) for i in range(4)] + [Scalar(1, "loss", 0, 100.0)]
    (panel,) = below(Trace(trace.columns, scalars, ranks=trace.ranks))
    assert [list(line.get_ydata()) for line in panel.lines] == [[0, 1, 2, 3]]


# Long runs


def test_the_time_axis_doubles_when_it_is_full():
    trace = alone(4)
    album = watched(trace, [400, 600, 1100])
    assert [frame.detail.extent_ns / MS for frame in album.frames] == [500, 500, 1000, 2000]
    assert "1000" in texts(album.pages[2])
    assert {"2", "time since the start of the run [s]"} <= set(texts(album.pages[3]))


def test_a_run_of_many_steps_shows_a_late_step_and_its_position():
    trace = data_parallel(steps=40)
    album = watched(trace, [200, 500])
    assert album.frames[1].detail.marked is None  # 8 steps: the whole
    detail = album.frames[2].detail
    bounds = trace.step_bounds()
    number = int(np.flatnonzero(bounds[:, 1] <= 500 * MS)[-1])
    assert detail.label == f"time since the start of step {number}"
    assert detail.trace.start_ns == bounds[number, 0]
    assert detail.marked[0] == bounds[number, 0] - trace.start_ns
    assert detail.extent_ns >= bounds[number, 1] - bounds[number, 0]
    assert detail.trace.end_ns == bounds[number, 1]  # not up to the end of the axis: the next step is not complete
    assert f"{number + 1} of 40 steps" in album.frames[2].progress
    assert f"time since the start of step {number} [ms]" in texts(album.pages[2])


def test_a_step_is_shown_long_enough_to_be_seen():
    labels = [frame.detail.label for frame in watched(data_parallel(steps=120), range(400, 2400, 200)).frames[1:]]
    changes = sum(a != b for a, b in itertools.pairwise(labels))
    assert changes == 3  # every 0.6 s, although a step takes 22 ms


def test_slow_steps_are_shown_while_they_run():
    frame = watched(in_steps(20, ("forward", 600), ("backward", 400), ranks=1), [15000, 15700]).frames[-1]
    assert frame.detail.label == "time since the start of step 14"
    assert frame.detail.extent_ns == 2000 * MS
    assert frame.detail.trace.end_ns == 15700 * MS
    compute, _ = lanes(frame.detail.trace, 0)
    assert [list(STYLES)[s] for s in compute.style.tolist()] == ["forward", "backward", "forward", "unlabelled"]


def test_frames_and_memory_are_bounded_for_any_number_of_spans():
    trace = many(400_000)
    album, live = begun(trace.ranks, "f on 4 ranks", trace.start_ns)
    for now_ns, new, operations in feed(trace, range(100, 1000, 100)):
        live.update(now_ns, new, operations)
        recent = live._recent
        assert len(recent._rows) <= recent_module.KEPT
        assert recent._rows.base is None  # it is not a part of a larger view
    assert album.frames[-1].detail is None  # too many to be drawn one by one: the past in bins
    assert max(map(len, album.pages)) < 100_000
    assert "forward" in texts(album.pages[-1])  # in the legend
    for page in album.pages:
        drawing(page)


@pytest.mark.parametrize("ranks", [1, 4, 16, 64])
def test_the_worst_case_frame_is_bounded_too(ranks):
    names, length = ("forward", "backward"), ranks / 10
    spans = [(names[i % 2], i * length, (i + 0.7) * length) for i in range(4000 // ranks - 1)]
    album = watched(made(*[spans] * ranks, start_ns=0), [200, 400])
    assert album.frames[-1].detail is not None
    assert max(map(len, album.pages)) < 150_000


def test_drawing_takes_a_bounded_share_of_the_processor():
    cost_ns = 20 * MS
    ticks = iter(range(0, 10_000 * cost_ns, cost_ns))  # each reading of the clock is 20 ms later
    album = watched(data_parallel(steps=300), range(200, 6200, 200), clock=lambda: next(ticks))
    assert len(album.frames) == 1 + 10  # 20 ms for a frame: one every 0.6 s, and not every 0.2 s


# What is remembered


def binned_exactly(trace, recent):
    edges = (recent.start_ns + np.arange(recent_module.BINS + 1) * recent.bin_ns).astype(np.int64)
    return [[coverage(bars, edges) for bars in lanes(trace, rank)] for rank in range(len(trace.ranks))]


@pytest.mark.parametrize("trace", [data_parallel(4, 60), model_parallel(20), alone(60)], ids=["data", "model", "alone"])
@pytest.mark.parametrize("every_ms", [37, 200])
@pytest.mark.parametrize("updates", [1, 3], ids=["a frame for each update", "a frame for three updates"])
def test_the_bins_hold_what_the_timeline_shows(trace, every_ms, updates):
    recent = Recent(trace.ranks, trace.start_ns)
    moments = np.arange(every_ms, trace.end_ns / MS + 3 * updates * every_ms + 20, every_ms)
    for number, (now_ns, new, _) in enumerate(feed(trace, moments)):
        before = recent.complete_ns
        recent.add(new, now_ns, drawn=number % updates == 0)
        assert recent.complete_ns == before or number % updates == 0
    assert recent.shown_ns > recent_module.FIRST_NS  # the bins were folded on the way
    for rank, exact in enumerate(binned_exactly(trace, recent)):
        for lane in (0, 1):
            found, expected = recent.binned(rank)[lane], exact[lane]
            missed_ns = np.abs(found - expected).sum()
            assert missed_ns <= 0.04 * trace.duration_ns, f"rank {rank}, lane {lane}: {missed_ns / trace.duration_ns:.1%}"


def test_an_outer_span_gets_the_time_outside_its_inner_spans():
    recent = Recent(("rank 0",), 0)
    recent.add(part(Span(0, "forward", "compute", 0, 100 * MS), ranks=1), 110 * MS)
    recent.add(part(Span(0, "epoch", "compute", 0, 150 * MS), ranks=1), 160 * MS)
    for now_ms in (300, 310):
        recent.add(part(ranks=1), now_ms * MS)
    assert ns_of(recent, 0, 0, "forward") == pytest.approx(100 * MS)
    assert ns_of(recent, 0, 0, "compute") == pytest.approx(50 * MS)
    assert ns_of(recent, 0, 0, "unlabelled") == pytest.approx(150 * MS, abs=2 * MS)  # up to where the bins are complete


def test_spans_are_not_kept_for_a_frame_that_does_not_come():
    trace = many(100_000)
    recent = Recent(trace.ranks, trace.start_ns)
    for now_ns, new, _ in feed(trace, range(10, 400, 10)):
        recent.add(new, now_ns, drawn=False)
        assert len(recent._unbinned) + len(recent._last) <= recent_module.EXACT
    assert ns_of(recent, 0, 0, "forward")


def test_very_many_spans_at_once_are_summed():
    trace = many(200_000)
    recent = Recent(trace.ranks, trace.start_ns)
    for now_ns, new, _ in feed(trace, [250, 500, 520, 540]):
        assert len(new) > recent_module.EXACT or now_ns > 510 * MS
        recent.add(new, now_ns)
    third = trace.duration_ns * 9 / 30
    assert [ns_of(recent, 0, 0, "forward"), ns_of(recent, 0, 1, "exposed")] == pytest.approx([third, third], rel=0.01)


def test_an_operation_spread_over_several_updates_is_one():
    recent = Recent(("rank 0", "rank 1"), 0)
    first = Span(0, "all_reduce", "communication", 0, 100 * MS, 0, 100 * MS, group="g", match=1)
    second = Span(1, "all_reduce", "communication", 90 * MS, 101 * MS, 90 * MS, 101 * MS, group="g", match=1)
    for now_ms, spans in ((100, [first]), (200, [second]), (300, [])):
        recent.add(part(*spans), now_ms * MS)
    assert [ns_of(recent, 0, 1, style) for style in ("waiting", "exposed")] == pytest.approx([90 * MS, 10 * MS])


# Progress


def loop(rank, at_ms, length):
    return Scalar(rank, STEPS_IN_ALL, int(at_ms * MS), float(length))


def in_words(progress):
    return "  ·  ".join(filter(None, progress.parts()))


def progress_of(*parts, ranks=1):
    """What is known after so many updates: the spans and scalars of each."""
    progress = Progress(ranks)
    for spans, scalars in parts:
        progress.add(part(*spans, scalars=scalars, ranks=ranks))
    return progress


def test_steps_rate_time_left_and_values():
    progress = progress_of(([step(0, 0, 500), step(1, 0, 500)], [loop(0, 0, 10), loop(1, 0, 10)]), ranks=2)
    assert in_words(progress) == "1 of 10 steps  ·  2 steps/s  ·  4 s left"
    values = [Scalar(0, "loss", 900 * MS, 2.0), Scalar(1, "loss", 900 * MS, 1.0), Scalar(0, "loss", 950 * MS, 0.5)]
    progress.add(part(step(0, 500, 1000), step(0, 1000, 1500), step(1, 500, 1000), scalars=values))
    assert in_words(progress) == "2 of 10 steps  ·  2 steps/s  ·  4 s left  ·  loss 0.75"  # the slowest rank, the mean value
    assert (progress.done, progress.fraction) == (2, 0.2)


@pytest.mark.parametrize(
    ("length", "now_ms", "said"),
    [
        (10, 2900, ("1 of 10 steps", "2 steps/s", "4 s left")),
        (10, 4000, ("1 of 10 steps", "no step for 4 s", "")),  # seven times as long as a step
        (1, 4000, ("1 of 1 step", "2 steps/s", "0 s left")),  # the loop is over
    ],
)
def test_without_a_step_for_long_there_is_neither_a_rate_nor_a_time_left(length, now_ms, said):
    assert progress_of(([step(0, 0, 500)], [loop(0, 0, length)])).parts(now_ms * MS) == said


def test_ranks_without_steps_do_not_delay_the_others():
    progress = progress_of(([step(0, 0, 100)], []), ranks=3)
    assert (progress.done, progress.fraction, in_words(progress)) == (1, None, "1 step  ·  10 steps/s")
    assert in_words(Progress(2)) == ""
    assert Progress(2).last_step() is None


def test_a_second_loop_starts_again():
    progress = progress_of(([step(0, 0, 10), step(0, 10, 20)], [loop(0, 0, 2)]), ([step(0, 30, 40)], [loop(0, 30, 4)]))
    assert in_words(progress).startswith("1 of 4 steps")
    assert in_words(progress).endswith("left in this loop")
    assert progress.done == 3


def test_two_loops_in_step_are_one():
    steps = [step(0, begin + late, begin + late + 10) for begin in (0, 10) for late in (0, 0.1)]
    assert in_words(progress_of((steps, [loop(0, 0, 2), loop(0, 0.1, 2)]))).startswith("2 of 2 steps")


def test_the_step_of_an_outer_loop_does_not_count():
    inner = [step(0, 10 * i, 10 * (i + 1)) for i in range(3)]
    progress = progress_of((inner, [loop(0, 0, 1), loop(0, 0.1, 3)]), ([step(0, 0, 30)], []))
    assert (progress.done, progress.last_step()) == (3, (20 * MS, 30 * MS))


def test_the_last_step_covers_all_ranks_that_made_it():
    steps = [step(0, 0, 10), step(0, 10, 19), step(0, 19, 30), step(1, 1, 11), step(1, 11, 21)]
    assert progress_of((steps, []), ranks=2).last_step() == (10 * MS, 21 * MS)


@pytest.mark.parametrize(("seconds", "words"), [(0.2, "0 s"), (59.4, "59 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")])
def test_the_remaining_time_as_text(seconds, words):
    assert in_words(progress_of(([step(0, 0, 1000 * seconds)], [loop(0, 0, 2)]))).endswith(f"{words} left")


# Where it is shown


@pytest.fixture
def displayed(monkeypatch):
    """What IPython would display in a cell of a notebook."""
    calls = []

    def display(data, *, raw, metadata, display_id, update):
        assert raw
        calls.append((display_id, update, data, metadata))

    monkeypatch.setattr("IPython.display.display", display)
    monkeypatch.setattr(live_module, "_screen_here", live_module._Cell)
    return calls


def run_through(trace, *, stopped=""):
    live = Live(clock=lambda: 0)
    live.begin(trace.ranks, "train on 4 ranks", trace.start_ns)
    for now_ns, new, operations in feed(trace, [30, 60]):
        live.update(now_ns, new, operations)
    live.end(trace, stopped)


def open_figures():
    return sys.modules["matplotlib.pyplot"].get_fignums() if "matplotlib.pyplot" in sys.modules else []


def test_one_display_is_updated_and_ends_as_an_image(displayed):
    before = open_figures()  # of other tests
    run_through(data_parallel())
    assert len({display_id for display_id, *_ in displayed}) == 1
    assert [update for _, update, *_ in displayed] == [False, True, True, True, True]
    # nbval compares the first output with the saved, last one: their texts are equal, and images are ignored.
    assert [data["text/plain"] for _, _, data, _ in displayed] == ["timeline of train on 4 ranks"] * 5
    assert [min(data) for _, _, data, _ in displayed] == ["text/plain", "text/html", "text/html", "text/html", "image/png"]
    scripts = ["scrollIntoView" in data.get("text/html", "") for _, _, data, _ in displayed]
    assert scripts == [False, True, False, False, False], "only the first frame comes into the window"
    _, _, last, metadata = displayed[-1]
    assert set(last) == {"image/png", "text/html", "text/plain"}
    image = base64.b64decode(last["image/png"])
    assert len(image) < 60_000
    with Image.open(io.BytesIO(image)) as opened:
        assert opened.mode == "P"
        assert opened.convert("RGBA").getpixel((2, 2))[3] == 0  # transparent, for light and dark themes
    assert metadata["image/png"]["alt"].startswith("Timeline: train on 4 ranks")
    assert open_figures() == before


def test_two_runs_on_a_page_do_not_share_their_patterns(displayed):
    run_through(alone())
    run_through(alone())
    pages = [data["text/html"] for _, _, data, _ in displayed if "<pattern" in data.get("text/html", "")]
    assert len({re.search(r'pattern id="([^"]+)"', page)[1] for page in pages}) == 2


def test_a_failed_run_says_so_in_its_picture(displayed, monkeypatch):
    titles = []
    figure_of = gantt.figure_of
    monkeypatch.setattr(gantt, "figure_of", lambda trace, title: titles.append(title) or figure_of(trace, title))
    run_through(data_parallel(), stopped="stopped by an error")
    assert titles == ["train on 4 ranks, stopped by an error"]


def test_a_run_without_a_span_leaves_its_text(displayed):
    live = Live()
    live.begin(("rank 0",), "f on rank 0", 0)
    live.end(Trace(ranks=["rank 0"]), "")
    assert displayed[-1][2] == {"text/plain": "timeline of f on rank 0"}


def test_a_drawing_error_is_reported_once_and_does_no_harm(capsys):
    class Broken(Album):
        def show(self, _):
            raise ValueError("no ink")

    album, trace = Broken(), data_parallel()
    live = Live(album, lambda: 0)
    live.begin(trace.ranks, "train on 4 ranks", 0)
    for now_ns, new, operations in feed(trace, [10, 20, 30]):
        live.update(now_ns, new, operations)
    assert capsys.readouterr().err == "labkit could not draw the run. The run itself is not affected. ValueError: no ink\n"
    live.end(trace, "")
    assert album.left == (trace, "train on 4 ranks")  # the finished picture may still succeed
    assert not capsys.readouterr().err


def test_stop_is_not_delayed():
    class Stopped(Album):
        def show(self, _):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Live(Stopped()).begin(("rank 0",), "f", 0)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_in_a_terminal_it_is_one_line(monkeypatch):
    terminal, trace = Terminal(), data_parallel(steps=4)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setitem(sys.modules, "IPython", None)
    monkeypatch.setenv("COLUMNS", "200")
    live = Live(clock=lambda: 0)
    live.begin(trace.ranks, "train on 4 ranks", trace.start_ns)
    ((now_ns, new, _),) = feed(trace, [50])
    live.update(now_ns, new, [[pending("all_reduce", 40, 41)], [], [], []])
    live.end(trace, "")
    begun, under_way, ended = terminal.getvalue().replace("\x1b[K", "").split("\r")[1:]
    assert begun == "train on 4 ranks  ·  0.0 s"
    assert under_way.startswith("train on 4 ranks  ·  2 of 4 steps")
    assert under_way.endswith("loss 2.085  ·  rank 0: all_reduce")
    assert ended == f"train on 4 ranks: {time_in_words(trace.duration_ns)}\n"


def test_without_a_display_it_prints_nothing(capsys):
    run_through(data_parallel())
    assert capsys.readouterr() == ("", "")


def test_fresh_ranks_after_a_restart():
    album, live = begun()
    gone = [step(0, 10, 20), step(1, 10, 20), Span(0, "f", "call", 0, 30 * MS)]
    live.update(40 * MS, part(*gone, scalars=[Scalar(1, ENDED, 30 * MS, 1)]), ((), ()))
    assert [row.status for row in album.frames[-1].rows] == ["returned", live_module.ENDED_HERE]
    live.restart(200 * MS)
    live.update(300 * MS, part(step(0, 210, 220), step(1, 210, 220)), ((), ()))
    frame = album.frames[-1]
    assert [row.status for row in frame.rows] == ["", ""]
    assert frame.detail is not None
    assert frame.detail.trace.filter(kind="step").columns.data["start_ns"].min() == 210 * MS
    assert live._progress.done == 1
    assert not live._failed


@pytest.mark.parametrize("ranks", [2, 5, 7, 9, 40])
def test_the_strip_has_the_scale_of_the_whole_run(ranks):
    album, live = begun([f"rank {rank}" for rank in range(ranks)], called=())
    live.update(
        300 * MS, part(*(Span(rank, "forward", "compute", 0, 300 * MS) for rank in range(ranks)), ranks=ranks), [()] * ranks
    )
    live.update(400 * MS, part(ranks=ranks), [()] * ranks)
    page = album.pages[-1]
    found = [path.get("d") for path in drawing(page).iter(f"{SVG}path") if re.match(r"#...$", path.get("fill") or "")]
    cells = [tuple(map(float, box)) for d in found for box in re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)", d)]
    outline = min(drawing(page).iter(f"{SVG}rect"), key=lambda rect: abs(float(rect.get("y") or 0) - HEAD + 1))
    left, wide = float(outline.get("x")), float(outline.get("width"))
    in_strip = [(x - left, width) for x, y, width in cells if y < HEAD + 40]
    pixel = wide / 16
    assert max(x + width for x, width in in_strip) == pytest.approx(wide * 300 / 500, abs=pixel)


def test_a_restart_is_marked_and_nothing_goes_on_across_it():
    album, live = begun()
    losses = [Scalar(rank, "loss", at * MS, value) for rank in (0, 1) for at, value in ((20, 4), (40, 2))]
    live.update(100 * MS, part(scalars=losses), ((), ()))
    assert "all ranks replaced" not in texts(album.pages[-1])
    live.update(120 * MS, part(Span(0, "f", "call", 0, 60 * MS), scalars=[Scalar(1, ENDED, 80 * MS, 1)]), ((), ()))
    live.restart(200 * MS)
    later = [Scalar(0, "loss", at * MS, value) for at, value in ((220, 4), (240, 3))]
    live.update(300 * MS, part(scalars=later), ((), ()))
    live.update(400 * MS, part(), ((), ()))
    assert not live._failed
    page, frame = album.pages[-1], album.frames[-1]
    for rank, returned_ms in ((0, 60), (1, 80)):
        unlabelled = frame.past.cells[rank][0][list(STYLES).index("unlabelled")]
        bins = np.arange(recent_module.BINS) * live._recent.bin_ns
        away = (bins >= returned_ms * MS) & (bins + live._recent.bin_ns <= 200 * MS)
        assert not unlabelled[away].any(), "between two attempts, no rank is in the function"
        assert unlabelled.sum() == pytest.approx((returned_ms + 300 - 200) * MS)
    (in_strip, *_), (in_rows, *_), _ = dashed(page)  # the last is in the legend
    share = 200 * MS / frame.past.shown_ns
    assert in_rows - in_strip == pytest.approx(share * CURVE, abs=1), "the rows, which show the whole run, are wider"
    assert "all ranks replaced" in texts(page)
    lines = [line.get("points").split() for line in drawing(page).iter(f"{SVG}polyline")]
    assert [len(points) for points in lines] == [2, 2, 2, 2, 2], "rank 0 twice, rank 1 once, their mean twice"
    assert lines[1] == lines[4], "the mean of rank 0 alone"
    ends = [float(point.split(",")[0]) for point in lines[0]], [float(point.split(",")[0]) for point in lines[1]]
    assert max(ends[0]) < min(ends[1])


def dashed(page):
    """The lines of a restart, as (x, top, bottom)."""
    found = []
    for path in drawing(page).iter(f"{SVG}path"):
        if path.get("stroke-dasharray"):
            found += re.findall(r"M([\d.]+) ([\d.]+)[Vv](-?[\d.]+)", path.get("d"))
    return [tuple(map(float, one)) for one in found]
