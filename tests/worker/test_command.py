"""`python -m labkit script.py`, `torchrun -m labkit script.py`: scripts that do not use labkit are recorded and run
as usual."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from python_programs import environment, python

from labkit.tracing.load import load_trace

pytestmark = pytest.mark.processes

SHOWS = """
import json, sys
print(json.dumps([__name__, sys.argv, sys.path[0], __file__]))
"""
FAILS = """
def inner():
    raise ValueError("the script's own")
inner()
"""
SPAWNS = """
import multiprocessing
def f(x):
    return x + 1
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(f, [1]))
"""
TRAINS = """
import os
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(10)
dist.all_reduce(x)
torch.compile(lambda x: (dist.broadcast(x, 0), x + 1), backend="eager")(x)  # imports torch's compiler
dist.destroy_process_group()
"""


def run(folder: Path, *command: str, trace: str = "") -> subprocess.CompletedProcess[str]:
    return python(*command, cwd=folder, env=environment(**({"LABKIT_TRACE": trace} if trace else {})))


@pytest.fixture
def script(tmp_path: Path) -> Path:
    folder = tmp_path / "scripts"
    folder.mkdir()
    for name, text in (("shows", SHOWS), ("fails", FAILS), ("spawns", SPAWNS), ("trains", TRAINS)):
        (folder / f"{name}.py").write_text(text)
    return folder


def test_a_script_runs_as_usual(script: Path, tmp_path: Path) -> None:
    plain = run(tmp_path, "scripts/shows.py", "--lr", "1", "-m")
    recorded = run(tmp_path, "-m", "labkit", "scripts/shows.py", "--lr", "1", "-m", trace="traces")
    assert (recorded.returncode, recorded.stdout, recorded.stderr) == (0, plain.stdout, "")
    assert load_trace(tmp_path / "traces").ranks == ("rank 0",)
    assert run(tmp_path, "-m", "labkit", "scripts/spawns.py", trace="traces").stdout == "[2]\n"


def test_a_script_may_have_the_name_of_a_command(script: Path) -> None:
    (script / "lab").write_text("print('the script')")
    (script / "lab.py").write_text("print('the module')")
    for line, said in (("./lab", "the script\n"), ("lab.py", "the module\n"), ("-m lab", "the module\n")):
        assert run(script, "-m", "labkit", *line.split(), trace="traces").stdout == said


def test_a_module_runs_as_usual(script: Path) -> None:
    plain = json.loads(run(script, "-m", "shows", "x").stdout)
    recorded = run(script, "-m", "labkit", "-m", "shows", "x", trace="traces")
    assert json.loads(recorded.stdout) == plain


def test_an_error_shows_only_the_scripts_frames(script: Path) -> None:
    plain = run(script, "fails.py")
    recorded = run(script, "-m", "labkit", "fails.py", trace="traces")
    assert recorded.returncode == plain.returncode == 1
    assert recorded.stderr == plain.stderr


def test_without_the_variable_there_is_a_default_folder_and_a_line(script: Path) -> None:
    recorded = run(script, "-m", "labkit", "shows.py")
    (line,) = recorded.stderr.splitlines()
    assert line.startswith("labkit: LABKIT_TRACE is not set, so the trace is written to 'labkit-trace'")
    assert load_trace(script / "labkit-trace").ranks == ("rank 0",)


def test_a_script_that_cannot_be_run_is_refused(tmp_path: Path) -> None:
    for command, words in ((["nothing.py"], "no file 'nothing.py'"), (["-m", "no.such"], "no module 'no.such'"), ([], "usage:")):
        ended = run(tmp_path, "-m", "labkit", *command)
        assert (ended.returncode, words in ended.stderr) == (2, True), ended.stderr
    assert not list(tmp_path.iterdir())
    assert run(tmp_path, "-m", "labkit", "--help").stdout.startswith("usage:")


def test_torchrun_records_a_script_that_does_not_use_labkit(script: Path) -> None:
    pytest.importorskip("torch")
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", str(script / "rendezvous"), "--rdzv-conf", "store_type=file"]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", *meet]
    ended = run(script, *torchrun, "-m", "labkit", "trains.py", trace="traces")
    assert ended.returncode == 0, ended.stderr
    (script / "rendezvous").unlink()
    plain = run(script, *torchrun, "trains.py")
    assert {*ended.stderr.splitlines()} <= {*plain.stderr.splitlines()}  # torch warns of what it cannot compile
    trace = load_trace(script / "traces")
    assert trace.ranks == ("rank 0", "rank 1")
    assert [s.name for s in trace.filter(kind="call")] == ["trains.py"] * 2
    for rank in (0, 1):
        assert [(s.name, s.nbytes, s.line) for s in trace.filter(rank=rank, name="all_reduce")] == [
            ("all_reduce", 40, "trains.py, line 7")
        ]
        assert [s.line for s in trace.filter(rank=rank, name="broadcast")] == ["trains.py, line 8"]
