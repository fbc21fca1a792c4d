"""A figure as a notebook shows it: a PNG with a transparent page, as wide as the page, with alternative text.

JupyterLab 4 gives no alternative text to `image/png`, and shows it at a fixed width. So the output has the image twice:
as HTML, which notebooks show, and as a PNG for all that show no HTML. `tools/notebooks.py` keeps the PNG alone in the
committed notebooks, because GitHub is not sure to show the image in HTML; its metadata has the alternative text, which
nbconvert shows.
"""

from __future__ import annotations

import base64
import io
import uuid
from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH_IN: Final = 9.0  # of figures as wide as the page
WIDEST_PX: Final = 1300  # of a figure of `WIDTH_IN` on the page; a wider one would have larger letters than the page
PNG_DPI: Final = 150  # so that a figure of `WIDTH_IN` has a pixel for each of the widest page
COLOURS: Final = 128  # of the palette: those of the bars, and the shades of text and antialiasing
MARGIN_IN: Final = 0.04
NEARLY: Final = 0.85  # of the width: such figures fill it, too, so that several below one another have the same width
HTML_CLASS: Final = "labkit-figure"
# Chromium keeps the focused cell below a growing output in its place, which scrolls the output out of the window.
STAYS: Final = "<style>.jp-WindowedPanel-outer{overflow-anchor:none}</style>"


def as_image(figure: Figure, alt_text: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Data and metadata of a display that shows the figure. The palette cuts its size to a quarter."""
    from PIL import Image

    full, small = io.BytesIO(), io.BytesIO()
    figure.savefig(full, format="png", dpi=PNG_DPI, transparent=True, bbox_inches="tight", pad_inches=MARGIN_IN)
    with Image.open(full) as image:
        share = image.width / PNG_DPI / WIDTH_IN
        share = 1.0 if share > NEARLY else share
        image.quantize(COLOURS, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(
            small, format="png", optimize=True
        )
    png, alt = base64.b64encode(small.getvalue()).decode(), escape(alt_text, quote=True)
    width_px = round(WIDEST_PX * share)
    html = (
        f'{STAYS}<img class="{HTML_CLASS}" alt="{alt}" style="width:{100 * share:.0f}%;max-width:{width_px}px" '
        f'src="data:image/png;base64,{png}">'
    )
    data = {"text/html": html, "image/png": png, "text/plain": summary(alt_text)}
    return data, {"image/png": {"width": width_px, "alt": alt_text}}


def summary(alt_text: str) -> str:
    """The alternative text up to its first colon, which is the same in every execution: what follows has numbers."""
    return alt_text.partition(":")[0]


def show(figure: Figure, alt_text: str, numbers: Mapping[str, Any]) -> None:
    """Display the figure in a cell's output; its numbers, by MIME type, are for programs that read the notebook.

    The display starts with its text only: nbval 0.11 compares the first version of a display with the saved notebook.
    """
    from IPython.display import display

    data, metadata = as_image(figure, alt_text)
    name = f"labkit-{uuid.uuid4().hex[:12]}"
    display({"text/plain": summary(alt_text)}, raw=True, display_id=name)
    display({**data, **numbers}, raw=True, metadata=metadata, display_id=name, update=True)
