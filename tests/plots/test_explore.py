"""The timeline that can be explored, without a browser: what is sent, what the notebook keeps, what the page says."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
import types
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic import MS, data_parallel, made, many, master_and_workers

import labkit as lab
from labkit.errors.exceptions import LabError
from labkit.errors.units import bytes_in_words, time_in_words
from labkit.plots.bars import STYLES, Bars, blend, caption, captioned, coverage, lanes
from labkit.plots.explorer.window import EXACT, MIME, SAVED_COLUMNS, Windows, about
from labkit.plots.timeline import figure_of
from labkit.plots.view import view_of
from labkit.recording.events import Scalar
from labkit.recording.schema import ENDED, Span
from labkit.tracing.trace import Trace

anywidget = pytest.importorskip("anywidget", reason="anywidget is not installed: the extra 'hosted' brings it")
ipywidgets = pytest.importorskip("ipywidgets")

WIDGET = "application/vnd.jupyter.widget-view+json"
NODE = shutil.which("node")


def needs_node(test: Any) -> Any:
    return pytest.mark.processes(pytest.mark.skipif(NODE is None, reason="no node on this machine")(test))


NUMBER = {name: i for i, name in enumerate(STYLES)}


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    ipywidgets.Widget.close_all()


class Answer:
    """What the kernel sent, unpacked as the page does it."""

    def __init__(self, trace: Trace, start_ms: float, end_ms: float, columns: int = 1000, rank: int | None = None) -> None:
        self.said, self.buffers = Windows(trace).look(start_ms * MS, end_ms * MS, columns, rank)
        kinds: list[Any] = [np.float64, np.float64, np.int32, np.uint8, np.uint32, np.uint8, np.float64, np.float64]
        arrays = [np.frombuffer(b, kind) for b, kind in zip(self.buffers, kinds, strict=True)]
        self.edges, self.times, self.marks = arrays[0].reshape(-1, 2), arrays[1].reshape(-1, 6), arrays[2].reshape(-1, 6)
        self.colours = arrays[3].reshape(-1, self.said["columns"], 4)
        self.counts, self.most = (a.reshape(-1, self.said["columns"]) for a in arrays[4:6])
        self.steps, self.numbers = arrays[6], arrays[7].reshape(-1, 4)
        self.edges = self.edges / MS

    def lane(self, rank: int, which: int) -> slice:
        """The positions of the bars in a row's lane; in these traces each rank has one."""
        before = 0
        for row in self.said["rows"]:
            for i, lane in enumerate(row["lanes"]):
                if (row["row"], i) == (rank, which):
                    return slice(before, before + lane["bars"])
                before += lane["bars"]
        raise AssertionError("no such lane")

    def text(self, bar: int, mark: int) -> str:
        return self.said["partners" if mark == 3 else "texts"][self.marks[bar, mark]]


# What is sent


def test_a_typical_run_is_sent_whole() -> None:
    trace = data_parallel()
    answer = Answer(trace, 0, trace.duration_ns / MS)
    assert answer.said["complete"]
    assert not answer.counts.size
    for rank in range(4):
        for which, bars in enumerate(lanes(trace, rank)):
            mine = answer.lane(rank, which)
            expected = np.column_stack([bars.start_ns, bars.end_ns]) - trace.start_ns
            assert (answer.edges[mine] * MS).round().tolist() == expected.tolist()
            assert answer.marks[mine, 0].tolist() == bars.style.tolist()
            assert [answer.text(b, 1) for b in range(mine.start, mine.stop)] == [
                trace.columns.names[trace.columns.data["name"][span]] for span in bars.span
            ]


def test_only_spans_in_the_visible_time_and_of_one_rank_are_sent() -> None:
    trace = made([("forward", start, start + 1) for start in range(10)])
    assert Answer(trace, 2, 4).edges.tolist() == [[2, 3], [3, 4]]
    assert [row["row"] for row in Answer(data_parallel(), 0, 60, rank=2).said["rows"]] == [2]


@pytest.mark.parametrize(("start_ms", "end_ms"), [(-1e9, 1e9), (1e9, 2e9), (5, 5), (60, 2)])
def test_a_window_that_the_trace_does_not_fill_is_clipped(start_ms: float, end_ms: float) -> None:
    answer = Answer(data_parallel(), start_ms, end_ms)
    assert 0 <= answer.said["start"] < answer.said["end"] <= data_parallel().duration_ns


def crowded() -> Trace:
    """A rank with ten thousand spans in a second, a few of them long."""
    short = [("forward" if i % 2 else "backward", i * 0.1, i * 0.1 + 0.08) for i in range(10_000)]
    return made([*short, *(("optimizer", 1000 + 20 * i, 1015 + 20 * i) for i in range(5))])


def test_bars_as_wide_as_a_pixel_are_kept_and_the_rest_is_mixed() -> None:
    trace = crowded()
    answer = Answer(trace, 0, trace.duration_ns / MS, columns=500)  # of 2.2 ms
    assert not answer.said["complete"]
    assert len(lanes(trace, 0)[0]) > EXACT
    assert [answer.text(bar, 1) for bar in range(len(answer.edges))] == ["optimizer"] * 5
    narrow = lanes(trace, 0)[0]
    narrow = narrow[narrow.style != NUMBER["optimizer"]]
    edges = np.linspace(trace.start_ns, trace.end_ns, 501).astype(np.int64)
    expected = np.round(255 * blend(coverage(narrow, edges), trace.duration_ns / 500))
    assert answer.colours[0].tolist() == expected.tolist()
    assert answer.counts.sum() == 10_000
    assert {*answer.most[0][answer.counts[0] > 0].tolist()} <= {NUMBER["forward"], NUMBER["backward"]}
    assert answer.said["styles"] == sorted(NUMBER[s] for s in ("forward", "backward", "optimizer"))


def test_zooming_in_separates_all_bars() -> None:
    """2,500 bars on 500 pixels: colours are drawn as well, and zooming in further needs no request."""
    for start_ms, end_ms, bars, mixed in ((100, 120, 200, 0), (0, 250, 2500, 2500)):
        answer = Answer(crowded(), start_ms, end_ms, columns=500)
        assert answer.said["complete"]
        assert (len(answer.edges), answer.counts.sum()) == (bars, mixed)


def test_an_answer_is_bounded_for_any_number_of_spans_and_ranks() -> None:
    trace = many(96_000, ranks=32)
    for part, complete in ((1, False), (50, True)):
        said, buffers = Windows(trace).look(0, trace.duration_ns / part, 100_000)
        assert said["complete"] is complete
        assert 0 < sum(map(len, buffers)) < 4.5e6


def test_the_details_of_a_collective() -> None:
    last = ("all_reduce", 6, 7, None, {"nbytes": 4096})
    key = {"nbytes": 4096, "line": "cell 3, line 2"}
    answer = Answer(made(*([("all_reduce", start, 5, (start + 0.5, 5), key), last] for start in (1.0, 3.0))), 0, 7)
    zero = 1.0  # the first span's start
    first = answer.lane(0, 1).start
    assert (answer.times[first, :5] / MS + zero).tolist() == [1, 3, 1.5, 5, 5]
    assert answer.times[first, 5] == 4096
    assert [answer.text(first, i) for i in (1, 2, 3)] == ["all_reduce", "cell 3, line 2", "among all 2 ranks"]
    operations = [{*answer.marks[answer.lane(rank, 1), 4].tolist()} for rank in (0, 1)]
    assert operations[0] == operations[1], "a bar and its partners have one number"
    assert len(operations[0]) == 2
    unwaited = answer.lane(0, 1).stop - 1
    assert np.isnan(answer.times[unwaited, 2:4]).all()


def test_the_details_of_messages_groups_and_unfinished_operations() -> None:
    spans = [
        Span(0, "send", "communication", 0, 2 * MS, peer=2, group="0→2", nbytes=10, device="cuda"),
        Span(2, "recv", "communication", 0, 3 * MS, peer=0, group="0→2", done=False),
        *(Span(rank, "broadcast", "communication", 4 * MS, 5 * MS, group="pair", match=1) for rank in (0, 1)),
        Span(1, "forward", "compute", 0, MS),
    ]
    answer = Answer(Trace(spans, ranks=["a", "b", "c"]), 0, 5)
    reported = {(answer.text(i, 1), answer.text(i, 3), answer.marks[i, 5]) for i in range(len(answer.edges))}
    messages = {("send", "with c", 2), ("recv", "with a", 1)}
    assert reported == messages | {("broadcast", "among a and b", 0), ("forward", "", 0)}


def test_a_rank_with_rows_for_gpu_and_cpu_has_both() -> None:
    spans = [
        Span(0, "forward", "compute", 0, 4 * MS, device="cuda"),
        Span(0, "data", "compute", 0, 3 * MS),
        Span(1, "forward", "compute", 0, 4 * MS),
    ]
    trace = Trace(spans, ranks=["rank 0", "rank 1"])
    rows = [(row["name"], row["rank"]) for row in lab.explore(trace).about["rows"]]
    assert rows == [("rank 0 GPU", 0), ("CPU", 0), ("rank 1", 1)]
    answer = Answer(trace, 0, 4)
    assert [answer.text(bar, 1) for bar in range(3)] == ["forward", "data", "forward"]
    for rank, of_rank in ((0, [0, 1]), (1, [2])):
        assert [row["row"] for row in Answer(trace, 0, 4, rank=rank).said["rows"]] == of_rank


def test_steps_have_their_lines_and_numbers() -> None:
    trace = data_parallel(ranks=2, steps=3)
    answer = Answer(trace, 0, trace.duration_ns / MS)
    own, other = (trace.filter(rank=rank).step_bounds() - trace.start_ns for rank in (0, 1))
    assert own.tolist() != other.tolist()
    assert answer.numbers.tolist() == [
        [row, i, *bounds] for row, steps in enumerate((own, other)) for i, bounds in enumerate(steps.tolist())
    ]
    assert [row["steps"] for row in answer.said["rows"]] == [4, 4]
    assert answer.steps[:4].tolist() == np.unique(own).tolist()
    trace = master_and_workers()
    alone = Answer(trace, 0, trace.duration_ns / MS, rank=1)
    assert (len(alone.numbers), alone.said["rows"][0]["steps"]) == (2, 0), "a rank without steps uses those of all ranks"


# What the notebook keeps


def test_the_output_is_the_image_of_timeline_and_names_no_widget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VSCODE_PID", raising=False)
    explorer = lab.explore(data_parallel())
    data, metadata = explorer._repr_mimebundle_()
    assert sorted(data) == [MIME, "image/png", "text/html", "text/plain"]
    assert data["text/plain"] == "timeline of 4 ranks, 3 steps, 67.7 ms"
    assert metadata["image/png"]["alt"].startswith("Timeline: 4 ranks, 3 steps, 67.7 ms. One row for each of rank 0,")
    assert f' {explorer.about["image"]}" alt="Timeline: 4 ranks' in data["text/html"], "the page finds the image by its class"
    monkeypatch.setenv("VSCODE_PID", "1")  # there, a widget is loaded only if an output names it
    named = explorer._repr_mimebundle_()[0]
    assert named[WIDGET]["model_id"] == explorer.model_id
    assert {kind: named[kind] for kind in data} == data, "also where no script of a widget can be loaded"


def test_colab_is_told_of_its_widget_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the metadata, Colab knows no widgets but those of ipywidgets itself."""
    asked = []
    output = types.ModuleType("google.colab.output")
    output.enable_custom_widget_manager = lambda: asked.append(True)  # type: ignore[attr-defined]
    output._widgets = types.SimpleNamespace(_installed_url="the manager")  # type: ignore[attr-defined]
    for name, module in {"google.colab": types.ModuleType("google.colab"), "google.colab.output": output}.items():
        monkeypatch.setitem(sys.modules, name, module)
    anywidget._util.enable_custom_widget_manager_once.cache_clear()
    explorer = lab.explore(data_parallel())
    data, metadata = explorer._repr_mimebundle_()
    assert asked == [True]
    assert metadata[WIDGET] == {"colab": {"custom_widget_manager": {"url": "the manager"}}}
    assert explorer.about["image"] in data["text/html"]
    assert metadata["image/png"]["alt"].startswith("Timeline: 4 ranks")
    anywidget._util.enable_custom_widget_manager_once.cache_clear()


def test_the_image_is_shown_by_ipywidgets_7_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """There, a widget displays itself and tells IPython so."""
    formatters = pytest.importorskip("IPython.core.formatters")
    shown: list[Any] = []
    monkeypatch.setattr(ipywidgets.Widget, "_ipython_display_", lambda *_, **__: shown.append(True), raising=False)
    explorer = lab.explore(data_parallel())
    data, _ = formatters.DisplayFormatter().format(explorer)
    assert "image/png" in data
    assert not shown


@pytest.mark.parametrize("package", ["anywidget", "ipywidgets"])
def test_without_widgets_there_is_the_picture_and_what_to_install(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith(("labkit.plots.explorer", "anywidget"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    figure = lab.explore(data_parallel(), step=1)
    assert figure.alt_text == figure_of(data_parallel(), "", 1).alt_text
    assert capsys.readouterr().err == f"{package} is not installed, so this is a picture only: %pip install anywidget\n"


def test_the_widgets_state_holds_no_spans() -> None:
    small, large = lab.explore(data_parallel()), lab.explore(data_parallel(steps=40))
    sizes = [len(json.dumps(e.about)) for e in (small, large)]
    assert abs(sizes[0] - sizes[1]) < 100
    assert sizes[1] < 5000
    ours = {key for key in large.get_state() if not key.startswith("_")}
    assert ours - {"layout", "tabbable", "tooltip"} == {"about"}  # the others are those of all widgets


def test_the_view_begins_with_the_content_of_the_image() -> None:
    long = data_parallel(steps=40)
    one, some, everything = (lab.explore(long, step=step) for step in (3, range(3, 6), "all"))
    bounds = long.step_bounds() - long.start_ns
    assert [one.about["begin"], one.about["end"]] == bounds[3].tolist()
    assert [some.about["begin"], some.about["end"]] == [bounds[3, 0], bounds[5, 1]]
    assert [everything.about["begin"], everything.about["end"]] == [0, long.duration_ns]
    assert one.about["title"] == everything.about["title"] == "4 ranks, 40 steps, " + time_in_words(long.duration_ns)
    assert "step 3" in repr(one)


def test_requests_of_the_page_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    explorer, sent = lab.explore(data_parallel()), []
    monkeypatch.setattr(explorer, "send", lambda content, buffers: sent.append((content, buffers)))
    explorer._handle_custom_msg({"whole": False, "start": 0, "end": 5 * MS, "columns": 700, "rank": None}, [])
    ((content, buffers),) = sent
    assert (content["whole"], content["rank"], content["end"]) == (False, None, 5 * MS)
    assert json.loads(json.dumps(content)) == content
    assert len(buffers) == 8


@pytest.mark.parametrize(
    ("what", "step", "error", "said"),
    [
        (3, None, TypeError, r"explore\(3\): expected a run"),
        (Trace([], ranks=["rank 0"]), None, LabError, "explore: the ranks recorded nothing"),
        (data_parallel(), 3, LabError, "this run has the steps 0 to 2"),
    ],
)
def test_objects_that_cannot_be_explored_are_reported(what: Any, step: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        lab.explore(what, step=step)


# What a notebook keeps for pages without a kernel


def test_the_output_keeps_the_whole_run_as_the_kernel_would_send_it(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = data_parallel()
    explorer = lab.explore(trace)
    kept = json.loads(json.dumps(explorer._repr_mimebundle_()[0][MIME]))
    header, buffers = Windows(trace).look(0, trace.duration_ns, SAVED_COLUMNS)
    assert kept["about"] == json.loads(json.dumps(explorer.about))
    assert kept["header"] == json.loads(json.dumps(header))
    assert [zlib.decompress(base64.b64decode(one)) for one in kept["buffers"]] == list(buffers)
    monkeypatch.setattr("labkit.plots.explorer.window.MOST_BYTES", 100)
    data, _ = lab.explore(trace)._repr_mimebundle_()
    assert MIME not in data, "too large for a notebook"
    assert "image/png" in data


# What the page says


def in_node(folder: Path, program: str) -> Any:
    """The output of a JavaScript program, read as JSON; the program sees the widget's script as `page`."""
    from labkit.plots.explorer import script

    (folder / "page.mjs").write_text(script(), encoding="utf-8")
    imports = "import * as page from './page.mjs';\nimport { readFileSync } from 'node:fs';\n"
    (folder / "test.mjs").write_text(imports + program, encoding="utf-8")
    assert NODE is not None
    answer = subprocess.run(
        [NODE, str(folder / "test.mjs")], cwd=folder, capture_output=True, text=True, timeout=200, check=False
    )
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


@needs_node
def test_the_page_formats_times_and_sizes_like_the_figure(tmp_path: Path) -> None:
    values = [int(1.37 * 10 ** (i / 7)) for i in range(84)]
    said = in_node(tmp_path, f"console.log(JSON.stringify({values}.map((v) => [page.timeInWords(v), page.bytesInWords(v)])));")
    assert said == [[time_in_words(v), bytes_in_words(v)] for v in values]


def about_of(trace: Trace) -> str:
    return json.dumps(about(view_of(trace, None, ""), "a class"))


def layer_of(trace: Trace, folder: Path) -> str:
    """Write what Python packs of a whole trace; return the JavaScript that unpacks it into `layer`."""
    said, buffers = Windows(trace).look(0, trace.duration_ns, 900)
    for i, buffer in enumerate(buffers):
        (folder / f"{i}").write_bytes(buffer)
    return f"""
        const buffers = [...Array({len(buffers)}).keys()].map((i) => new Uint8Array(readFileSync(String(i))));
        const layer = new page.Layer({json.dumps(said)}, buffers);"""


@needs_node
def test_the_page_describes_a_bar(tmp_path: Path) -> None:
    """From the trace to the text: Python packs, JavaScript unpacks."""
    trace = data_parallel()
    program = f"""
        {layer_of(trace, tmp_path)}
        const about = {about_of(trace)};
        const words = (rank, lane, ms) => {{
            const found = layer.firstAfter(layer.lanes.get(rank)[lane], ms * 1e6);
            return page.barInWords(layer.bar(found, rank), about);
        }};
        const crowd = page.crowdInWords({{ row: 1, count: 12, most: about.communication, length: 5e5 }}, about);
        console.log(JSON.stringify([words(1, 0, 3), words(0, 1, 20), words(0, 1, 12), crowd]));"""
    forward, last, hidden, crowd = in_node(tmp_path, program)
    assert forward == ["forward", "rank 1  ·  6.25 ms", "from 1.20 ms to 7.45 ms"]
    assert last[0] == "all_reduce  1.05 MB"
    assert last[2] == "exposed communication"
    assert last[-1] == "among all 4 ranks  ·  cell 5, line 12"
    assert last[4].startswith("the rank was blocked in it for ")
    assert hidden[2] == "hidden behind compute"
    assert hidden[4] == "the rank was not blocked in it"
    assert crowd == [
        "12 bars",
        "rank 1  ·  in 500 µs, mostly: exposed communication",
        "each narrower than a pixel: zoom in to see them",
    ]


@needs_node
@pytest.mark.parametrize(
    ("span", "words"),
    [
        ({"device": "cuda", "through_host": True}, "moved by gloo through the host's memory, copies included"),
        ({"device": "cuda"}, "timed by the GPU"),
        ({"name": "forward", "kind": "compute", "line": "cell 2, line 3"}, "first used at cell 2, line 3"),
    ],
)
def test_the_page_says_where_and_how(tmp_path: Path, span: dict[str, Any], words: str) -> None:
    given = {"name": "all_reduce", "kind": "communication", "group": "world", "match": 1} | span
    trace = Trace([Span(rank, start_ns=0, end_ns=MS, **given) for rank in (0, 1)], ranks=["rank 0", "rank 1"])
    program = f"""
        {layer_of(trace, tmp_path)}
        console.log(JSON.stringify(page.barInWords(layer.bar(0, 0), {about_of(trace)})));"""
    assert words in in_node(tmp_path, program)


@needs_node
def test_the_page_names_the_axis_of_a_mesh(tmp_path: Path) -> None:
    """In the details of a bar, and in its caption as in the figure's."""
    group = "group 3 mesh_tp of ranks 0,1"
    spans = [Span(r, "all_reduce", "communication", 0, 4 * MS, group=group, match=1, nbytes=4_190_000) for r in (0, 1)]
    trace = Trace(spans, ranks=["rank 0", "rank 1"])
    widths = [1, 2, 12, 13, 20, 21]
    program = f"""
        {layer_of(trace, tmp_path)}
        const about = {about_of(trace)};
        const bar = layer.bar(layer.firstAfter(layer.lanes.get(1)[1], 0), 1);
        const captions = {widths}.map((characters) => {{
            const drawn = [""];
            const pen = {{ measureText: (text) => ({{ width: text.length }}), fillText: (text) => drawn.push(text) }};
            page.Picture.prototype.caption.call({{ about, width: 1000 }}, pen, bar, 0, 0, characters + 4, 20);
            return drawn.at(-1);
        }});
        console.log(JSON.stringify([captions, page.barInWords(bar, about).at(-1)]));"""
    captions, where = in_node(tmp_path, program)
    communication = lanes(trace, 1)[1]
    assert captions == [caption(trace, 0, communication, characters) for characters in widths]
    assert where == "among all 2 ranks  ·  along tp"


@needs_node
@pytest.mark.parametrize(
    ("begin_ms", "end_ms", "at", "marks"),
    [
        (0, 100, [300.0, 600.0], ["┆ all ranks replaced", "✕ rank failed"]),
        (20, 40, [500.0], ["┆ all ranks replaced", "✕ rank failed"]),
        (70, 100, [], []),
    ],
)
def test_failures_are_marked_in_their_rows_and_restarts_across_all(
    begin_ms: float, end_ms: float, at: list[float], marks: list[str], tmp_path: Path
) -> None:
    spans = [Span(rank, "forward", "compute", 0, 100 * MS) for rank in (0, 1)]
    ends = [Scalar(1, ENDED, at_ms * MS, 1.0) for at_ms in (30, 60)]
    trace = Trace(spans, ends, ranks=["rank 0", "rank 1"], restarts_ns=[35 * MS])
    program = f"""
        const lines = [];
        const add = (...at) => lines.push(at);
        const pen = {{ beginPath() {{}}, stroke() {{}}, setLineDash() {{}}, moveTo: add, lineTo: add }};
        const [begin, end] = [{begin_ms} * 1e6, {end_ms} * 1e6];
        const about = {about_of(trace)};
        const view = {{ about, view: {{ start: begin, end }}, shown: [0, 1], top: 10, rowHigh: 50, high: 110 }};
        page.Picture.prototype.ends.call(view, pen, (ns) => (1000 * (ns - begin)) / (end - begin));
        console.log(JSON.stringify([[...view.marks], lines]));"""
    said, lines = in_node(tmp_path, program)
    assert said == marks
    if marks:
        restart = 1000 * (35 - begin_ms) / (end_ms - begin_ms)
        assert lines[:2] == [[restart, 10], [restart, 110]]
    crosses = lines[2:]
    middles = {((x + a) / 2, (y + b) / 2) for (x, y), (a, b) in zip(crosses[::2], crosses[1::2], strict=True)}
    assert middles == {(x, 10 + 1.5 * 50) for x in at}


@needs_node
def test_pieces_of_one_span_around_a_sliver_have_one_caption_in_the_page(tmp_path: Path) -> None:
    """The page chooses as `bars.captioned` does, for the pieces of one exposed operation and its hidden part."""
    edges = [(0, 100), (100, 103), (103, 400), (400, 410), (1000, 1100)]
    spans, exposed = [7, 7, 7, 8, 7], [True, False, True, False, True]
    bars = [
        {"start": start, "end": end, "style": int(shown), "name": "all_reduce", "issued": span, "completed": 2000}
        for (start, end), span, shown in zip(edges, spans, exposed, strict=True)
    ]
    program = f"""
        const bars = {json.dumps(bars)};
        const chosen = (scale) => bars.map((bar) => page.captioned(bars, scale).has(bar));
        console.log(JSON.stringify([chosen(1), chosen(3)]));"""
    start, end = np.array(edges).T
    drawn = Bars(start, end, np.array(exposed, np.uint8), np.array(spans))
    assert in_node(tmp_path, program) == [captioned(drawn, scale).tolist() for scale in (1.0, 3.0)]
    assert not captioned(drawn, 1.0).all()


@needs_node
def test_the_page_uses_the_answers_that_fit_whoever_asked_for_them(tmp_path: Path) -> None:
    """The kernel sends each answer to all pages: another page's view must not replace this one's."""
    program = f"""
        {layer_of(data_parallel(), tmp_path)}
        const view = {{ start: layer.start + 10, end: layer.end - 10 }};
        const used = (changes, base = null) => {{
            const explorer = {{ view, base, whole: layer, fine: null, isolated: 1, root: {{ classList: new Set() }} }};
            for (const act of ["wait", "redraw", "arrived"]) explorer[act] = () => {{}};
            explorer.root.classList.remove = () => {{}};
            page.Explorer.prototype.answer.call(explorer, {{ ...layer, ...changes }}, buffers);
            return [explorer.base != base, explorer.fine != null];
        }};
        const fits = {{ whole: false, rank: 1 }};
        const answers = [{{ whole: true, rank: null }}, fits, {{ ...fits, rank: 2 }}, {{ ...fits, end: view.end - 1 }}];
        console.log(JSON.stringify([...answers.map((changes) => used(changes)), used({{ whole: true }}, layer)]));"""
    assert in_node(tmp_path, program) == [[True, False], [False, True], [False, False], [False, False], [False, False]]


@needs_node
def test_the_axis_has_round_numbers(tmp_path: Path) -> None:
    expected = {
        (0, 67.7, 7): ([0, 10, 20, 30, 40, 50, 60], 0),
        (17.03, 28.2, 6): ([18, 20, 22, 24, 26, 28], 0),
        (0.8199, 0.8206, 5): ([0.82, 0.8202, 0.8204, 0.8206], 4),
        (0, 1, 1): ([0, 1], 0),
    }
    axes = json.dumps(list(expected))
    found = in_node(tmp_path, f"console.log(JSON.stringify({axes}.map((a) => page.ticks(...a))));")
    assert [([round(v, 9) for v in axis["at"]], axis["decimals"]) for axis in found] == list(expected.values())
