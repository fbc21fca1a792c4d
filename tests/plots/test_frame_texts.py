"""Texts beside a rank in a live frame do not overlap their neighbours, whatever their length."""

from __future__ import annotations

import functools
import itertools
import re
from xml.etree import ElementTree as ET

import pytest
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

from labkit.launch.resource_usage import Load
from labkit.plots.live.drawing import STILL, WIDTH, LiveFrame, LiveRow, Past, svg
from labkit.plots.live.recent import Recent

STATUSES = (
    "", "returned", "recv", "all_reduce · 1.2 s",
    "TensorFlow's ClusterCoordinator.join · 12.3 s", "W" * 60 + " · 1 min 40 s",
    "rpc_async NetShard2.forward", "i" * 200, "m" * 200,
)  # fmt: skip
LOADS = (Load(), Load(nbytes=999_000_000_000), Load(nbytes=123_456_789, busy=100), Load(busy=7))
BOLD = FontProperties(family="DejaVu Sans", weight="bold")  # the widest font that a page may have


@functools.cache
def character(which: str) -> float:
    """The width of a character, in units of the font's size."""
    between = TextPath((0, 0), f"|{which}|", size=1, prop=BOLD).get_extents().width
    return between - TextPath((0, 0), "||", size=1, prop=BOLD).get_extents().width


def texts_of(rows: list[LiveRow]) -> list[tuple[str, float, float, float]]:
    """For each text: its content, its left and right end and its distance from the top, in the drawing's units."""
    names = tuple(row.name for row in rows)
    recent = Recent(names, 0)
    past = Past([recent.binned(i) for i in range(len(rows))], recent.shown_ns)
    page = svg(LiveFrame("train", 0, None, (), rows, past, None), "a")
    found = []
    for text in ET.fromstring(re.search(r"<svg.*</svg>", page)[0]).iter("{http://www.w3.org/2000/svg}text"):
        size = float(text.get("font-size", "11"))
        length = sum(map(character, text.text)) * size
        end = float(text.get("x")) + {"end": 0, "middle": length / 2}.get(text.get("text-anchor"), length)
        found.append((text.text, end - length, end, float(text.get("y"))))
    return found


def near(one: float, other: float) -> bool:
    """Whether two texts belong to one row: a row of one to five ranks has its status above its memory."""
    return abs(one - other) < 8


@pytest.mark.parametrize("ranks", [1, 4, 24])
def test_a_status_of_any_length_leaves_room_for_the_memory(ranks: int):
    for status, load in itertools.product(STATUSES, LOADS):
        found = texts_of([LiveRow(f"rank {i}", status, blocked=True, load=load) for i in range(ranks)])
        height = next(y for text, _, _, y in found if text == "rank 0")
        beside = [text for text in found if near(text[3], height) and text[0] not in STILL]
        lines = {y: sorted((left, right, text) for text, left, right, at in beside if at == y) for *_, y in beside}
        assert sum(map(len, lines.values())) == 1 + bool(status) + bool(load.nbytes) + (load.busy is not None)
        for row in lines.values():
            for (_, right, text), (left, _, following) in itertools.pairwise(row):
                assert right + 2 < left, (text, following)
            assert row[-1][1] <= WIDTH


def test_a_status_that_is_cut_still_says_how_long():
    found = texts_of(
        [LiveRow("rank 0", "TensorFlow's ClusterCoordinator.join · 12.3 s", blocked=True, load=Load(nbytes=123_000_000))]
    )
    (status,) = [text for text, *_ in found if text.startswith("Tensor")]
    assert status.endswith("… · 12.3 s")
    assert status.count("…") == 1
