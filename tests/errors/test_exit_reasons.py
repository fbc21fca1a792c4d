"""Why a process ended: its signal, the likely cause, and whether the kernel's OOM killer was at work."""

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
from fake_control_groups import fake_control_groups
from processes import left_after

from labkit.errors.exit_reasons import SAMPLE_EVERY_S, Cause, OOMKillCounters, control_group_folders, explain_exit


@pytest.mark.parametrize(
    ("code", "oom_kills", "cause", "words"),
    [
        (0, "", Cause.EXITED, "the process ended with exit code 0 "),
        (3, "group", Cause.EXITED, "the process ended with exit code 3 "),
        (
            -signal.SIGKILL, "", Cause.KILLED,
            "killed by SIGKILL (sent by this or another process; if by none of yours, the machine probably ran out of memory)",
        ),
        (
            -signal.SIGKILL, "group", Cause.OUT_OF_MEMORY,
            "killed by SIGKILL (out of memory: the kernel's OOM killer ended it; use smaller batches, a smaller model or fewer ",
        ),
        (-signal.SIGKILL, "machine", Cause.OUT_OF_MEMORY, "killed by SIGKILL (probably out of memory: the kernel's OOM killer"),
        (-signal.SIGSEGV, "machine", Cause.CRASHED, "killed by SIGSEGV (segmentation fault:"),
        (-signal.SIGABRT, "", Cause.ABORTED, "killed by SIGABRT (C or C++ code aborted"),
        (-signal.SIGTERM, "group", Cause.SIGNALLED, "killed by SIGTERM"),
        (-99, "", Cause.SIGNALLED, "killed by signal 99"),
    ],
)  # fmt: skip
def test_the_cause_of_an_exit(code: int, oom_kills: str, cause: Cause, words: str) -> None:
    found, said = explain_exit(code, oom_kills)
    assert found is cause
    assert said.startswith(words)
    assert cause is not Cause.SIGNALLED or said == words


CGROUPS = {
    "v2": ("user/kernel/memory.events", "low 0\noom 3\noom_kill {}\noom_group_kill 9\n"),
    "v1": ("memory/user/memory.oom_control", "under_oom 0\noom_kill {}\n"),
    "none": ("../../../proc/vmstat", "nr_free_pages 7\noom_kill {}\n"),
}


@pytest.mark.parametrize("kind", CGROUPS)
def test_the_kernels_counters_are_read(kind: str, tmp_path: Path) -> None:
    file, text = CGROUPS[kind]
    counter = fake_control_groups(tmp_path, kind, "/user" if kind == "v1" else "/user/kernel") / file
    counter.parent.mkdir(parents=True, exist_ok=True)
    counter.write_text(text.format(1))
    counters = OOMKillCounters(tmp_path)
    counters.sample(SAMPLE_EVERY_S)
    assert counters.recent() == ""
    counter.write_text(text.format(2))
    counters.sample(1.5 * SAMPLE_EVERY_S)  # too early for another sample
    where = "machine" if kind == "none" else "group"
    assert counters.recent() == where
    counters.sample(2 * SAMPLE_EVERY_S)
    assert counters.recent() == where, "a large process takes a while to end"
    counters.sample(3 * SAMPLE_EVERY_S)
    assert counters.recent() == "", "that kill is too old"
    if kind != "none":
        fake = tmp_path / "proc/vmstat"
        fake.write_text("oom_kill 7\n")
        counters.sample(4 * SAMPLE_EVERY_S)
        counters.sample(5 * SAMPLE_EVERY_S)
        fake.write_text("oom_kill 8\n")
        assert counters.recent() == "", "somebody else's process"


def test_a_system_without_counters(tmp_path: Path) -> None:
    assert OOMKillCounters(tmp_path).recent() == ""


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
            with contextlib.suppress(OSError):  # busy, until the last process is reaped
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
@pytest.mark.processes
def test_a_rank_that_the_oom_killer_ends() -> None:
    with limited(400 << 20) as group:
        program = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(group / "cgroup.procs")], capture_output=True, text=True, timeout=200, check=True
        )
        assert program.stdout.startswith("rank 1 failed: killed by SIGKILL (out of memory: the kernel's OOM killer ended it;")


@pytest.mark.parametrize(
    ("path", "mounted_from", "folders"),
    [
        ("/", "/", ["."]),
        ("/pods/two", "/", ["pods/two", "pods", "."]),
        ("/docker/a/inner", "/docker/a", ["inner", "."]),  # a container without a namespace of its own
        ("/docker/a", "/docker/b", ["."]),
    ],
)
@pytest.mark.parametrize(("version", "mounted"), [("v1", "cpu,cpuacct"), ("v2", ".")])
def test_the_folders_of_a_process_begin_with_the_innermost(
    version: str, mounted: str, path: str, mounted_from: str, folders: list[str], tmp_path: Path
) -> None:
    below = fake_control_groups(tmp_path, version, path, mounted_from) / mounted
    found = [folder for folder in control_group_folders("cpu", tmp_path) if "unified" not in folder.parts]
    assert found == [below / folder for folder in folders]


def test_a_system_without_control_groups_has_no_folders(tmp_path: Path) -> None:
    assert not list(control_group_folders("cpu", tmp_path))
    fake_control_groups(tmp_path, "none")
    assert not list(control_group_folders("cpu", tmp_path))
