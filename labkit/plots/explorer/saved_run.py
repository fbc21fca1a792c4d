"""A whole run as the explorer's pages need it, for notebooks: static pages have no kernel to ask."""

from __future__ import annotations

import base64
import zlib
from typing import Any, Final

from labkit.plots.explorer.window import Windows

MIME: Final = "application/vnd.labkit.explorer+json"
COLUMNS: Final = 2000  # of a run that has too many bars to be kept one by one
MOST_BYTES: Final = 150_000  # compressed; a larger run is not kept: notebooks stay small


def saved(about: dict[str, Any], windows: Windows) -> dict[str, Any] | None:
    """Return the data of a run, as JSON can hold them; None if they are too large for a notebook.

    Args:
        about: the constant data of the explorer.
        windows: the trace.
    """
    header, buffers = windows.look(0, about["duration"], COLUMNS)
    packed = [base64.b64encode(zlib.compress(buffer, 9)).decode() for buffer in buffers]
    return {"about": about, "header": header, "buffers": packed} if sum(map(len, packed)) <= MOST_BYTES else None
