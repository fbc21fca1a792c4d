"""Films the picture of `watch`: a real run's frames as they came, and the timeline that it leaves, as one GIF.

A browser draws them, but only when the run is over, so that it takes nothing from the ranks. Needs the extra `test`
and a Chromium.
"""

from __future__ import annotations

import io
import itertools
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from PIL import Image

import labkit as lab
from labkit.plots.image import as_image
from labkit.plots.live.curves import draw_below
from labkit.plots.live.drawing import LiveFrame
from labkit.plots.live.drawing import page as html_of
from labkit.plots.live.live import Live, Screen
from labkit.plots.timeline import figure_of

WIDTH, MARGIN = 900, 10  # pixels
STAYS_MS: Final = 5000  # how long the last picture stays before the film restarts
COLOURS: Final = 192
SAMPLES: Final = 6  # frames from which the colours are chosen
PAGE: Final = "<body style='margin:{margin}px;background:white;font-family:DejaVu Sans,sans-serif'>{content}</body>"


class _Film(Screen):
    """Keeps what it is shown."""

    def __init__(self) -> None:
        self.shown: list[tuple[float, str]] = []  # when, and as HTML

    def show(self, frame: LiveFrame) -> None:
        self.shown.append((time.perf_counter(), html_of(frame, "film")))

    def end(self, trace: lab.Trace, title: str) -> None:
        figure = figure_of(trace, title)
        draw_below(figure, trace)
        data, _ = as_image(figure, figure.alt_text)
        self.shown.append((time.perf_counter(), f"<img src='data:image/png;base64,{data['image/png']}' width='{WIDTH}'>"))


def chromium() -> str | None:
    """Where a Chromium is on this machine."""
    return next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)


def film(path: Path, group: lab.Group, function: Callable[..., Any], *args: Any) -> lab.Run:
    """Watch a run of the group, and leave what was to be seen of it in a GIF.

    Raises:
        LabError: no Chromium is installed.
    """
    browser = chromium()
    if browser is None:
        raise lab.LabError("a film needs a Chromium to draw its frames, and there is none on this machine")
    kept, before = _Film(), lab.Group.picture
    lab.Group.picture = lambda: Live(kept)
    try:
        run = group.watch(function, *args)
    finally:
        lab.Group.picture = before
    pictures = _drawn([html for _, html in kept.shown], browser)
    high = max(picture.height for picture in pictures)
    pages = []
    for picture in pictures:
        pages.append(Image.new("RGB", (picture.width, high), "white"))
        pages[-1].paste(picture, (0, 0))
    samples = Image.new("RGB", (pictures[0].width, high * SAMPLES))
    for i in range(SAMPLES):
        samples.paste(pages[-1 - i * (len(pages) - 1) // SAMPLES], (0, i * high))
    # One palette for all: with one each, colours would flicker. By coverage: the median cut makes white a pale grey.
    palette = samples.quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE)
    frames = [page.quantize(palette=palette, dither=Image.Dither.NONE) for page in pages]
    times = [at for at, _ in kept.shown]
    stays = [round(1000 * (b - a)) for a, b in itertools.pairwise(times)] + [STAYS_MS]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=stays, loop=0, optimize=True)
    return run


def _drawn(pages: list[str], executable: str) -> list[Image.Image]:
    """What a browser makes of some HTML."""
    from playwright.sync_api import sync_playwright

    pictures = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": WIDTH + 2 * MARGIN, "height": 100})
        for content in pages:
            page.set_content(PAGE.format(margin=MARGIN, content=content))
            page.wait_for_function("() => [...document.images].every((image) => image.complete)")
            pictures.append(Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("RGB"))
        browser.close()
    return pictures
