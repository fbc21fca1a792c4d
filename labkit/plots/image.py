"""A figure as the image stored in a notebook: a PNG with a palette, and its width on the page."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["as_image"]

SHOWN_DPI: Final = 100  # of the image on the page
PNG_DPI: Final = 150  # of its pixels, for sharp text on high-resolution screens
COLOURS: Final = 128  # of its palette: those of the bars, and the shades of text and antialiasing


def as_image(figure: Figure) -> tuple[dict[str, str], dict[str, Any]]:
    """Data and metadata of a display that shows the figure. The palette cuts its size to a quarter."""
    from PIL import Image

    full, small = io.BytesIO(), io.BytesIO()
    figure.savefig(full, format="png", dpi=PNG_DPI)
    with Image.open(full) as image:
        image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(small, format="png", optimize=True)
    width = int(figure.get_figwidth() * SHOWN_DPI)
    return {"image/png": base64.b64encode(small.getvalue()).decode()}, {"image/png": {"width": width}}
