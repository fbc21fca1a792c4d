"""Tests that start processes are recognized from their code, and a quick run notices a process that a test starts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import answers
import kernels
import pytest
import quick_run

import labkit as lab
from bench.load import loads

ROOT = Path(__file__).resolve().parents[1]


class Starter:
    def start(self) -> None:
        subprocess.run(["true"], check=True)


def itself() -> None:
    lab.Group(2)


def inside_a_function() -> Callable[[], Any]:
    return lambda: lab.Group(2)


def through_a_function() -> None:
    itself()


def through_a_class() -> None:
    Starter()


def through_a_helper() -> None:
    kernels.Kernel(ROOT)


def through_a_benchmark() -> None:
    loads.many_ranks(2)


def through_a_context_manager() -> None:
    with kernels.shared_kernel(ROOT):
        pass


def through_an_exercise() -> None:
    answers.judge(answers.Answer("introduce", None, ""))


def not_at_all() -> str:
    return os.getcwd()


@pytest.mark.parametrize(
    "function",
    [
        itself, inside_a_function, through_a_function, through_a_class, through_a_helper, through_a_benchmark,
        through_a_context_manager, through_an_exercise,
    ],
)  # fmt: skip
def test_who_starts_processes_is_recognized(function: Callable[[], Any]) -> None:
    assert quick_run.starts_processes(function)


def test_who_starts_none_is_recognized() -> None:
    assert not quick_run.starts_processes(not_at_all)


SUITE = """
import os, sys

def test_quick(): pass

def test_hidden(): getattr(os, "wait" + "pid")(getattr(os, "posix_" + "spawn")(sys.executable, [sys.executable, "-c", ""], {}), 0)

def test_open(): os.fork()
"""


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
