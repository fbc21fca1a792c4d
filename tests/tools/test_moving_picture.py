"""The film of a run, as `tools/moving_picture.py` makes it."""

from __future__ import annotations

from pathlib import Path

import pytest

import labkit as lab

pytest.importorskip("playwright", reason="playwright is not installed: the extra 'test' brings it")
from PIL import Image

from tools.moving_picture import STAYS_MS, chromium, film

pytestmark = [
    pytest.mark.processes,
    pytest.mark.browser,
    pytest.mark.skipif(chromium() is None, reason="no Chromium on this machine; .ci/run installs one where it can"),
]


def test_a_film_begins_empty_and_ends_with_the_timeline(tmp_path: Path) -> None:
    def work() -> str:
        for _ in lab.steps(range(50)):
            with lab.span("forward"):
                sum(range(10_000))
        return "done"

    before = lab.Group.picture
    with lab.Group(2, runtime="bare") as group:
        run = film(tmp_path / "run.gif", group, work)
    assert run.results == ["done"] * 2
    assert lab.Group.picture is before
    with Image.open(tmp_path / "run.gif") as image:
        pictures, stays = [], []
        for number in range(image.n_frames):
            image.seek(number)
            pictures.append(image.convert("RGB"))
            stays.append(image.info["duration"])
    assert len(pictures) >= 2
    assert stays[-1] == STAYS_MS
    forward = [sum(count for count, colour in picture.getcolors(1 << 24) or [] if _near(colour)) for picture in pictures]
    assert forward[0] < 0.1 * forward[-1], "the ranks' bars are there at the end, and in the beginning but for the legend's"


def _near(colour: object) -> bool:
    """Whether it is the colour of a forward pass, within the precision of a palette."""
    assert isinstance(colour, tuple)
    return max(abs(a - b) for a, b in zip(colour, (0x56, 0xB4, 0xE9), strict=True)) < 12
