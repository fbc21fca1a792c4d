"""The folder of labkit's own code: tracebacks that students see leave out the frames in it."""

from __future__ import annotations

import os
from typing import Final

LABKIT: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
