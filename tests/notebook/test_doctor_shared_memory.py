"""/dev/shm: what there is, which files are nobody's, and the command that deletes only those."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from labkit.notebook.doctor_places import PLAIN, Place
from labkit.notebook.doctor_shared_memory import SharedMemory, find_shared_memory, shared_memory
from labkit.notebook.findings import Finding

MIB = 2**20
PLACE = Place("a container", shared_memory="more of it")


def test_files_of_dead_processes(tmp_path: Path) -> None:
    """Those are spared that a process has mapped, whose process runs, or that are of another kind."""
    folder, proc = tmp_path / "shm", tmp_path / "proc"
    for process, mapped in {"7": "sem.used", "8": "torch_99_1_0"}.items():
        (proc / process).mkdir(parents=True)
        (proc / process / "maps").write_text(
            f"7f0000000000-7f0000001000 rw-s 00000000 00:1a 5                          {folder}/{mapped}\n"
            "7f1000000000-7f1000001000 r-xp 00000000 08:01 6                          /lib/libc.so.6\n"
        )
    (proc / "9").mkdir()  # of another user: its maps cannot be read
    folder.mkdir()
    for name in ("torch_99_1_0", "torch_99_2_1", "torch_8_3_0", "nccl-abc", "sem.used", "sem.loky-1", "mine.bin", "torch_model"):
        (folder / name).write_bytes(b"x" * 5)
    found = find_shared_memory(folder, proc)
    assert found is not None
    assert [name for name, _ in found.stale] == ["nccl-abc", "sem.loky-1", "torch_99_2_1"]
    assert set(found.others) == {"torch_99_1_0", "torch_8_3_0", "sem.used"}


def test_files_of_other_users_are_spared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nccl-abc").touch()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    found = find_shared_memory(tmp_path, tmp_path / "proc")
    assert found is not None
    assert (found.stale, found.others) == ((), ("nccl-abc",))


def test_there_may_be_none(tmp_path: Path) -> None:
    assert find_shared_memory(tmp_path / "nothing") is None
    assert list(shared_memory(None, PLAIN)) == []


@pytest.mark.processes
def test_a_file_that_a_process_has_mapped() -> None:
    program = """
import ctypes, os, sys
path = f"/dev/shm/nccl-labkit-test-{os.getpid()}"
with open(path, "w+b") as file:
    file.truncate(4096)
    import mmap
    kept = mmap.mmap(file.fileno(), 4096)
print(os.path.basename(path), flush=True)
sys.stdin.readline()
"""
    with subprocess.Popen(["python3", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        name = process.stdout.readline().strip()
        try:
            found = find_shared_memory()
            assert found is not None
            assert name in found.others
            process.communicate("")
            found = find_shared_memory()
            assert found is not None
            assert (name, 0) in found.stale  # nothing was written, so that it takes no memory
        finally:
            os.unlink(f"/dev/shm/{name}")


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        (SharedMemory(2048 * MIB, 1024 * MIB), [Finding("2 GiB in /dev/shm")]),
        (
            SharedMemory(64 * MIB, 60 * MIB),
            [
                Finding(
                    "only 64 MiB in /dev/shm, 60 MiB of it free; DataLoader's workers and NCCL may need more", False, "more of it"
                )
            ],
        ),
        (
            SharedMemory(2048 * MIB, 16 * MIB),
            [
                Finding(
                    "2 GiB in /dev/shm, only 16 MiB of it free; DataLoader's workers and NCCL may need more", False,
                    "du -a /dev/shm | sort -n | tail",
                )
            ],
        ),
        (
            SharedMemory(2048 * MIB, 1024 * MIB, (("nccl-a", MIB), ("torch_1_2_3", 3 * MIB))),
            [
                Finding("2 GiB in /dev/shm"),
                Finding("2 files of dead processes, 4 MiB", remedy="rm /dev/shm/nccl-a /dev/shm/torch_1_2_3"),
            ],
        ),
    ],
)  # fmt: skip
def test_findings(memory: SharedMemory, expected: list[Finding]) -> None:
    assert list(shared_memory(memory, PLACE)) == expected


def test_a_command_for_many_files_spares_the_others() -> None:
    stale = [(name, 1) for name in (*(f"torch_7_{i}_0" for i in range(20)), "nccl-a", "sem.a", "sem.b")]
    *_, finding = shared_memory(SharedMemory(2048 * MIB, 1024 * MIB, tuple(stale), ("sem.c",)), PLACE)
    assert finding.remedy == "rm /dev/shm/torch_7_* /dev/shm/nccl-* /dev/shm/sem.a /dev/shm/sem.b"
