"""Where labkit's own code lies: what a student sees of an error leaves its frames out."""

from __future__ import annotations

import os
from typing import Final

__all__ = ["LABKIT"]

LABKIT: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
