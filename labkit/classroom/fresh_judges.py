"""Verdicts of judges that are imported afresh, for graders that test an answer in the kernel where it was written.

A student's cell can rebind `lab.check`, by mistake or not. It can also change anything else in its kernel, and no code
in the same kernel can prevent this: `python -m labkit grade` judges in processes in which no code of a student runs.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any


def check(name: str, answer: Any, seed: int = 0) -> Any:
    """Judge an answer as `labkit.check` does, and return its verdict."""
    for module in [module for module in sys.modules if module.startswith("labkit.exercises")]:
        del sys.modules[module]
    return importlib.import_module("labkit.exercises.check").check(name, answer, seed=seed)
