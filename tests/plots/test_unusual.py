"""Figures of unusual runs are drawn, whatever their names and times; what they say was also inspected by eye."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.text import Text

from labkit.costs.fit import fit
from labkit.costs.link import Link
from labkit.errors.exceptions import LabError
from labkit.errors.units import time_in_words
from labkit.plots.breakdown import breakdown, compare
from labkit.plots.image import as_image
from labkit.plots.measured_link import MeasuredLink
from labkit.plots.memory import memory
from labkit.plots.scaling import scaling
from labkit.plots.style import labkit_style, shortened
from labkit.plots.timeline import timeline
from labkit.plots.traffic import traffic
from labkit.plots.what_helps import what_helps
from labkit.recording.schema import MEMORY, MEMORY_KINDS, Span
from labkit.tracing.ideal_pipeline import schedule
from labkit.tracing.trace import Trace

from synthetic import made, MS, Book, alone, data_parallel, lasting, remote_calls, sharded  # isort: skip

LONG = ("parameter_server_of_embeddings", "trainer_number_one_of_the_two0", "trainer_number_two_of_the_two0")  # 30 characters
US, HOUR = 1_000, 3_600_000_000_000  # ns
DOLLARS = "$a_{$ x"  # as mathematics, this would be an error


pytestmark = pytest.mark.usefixtures("plain")


def stretched(trace, length_ns):
    """The same run with another duration."""

    def at(time_ns):
        return int(time_ns * length_ns / trace.duration_ns)

    times = ("start_ns", "end_ns", "wait_start_ns", "wait_end_ns")
    spans = [replace(s, **{name: at(getattr(s, name)) for name in times}) for s in trace]
    scalars = [replace(s, time_ns=at(s.time_ns)) for s in trace.scalars]
    return Trace(spans, scalars, ranks=trace.ranks, start_ns=at(trace.start_ns), end_ns=at(trace.end_ns))


def renamed(trace, ranks=None, characters=0):
    """The same run with other rank names and longer span names."""

    def longer(name):
        return f"{name} Outer.a_method_whose_name_says_everything.that_there_is_to_say"[:characters] if characters else name

    spans = [s if s.kind in ("step", "call") else replace(s, name=longer(s.name)) for s in trace]
    return Trace(spans, trace.scalars, ranks=ranks or trace.ranks, start_ns=trace.start_ns, end_ns=trace.end_ns)


def stopped():
    """One rank computed for ever, and the others waited for it until they were stopped."""
    call, key = ("call", 0, 60, {"done": False}), {"nbytes": 1 << 20, "done": False}
    first, last = ([("forward", 0, at), ("all_reduce", at, 60, (at, 60), key), call] for at in (5, 7))
    return made(first, [("forward", 0, 6), call], last)


def silent(trace):
    return Trace([s for s in trace if s.kind != "communication"], ranks=trace.ranks)


def ranks_of(count):
    return ("master", *(f"worker{i}" for i in range(1, count)))


def measured(link, operations, sizes=(64, 4096, 1 << 18, 1 << 24)):
    fits = [fit(name, 4, sizes, [link.seconds(name, n, 4) for n in sizes]) for name in operations]
    return MeasuredLink(tuple(fits))


def of_all_kinds(ranks):
    """Ranks whose memory has every kind that exists."""
    book = Book()
    for rank in range(len(ranks)):
        for number, kind in enumerate(MEMORY_KINDS):
            book.scalar(rank, MEMORY + kind, number, 1234 * 2**20 * (number + 1))
        book.whole(rank, "call", 0, 20)
    return book.trace(ranks)


RUNS = {
    "one_rank": alone,
    "16_ranks": lambda: data_parallel(16, 3),
    "16_names": lambda: renamed(remote_calls(), ranks_of(16)),
    "4_names": lambda: renamed(remote_calls(), ranks_of(4)),
    "without_communication": lambda: silent(data_parallel()),
    "of_1_us": lambda: stretched(data_parallel(), US),
    "of_1_hour": lambda: stretched(data_parallel(), HOUR),
    "calls_of_1_hour": lambda: stretched(remote_calls(), HOUR),
    "long_names": lambda: renamed(remote_calls(), LONG, 60),
    "stopped": stopped,
    "one_micro_batch": lambda: schedule("gpipe", stages=4, micro_batches=1, communication=0.3),
}
NOTHING_TRAVELS = ("one_rank", "without_communication", "stopped", "one_micro_batch")
FIGURES = {
    **{f"timeline_{name}": lambda run=run: timeline(run()) for name, run in RUNS.items()},
    **{f"breakdown_{name}": lambda run=run: breakdown(run()) for name, run in RUNS.items()},
    **{f"traffic_{name}": lambda run=run: traffic(run()) for name, run in RUNS.items() if name not in NOTHING_TRAVELS},
    "timeline_dollars": lambda: timeline({DOLLARS: data_parallel(2, 3), "$b$": data_parallel(2, 3)}),
    "compare_dollars": lambda: compare({DOLLARS: data_parallel(2, 3), "$b$": data_parallel(2, 3)}),
    "traffic_dollars": lambda: traffic(renamed(remote_calls(), (DOLLARS, "$b$", "c"))),
    "compare_far_apart": lambda: compare(hour=stretched(alone(), HOUR), microsecond=stretched(alone(), US)),
    "memory_of_1_hour": lambda: memory(stretched(sharded(), HOUR)),
    "memory_of_all_kinds": lambda: memory(of_all_kinds(LONG)),
    "scaling_256": lambda: scaling({2**i: lasting((1 + i) / 2**i) for i in range(9)}, predicted={n: 1 / n for n in (1, 2, 512)}),
    "scaling_far_apart": lambda: scaling({1: lasting(3600), 16: lasting(1e-6)}),
    "link_slow": lambda: measured(Link(gbit_per_s=1e-5, latency_us=1e7), ("send",)).plot(),
    "link_two_sizes": lambda: measured(Link(gbit_per_s=1, latency_us=50), ("send", "all_reduce"), (4, 8)).plot(),
}


@pytest.mark.parametrize("name", FIGURES)
def test_figures_of_unusual_runs_are_drawn(name):
    figure = FIGURES[name]().figure
    figure.canvas.draw()
    assert figure.alt_text


@pytest.mark.parametrize("name", NOTHING_TRAVELS[:3])
def test_traffic_says_if_nothing_arrived(name):
    """Operations that ranks waited in when they were stopped moved no bytes."""
    with pytest.raises(LabError, match="labkit recorded no bytes between ranks"):
        traffic(RUNS[name]())


@pytest.mark.parametrize("figure", [timeline, breakdown, traffic, memory, what_helps])
@pytest.mark.parametrize("ranks", [(), ("rank 0", "rank 1")])
def test_an_empty_trace_is_reported(figure, ranks):
    for spans in ([], [Span(0, "forward", "compute", 5, 5)] if ranks else []):
        with pytest.raises(LabError, match="the ranks recorded nothing"):
            figure(Trace(spans, ranks=ranks))


def test_names_of_ranks_are_shortened_and_still_differ():
    beside = traffic(RUNS["long_names"]()).figure.axes[1]
    names = [t.get_text() for t in beside.get_yticklabels()]
    assert len(set(names)) == 3
    assert max(map(len, names)) < 30
    assert names[0].startswith("parameter_")
    assert names[0].endswith("embeddings")


def test_rounded_up_numbers_and_shortened_names():
    assert [time_in_words(ms * MS) for ms in (9.994, 9.996, 99.94, 99.97)] == ["9.99 ms", "10.0 ms", "99.9 ms", "100 ms"]
    assert (shortened("forward", 7), shortened("forward", 6)) == ("forward", "for…rd")
    assert len(shortened("rpc_async Shard.forward", 18)) == 18


def test_the_sizes_that_were_measured_are_named():
    ax = FIGURES["link_two_sizes"]()
    assert [t.get_text() for t in ax.get_xticklabels()] == ["4 B", "8 B"]


def test_compare_formats_large_numbers_with_few_digits():
    words = [t.get_text() for t in FIGURES["compare_far_apart"]().texts]
    assert "1000 ns, 3.6e+09 × as fast" in words
    assert "3061" in words  # seconds of compute, not 3.06e+03


@pytest.mark.parametrize("name", [name for name in FIGURES if name.endswith("_dollars")])
def test_names_are_drawn_as_they_are_written(name):
    figure = FIGURES[name]().figure
    figure.canvas.draw()
    assert any(DOLLARS in text.get_text() for text in figure.findobj(Text))
    assert not any(text.get_parse_math() for text in figure.findobj(Text) if "$" in text.get_text())


NO_FONT_HAS_IT = "\U000f1234"  # a private character


@pytest.mark.parametrize("name", ["前向传播", "🚀 ключ", NO_FONT_HAS_IT])
def test_characters_that_the_font_lacks_give_no_warning(name, tmp_path):
    """A warning is an error in these tests."""
    run = Trace(list(made([(name, 0, 5)], [(name, 5, 9)])), ranks=(name, "b"))
    for ax in (timeline(run), breakdown(run), compare({name: run, "b": run})):
        assert any(name in text.get_text() for text in ax.figure.findobj(Text))
        ax.figure.savefig(tmp_path / "plain.png")
        as_image(ax.figure, "")


def test_of_the_fonts_for_other_characters_those_that_are_installed_are_used(monkeypatch):
    own = mpl.rcParams["font.family"]
    fonts = ["DejaVu Sans", "Symbola", "Noto Sans CJK JP", "WenQuanYi Zen Hei"]
    monkeypatch.setattr("matplotlib.font_manager.fontManager.ttflist", [SimpleNamespace(name=name) for name in fonts])
    with labkit_style():
        assert mpl.rcParams["font.family"] == [*own, "Noto Sans CJK JP", "Symbola"]
    monkeypatch.setattr("matplotlib.font_manager.fontManager.ttflist", [])
    with labkit_style():
        assert mpl.rcParams["font.family"] == own


@pytest.mark.parametrize("projection", ["polar", "3d", "mollweide"])
@pytest.mark.parametrize(
    "draw",
    [
        lambda ax: timeline(alone(), ax=ax),
        lambda ax: breakdown(alone(), ax=ax),
        lambda ax: compare(a=alone(), b=alone(), ax=ax),
        lambda ax: scaling({1: alone(), 2: alone()}, ax=ax),
        lambda ax: traffic(data_parallel(), ax=ax),
        lambda ax: memory(sharded(), ax=ax),
        lambda ax: measured(Link(gbit_per_s=8, latency_us=5), ("send",)).plot(ax),
    ],
    ids=["timeline", "breakdown", "compare", "scaling", "traffic", "memory", "link"],
)
def test_axes_that_are_not_plain_are_refused_in_one_line(draw, projection):
    ax = plt.subplots(subplot_kw={"projection": projection})[1]
    with pytest.raises(ValueError, match=f"^ax: these axes are {projection}; expected plain ones, as plt.subplots.. makes them$"):
        draw(ax)
    timeline(alone())  # the current axes are not drawn into


def test_numbers_of_numpy_select_steps_and_ranks():
    run = data_parallel()
    assert timeline(run, step=np.int64(1)).figure.alt_text == timeline(run, step=1).figure.alt_text
    assert scaling({np.int64(n): lasting(1 / n) for n in (1, 2)}).get_title(loc="left")
