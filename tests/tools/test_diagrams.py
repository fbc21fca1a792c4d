"""The course's diagrams: the committed files are what the code draws, and everything in them is readable and inside."""

import xml.etree.ElementTree as ET

import numpy as np
import pytest

from labkit.plots.bars import STYLES
from tools.diagrams.collectives import COLLECTIVES, RANKS
from tools.diagrams.draw import IMAGES, all_diagrams
from tools.diagrams.kit import INK, SHARES, Diagram

DIAGRAMS = all_diagrams()
SVG = "{http://www.w3.org/2000/svg}"


def luminance(color):
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a, b):
    """As in WCAG 2.2: 1 to 21."""
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_the_committed_files_are_what_the_code_draws():
    committed = {path.stem: path.read_text(encoding="utf-8") for path in IMAGES.glob("*.svg")}
    assert committed == {name: diagram.svg() for name, diagram in DIAGRAMS.items()}, "run `make diagrams`"


@pytest.mark.parametrize("page", ["#ffffff", "#111111"], ids=["light", "dark"])
def test_the_ink_is_readable_on_both_pages(page):
    assert contrast(INK, page) > 4.2


@pytest.mark.parametrize("name", DIAGRAMS)
def test_a_diagram_is_described_and_nothing_is_cut_off(name):
    root = ET.fromstring(DIAGRAMS[name].svg())
    width, height = float(root.get("width")), float(root.get("height"))
    assert len(root.find(f"{SVG}title").text) > 3
    assert len(root.find(f"{SVG}desc").text) > 30
    for box in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(box.get(key)) for key in ("x", "y", "width", "height"))
        assert x >= 0
        assert y >= 0
        assert x + w <= width
        assert y + h <= height
    for text in root.iter(f"{SVG}text"):
        length = 0.62 * float(text.get("font-size")) * len(text.text)  # of a wide font
        start = float(text.get("x")) - {"start": 0, "middle": length / 2, "end": length}[text.get("text-anchor")]
        assert start >= -2, text.text
        assert start + length <= width + 2, text.text


@pytest.mark.parametrize("name", DIAGRAMS)
def test_the_text_in_a_box_is_readable_on_its_fill(name):
    boxes, texts = {}, 0
    for part in ET.fromstring(DIAGRAMS[name].svg()):
        if part.tag == f"{SVG}rect" and part.get("fill") != "none":
            boxes["last"] = part
        elif part.tag == f"{SVG}text" and part.get("fill") in ("#111111", "#ffffff"):
            assert contrast(part.get("fill"), boxes["last"].get("fill")) > 3.2, part.text
            texts += 1
    assert texts or name in ("10_shards", "17_interval")  # these have no text in boxes


def test_what_is_done_and_who_does_it_have_different_colours():
    """A rank's colour is far from those of the timelines: here, in red, green and blue from 0 to 255."""

    def channels(color):
        return np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)])

    for share in SHARES:
        for name, style in STYLES.items():
            assert np.linalg.norm(channels(share) - channels(style.colour)) > 50, f"{share} is like {name}"


@pytest.mark.parametrize("name", DIAGRAMS)
def test_a_box_that_names_a_rank_has_no_colour_of_the_timelines(name):
    filled = ""
    for part in ET.fromstring(DIAGRAMS[name].svg()):
        if part.tag == f"{SVG}rect":
            filled = part.get("fill")
        elif part.tag == f"{SVG}text" and part.get("fill") in ("#111111", "#ffffff") and part.text.startswith("rank "):
            assert filled not in {style.colour for style in STYLES.values()}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_neither_makes_nor_loses_data(name):
    """What is there afterwards was there before, or is the sum of what was."""
    before, after, _ = COLLECTIVES[name]
    assert all(len(row) == RANKS for state in (before, after) for row in state)
    had = {cell[0] for row in before for cell in row if cell}
    has = {cell[0] for row in after for cell in row if cell}
    assert {text for text in has if not text.startswith("Σ")} <= had
    if name in ("broadcast", "scatter", "gather", "all_gather", "all_to_all"):
        assert has == had


def test_markup_in_a_text_is_text():
    picture = Diagram(100, 50, "a < b", 'the "first" & only')
    picture.box(0, 0, 50, 20, "x < y\n& z")
    root = ET.fromstring(picture.svg())
    assert [text.text for text in root.iter(f"{SVG}text")] == ["x < y", "& z"]
    assert root.find(f"{SVG}title").text == "a < b"
