"""Limits of a process: time, memory, processes and output; and nothing of it is left."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest

from labkit.classroom.bounded import MOST_OUTPUT, Ended, Limits, run_bounded

pytestmark = pytest.mark.processes


def run(code: str, tmp_path: Path, limits: Limits = Limits(60)) -> Ended:  # noqa: B008  # it is frozen
    (tmp_path / "submitted.py").write_text(f"import os, sys, time\nresult = os.fdopen(int(sys.argv[1]), 'w')\n{code}\n")
    return run_bounded(["submitted"], "the input", limits, str(tmp_path), os.environ | {"PYTHONPATH": str(tmp_path)})


def test_its_input_result_and_output(tmp_path: Path) -> None:
    ended = run("print('printed'); print('error', file=sys.stderr); result.write(sys.stdin.read().upper())", tmp_path)
    assert ended == Ended("THE INPUT", "printed\nerror\n", "") or sorted(ended.output.split()) == ["error", "printed"]
    assert ended.result == "THE INPUT"


def test_a_process_that_fails_tells_its_exit_code_and_keeps_its_result(tmp_path: Path) -> None:
    ended = run("result.write('so far'); result.flush(); os._exit(3)", tmp_path)
    assert (ended.result, ended.why) == ("so far", "it ended with exit code 3")


def test_time(tmp_path: Path) -> None:
    assert run("while True: pass", tmp_path, Limits(1)).why == "it was not finished after 1 s"


def test_memory_of_all_its_processes(tmp_path: Path) -> None:
    code = "hoard = []\nos.fork()\nwhile True: hoard.append(bytearray(os.urandom(1000) * 10_000)); time.sleep(0.01)"
    assert "of memory; allowed are 300" in run(code, tmp_path, Limits(60, memory_mb=300)).why


def test_the_number_of_processes(tmp_path: Path) -> None:
    code = "for _ in range(30):\n    if os.fork() == 0: time.sleep(1000)\ntime.sleep(1000)"
    assert run(code, tmp_path, Limits(60, processes=20)).why == "it started more than 20 processes"


def test_endless_output_is_cut(tmp_path: Path) -> None:
    ended = run("while True: print('x' * 1000)", tmp_path, Limits(2))
    assert len(ended.output) == MOST_OUTPUT


def test_nothing_is_left(tmp_path: Path) -> None:
    daemon = "if os.fork() == 0:\n    os.setsid()\n    print(os.getpid(), flush=True)\n    time.sleep(1000)"
    ended = run(f"{daemon}\ntime.sleep(1)", tmp_path)
    assert ended.why == ""
    limit_s = time.monotonic() + 60  # a process that was killed may still need a core to end
    while is_left(int(ended.output)) and time.monotonic() < limit_s:
        time.sleep(0.05)
    assert not is_left(int(ended.output))


def is_left(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
