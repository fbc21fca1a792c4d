"""The command's options."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[3]


def test_the_command_explains_itself() -> None:
    command = [sys.executable, "-m", "bench.load", "--help"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=True)
    assert "--only {runs,groups,ranks,move,flood,spans,notebooks}" in shown.stdout
