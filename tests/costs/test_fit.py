"""Latency and bandwidth are recovered from times computed with them, and from real ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import matplotlib.pyplot as plt
import pytest

import labkit as lab
from labkit.costs.fit import Fit, fit
from labkit.costs.link import Link
from labkit.notebook.measure_link import OPERATIONS as BY_RUNTIME
from labkit.notebook.measure_link import _median_s
from labkit.plots.measured_link import MeasuredLink, MeasuredNetwork

OPERATIONS = (*BY_RUNTIME["torch"], *BY_RUNTIME["rpc"])
SIZES = [4**i for i in range(3, 13)]
LINK = Link(gbit_per_s=8.3, latency_us=41.7)


def times(operation: str, ranks: int, link: Link = LINK) -> list[float]:
    return [link.seconds(operation, n, ranks) for n in SIZES]


@pytest.fixture
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> tuple[int, ...]:
    monkeypatch.setattr("labkit.notebook.measure_link.SIZES", (64, 4096, 16384))
    return 64, 4096, 16384


def check_measured(fits: Iterable[Fit], link: Link) -> None:
    """No time is below the link's."""
    for found in fits:
        for n, s in zip(found.nbytes, found.seconds, strict=True):
            assert s >= link.seconds(found.operation, n, 2) - 1e-9


@pytest.fixture(autouse=True)
def no_figures_left() -> Iterator[None]:
    yield
    plt.close("all")


@pytest.mark.parametrize(("operation", "ranks"), [*itertools.product(OPERATIONS, (2, 4))])
def test_the_parameters_of_the_times_are_recovered(operation: str, ranks: int) -> None:
    found = fit(operation, ranks, SIZES, times(operation, ranks))
    assert found.latency_us == pytest.approx(41.7)
    assert found.gbit_per_s == pytest.approx(8.3)
    assert found.worst < 1e-6
    assert found.link == Link(gbit_per_s=found.gbit_per_s, latency_us=found.latency_us)


def test_outliers_and_noise_hardly_change_the_fit() -> None:
    seconds = times("send", 2)
    seconds[1] *= 100
    seconds[7] *= 10
    found = fit("send", 2, SIZES, seconds)
    assert (found.latency_us, found.gbit_per_s) == pytest.approx((41.7, 8.3), rel=0.01)
    assert found.error < 0.01
    assert found.worst == pytest.approx(99, rel=0.02)
    noise = itertools.cycle([1.1, 0.9, 1.0, 0.95, 1.05])
    found = fit("all_reduce", 4, SIZES, [s * x for s, x in zip(times("all_reduce", 4), noise, strict=False)])
    assert (found.latency_us, found.gbit_per_s) == pytest.approx((41.7, 8.3), rel=0.1)
    assert 0.01 < found.error < 0.1


def test_neither_is_negative() -> None:
    no_latency = fit("send", 2, SIZES, [n * 1e-9 * (0.8 if n < 1000 else 1.0) for n in SIZES])
    assert no_latency.latency_us == 0
    assert no_latency.gbit_per_s > 0
    no_bandwidth = fit("send", 2, SIZES, [1e-3 / (1 + i / 10) for i in range(len(SIZES))])
    assert math.isinf(no_bandwidth.gbit_per_s)
    assert no_bandwidth.latency_us > 0
    with pytest.raises(lab.LabError, match=r"16\.8 MB took no longer than 64 B, so the bandwidth is unknown"):
        _ = no_bandwidth.link
    assert "not seen" in repr(MeasuredLink((no_bandwidth,)))


def test_the_table() -> None:
    fits = tuple(fit(name, 2, SIZES, times(name, 2)) for name in ("send", "all_reduce"))
    measured = MeasuredLink(fits)
    assert repr(measured).splitlines() == [
        "operation   ranks  latency α  bandwidth B  off by (median)  at most",
        "send        2      41.7 µs    8.30 Gbit/s  0 %              0 %",
        "all_reduce  2      41.7 µs    8.30 Gbit/s  0 %              0 %",
    ]
    assert measured._repr_html_().count("<tr>") == 3
    assert measured["all_reduce"] is fits[1]
    assert measured.link == fits[0].link
    assert MeasuredLink(fits[1:]).link == fits[1].link
    assert list(measured) == list(fits)
    with pytest.raises(lab.LabError, match="'gather' was not measured; the measured operations are send, all_reduce"):
        _ = measured["gather"]


def test_a_repetition_lasts_from_the_last_start_to_the_last_end() -> None:
    of_ranks: Any = [[[0, 100, 200], [90, 190, 990]], [[10, 110, 210], [60, 160, 260]]]
    assert _median_s("all_reduce", of_ranks, one_clock=True) == 80e-9
    assert _median_s("send", of_ranks, one_clock=True) == 45e-9  # rank 0's round trip
    hour = 3_600 * 10**9
    of_ranks[1] = [[at + hour for at in times] for times in of_ranks[1]]  # another machine's clock
    assert _median_s("all_reduce", of_ranks, one_clock=False) == 90e-9  # the longest time of a rank: 10 ns too long
    buffered: Any = [[[0, 100, 200], [5, 105, 205]], [[at + hour for at in times] for times in [[1, 101, 201], [90, 190, 290]]]]
    assert _median_s("broadcast", buffered, one_clock=False) == 89e-9  # rank 0 leaves its data in a buffer


def test_the_picture() -> None:
    fits = tuple(fit(name, 4, SIZES, times(name, 4)) for name in OPERATIONS)
    ax = MeasuredLink(fits).plot()
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        f"{name}: 41.7 µs, 8.30 Gbit/s, off by 0 %" for name in OPERATIONS
    ]
    points = [line for line in ax.lines if line.get_linestyle() == "None"]
    assert [list(line.get_xdata()) for line in points] == [SIZES] * len(OPERATIONS)
    assert [list(line.get_ydata()) for line in points] == [times(name, 4) for name in OPERATIONS]
    assert len({(line.get_color(), line.get_marker()) for line in points}) == len(OPERATIONS)
    assert ax.get_xscale() == ax.get_yscale() == "log"
    own = plt.subplots()[1]
    assert MeasuredLink(fits[:1]).plot(own) is own
    labels = [own.xaxis.get_major_formatter()(n) for n in (100, 1000, 1e6)]
    assert labels == ["100 B", "1 kB", "1 MB"]


@pytest.mark.processes
def test_real_ranks_and_calls(small_sizes: tuple[int, ...]) -> None:
    link = Link(gbit_per_s=0.005, latency_us=1000)  # the largest takes 26 ms, more than another program's time slice
    with lab.Group(2, link=link) as group:
        measured = lab.measure_link(group, operations=["send", "all_gather"])
    assert [(f.operation, f.nbytes) for f in measured] == [("send", small_sizes), ("all_gather", small_sizes)]
    check_measured(measured, link)
    assert measured.link.latency_us > 0
    with lab.Group(["master", "worker"], runtime="rpc", link=link) as group:
        measured = lab.measure_link(group)
        with pytest.raises(ValueError, match="'send' is none of rpc"):
            lab.measure_link(group, operations=["send"])
    (found,) = measured
    assert (found.operation, found.ranks, found.nbytes) == ("rpc", 2, small_sizes)
    check_measured(measured, link)  # half of a call's round trip
    assert measured.link.name == "measured by rpc"


NETWORK = lab.Network(nodes=2, inside=LINK, between=Link(gbit_per_s=0.5, latency_us=5000), ranks=4)


LEVELS = """
level    operation   ranks  latency α  emulated  bandwidth B  emulated     off by (median)  at most
inside   send        2      50 µs      41.7 µs   8 Gbit/s     8.30 Gbit/s  0%               0%
inside   all_reduce  2      50 µs      41.7 µs   8 Gbit/s     8.30 Gbit/s  0%               0%
between  send        2      5 ms       5 ms      500 Mbit/s   500 Mbit/s   0%               0%
between  all_reduce  2      5 ms       5 ms      500 Mbit/s   500 Mbit/s   0%               0%"""
REAL_LEVELS = """
level    operation  ranks  latency α  bandwidth B  off by (median)  at most
inside   send       2      41.7 µs    8.30 Gbit/s  0%               0%
between  send       2      5 ms       500 Mbit/s   0%               0%"""


def measured_levels(names: tuple[str, ...], *links: Link) -> list[MeasuredLink]:
    """What is measured on links as fast as these."""
    return [MeasuredLink(tuple(fit(name, 2, SIZES, times(name, 2, link)) for name in names)) for link in links]


def first_of_dashed(ax: Any) -> list[float]:
    """Where each line of an emulated or expected link begins."""
    return [line.get_ydata()[0] for line in ax.lines if line.get_linestyle() == "--"]


def test_both_levels_of_a_network() -> None:
    names = ("send", "all_reduce")
    inside, between = measured_levels(names, Link(gbit_per_s=8, latency_us=50), NETWORK.between)
    measured = MeasuredNetwork(NETWORK, inside, between, NETWORK.nodes, 4)
    assert repr(measured).splitlines() == LEVELS.splitlines()[1:]
    assert measured._repr_html_().count("<tr>") == 5
    assert measured.link.inside.latency_us == pytest.approx(50)
    assert measured.link.between.gbit_per_s == pytest.approx(0.5)
    assert (measured.link.nodes, measured.link.ranks) == (2, 4)
    assert measured["between"]["all_reduce"] is between["all_reduce"]
    assert len(list(measured)) == 4
    with pytest.raises(lab.LabError, match="'send' is not a level; expected 'inside' or 'between'"):
        _ = measured["send"]
    axes = measured.plot().figure.axes
    assert [ax.get_title(loc="left").partition(",")[0] for ax in axes] == ["inside a node", "between nodes"]
    for ax, link in zip(axes, (NETWORK.inside, NETWORK.between), strict=True):
        assert first_of_dashed(ax) == pytest.approx([link.seconds(name, SIZES[0], 2) for name in names])
        assert f"over {link}" in [text.get_text() for text in ax.get_legend().get_texts()]


def test_both_levels_of_real_machines() -> None:
    """Nothing is emulated, so there is nothing to compare with, unless a network is given."""
    measured = MeasuredNetwork(None, *measured_levels(("send",), LINK, NETWORK.between), 2, 4)
    assert repr(measured).splitlines() == REAL_LEVELS.splitlines()[1:]
    for ax in measured.plot().figure.axes:
        assert first_of_dashed(ax) == []
        assert "dashed" not in ax.get_title(loc="left")
    expected = lab.Network(nodes=2, inside=Link(gbit_per_s=1, latency_us=10), between=LINK)
    for ax, link in zip(measured.plot(expected).figure.axes, (expected.inside, expected.between), strict=True):
        assert first_of_dashed(ax) == pytest.approx([link.seconds("send", SIZES[0], 2)])
    with pytest.raises(TypeError, match=r"a lab\.Network"):
        measured.plot(LINK)  # type: ignore[arg-type]


@pytest.mark.parametrize("runtime", ["torch", "rpc"])
@pytest.mark.processes
@pytest.mark.usefixtures("small_sizes")
def test_both_levels_of_real_ranks(runtime: str) -> None:
    network = lab.Network(nodes=2, inside=Link(gbit_per_s=1, latency_us=10), between=Link(gbit_per_s=0.005, latency_us=40_000))
    names: Any = 4 if runtime == "torch" else ["a", "b", "c", "d"]
    with lab.Group(names, runtime=runtime, link=network) as group:
        operations = ["send", "all_reduce"] if runtime == "torch" else None
        measured = lab.measure_link(group, operations=operations)
    assert isinstance(measured, MeasuredNetwork)
    check_measured(measured.between, network.between)
    assert measured.inside.fits[0].seconds[0] < network.between.latency_s  # a message inside a node does not wait for the other
    assert {found.ranks for found in measured} == {2}


@pytest.mark.processes
@pytest.mark.usefixtures("small_sizes")
def test_a_network_with_one_rank_on_each_node_has_one_level() -> None:
    with lab.Group(2, link=lab.Network(nodes=2, inside=LINK, between=LINK)) as group:
        assert isinstance(lab.measure_link(group, operations=["send"]), MeasuredLink)


@pytest.mark.parametrize(
    ("group", "options", "error", "says"),
    [
        (None, {}, TypeError, r"measure_link\(None\): expected a group"),
        (1, {}, lab.LabError, "expected at least two ranks of runtime='torch' or 'rpc'"),
        (2, {"operations": ["shout"]}, ValueError, "'shout' is none of send, all_reduce"),
        (2, {"operations": []}, ValueError, "expected an operation"),
        (2, {"operations": "shout"}, ValueError, "'shout' is none of send, all_reduce"),
    ],
)
@pytest.mark.processes
def test_what_cannot_be_measured(group: Any, options: dict[str, Any], error: type[Exception], says: str) -> None:
    given = lab.Group(group) if group else group
    try:
        with pytest.raises(error, match=says):
            lab.measure_link(given, **options)
    finally:
        if group:
            given.close()


def test_a_fit_is_plain_data() -> None:
    found = Fit("send", 2, (8, 1000), (1e-4, 2e-4), 100, 0.08)
    assert found.predicted_s(1000) == pytest.approx(2e-4)
    assert found.residuals == pytest.approx((1e-4 / 1.008e-4 - 1, 0))
