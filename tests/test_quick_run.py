"""A quick run notices a process that a test starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


SUITE = """
import os, sys
import pytest

def test_quick(): pass

def test_hidden(): getattr(os, "wait" + "pid")(getattr(os, "posix_" + "spawn")(sys.executable, [sys.executable, "-c", ""], {}), 0)

@pytest.mark.processes
def test_open(): os.fork()
"""


@pytest.mark.processes
def test_a_quick_run_fails_a_test_that_starts_a_process_unmarked(tmp_path: Path) -> None:
    """In a folder with the same `conftest.py`."""
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "test_it.py").write_text(SUITE)
    options = ["-q", "-p", "no:cacheprovider", "-o", f"pythonpath={ROOT} {ROOT / 'tests' / 'helpers'}", "-o", "markers=processes"]
    place = ["-c", os.devnull, "--rootdir", str(tmp_path)]
    command = [sys.executable, "-m", "pytest", *options, *place, "-m", "not processes", str(tmp_path)]
    answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert "2 passed, 1 deselected, 1 error" in answer.stdout, answer.stdout + answer.stderr
    assert "ERROR test_it.py::test_hidden - AssertionError: the test starts processes;" in answer.stdout
