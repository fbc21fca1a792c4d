"""The server moves its memory into huge pages where the system can, and only while no ranks share it."""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import labkit as lab
from labkit.group.open_groups import notebook
from labkit.launch import fork_server

MIB = 1 << 20
LIMIT_S = 60.0
PRELOAD = ("torch", "labkit.worker.main_loop")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has MADV_COLLAPSE")


def in_huge_pages(process: int) -> int:
    """Bytes of a process's memory in huge pages."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("AnonHugePages"))


@pytest.fixture
def memory() -> Iterator[mmap.mmap]:
    """Memory that was moved, full of the numbers 0 to 255. Skips the test where the system moves nothing."""
    with mmap.mmap(-1, 16 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory[:] = bytes(range(256)) * (len(memory) >> 8)
        before = in_huge_pages(os.getpid())
        assert sum(fork_server.collapse()) >= 12 * MIB or not fork_server.SIZE_FILE.exists()
        if in_huge_pages(os.getpid()) == before:
            pytest.skip("this system has no MADV_COLLAPSE")
        yield memory


def test_memory_keeps_its_content(memory: mmap.mmap) -> None:
    assert memory[:] == bytes(range(256)) * (len(memory) >> 8)


@pytest.mark.processes
@pytest.mark.usefixtures("memory")
def test_the_server_moves_its_memory_only_while_it_has_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("labkit.worker.runtimes.base.Runtime.preload", PRELOAD)  # for a server of its own
    with lab.Group(2, runtime="bare", start="fork") as group:
        group.run(int)
        (server,) = (starter for (preload, *_), starter in notebook.starters.items() if preload == ",".join(PRELOAD))
        beside_ranks = in_huge_pages(server._process.pid)
        group.run(time.sleep, 1)
        assert in_huge_pages(server._process.pid) <= beside_ranks
    until_s = time.monotonic() + LIMIT_S
    while in_huge_pages(server._process.pid) < beside_ranks + 16 * MIB:
        assert time.monotonic() < until_s, "the server has not moved its memory"
        time.sleep(0.05)
    notebook.starters.pop(next(key for key, starter in notebook.starters.items() if starter is server)).close()
