"""Runs a short suite on every other Python that labkit promises and this machine has: a process's life, what travels.

Without torch: on Linux, the package index has CUDA builds only, 3 GB to download and 5 GB on disk for each Python.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
VERSIONS: Final = ("3.11", "3.12", "3.13")
TOOLS: Final = ("pytest", "pytest-timeout")
TESTS: Final = (
    "tests/group/test_group.py",
    "tests/ipc",  # pickling, tracebacks, prints
    "tests/recording/test_record.py",
    "tests/launch/test_starters.py",  # starts and ends of ranks, and of programs that leave them open
)
PYTEST: Final = (
    "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider",
    "-o", "addopts=--import-mode=importlib --strict-markers",  # not the options of nbval, which is not installed
    "--durations=3",
)  # fmt: skip


def tested(version: str) -> bool:
    """Run the suite on a Python of this version, if there is one; return whether nothing failed."""
    found = subprocess.run(["sh", "tools/find-python", version], cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode:
        print(f"Python {version} is not tested: {found.stderr.strip()}", flush=True)
        return True
    print(f"Python {version}: {found.stdout.strip()}", flush=True)
    folder = ROOT / ".venv" / "pythons" / version
    python = str(folder / "bin" / "python")
    steps = [
        [found.stdout.strip(), "-m", "venv", str(folder)],
        [python, "-m", "pip", "install", "--quiet", "-c", "constraints.txt", "-e", ".", *TOOLS],
        [python, *PYTEST, *TESTS],
    ]
    return all(subprocess.run(step, cwd=ROOT, check=False).returncode == 0 for step in steps)


def main() -> int:
    """Test all versions; return the exit code."""
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    results = [tested(version) for version in VERSIONS if version != own]
    return 0 if all(results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
