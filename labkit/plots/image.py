"""A figure as the image that a notebook keeps: a PNG with a palette, and its width on the page."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["as_image"]

SHOWN_DPI: Final = 100  # of the picture on the page
PNG_DPI: Final = 150  # of its pixels: sharp on fine screens too
COLOURS: Final = 128  # of its palette: those of the bars and the shades of text and edges


def as_image(figure: Figure) -> tuple[dict[str, str], dict[str, Any]]:
    """The data and the metadata of a display that shows the figure. The palette makes it a quarter of the size."""
    from PIL import Image

    full, small = io.BytesIO(), io.BytesIO()
    figure.savefig(full, format="png", dpi=PNG_DPI)
    with Image.open(full) as image:
        image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(small, format="png", optimize=True)
    width = int(figure.get_figwidth() * SHOWN_DPI)
    return {"image/png": base64.b64encode(small.getvalue()).decode()}, {"image/png": {"width": width}}
