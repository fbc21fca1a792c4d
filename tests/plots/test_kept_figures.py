"""Every figure is compared with a reviewed reference in tests/plots/pictures/.

After an intended change to a figure, `LABKIT_RENEW_PICTURES=1 pytest` with this file draws the references again; look
at each that git shows as changed before you commit it. A picture that differs is written to pytest's folder for the
test, next to the one expected and the difference.

Pictures are compared in squares of ten pixels, by their mean colour. What another version of matplotlib puts one pixel
further does not count: the best of the nine positions does. A bar, a row, an arrow or a word that is absent or of
another colour counts.
"""

from __future__ import annotations

import dataclasses
import io
import os
from pathlib import Path
from unittest import mock

import matplotlib.pyplot as plt
import numpy as np
import pytest
from PIL import Image

from labkit.plots import bars
from labkit.plots import timeline as gantt
from labkit.plots.breakdown import breakdown, compare
from labkit.plots.live.curves import draw_below
from labkit.plots.memory import memory
from labkit.plots.scaling import scaling
from labkit.plots.timeline import timeline
from labkit.plots.traffic import traffic
from labkit.plots.what_helps import what_helps
from labkit.tracing.ideal_pipeline import schedule
from labkit.tracing.trace import Trace

from synthetic import alone, data_parallel, gpu_and_cpu, lasting, many, model_parallel, remote_calls, sharded  # isort: skip

KEPT = Path(__file__).with_name("pictures")
RENEW = bool(os.environ.get("LABKIT_RENEW_PICTURES"))
SQUARE_PX = 10
LIMIT = 0.12  # of red, green or blue of a square; other font smoothing gives 0.11, a missing arrow 0.19


def with_curve(trace):
    axes = timeline(trace)
    draw_below(axes.figure, trace)
    return axes


def pipelines():
    ideal = {"stages": 4, "micro_batches": 6}
    return {"GPipe": schedule("gpipe", **ideal), "1F1B": schedule("1f1b", **ideal, communication=0.3)}


FIGURES = {
    "timeline_data_parallel": lambda: timeline(data_parallel()),
    "timeline_zoomed": lambda: timeline(data_parallel(steps=30)),
    "timeline_messages": lambda: timeline(model_parallel()),
    "timeline_calls": lambda: timeline(remote_calls()),
    "timeline_critical_path": lambda: timeline(model_parallel(), critical_path=True),
    "timeline_gpu_and_cpu": lambda: timeline(gpu_and_cpu()),
    "timeline_pipelines": lambda: timeline(pipelines()),
    "timeline_many": lambda: timeline(many(40_000)),
    "breakdown": lambda: breakdown(data_parallel()),
    "compare": lambda: compare(naive=model_parallel(), overlapped=data_parallel(2, 2), alone=alone()),
    "timeline_and_curve": lambda: with_curve(data_parallel(steps=30)),
    "memory": lambda: memory(sharded()),
    "traffic_ring": lambda: traffic(data_parallel()),
    "traffic_calls": lambda: traffic(remote_calls()),
    "what_helps": lambda: what_helps(data_parallel()),
    "scaling": lambda: scaling({1: lasting(8), 2: lasting(5), 4: lasting(3)}, predicted={1: 8, 2: 4.4, 4: 2.6, 8: 1.7}),
}


pytestmark = pytest.mark.usefixtures("plain")


def drawn(ax) -> np.ndarray:
    """The figure as red, green and blue from 0 to 1, shape (height, width, 3)."""
    file = io.BytesIO()
    ax.figure.savefig(file, format="png", dpi=100)
    return pixels(file)


def pixels(file) -> np.ndarray:
    with Image.open(file) as image:
        return np.asarray(image.convert("RGB"), np.float64) / 255


def keep(picture: np.ndarray, path: Path) -> None:
    image = Image.fromarray(np.round(255 * picture).astype(np.uint8))
    image.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


def squares(picture: np.ndarray) -> np.ndarray:
    height, width = (size // SQUARE_PX * SQUARE_PX for size in picture.shape[:2])
    cut = picture[:height, :width].reshape(height // SQUARE_PX, SQUARE_PX, width // SQUARE_PX, SQUARE_PX, 3)
    return cut.mean(axis=(1, 3))


def difference(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The colour difference of each square, at the best of the nine positions within a pixel."""
    height, width = (min(a, b) for a, b in zip(one.shape[:2], other.shape[:2], strict=True))
    middle = squares(one[:height, :width])
    moved = [np.roll(other[:height, :width], (down, right), (0, 1)) for down in (-1, 0, 1) for right in (-1, 0, 1)]
    return np.min([np.abs(middle - squares(m)).max(axis=2) for m in moved], axis=0)


def differs(one: np.ndarray, other: np.ndarray) -> str:
    """A description of where two pictures differ; "" if they do not."""
    if any(abs(a - b) > 2 for a, b in zip(one.shape, other.shape, strict=True)):
        return f"{other.shape[1]} × {other.shape[0]} pixels are now {one.shape[1]} × {one.shape[0]}"
    found = difference(one, other)
    if found.max() < LIMIT:
        return ""
    row, column = (int(i) for i in np.unravel_index(found.argmax(), found.shape))
    x, y = (SQUARE_PX * i + SQUARE_PX // 2 for i in (column, row))
    return f"{(found >= LIMIT).sum()} of {found.size} squares differ, most ({found.max():.2f}) at pixel x = {x}, y = {y}"


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_matches_its_reference(name, tmp_path):
    now, path = drawn(FIGURES[name]()), KEPT / f"{name}.png"
    if RENEW:
        KEPT.mkdir(exist_ok=True)
        if not path.exists() or differs(now, pixels(path)):
            keep(now, path)
        return
    kept = pixels(path)
    if reported := differs(now, kept):
        keep(now, tmp_path / "now.png")
        keep(kept, tmp_path / "kept.png")
        coarse = np.kron(np.minimum(difference(now, kept) / LIMIT, 1), np.ones((SQUARE_PX, SQUARE_PX)))
        keep(np.repeat(1 - coarse[..., None], 3, axis=2), tmp_path / "difference.png")
        pytest.fail(f"{name}: {reported}. Look at now.png, kept.png and difference.png in {tmp_path}")


def test_every_reference_belongs_to_a_figure():
    assert {path.stem for path in KEPT.glob("*.png")} == set(FIGURES)
    assert sum(path.stat().st_size for path in KEPT.glob("*.png")) < 600_000


# The comparison detects what it must, and only that


def without_a_short_bar():
    trace = data_parallel()
    (short, *_) = trace.filter(rank=1, name="optimizer")
    spans = [span for span in trace if span != short]
    return timeline(Trace(spans, ranks=trace.ranks, start_ns=trace.start_ns, end_ns=trace.end_ns))


def with_another_title():
    ax = timeline(model_parallel())
    ax.set_title("3 ranks, 2 steps, 69.6 ms")
    return ax


def without_arrows():
    with mock.patch.object(gantt, "draw_messages", return_value=False):
        return timeline(model_parallel())


def in_a_wrong_colour():
    wrong = dataclasses.replace(bars.STYLES["optimizer"], colour="#5E9E00")
    with mock.patch.dict(bars.STYLES, optimizer=wrong):
        return timeline(data_parallel())


@pytest.mark.parametrize(
    ("name", "draw", "said"),
    [
        ("timeline_data_parallel", lambda: timeline(data_parallel(3)), "pixels are now"),  # a missing row
        ("timeline_data_parallel", without_a_short_bar, "squares differ"),
        ("timeline_data_parallel", in_a_wrong_colour, "squares differ"),
        ("timeline_messages", with_another_title, "squares differ"),
        ("timeline_messages", without_arrows, "squares differ"),
    ],
)
def test_what_is_missing_or_different_is_detected(name, draw, said):
    assert said in differs(drawn(draw()), pixels(KEPT / f"{name}.png"))


@pytest.mark.parametrize("move", [(1, 0), (-1, 0), (0, 1), (0, -1), (1, 1)])
def test_a_shift_by_one_pixel_is_ignored(move):
    kept = pixels(KEPT / "traffic_ring.png")
    assert differs(np.roll(kept, move, (0, 1)), kept) == ""


def test_other_antialiasing_is_ignored():
    plt.rcParams.update({"text.antialiased": False, "path.snap": False})
    assert differs(drawn(timeline(data_parallel())), pixels(KEPT / "timeline_data_parallel.png")) == ""
