"""Why a process ended: its signal, the likely cause, and whether the kernel's memory killer was at work."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import left_after

from labkit.errors.exit_reasons import LOOK_EVERY_S, MemoryKiller, OutOfMemoryKills, explain_exit


def test_out_of_memory_is_told_where_it_is_known() -> None:
    kill = -signal.SIGKILL
    assert explain_exit(kill) == "killed by SIGKILL (killed from outside; if nobody did, the machine ran out of memory)"
    assert explain_exit(kill, "group") == (
        "killed by SIGKILL (out of memory: the kernel's memory killer ended it; "
        "smaller batches, a smaller model or fewer ranks need less)"
    )
    assert explain_exit(kill, "machine").startswith("killed by SIGKILL (out of memory, by all signs: the kernel's memory killer")
    assert "memory" not in explain_exit(-signal.SIGTERM, "group")


@pytest.mark.parametrize(
    ("now", "before", "where"),
    [
        (OutOfMemoryKills(2, 5), OutOfMemoryKills(1, 4), "group"),
        (OutOfMemoryKills(1, 5), OutOfMemoryKills(1, 4), ""),  # somebody else's process
        (OutOfMemoryKills(None, 5), OutOfMemoryKills(None, 4), "machine"),
        (OutOfMemoryKills(None, 4), OutOfMemoryKills(None, 4), ""),
        (OutOfMemoryKills(None, None), OutOfMemoryKills(None, None), ""),
        (OutOfMemoryKills(1, None), OutOfMemoryKills(None, None), ""),
    ],
)
def test_where_it_struck(now: OutOfMemoryKills, before: OutOfMemoryKills, where: str) -> None:
    assert now.since(before) == where


CGROUPS = {
    "v2": ("0::/user/kernel\n", "sys/fs/cgroup/user/kernel/memory.events", "low 0\noom 3\noom_kill {}\noom_group_kill 9\n"),
    "v1": ("9:cpu:/\n4:memory:/user\n0::/\n", "sys/fs/cgroup/memory/user/memory.oom_control", "under_oom 0\noom_kill {}\n"),
    "none": ("0::/\n", "proc/vmstat", "nr_free_pages 7\noom_kill {}\n"),
}


@pytest.mark.parametrize("kind", CGROUPS)
def test_the_kernels_counters_are_read(kind: str, tmp_path: Path) -> None:
    groups, file, text = CGROUPS[kind]
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    counter = tmp_path / file
    counter.parent.mkdir(parents=True, exist_ok=True)
    counter.write_text(text.format(1))
    killer = MemoryKiller(tmp_path)
    killer.look(LOOK_EVERY_S)
    assert killer.struck() == ""
    counter.write_text(text.format(2))
    killer.look(1.5 * LOOK_EVERY_S)  # too early to look again
    where = "machine" if kind == "none" else "group"
    assert killer.struck() == where
    killer.look(2 * LOOK_EVERY_S)
    assert killer.struck() == where, "a large process takes a while to end"
    killer.look(3 * LOOK_EVERY_S)
    assert killer.struck() == "", "that was another one"


def test_a_system_without_counters(tmp_path: Path) -> None:
    assert MemoryKiller(tmp_path).struck() == ""


@contextlib.contextmanager
def limited(limit_bytes: int) -> Iterator[Path]:
    """A control group with little memory, below this process's own."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    where = {controllers: path.lstrip("/") for _, controllers, path in lines}
    one, two = Path("/sys/fs/cgroup/memory", where.get("memory", "")), Path("/sys/fs/cgroup", where.get("", ""))
    if (one / "memory.oom_control").exists():
        parent, limit, swap = one, "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"
    elif (two / "cgroup.controllers").exists():
        parent, limit, swap = two, "memory.max", "memory.swap.max"
    else:
        pytest.skip("no control groups here")
    group = parent / f"labkit-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"this user may make no control group: {error}")
    try:
        if not (group / limit).exists():
            pytest.skip("control groups here do not limit memory")
        (group / limit).write_text(str(limit_bytes))
        with contextlib.suppress(OSError):  # no swap to limit
            (group / swap).write_text(str(limit_bytes if parent is one else 0))  # version 1 counts both together
        yield group
    finally:
        assert not left_after(60, map(int, (group / "cgroup.procs").read_text().split()))
        until = time.monotonic() + 60
        while group.exists() and time.monotonic() < until:
            with contextlib.suppress(OSError):  # busy, until the last of them is buried
                group.rmdir()
                break
            time.sleep(0.1)


PROGRAM = """
import os, sys
with open(sys.argv[1], "w") as procs:
    procs.write(str(os.getpid()))
import labkit as lab
def eat():
    if os.environ["RANK"] == "1":
        held = []
        while True:
            held.append(bytearray(os.urandom(1 << 20)))
with lab.Group(2, runtime="bare", timeout_s=180) as group:
    try:
        group.run(eat)
    except lab.RankError as error:
        print(error.failures[0])
"""


@pytest.mark.slow
def test_a_rank_that_the_memory_killer_ends() -> None:
    with limited(400 << 20) as group:
        program = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(group / "cgroup.procs")], capture_output=True, text=True, timeout=200, check=True
        )
        assert program.stdout.startswith("rank 1 failed: killed by SIGKILL (out of memory: the kernel's memory killer ended it;")
