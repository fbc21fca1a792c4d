"""The colours of the figures, as people with each kind of colour blindness see them.

Source: G. M. Machado, M. M. Oliveira and L. A. F. Fernandes, "A physiologically-based model for simulation of color
vision deficiency", IEEE Transactions on Visualization and Computer Graphics 15, 2009: its matrices for a severity of 1,
which work on linear RGB. Distances are those of CIE 1976 (L*a*b*, D65), where about 2.3 can just be noticed.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from labkit.plots.bars import STYLES, ink
from labkit.plots.style import CHIP, INK, INKS
from labkit.plots.traffic import OTHERS
from labkit.recording.operations import OPERATION_TYPES, OTHER

EYES = {
    "full": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
TO_XYZ = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]])
WHITE = np.array([0.95047, 1.0, 1.08883])

COMPUTE = ("data", "forward", "backward", "optimizer", "compute", "unlabelled")
COMMUNICATION = ("exposed", "hidden", "waiting")  # an issued operation has the colour of waiting, with dots for its stripes
PAGES = {"light": np.ones(3), "dark": np.full(3, 0x11 / 255)}  # of JupyterLab


def rgb(colour: str) -> np.ndarray:
    return np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])


def on_page(style: str, page: str = "light") -> np.ndarray:
    """The colour of a bar with the page behind it, without its stripes."""
    look = STYLES[style]
    return look.alpha * rgb(look.colour) + (1 - look.alpha) * PAGES[page]


def contrast(one: np.ndarray, other: np.ndarray) -> float:
    """The ratio of relative luminances, as WCAG 2 defines it."""
    linear = [np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4) for c in (one, other)]
    both = sorted(float(c @ [0.2126, 0.7152, 0.0722]) for c in linear)
    return (both[1] + 0.05) / (both[0] + 0.05)


def seen(colour: np.ndarray, eye: str) -> np.ndarray:
    """L*, a* and b* of a colour as a given eye sees it."""
    linear = np.where(colour <= 0.04045, colour / 12.92, ((colour + 0.055) / 1.055) ** 2.4)
    xyz = TO_XYZ @ np.clip(np.array(EYES[eye]) @ linear, 0, 1) / WHITE
    f = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def closest(colours: dict[str, np.ndarray], eye: str) -> tuple[float, str]:
    lab = {name: seen(colour, eye) for name, colour in colours.items()}
    return min((float(np.linalg.norm(lab[a] - lab[b])), f"{a} and {b}") for a, b in itertools.combinations(lab, 2))


def test_the_arithmetic():
    assert seen(np.ones(3), "full") == pytest.approx([100, 0, 0], abs=0.02)
    apart = {eye: closest({"red": rgb("#C05A3C"), "green": rgb("#1A9933")}, eye)[0] for eye in EYES}
    assert apart["full"] > 90
    assert apart["deuteranopia"] < 2


@pytest.mark.parametrize("page", PAGES)
def test_text_and_lines_are_legible_on_both_pages(page):
    """WCAG 2 requires 3 : 1 for graphics and 4.5 : 1 for small text; no colour has more than 4.4 : 1 on both pages."""
    assert contrast(rgb(INK), PAGES[page]) > 4.2
    assert contrast(rgb(INKS["dark"]), rgb(CHIP["facecolor"])) > 7


@pytest.mark.parametrize("style", STYLES)
def test_texts_on_bars_are_legible(style):
    look = STYLES[style]
    if look.alpha == 1:
        assert contrast(rgb({"white": "#FFFFFF"}.get(INKS[ink(style)], INKS[ink(style)])), rgb(look.colour)) > 4.5


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("eye", EYES)
@pytest.mark.parametrize("lane", [COMPUTE, COMMUNICATION], ids=["compute", "communication"])
def test_the_colours_of_one_lane_are_distinguishable(lane, eye, page):
    distance, pair = closest({name: on_page(name, page) for name in lane} | {"the page": PAGES[page]}, eye)
    assert distance > 9, f"{pair}: {distance:.1f}"


@pytest.mark.parametrize("eye", EYES)
def test_the_most_important_colours_are_far_apart(eye):
    """Forward, backward, the optimizer and exposed communication matter most in a timeline."""
    distance, pair = closest({name: on_page(name) for name in ("forward", "backward", "optimizer", "exposed")}, eye)
    assert distance > 16, f"{pair}: {distance:.1f}"
    for cool in ("data", "forward", "backward", "compute"):
        distance, pair = closest({name: on_page(name) for name in (cool, "exposed")}, eye)
        assert distance > 40, f"{pair}: {distance:.1f}"


@pytest.mark.parametrize("eye", EYES)
def test_the_colours_of_operations_are_distinguishable(eye):
    colours = {kind.colour for kind in OPERATION_TYPES} | {OTHER.colour, OTHERS, "#FFFFFF"}
    distance, pair = closest({colour: rgb(colour) for colour in sorted(colours)}, eye)
    assert distance > 12, f"{pair}: {distance:.1f}"
