"""The folder in which a script started by torchrun saves what its ranks record."""

from __future__ import annotations

from typing import Final

VARIABLE: Final = "LABKIT_TRACE"
DEFAULT_FOLDER: Final = "labkit-trace"  # used by `python -m labkit` if the variable is not set
