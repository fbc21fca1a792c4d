"""Python programs in processes of their own, as a student starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 200


def environment(**more: str) -> dict[str, str]:
    """This process's variables, without those of torchrun and of a recording, for a program that imports labkit."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "LABKIT_TRACE"))}
    return clean | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | more


def python(
    *words: str, command: str = sys.executable, env: dict[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run `python` with these words on its command line until it ends; `options` are those of `subprocess.run`."""
    return subprocess.run(
        [command, *words], env=env or environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False, **options
    )
