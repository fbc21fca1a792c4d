"""Leftovers of a round are found."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from bench.chaos.leftovers import MARK, Traces

pytestmark = pytest.mark.processes


def test_a_process_that_was_left_is_found(tmp_path: Path) -> None:
    traces = Traces("a mark", tmp_path)
    left_behind = subprocess.Popen(["sleep", "100"], env=os.environ | {MARK: "a mark"})
    others = subprocess.Popen(["sleep", "100"], env=os.environ | {MARK: "another mark"})
    try:
        left, _ = traces.left((), (), 0.0)
        assert left == [f"process {left_behind.pid}: sleep 100"]
        assert traces.left([left_behind.pid], (), 0.0)[0] == []
        (tmp_path / "forgotten").touch()
        assert traces.left([left_behind.pid], (), 0.0)[0] == ["forgotten"]
        assert traces.left([left_behind.pid], ["forgotten"], 0.0)[0] == []
    finally:
        for process in (left_behind, others):
            process.kill()
            process.wait()
