"""Where a script that torchrun started leaves what its ranks record."""

from __future__ import annotations

from typing import Final

__all__ = ["DEFAULT_FOLDER", "VARIABLE"]

VARIABLE: Final = "LABKIT_TRACE"
DEFAULT_FOLDER: Final = "labkit-trace"  # for `python -m labkit` without the variable
