"""Figures are drawn without a display; those that a test leaves open are closed after it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import pytest

with contextlib.suppress(ImportError):
    import matplotlib as mpl

    mpl.use("agg")


@pytest.fixture(autouse=True)
def closed_figures() -> Iterator[None]:
    yield
    if (pyplot := sys.modules.get("matplotlib.pyplot")) is not None:
        pyplot.close("all")
