"""Which notebook a person has open: its path, as Jupyter's server or VS Code gives it."""

from __future__ import annotations

import os
import sys


def notebook_path() -> str:
    """Return the path of the notebook of this kernel; "" if a program executes it, or in a script."""
    path = os.environ.get("JPY_SESSION_NAME", "") or getattr(sys.modules.get("__main__"), "__vsc_ipynb_file__", "")
    return str(path) if str(path).endswith(".ipynb") else ""
