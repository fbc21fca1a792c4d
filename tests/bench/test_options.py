"""The options of the benchmarks' commands."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("module", "option"),
    [("bench.load", "--only {runs,groups,ranks,move,flood,spans,notebooks}"), ("bench.speed", "--write FILE")],
)
def test_the_command_explains_itself(module: str, option: str) -> None:
    command = [sys.executable, "-m", module, "--help"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=True)
    assert option in shown.stdout
