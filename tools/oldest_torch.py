"""Runs a short suite with the oldest torch that labkit supports, in an environment of its own without TensorFlow.

Colab has this version. labkit uses private names of torch (`labkit/comm/torch_internals.py`), which every version may
change.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
TORCH: Final = "2.11.0"
ROOM_BYTES: Final = 9 * 10**9  # where only a CUDA build can be had, it takes 5.1 GB, and pip as much for a moment
INSTALL_S: Final = 600
TOOLS: Final = (
    "ipykernel",
    "ipywidgets",
    "matplotlib",
    "nbclient",
    "numpy",
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "scikit-learn",
)
TESTS: Final = (
    "tests/comm/test_compiled.py",
    "tests/comm/test_phases.py",
    "tests/comm/test_pipelines.py",
    "tests/comm/test_process_group.py",
    "tests/comm/test_rpc_calls.py",
    "tests/comm/test_torch_internals.py",
    "tests/group/test_short_runs.py",
    "tests/simulation",
)
PYTEST: Final = (
    "-m", "pytest", "-q", "-n", "2", "-m", "not slow", "-p", "no:cacheprovider",
    "-o", "addopts=--import-mode=importlib --strict-markers",  # not the options of nbval, which is not installed
    "--durations=3",
)  # fmt: skip


def main() -> int:
    """Install and test; return the exit code: 0 also where this torch cannot be installed."""
    if shutil.disk_usage(ROOT).free < ROOM_BYTES:
        print(f"torch {TORCH} is not tested: its CUDA build needs {ROOM_BYTES // 10**9} GB of free space")
        return 0
    folder = ROOT / ".venv" / "pythons" / f"torch-{TORCH}"
    python = str(folder / "bin" / "python")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    constraints = folder / "constraints.txt"
    pinned = (ROOT / "constraints.txt").read_text()
    constraints.write_text(re.sub(r"^(torch|setuptools)==.*\n", "", pinned, flags=re.MULTILINE))  # it wants its own setuptools
    install = [python, "-m", "pip", "install", "--quiet", "-c", str(constraints), "-e", ".", f"torch=={TORCH}", *TOOLS]
    try:
        installed = subprocess.run(install, cwd=ROOT, capture_output=True, text=True, check=False, timeout=INSTALL_S)
    except subprocess.TimeoutExpired:
        print(f"torch {TORCH} is not tested: its installation took more than {INSTALL_S} s")
        return 0
    if installed.returncode:
        print(f"torch {TORCH} is not tested: {installed.stderr.strip().splitlines()[-1]}")
        return 0
    print(f"torch {TORCH}:", flush=True)
    return subprocess.run([python, *PYTEST, *TESTS], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
