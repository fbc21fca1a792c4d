"""Runs a program in a Python in which labkit's tables of private names lack some of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def reports(program: ModuleType, names: list[str], gone: str, folder: Path) -> list[dict[str, Any]]:
    """Return what a program prints as objects of JSON, one in each line.

    Args:
        program: its file runs; its `HIDE` runs first, in each process of Python.
        names: its arguments.
        gone: the variable GONE in its environment, which `HIDE` reads.
        folder: an empty folder.
    """
    (folder / "sitecustomize.py").write_text(program.HIDE)
    path = os.pathsep.join([str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, str(program.__file__), *names]
    environment = os.environ | {"GONE": gone, "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
