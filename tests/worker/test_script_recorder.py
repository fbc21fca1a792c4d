"""Scripts started by torchrun or by the student: what they leave in the folder that LABKIT_TRACE names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import python_programs
from python_programs import LIMIT_S, ROOT

from labkit.errors.exceptions import LabError
from labkit.recording.cores import RUN_QUEUE
from labkit.recording.ring_buffer import CAPACITY
from labkit.recording.schema import COMPUTE
from labkit.tracing.load import load_trace
from labkit.tracing.trace import Trace
from labkit.worker.script_recorder import MOVE_AT, _Script

HERE = ROOT / "tests" / "helpers"
SCRIPT = HERE / "torchrun_script.py"


def recorded_in(folder: Path, **more: str) -> dict[str, str]:
    """The variables of a script that leaves its trace in a folder."""
    return python_programs.environment(**({"LABKIT_TRACE": str(folder)} | more))


def python(folder: Path, code: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a script without torch, as the rank given by `more`."""
    return python_programs.python("-c", code, str(folder), env=recorded_in(folder, **more))


def torchrun(folder: Path, nodes: list[int], **more: str) -> list[tuple[int, str, str]]:
    """Start torchrun once per node with the given numbers of ranks; returns exit codes, outputs and errors."""
    # The agents meet in a file: no port that might be taken by the time they listen on it.
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", str(folder.parent / "rendezvous"), "--rdzv-conf", "store_type=file"]
    agents = []
    for ranks in nodes:
        sizes = ["--nnodes", str(len(nodes)), "--nproc-per-node", str(ranks)]
        command = [sys.executable, "-m", "torch.distributed.run", *sizes, *meet, str(SCRIPT), str(folder)]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        agents.append(subprocess.Popen(command, env=recorded_in(folder, **more), **pipes))
    try:
        printed = [agent.communicate(timeout=LIMIT_S) for agent in agents]
        return [(agent.returncode, *texts) for agent, texts in zip(agents, printed, strict=True)]
    finally:
        for agent in agents:
            agent.kill()
            agent.communicate()


@pytest.mark.slow
@pytest.mark.processes
def test_two_nodes_leave_one_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "traces"
    another = os.pathsep.join([str(HERE / "another_machine"), str(ROOT)])
    ended = torchrun(folder, [2, 1], PYTHONPATH=another)
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert "labkit" not in "".join(err for _, _, err in ended), "nothing to complain of"
    trace = load_trace(folder)
    assert trace.ranks == ("rank 0", "rank 1", "rank 2")
    (reported,) = capsys.readouterr().out.splitlines()
    assert reported == f"labkit: {trace.notes[0]}"
    assert reported.startswith("labkit: clocks of another set to rank 0's, right to within ")
    for rank in range(3):
        spans = trace.filter(rank=rank).spans
        assert [s.name for s in spans if s.kind == "compute"] == ["forward"] * 3
        assert [s.name for s in spans if s.kind == "step"] == ["step"] * 3
        assert [s.name for s in spans if s.kind == "call"] == ["torchrun_script.py"]
        assert [(s.match, s.line, s.done) for s in spans if s.name == "all_reduce"] == [
            (i, "torchrun_script.py, line 19", True) for i in (1, 2, 3)
        ]
    assert [s.value for s in trace.scalars if s.rank == 2 and s.name == "loss"] == [6000.0, 12000.0, 18000.0]
    # No rank completes an all_reduce before all have begun it, also if one clock is an hour ahead and too fast.
    within_ns = 1000 * int(reported.removeprefix("labkit: clocks of another set to rank 0's, right to within ").split()[0])
    drift_ns = 1_000_000  # if the machine was so busy that the clock was read only once
    for match in (1, 2, 3):
        parts = [s for s in trace if s.name == "all_reduce" and s.match == match]
        assert len(parts) == 3
        assert max(s.start_ns for s in parts) <= min(s.end_ns for s in parts) + 2 * within_ns + drift_ns
    (sent,), (received,) = ([s for s in trace if s.name == name] for name in ("send", "recv"))
    assert (sent.rank, sent.peer, sent.nbytes, received.rank, received.peer) == (0, 2, 2000, 2, 0)
    assert (sent.group, sent.match) == (received.group, received.match)
    assert sent.start_ns <= received.end_ns + 2 * within_ns + drift_ns


KILLED = """
import os, sys
import labkit as lab
import torch, torch.distributed as dist
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
with lab.span("prepare"):
    dist.barrier()
if rank == 0:
    dist.irecv(torch.empty(7), 1)
    dist.send(torch.empty(7), 1)
    os.kill(os.getpid(), 9)
dist.recv(torch.empty(7), 0)
sys.stdin.read()
os.kill(os.getpid(), 9)
"""


ALONE = """
import sys
import labkit as lab
import torch, torch.distributed as dist
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
dist.all_reduce(torch.ones(1))
work = dist.all_reduce(torch.ones(1), async_op=True)
while not work.is_completed():
    pass
work.wait()
"""


@pytest.mark.processes
@pytest.mark.parametrize("ranks", ["1", "5000"])
def test_delays_and_waits_of_a_script(tmp_path: Path, ranks: str) -> None:
    """Delays are recorded if this machine has more ranks than cores."""
    done = python(tmp_path, ALONE, RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE=ranks)
    assert done.returncode == 0, done.stderr
    trace = load_trace(tmp_path)
    delays = [s.issue_delay_ns > 0 for s in trace.filter(name="all_reduce")]
    assert delays == [ranks == "5000" and os.path.exists(RUN_QUEUE)] * 2
    assert trace.waits["match"].tolist() == [2]


@pytest.mark.processes
def test_a_killed_rank_leaves_its_records(tmp_path: Path) -> None:
    """torchrun is not needed: any launcher that sets RANK and WORLD_SIZE works."""
    ranks = []
    for rank in (0, 1):
        command = [sys.executable, "-c", KILLED, str(tmp_path / "store")]
        env = recorded_in(tmp_path / "traces", RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
        ranks.append(subprocess.Popen(command, env=env, stdin=subprocess.PIPE))
    try:
        assert ranks[0].wait(LIMIT_S) == -9
        ranks[1].communicate(timeout=LIMIT_S)
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    trace = load_trace(tmp_path / "traces")
    assert trace.notes == tuple(f"rank {rank} did not come to its end, or has not yet" for rank in (0, 1))
    for rank in (0, 1):
        assert [s.name for s in trace.filter(rank=rank, kind="compute")] == ["prepare"]
        assert [(s.match, s.done) for s in trace.filter(rank=rank, name="barrier")] == [(1, True)]
    assert [(s.nbytes, s.peer, s.done) for s in trace.filter(rank=0, name="recv")] == [(28, 1, False)]
    assert [s.done for s in trace.filter(rank=1, name="recv")] == [True]


RECORDS = "import labkit as lab\nfor step in lab.steps(range(3)):\n    with lab.span('forward'): lab.record(loss=step)\n"


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., _Script]:
    """A rank that is recorded, in this process."""
    return lambda **env: _Script(tmp_path, env)


def named(left: Trace) -> list[str]:
    return [s.name for s in left]


@pytest.mark.processes
def test_a_script_without_a_launcher_is_one_rank(tmp_path: Path) -> None:
    ended = python(tmp_path / "new" / "folder", RECORDS)
    assert (ended.returncode, ended.stderr) == (0, "")
    trace = load_trace(tmp_path / "new" / "folder")
    assert (trace.ranks, trace.notes) == (("rank 0",), ())
    assert sorted(named(trace)) == ["-c"] + ["forward"] * 3 + ["step"] * 3
    assert [s.value for s in trace.scalars if s.name == "loss"] == [0, 1, 2]


@pytest.mark.processes
def test_the_operations_of_a_killed_rank_are_kept(tmp_path: Path) -> None:
    killed = RECORDS + "span = lab.span('save', kind='communication')\nspan.__enter__()\nimport os\nos.kill(os.getpid(), 9)\n"
    assert python(tmp_path, killed).returncode == -9
    trace = load_trace(tmp_path)
    assert [s.done for s in trace.filter(name="save")] == [False]
    assert len(trace.filter(name="forward")) == 3


@pytest.mark.processes
def test_a_child_process_of_a_rank_is_not_a_rank(tmp_path: Path) -> None:
    children = (
        "import os, subprocess, sys\n"
        "import labkit as lab\n"
        "if hasattr(os, 'fork') and os.fork() == 0:\n"
        "    with lab.span('forked'): pass\n"
        "    sys.exit()\n"
        "if hasattr(os, 'fork'): os.wait()\n"
        "import glob, json\n"
        "(about,) = glob.glob(f'{sys.argv[1]}/*.json')\n"
        "assert json.load(open(about))['ended_ns'] == 0, 'the end of a forked process is not its own'\n"
        "code = 'import labkit as lab\\nwith lab.span(\"started\"): pass'\n"
        "subprocess.run([sys.executable, '-c', code], check=True)\n"
        "with lab.span('own'): pass\n"
    )
    # From Python 3.12 on, a fork beside another thread, here labkit's, gives a warning.
    ended = python(tmp_path, children, PYTHONWARNINGS="ignore::DeprecationWarning")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert len(list(tmp_path.glob("*.ring"))) == 1
    assert sorted(named(load_trace(tmp_path))) == ["-c", "own"]


@pytest.mark.processes
def test_the_ranks_of_a_group_are_not_recorded_as_a_script(tmp_path: Path) -> None:
    """If the notebook's own process has the variable, for example from its shell."""
    notebook = (
        "import os, sys, labkit as lab\n"
        "os.environ['LABKIT_TRACE'] = sys.argv[1]\n"
        "for start in 'fork', 'spawn':\n"
        "    with lab.Group(1, runtime='bare', start=start) as group: assert group.run(abs, -1).results == [1]\n"
    )
    ended = python(tmp_path / "traces", notebook, LABKIT_TRACE="")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert not (tmp_path / "traces").exists()


@pytest.mark.processes
def test_a_folder_that_cannot_be_written_does_not_end_the_script(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ended = python(tmp_path / "file", RECORDS + "print('went on')", RANK="1", WORLD_SIZE="2")
    assert (ended.returncode, ended.stdout) == (0, "went on\n")
    (line,) = ended.stderr.splitlines()
    says = f"labkit, rank 1: LABKIT_TRACE={tmp_path / 'file'}: this rank runs without being recorded: FileExistsError"
    assert line.startswith(says)


@pytest.mark.processes
def test_a_torch_that_cannot_be_recorded_does_not_end_the_script(tmp_path: Path) -> None:
    """The import of torch is noticed even if its spec was asked for before."""
    (tmp_path / "torch.py").write_text("print('torch comes in')")
    code = "import labkit, importlib.util\nimportlib.util.find_spec('torch')\nimport torch\nprint('went on')"
    ended = python(tmp_path / "traces", code, PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))
    assert (ended.returncode, ended.stdout) == (0, "torch comes in\nwent on\n")
    (line,) = ended.stderr.splitlines()
    assert line.startswith("labkit: communication is not recorded: ModuleNotFoundError: ")


@pytest.mark.processes
def test_without_the_variable_nothing_is_loaded() -> None:
    costly = ("labkit.worker.script_recorder", "labkit.recording.record", "mmap", "socket")
    code = f"import labkit, sys; print([m for m in {costly} if m in sys.modules])"
    assert python_programs.python("-c", code).stdout == "[]\n"


@pytest.mark.slow
def test_records_beyond_the_ring_are_moved(script: Callable[..., _Script], tmp_path: Path) -> None:
    own = script()
    ring = own._recorder.ring
    for i in range(2 * CAPACITY):
        ring.write("span", COMPUTE, i, i + 1)
        if i % MOVE_AT == 0:
            own._move()
    trace = load_trace(tmp_path)
    spans = trace.filter(name="span").spans
    assert [s.start_ns for s in spans] == list(range(2 * CAPACITY))
    assert trace.dropped == (0,)
    # The process was killed while it wrote there.
    (moved,) = tmp_path.glob("*.records")
    os.truncate(moved, moved.stat().st_size - 7)
    assert len(load_trace(tmp_path).filter(name="span")) >= 2 * CAPACITY - 1 - CAPACITY // 8


def test_runs_do_not_mix(script: Callable[..., _Script], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def leave(name: str, rank: int, restart: int = 0, run: str = "") -> None:
        own = script(RANK=str(rank), WORLD_SIZE="2", TORCHELASTIC_RESTART_COUNT=str(restart))
        own._about["run"] = run
        own._recorder.ring.write(name, COMPUTE, own._about["began_ns"] + 10, own._about["began_ns"] + 20)
        own._path = own._path.with_name(f"{own._path.name}-{name}")  # one process cannot be the same rank twice
        for old in tmp_path.glob("*-rank[01].*"):
            old.rename(old.with_stem(f"{old.stem}-{name}"))
        own._write_about()

    leave("first", 0)
    leave("first", 1)
    leave("second", 0)
    leave("again", 1, restart=1)
    leave("b", 0, run="two")
    leave("a", 0, run="one")
    leave("a", 1, run="one")
    runs = [{s.name for s in load_trace(tmp_path, run=i) if s.kind == "compute"} for i in range(5)]
    assert runs == [{"first"}, {"second"}, {"again"}, {"b"}, {"a"}]
    capsys.readouterr()
    assert {s.name for s in load_trace(tmp_path) if s.kind == "compute"} == {"a"}
    assert "the folder holds 5 runs, run=0 to run=4" in capsys.readouterr().out
    assert "rank 1 of 2 left no trace" in load_trace(tmp_path, run=3).notes
    with pytest.raises(
        LabError, match=r"run=5: the folder .* holds\n  run=0: .* on 2 ranks, begun .*\n.*\n  run=2: .*, restart 1, "
    ):
        load_trace(tmp_path, run=5)


def test_machines_with_uncompared_clocks_use_their_own_time(script: Callable[..., _Script], tmp_path: Path) -> None:
    began = []
    for rank in (0, 1):
        own = script(RANK=str(rank), WORLD_SIZE="2")
        own._about |= {"machine": f"machine {rank}", "host": f"host{rank}", "began_unix_ns": 10**18 + rank * 1000}
        own._recorder.ring.write("span", COMPUTE, own._about["began_ns"] + 5000, own._about["began_ns"] + 6000)
        own._write_about()
        began.append(own._about["began_ns"])
    trace = load_trace(tmp_path)
    first, second = trace.filter(name="span").spans
    assert (first.start_ns, second.start_ns - first.start_ns) == (began[0] + 5000, 1000)
    assert any(note.startswith("the clocks of host1 were not compared with rank 0's: ") for note in trace.notes)


def test_a_folder_without_a_trace_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where no script has left a trace
    (tmp_path / "other.json").write_text(json.dumps({"mine": 1}))
    (tmp_path / "broken.json").write_text("{")
    forgotten = r"either LABKIT_TRACE=.* was not set .*, or the script neither has `import labkit` nor was run with .* -m labkit"
    with pytest.raises(LabError, match=rf"no trace in the folder .*: {forgotten}"):
        load_trace(tmp_path)


def test_an_empty_folder_says_what_was_forgotten(
    script: Callable[..., _Script], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "traces").mkdir()
    monkeypatch.chdir(tmp_path)
    script()
    for left in tmp_path.glob("*-rank0.*"):
        (tmp_path / "labkit-trace").mkdir(exist_ok=True)
        left.rename(tmp_path / "labkit-trace" / left.name)
    with pytest.raises(LabError, match="LABKIT_TRACE was not set when the script ran, and its trace is in 'labkit-trace'"):
        load_trace("traces")


def test_unreadable_files_are_reported(script: Callable[..., _Script], tmp_path: Path) -> None:
    def left(rank: int) -> Any:
        own = script(RANK=str(rank), WORLD_SIZE="2")
        own._recorder.ring.write("span", COMPUTE, 5, 6)
        return own._path

    left(0)
    os.truncate(left(1).with_suffix(".ring"), 100)
    trace = load_trace(tmp_path)
    assert any(note.startswith("what rank 1 left cannot be read: ") for note in trace.notes)
    assert len(trace.filter(rank=0, name="span")) == 1


WORKER = """
import sys
import labkit
from torch.distributed import rpc
rank = int(__import__("os").environ["RANK"])
options = rpc.TensorPipeRpcBackendOptions(init_method="file://" + sys.argv[2])
rpc.init_rpc(("trainer", "server")[rank], rank=rank, world_size=2, rpc_backend_options=options)
if rank == 0:
    rpc.rpc_sync("server", len, args=([1, 2],))
rpc.shutdown()
"""


@pytest.mark.processes
def test_workers_of_rpc_have_their_names(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    command = [sys.executable, "-c", WORKER, str(folder), str(tmp_path / "store")]
    ranks = [
        subprocess.Popen(
            command, env=recorded_in(folder, RANK=str(rank), WORLD_SIZE="2", TP_SOCKET_IFNAME="lo"), stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    try:
        complained = [rank.communicate(timeout=LIMIT_S)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert [rank.returncode for rank in ranks] == [0, 0], complained
    trace = load_trace(folder)
    assert trace.ranks == ("trainer", "server")
    assert [(s.rank, s.name) for s in trace.filter(kind="communication")] == [(0, "rpc_sync len"), (1, "reply len")]
