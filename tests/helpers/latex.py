"""Formulas in LaTeX, read back as Python."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping


def evaluated(formula: str, values: Mapping[str, float]) -> float:
    """The value of a formula of `lab.predict`."""
    python = re.sub(r"_\\text\{(inside|between)\}", r"_\1", formula).replace(r"\lceil\log_2 p\rceil", "(deep)")
    python = python.replace(r"\,", "*").replace(r"\alpha", "alpha").replace(r"\left", "").replace(r"\right", "")
    while r"\frac" in python:
        python = re.sub(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"((\1)/(\2))", python)
    python = re.sub(r"(?<=[\d)])(?=\()", "*", python)
    known = {"__builtins__": {}, "deep": math.ceil(math.log2(values.get("p", 1)))}
    return float(eval(python, known, dict(values)))
