"""`make gpu` without a GPU: what it reports as missing, how it runs stages, and the page that it writes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tools import gpu, gpu_lessons, gpu_machine, gpu_report
from tools.gpu_machine import Machine

ROOT = Path(__file__).resolve().parents[2]
H = Machine(
    "python3", version="3.12.3", torch="2.11.0+cu130", cuda="13.0", nccl="2.28.9", gpus=[("NVIDIA X", 141 << 30, "9.0")] * 2,
    driver="580.1",
)  # fmt: skip


def answering(folder: Path, answer: str) -> str:
    """A fake Python that answers the probe with the given text."""
    program = folder / "python-that-answers"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{answer}\nEND\n")
    program.chmod(0o755)
    return str(program)


def said(**changes: Any) -> str:
    found = {"python": "3.12.3", "torch": "2.11.0+cu130", "cuda": "13.0", "gpus": [["NVIDIA X", 1 << 30, "9.0"]], "missing": []}
    return json.dumps(found | changes)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (said(torch="2.13.0+cpu", cuda=None, gpus=[]), r"torch 2.13.0\+cpu is a build without CUDA"),
        (said(gpus=[]), r"torch 2.11.0\+cu130 \(CUDA 13.0\) sees no GPU"),
        (said(torch="2.9.1"), "torch 2.9.1 is older than 2.10"),
        ('{"python": "3.12.3", "gpus": [], "missing": [], "error": "No module named \'torch\'"}', "not installed"),
        ('{"python": "3.12.3", "gpus": [], "missing": [], "error": "OSError: libcudart.so.13"}', "does not load .*libcudart"),
        ("Segmentation fault", "does not load"),
    ],
)  # fmt: skip
@pytest.mark.processes
def test_why_a_python_cannot_run_on_a_gpu(tmp_path: Path, answer: str, words: str) -> None:
    machine, reasons = gpu_machine.find(answering(tmp_path, answer))
    assert machine is None
    assert any(re.search(words, reason) for reason in reasons), reasons


@pytest.mark.processes
def test_a_python_that_can_run_on_a_gpu(tmp_path: Path) -> None:
    machine, reasons = gpu_machine.find(answering(tmp_path, said(missing=["nbclient", "sklearn"])))
    assert machine is not None
    assert reasons == []
    assert machine.gpus == [("NVIDIA X", 1 << 30, "9.0")]
    assert machine.lacks("tests") == []
    assert machine.lacks("lessons") == ["nbclient", "scikit-learn"]


def test_a_missing_program() -> None:
    machine, reasons = gpu_machine.find("/nowhere/python3")
    assert machine is None
    assert reasons[0] == "/nowhere/python3: there is no such program"


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine may have a GPU, where `make gpu` runs")
@pytest.mark.processes
def test_without_a_gpu_the_command_says_what_is_missing_and_fails() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHON"}
    done = subprocess.run(
        [sys.executable, "tools/gpu.py"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 1
    assert "nvidia-smi shows no GPU" in done.stdout
    assert "nothing on this machine can run on an NVIDIA GPU" in done.stdout
    assert "Traceback" not in done.stderr


# Stages


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gpu, "BUILD", tmp_path)
    return tmp_path


def machine_here(**changes: Any) -> Machine:
    return Machine(sys.executable, **changes)


@pytest.mark.parametrize(("code", "state"), [("print('fine')", "ran"), ("raise SystemExit(1)", "failed")])
@pytest.mark.processes
def test_a_stage_that_ends(build: Path, monkeypatch: pytest.MonkeyPatch, code: str, state: str) -> None:
    monkeypatch.setattr(gpu, "_command", lambda _: ["-c", code])
    assert gpu.run_stage("tests", machine_here(), rehearsal=True, left_s=60).state == state


@pytest.mark.processes
def test_a_hanging_stage_is_ended_with_all_its_processes(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    monkeypatch.setattr(gpu, "_command", lambda _: ["-c", code])
    outcome = gpu.run_stage("tests", machine_here(), rehearsal=True, left_s=1.0)
    assert outcome.state == "timed out"  # and the fixture of all tests checks that no process is left


def test_a_stage_that_lacks_a_package_is_not_run(build: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = gpu.run_stage("lessons", machine_here(missing=frozenset({"nbclient"})), rehearsal=True, left_s=60)
    assert (outcome.state, outcome.missing) == ("not run", ("nbclient",))
    assert "pip install nbclient" in capsys.readouterr().out


def test_all_marked_tests_are_run() -> None:
    marked = {p.name for p in (ROOT / "tests").rglob("test_*.py") if "\npytestmark = gpu" in p.read_text()}
    assert marked == {Path(a).name for a in gpu._command("tests") if a.startswith("tests")}
    assert len(marked) >= 3


def test_the_stages_fit_into_the_total_time() -> None:
    assert sum(gpu.LIMITS_S.values()) <= gpu.LIMIT_S == 480


# Lessons


def test_the_lessons_are_the_torch_lessons() -> None:
    names = [path.name[:2] for path in gpu_lessons.torch_lessons()]
    assert {"00", "02", "04", "08"} <= set(names)
    assert "10" not in names


@pytest.mark.processes
def test_a_lesson_is_run_to_its_end_and_its_figures_are_saved(tmp_path: Path) -> None:
    v4 = nbformat.v4
    draw = "import matplotlib.pyplot as plt\n%matplotlib inline\nplt.plot([1, 2]);"
    meant = v4.new_code_cell("1 / 0", metadata={"tags": ["raises-exception"]})
    cells = [v4.new_code_cell("1 / 0"), meant, v4.new_code_cell("'not raised'", metadata={"tags": ["raises-exception"]})]
    nbformat.write(v4.new_notebook(cells=[*cells, v4.new_code_cell(draw)]), tmp_path / "00_x.ipynb")
    out = tmp_path / "out"
    out.mkdir()
    found = gpu_lessons.execute(tmp_path / "00_x.ipynb", out)
    assert found["failed"] == ["cell 1: ZeroDivisionError: division by zero", "cell 3 was expected to raise, and did not"]
    assert found["figures"] == ["00_x_cell04.png"]
    assert (out / "00_x_cell04.png").read_bytes().startswith(b"\x89PNG")


# The page

XML = """<testsuites><testsuite>
<testcase classname="tests.test_gpu_groups" name="test_a"/>
<testcase classname="tests.test_gpu_groups" name="test_b"><failure message="AssertionError: 1 | 2&#10;more"/></testcase>
<testcase classname="tests.test_gpu_groups" name="test_c"><skipped message="needs two GPUs"/></testcase>
<testcase classname="tests.test_gpu_groups" name="test_d"><skipped message="needs two GPUs"/></testcase>
</testsuite></testsuites>"""


def test_the_page_reports_stages_and_machine(tmp_path: Path) -> None:
    (tmp_path / "tests.xml").write_text(XML)
    (tmp_path / "timeline.png").write_bytes(b"png")
    results = {
        "doctor": "  NCCL  all-reduces 1 MB between 2 GPUs",
        "tests": gpu_report.read_junit(tmp_path / "tests.xml"),
        "lessons": [
            {"lesson": "00", "seconds": 9.6, "cells": 3, "failed": ["cell 2: E: a|b"], "ended_by": "", "figures": ["x.png"]}
        ],
        "benchmark": {
            "step": {"step_ms": 12.34, "spans_on_gpu": 30, "spans": 40, "gradients_mib": 64.0},
            "clocks": {"by_events_ms": 11.0, "by_profiler_ms": 10.0, "kernels": 200, "kernels_within": 198},
            "watch": {"run_s": 1.5, "ratio": 1.02},
            "predictions": [{"case": "copy", "rate": "50 GB/s", "predicted_s": 0.001, "measured_s": 0.0012}],
        },
    }  # fmt: skip
    outcomes = [
        {"stage": "tests", "state": "failed", "seconds": 61.2, "missing": ()},
        {"stage": "lessons", "state": "not run", "seconds": 0, "missing": ("nbclient",)},
    ]
    page = tmp_path / "docs" / "gpu.md"
    gpu_report.write(page, H, outcomes, results, tmp_path, rehearsal=False)
    text = page.read_text()
    for words in (
        "2 × NVIDIA X, 141 GiB",
        "NCCL 2.28.9",
        "```text\n  NCCL  all-reduces 1 MB between 2 GPUs\n```",
        "| tests | failed | 61 |",
        "not run: `pip install nbclient`",
        "1 of 2 tests passed",
        "`test_gpu_groups::test_b`: AssertionError",
        "skipped, 2: needs two GPUs",
        "cell 2: E: a\\|b",
        "12.3 ms",
        "30 of 40 spans",
        "1.100 times as long",
        "+2.0% longer",
        "| copy | 50 GB/s | 1.000 ms | 1.200 ms | 1.20 |",
        "(pictures/gpu_timeline.png)",
    ):
        assert words in text, words
    assert (tmp_path / "docs" / "pictures" / "gpu_timeline.png").exists()


def test_a_page_of_stages_without_results(tmp_path: Path) -> None:
    page = tmp_path / "gpu.md"
    outcomes = [{"stage": "tests", "state": "timed out", "seconds": 210, "missing": ()}]
    gpu_report.write(page, H, outcomes, {"tests": None, "lessons": None, "benchmark": None}, tmp_path, rehearsal=True)
    assert "| tests | timed out | 210 |" in page.read_text()
    assert page.read_text().startswith("# A rehearsal")


def test_a_truncated_report_of_pytest(tmp_path: Path) -> None:
    (tmp_path / "tests.xml").write_text(XML[:100])
    assert gpu_report.read_junit(tmp_path / "tests.xml") is None
