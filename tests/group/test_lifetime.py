"""How long groups live: killed with their notebook, closed, forgotten, several at once, in threads, in asyncio,
beside a fork."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from lifetime_cases import rank, sum_of_ranks
from processes import GONE_LIMIT_S, START, left_after

import labkit as lab
from labkit.group.processes import RankPool

pytestmark = pytest.mark.processes

NEEDS = {"bare": "os", "torch": "torch", "rpc": "torch", "tensorflow": "tensorflow"}
EACH = [*[(runtime, "fork") for runtime in NEEDS], ("bare", "spawn")]
ROOT = Path(__file__).resolve().parents[2]
DONE_LIMIT_S = 200.0


@pytest.fixture(params=EACH, ids="-".join)
def of_each_kind(request: pytest.FixtureRequest) -> dict[str, str]:
    runtime, start = request.param
    pytest.importorskip(NEEDS[runtime])
    return {"runtime": runtime, "start": start}


# The notebook's process is killed

# What ranks are blocked in when their notebook dies.
HOLDS = {
    "bare": "threading.Event().wait()",
    "torch": """
        import torch, torch.distributed as dist
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(1))
        sum(range(10 ** 13))
    """,
    "rpc": """
        from torch.distributed import rpc
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()  # it may act: no deadlock to be reported
        if rpc.get_worker_info().id == 0:
            rpc.rpc_sync("worker1", time.sleep, args=(600,))
        threading.Event().wait()
    """,
    "tensorflow": """
        import tensorflow as tf
        @tf.function
        def count(n):
            while tf.constant(True):
                n += 1
            return n
        count(tf.constant(1))
    """,
}

PROGRAM = """
import json, os, threading, time
import numpy as np
import labkit as lab
from labkit.group.open_groups import notebook

def hold(array):
    print("ready", flush=True)
{body}

child = os.fork()
if child == 0:                     # outlives the notebook's process, with all that it had open
    time.sleep(600)
    os._exit(0)
group = lab.Group(2, runtime={runtime!r}, start={start!r})
servers = [s._process.pid for s in notebook.starters.values()]
print(json.dumps([child, servers]), flush=True)
group.run(hold, np.ones(1 << 20))
"""


@pytest.mark.parametrize(
    ("runtime", "start"),
    [(r, s) if (r, s) in EACH else pytest.param(r, s, marks=pytest.mark.slow) for r in NEEDS for s in START],
)
def test_nothing_is_left_of_a_notebook_that_was_killed(runtime: str, start: str, tmp_path: Path) -> None:
    """No process, no shared memory, no socket with a name, no temporary file; also where a fork of its process
    lives on."""
    pytest.importorskip(NEEDS[runtime])
    folder, mark = tmp_path / "temporary", f"LABKIT_TEST_{os.getpid()}_{runtime}_{start}"
    folder.mkdir()
    source = PROGRAM.format(body=textwrap.indent(textwrap.dedent(HOLDS[runtime]), "    "), runtime=runtime, start=start)
    (tmp_path / "program.py").write_text(source)
    shared = shared_files()
    program = subprocess.Popen(
        [sys.executable, str(tmp_path / "program.py")],
        env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder), "LABKIT_TEST_MARK": mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert program.stdout is not None
    try:
        child, servers = json.loads(program.stdout.readline())
        ready = [program.stdout.readline() for _ in range(2)]
        assert sorted(ready) == sorted(f"[{name}] ready\n" for name in lab.Group(2, runtime=runtime).names), ready
        mine = marked(mark)
        assert {*servers, child} <= mine
        assert len(mine) >= 5, "the notebook, the fork, what starts ranks, and two ranks"
    finally:
        program.kill()
        program.wait()
    assert not left_after(GONE_LIMIT_S, mine - {child}), "processes"
    os.kill(child, 9)
    assert not left_after(GONE_LIMIT_S, [child])
    program.communicate()
    # torch keeps a cache of compiled code there for later processes of this user, and makes its folder when loaded.
    assert [f.name for f in folder.iterdir() if not f.name.startswith("torchinductor_")] == [], "temporary files"
    assert not left_of(shared_files() - shared), "shared memory"
    assert mark not in Path("/proc/net/unix").read_text()


def marked(mark: str) -> set[int]:
    """The processes that have inherited a marker."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("LABKIT_TEST_MARK") == mark:
                found.add(process.pid)
    return found


def shared_files() -> set[Path]:
    """Named shared memory of the kinds that labkit and its frameworks make."""
    folder = Path("/dev/shm")
    kinds = ("labkit", "torch_", "tensorpipe", "gloo", "sem.")
    return {f for f in folder.iterdir() if f.name.startswith(kinds)} if folder.is_dir() else set()


def left_of(files: set[Path]) -> set[Path]:
    """The files that stay. Those of tests that run at the same time disappear by themselves."""
    until = time.monotonic() + GONE_LIMIT_S
    while (left := {file for file in files if file.exists()}) and time.monotonic() < until:
        time.sleep(0.05)
    return left


# Closed


def test_closed_twice_and_never_used(of_each_kind: dict[str, str]) -> None:
    group = lab.Group(2, **of_each_kind)
    pids = group.run(os.getpid).results
    group.close()
    assert not left_after(GONE_LIMIT_S, pids)
    group.close()
    with pytest.raises(lab.LabError):
        group.run(rank)
    with lab.Group(2, **of_each_kind) as unused:
        unused.close()


def in_a_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Run it in a thread; returns the thread and a list that will hold the outcome."""
    outcome: list[Any] = []

    def do() -> None:
        try:
            outcome.append(work())
        except lab.LabError as error:
            outcome.append(error)

    thread = threading.Thread(target=do)
    thread.start()
    return thread, outcome


def test_closed_in_another_thread_during_a_run(of_each_kind: dict[str, str], tmp_path: Path) -> None:
    group = lab.Group(2, timeout_s=200, **of_each_kind)

    def hang(folder: Path) -> None:
        (folder / f"{os.environ['RANK']} {os.getpid()}").touch()
        threading.Event().wait()

    thread, outcome = in_a_thread(lambda: group.run(hang, tmp_path))
    while len(list(tmp_path.iterdir())) < 2:
        os.sched_yield()
    with pytest.raises(lab.LabError):
        group.run(rank)  # one run at a time
    group.close()
    group.close()
    thread.join(DONE_LIMIT_S)
    assert type(outcome[0]) is lab.LabError, "and no rank is blamed"
    assert not left_after(GONE_LIMIT_S, [int(path.name.split()[1]) for path in tmp_path.iterdir()])


@pytest.mark.parametrize("step", ["_start", "_answers"])
def test_closed_in_another_thread_while_the_ranks_start(
    step: str, of_each_kind: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No ranks may be left that nobody ends."""
    group = lab.Group(2, timeout_s=200, **of_each_kind)
    pids: list[int] = []
    real = getattr(RankPool, step)

    def close_then(pool: RankPool, *args: Any) -> Any:
        monkeypatch.undo()
        pids.extend(p.pid for p in pool._processes)
        closing, _ = in_a_thread(group.close)
        closing.join(DONE_LIMIT_S)
        answer = real(pool, *args)
        pids.extend(p.pid for p in pool._processes)
        return answer

    monkeypatch.setattr(RankPool, step, close_then)
    with pytest.raises(lab.LabError):
        group.run(rank)
    assert group._pool is None
    assert len(set(pids)) == 2
    assert not left_after(GONE_LIMIT_S, pids)


def test_an_unreferenced_group_ends(of_each_kind: dict[str, str]) -> None:
    """Also one in a reference cycle, which an error has held."""
    group = lab.Group(2, **of_each_kind)
    group.circle = group  # type: ignore[attr-defined]
    with pytest.raises(lab.RankError) as caught:
        group.run(int, "no")
    pids = group.run(os.getpid).results
    del group, caught
    gc.collect()
    assert not left_after(GONE_LIMIT_S, pids)


def test_a_group_that_only_its_run_references(of_each_kind: dict[str, str]) -> None:
    run = lab.Group(2, **of_each_kind).run(os.getpid)
    gc.collect()
    assert not left_after(GONE_LIMIT_S, run.results)
    assert len(run.trace.filter(kind="call")) == 2


# Several


@pytest.fixture
def several(of_each_kind: dict[str, str]) -> Iterator[list[lab.Group]]:
    groups = [lab.Group(2, timeout_s=200, **of_each_kind) for _ in range(3)]
    yield groups
    for group in groups:
        group.close()


def test_a_group_per_thread(several: list[lab.Group]) -> None:
    """They start, run and close at the same time, and fail independently."""
    failing = several[1]

    def fail() -> None:
        raise ValueError("one of them")

    def work(group: lab.Group) -> list[Any]:
        results = []
        for _ in range(3):
            if group is failing:
                with pytest.raises(lab.RankError, match="one of them"):
                    group.run(fail)
            results += group.run(sum_of_ranks, group.runtime).results
        group.close()
        return results

    threads = [in_a_thread(lambda group=group: work(group)) for group in several]
    for thread, _ in threads:
        thread.join(DONE_LIMIT_S)
    assert [outcome for _, outcome in threads] == [[[1] * 6]] * 3


def test_a_group_inside_asyncio(of_each_kind: dict[str, str]) -> None:
    """In the loop's own thread, as in a notebook's cell, and in threads while the loop runs."""

    async def cell() -> tuple[Any, Any, int]:
        with lab.Group(2, timeout_s=200, **of_each_kind) as one, lab.Group(2, timeout_s=200, **of_each_kind) as other:
            here = one.run(rank).results
            turns = 0

            async def count() -> None:
                nonlocal turns
                while True:
                    turns += 1
                    await asyncio.sleep(0)

            counting = asyncio.create_task(count())
            runs = await asyncio.gather(asyncio.to_thread(one.run, rank), asyncio.to_thread(other.run, rank))
            counting.cancel()
            return here, [run.results for run in runs], turns

    here, beside, turns = asyncio.run(cell())
    assert here == [0, 1]
    assert beside == [[0, 1], [0, 1]]
    assert turns > 1


def test_a_fork_of_the_notebooks_process_does_not_affect_its_groups(of_each_kind: dict[str, str]) -> None:
    """It may close the group, forget it, or start a run: the ranks belong to its parent, which keeps using them."""
    group = lab.Group(2, timeout_s=200, **of_each_kind)
    group.run(rank)
    assert group._pool is not None
    pids = [member.process.pid for member in group._pool.members]
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with contextlib.suppress(lab.LabError):
                group.run(rank)
                code = 2
            group.close()
            del group
            gc.collect()
            code = 0 if code == 1 else code
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert [member.process.pid for member in group._pool.members] == pids
    assert all(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)
    assert group.run(rank).results == [0, 1]
    group.close()
    assert not left_after(GONE_LIMIT_S, pids)
