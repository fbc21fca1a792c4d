"""`make gpu` without a GPU: which Python it takes, how it runs stages, the page it writes, and a rehearsal."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests import test_docs
from tools import gpu, gpu_lessons, gpu_report, gpu_smoke, versions
from tools.gpu_report import Outcome

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("sees", "arguments", "runs"), [(0, "", True), (1, "", False), (1, "--rehearse", True)])
@pytest.mark.processes
def test_it_takes_a_python_whose_torch_sees_a_gpu_and_for_a_rehearsal_any_torch(
    tmp_path: Path, sees: int, arguments: str, runs: bool
) -> None:
    python = tmp_path / "python3"  # the only one here; asked whether torch sees a GPU
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] || {{ echo "runs $*"; exit 0; }}\n[ $# -gt 2 ] || exit {sees}\n')
    python.chmod(0o755)
    make = ["make", "-f", str(ROOT / "Makefile"), "gpu", f"PYTHON={python}", f"ARGS={arguments}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # of `make test`
    environment["PATH"] = f"{tmp_path}:/usr/bin:/bin"
    done = subprocess.run(make, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == (f"runs tools/gpu.py {arguments}".rstrip() + "\n" if runs else "")
    assert ("no torch here sees a GPU" in done.stderr) == (not runs)
    assert (done.returncode == 0) == runs


# Stages


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gpu, "BUILD", tmp_path)
    return tmp_path


@pytest.mark.parametrize(("code", "state"), [("print('fine')", "ran"), ("raise SystemExit(1)", "failed")])
@pytest.mark.processes
def test_a_stage_that_ends(build: Path, code: str, state: str) -> None:
    assert gpu.run_stage("tests", ["-c", code], rehearsal=True, limit_s=60).state == state


@pytest.mark.processes
def test_a_hanging_stage_is_ended_with_all_its_processes(build: Path) -> None:
    code = "import subprocess; print('so far', flush=True); subprocess.run(['sleep', '600'])"
    outcome = gpu.run_stage("tests", ["-c", code], rehearsal=True, limit_s=3.0)
    assert outcome.state == "timed out"  # and the fixture of all tests checks that no process is left
    assert (build / "tests.log").read_text() == "so far\n"


def test_all_marked_tests_are_run_and_none_may_hang() -> None:
    marked = {p.name for p in (ROOT / "tests").rglob("test_*.py") if "\npytestmark = gpu" in p.read_text()}
    command = gpu._command("tests", [])
    assert marked == {Path(a).name for a in command if a.startswith("tests")}
    assert len(marked) >= 3
    assert {"--timeout=60", "faulthandler_timeout=45", "-v"} <= set(command)


def test_the_stages_run_in_this_order_and_fit_into_the_total_time() -> None:
    assert [*gpu.LIMITS_S] == ["doctor", "smoke", "tests", "lessons", "benchmark"]
    assert sum(gpu.LIMITS_S.values()) <= gpu.LIMIT_S == 480
    table = re.findall(r"^\| (\w+) \| .* \| (\d+) \|$", (ROOT / "docs" / "installing.md").read_text(), re.MULTILINE)
    assert {stage: float(limit_s) for stage, limit_s in table} == gpu.LIMITS_S


@pytest.mark.processes
def test_the_command_runs_the_stages_and_shows_the_end_of_a_failed_ones_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fails = "for i in range(100, 120): print('line', i)\nraise SystemExit(1)"
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr(gpu, "BUILD", tmp_path / "build" / "gpu")
    monkeypatch.setattr(gpu, "_command", lambda stage, _: ["-c", fails if stage == "smoke" else "print('fine')"])
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--rehearse", "--stages", "doctor", "smoke", "--out", str(tmp_path / "out")])
    assert gpu.main() == 1
    printed = capsys.readouterr().out
    assert re.findall(r"^(\w+) \.\.\. (\w+)", printed, re.MULTILINE) == [("doctor", "ran"), ("smoke", "failed")]
    assert re.search(r"^smoke: failed after \d+ s\n.*build/gpu/smoke.log", printed, re.MULTILINE)
    assert re.findall(r"line (\d+)", printed) == [str(i) for i in range(105, 120)]
    page = (tmp_path / "out" / "gpu.md").read_text()
    assert re.findall(r"^\| (\w+) \| (\w+) \|", page, re.MULTILINE) == [("doctor", "ran"), ("smoke", "failed")]


# The pre-flight


@pytest.mark.parametrize(
    ("find", "line"),
    [
        (lambda: [3], r"ok +a name +\d+\.\d\d s  \[3\]\n"),
        (lambda: [4], r"FAILED +a name +\d+\.\d\d s  \[4\]\n"),
        (lambda: 1 // 0, r"FAILED +a name .*  ZeroDivisionError: .*\n"),
    ],
)  # fmt: skip
def test_a_check_is_one_line(find: Any, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_smoke.check("a name", find, lambda found: found == [3]) == line.startswith("ok")
    assert re.fullmatch(line, capsys.readouterr().out)


@pytest.mark.processes
def test_the_pre_flight_passes_on_the_cpu() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.gpu_smoke"], cwd=ROOT, env=gpu.environment(rehearsal=True),
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["ok"] * 7 + ["left"]
    assert "[[7.0, 7.0], [7.0, 7.0]]" in done.stdout


# Lessons


def test_the_lessons_are_the_torch_lessons() -> None:
    names = [path.name[:2] for path in gpu_lessons.torch_lessons()]
    assert {"00", "02", "04", "08"} <= set(names)
    assert "10" not in names
    assert [path.stem[:3] for path in gpu_lessons.torch_lessons(["02", "00", "10"])] == ["00_", "02_"]


@pytest.mark.processes
def test_a_lesson_is_run_to_its_end_and_its_figures_are_saved(tmp_path: Path) -> None:
    v4 = nbformat.v4
    draw = "import matplotlib.pyplot as plt\n%matplotlib inline\nplt.plot([1, 2]);"
    error = v4.new_output("error", ename="E", evalue="", traceback=[])  # of the stored run, of a cell that is meant to raise
    cells = [v4.new_code_cell("1 / 0"), *(v4.new_code_cell(source, outputs=[error]) for source in ("1 / 0", "'not raised'"))]
    nbformat.write(v4.new_notebook(cells=[*cells, v4.new_code_cell(draw)]), tmp_path / "00_x.ipynb")
    out = tmp_path / "out"
    out.mkdir()
    found = gpu_lessons.execute(tmp_path / "00_x.ipynb", out)
    assert found[0] == "00_x"
    assert re.fullmatch(r"\d+ s, 4 cells, 1 figures", found[1])
    assert found[2] == ["cell 1: ZeroDivisionError: division by zero", "cell 3 was expected to raise, and did not"]
    assert (out / "00_x_cell04.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.processes
def test_a_lesson_that_stops_early_has_no_stored_figures_and_says_what_did_not_run(tmp_path: Path) -> None:
    v4 = nbformat.v4
    stored = v4.new_output("display_data", {"image/png": "iVBORw0KGgo="})
    sources = ["print(1)", "import os; os._exit(1)", "print(3)", "print(4)"]
    cells = [v4.new_code_cell(source, outputs=[stored], execution_count=9) for source in sources]
    cells[3].outputs.append(v4.new_output("error", ename="E", evalue="", traceback=[]))  # it is meant to raise
    nbformat.write(v4.new_notebook(cells=cells), tmp_path / "00_x.ipynb")
    out = tmp_path / "out"
    out.mkdir()
    found = gpu_lessons.execute(tmp_path / "00_x.ipynb", out)
    assert found[1].endswith(" 0 figures")
    assert found[2] == ["cell 2: DeadKernelError: Kernel died", "cells 3 to 4 did not run"]
    written = nbformat.read(out / "00_x.ipynb", as_version=4).cells
    assert [cell.execution_count for cell in written[2:]] == [None, None]
    assert [bool(cell.outputs) for cell in written] == [True, False, False, False]


def test_lessons_run_at_a_time_and_what_failed_is_said_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    both_run, begun = threading.Barrier(2, timeout=60), []

    def execute(path: Path, _: Path) -> tuple[str, str, list[str]]:
        begun.append(path.stem)
        both_run.wait()
        return path.stem, "1 s", ["cell 2: E: e"] if path.stem.startswith("02") else []

    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(gpu_lessons, "execute", execute)
    assert gpu_lessons.main(tmp_path, ["02", "00"]) == 1
    assert begun == ["02_data_parallel", "00_start_here"]  # the later ones take longer
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2 lessons: 00_start_here 02_data_parallel"
    assert sorted(lines[1:3]) == ["00_start_here: 1 s, no failures", "02_data_parallel: 1 s, 1 failures"]
    assert lines[3:] == ["02_data_parallel failed:", "  cell 2: E: e"]


def test_a_lesson_that_does_not_exist(tmp_path: Path) -> None:
    assert gpu_lessons.main(tmp_path, ["99"]) == 1


# The benchmark


def test_a_part_of_the_benchmark_that_fails_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from bench.speed import gpu as benchmark

    monkeypatch.setattr(benchmark, "step_in_a_picture", lambda _: 1 // 0)
    monkeypatch.setattr(benchmark, "watch_beside_run", lambda: ["watch_beside_run"])
    assert benchmark.main(tmp_path) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2] == "watch_beside_run"
    assert lines[-1].startswith("step failed: ZeroDivisionError: ")


@pytest.mark.parametrize(("limit_s", "pairs"), [(0.0, 1), (60.0, 5)])
def test_the_comparison_of_watch_with_run_keeps_its_time(limit_s: float, pairs: int) -> None:
    from bench.speed import live_picture

    timed = []

    class Kernel:
        def run(self, _source: str, *, value: str = "") -> float:
            timed.append(value)
            return 3.0 if "watch" in value else 2.0

    kernel: Any = Kernel()
    assert live_picture.compare(kernel, 100, 5, limit_s) == (2.0, 1.5)
    assert timed.count("timed(group.run)") == timed.count("timed(group.watch)") == pairs


# The page


def check_as_docs(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks of tests/test_docs.py on a page that `make gpu` has written."""
    monkeypatch.setitem(test_docs.PAGES, "gpu.md", page)
    test_docs.test_links_lead_somewhere("gpu.md")
    test_docs.test_named_files_exist("gpu.md")
    test_docs.test_named_make_targets_exist("gpu.md")
    test_docs.test_lines_of_prose_are_not_too_wide("gpu.md")


def test_the_page_reports_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "doctor.log").write_text("  GPU to GPU  1 of 1 pair of GPUs have peer access\n")
    (tmp_path / "tests.log").write_text('collected 4 items\n  File "/home/ada/x.py" in `wait.py`\nFAILED a|b [1](2)\n')
    (tmp_path / "timeline.png").write_bytes(b"png")
    outcomes = [
        Outcome("doctor", tmp_path / "doctor.log", "ran", 3.4),
        Outcome("tests", tmp_path / "tests.log", "failed", 61.2),
        Outcome("lessons", tmp_path / "lessons.log", "timed out", 120),
    ]
    page = tmp_path / "docs" / "gpu.md"
    gpu_report.write(page, outcomes, tmp_path, rehearsal=False)
    text = page.read_text()
    check_as_docs(page, monkeypatch)
    for words in (
        "On one GPU, NCCL between GPUs does not run.",
        "## Doctor\n\n```text\n  GPU to GPU  1 of 1 pair of GPUs have peer access\n```",
        "| tests | failed | 61 |",
        "### tests: failed after 61 s\n\n```text\nThe last lines of build/gpu/tests.log:\n  collected 4 items",
        "\n  FAILED a|b [1] (2)\n```",
        "~/ada/x.py",
        "### lessons: timed out after 120 s\n",
        "## Tests\n\n```text\ncollected 4 items\n",
        "(pictures/gpu_timeline.png)",
    ):
        assert words in text, words
    assert re.findall(r"^## (.*)", text, re.MULTILINE) == ["What failed", "Stages", "Doctor", "Tests", "Lessons", "Pictures"]
    assert (tmp_path / "docs" / "pictures" / "gpu_timeline.png").exists()


def test_a_page_of_stages_without_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "gpu.md"
    outcomes = [Outcome(stage, tmp_path / f"{stage}.log", "timed out", 210) for stage in gpu.LIMITS_S]
    gpu_report.write(page, outcomes, tmp_path, rehearsal=True)
    assert "| tests | timed out | 210 |" in page.read_text()
    assert page.read_text().startswith("# A rehearsal")
    assert "Nothing of CUDA, NCCL and NVML has run." in page.read_text()
    check_as_docs(page, monkeypatch)


# A rehearsal


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(versions.INSTALL_S + gpu.REHEARSAL_FACTOR * gpu.LIMIT_S + 200)
def test_a_rehearsal_on_the_oldest_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ROOT / ".venv" / "pythons" / "kaggle"
    missing = versions.made(versions.TABLE["kaggle"], folder)
    if missing:
        pytest.skip(missing)
    page = gpu.BUILD / "gpu.md"
    page.unlink(missing_ok=True)
    done = subprocess.run(
        [folder / "bin" / "python", "tools/gpu.py", "--rehearse", "--lessons", "00", "02"], cwd=ROOT,
        capture_output=True, text=True, timeout=gpu.REHEARSAL_FACTOR * gpu.LIMIT_S + 100, check=False,
    )  # fmt: skip
    said = done.stdout + done.stderr
    text = page.read_text()
    assert dict(re.findall(r"^\| (\w+) \| ([\w ]+) \| \d+ \|$", text, re.MULTILINE)) == dict.fromkeys(gpu.LIMITS_S, "ran"), said
    assert done.returncode == 0, said
    assert re.search(r"^ok +torch .*  2\.10\.", text, re.MULTILINE)
    assert "What failed" not in text
    check_as_docs(page, monkeypatch)
