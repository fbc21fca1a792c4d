"""Growth per repetition is detected, and constant resources count as flat."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from bench.load.footprint import Footprint, growth, too_much, watch_growth
from labkit.group.open_groups import notebook

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
# A short measurement is less exact: one growth of an allocator's pool counts for more. A leak of a page each time is
# still found.
MANY = 4


def test_constant_resources_are_flat(nothing_imports: None) -> None:
    assert too_much(watch_growth(lambda: None, 20, warm=2), MANY) == []


@pytest.fixture
def spares() -> None:
    """Garbage as an earlier test may have left it."""
    pytest.importorskip("torch")
    notebook.starter("torch", "spawn").warm(2)


@pytest.mark.processes
def test_background_imports_are_not_growth(spares: None, nothing_imports: None) -> None:
    assert too_much(watch_growth(lambda: None, 20, warm=2), MANY) == []


@pytest.mark.parametrize(
    ("leak", "grown"),
    [
        pytest.param(lambda: os.open(os.devnull, os.O_RDONLY), ["descriptors"], id="a descriptor"),
        pytest.param(lambda: os.memfd_create("left"), ["descriptors", "segments"], id="a segment"),
    ],
)
def test_a_leak_is_detected(leak: Callable[[], int], grown: list[str], nothing_imports: None) -> None:
    left: list[int] = []
    try:
        found = watch_growth(lambda: left.append(leak()), 20, warm=2)
        assert found.descriptors == 1
        assert too_much(found) == grown
    finally:
        for fd in left:
            os.close(fd)


def test_leaked_memory_is_detected(nothing_imports: None) -> None:
    left: list[mmap.mmap] = []  # new pages, unlike those of `bytes`, which the allocator may have kept from earlier tests

    def leak() -> None:
        left.append(mmap.mmap(-1, 8 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        left[-1].write(bytes(8 << 20))

    assert "resident" in too_much(watch_growth(leak, 20, warm=2), MANY)  # others may fill /dev/shm meanwhile


@pytest.mark.processes
def test_a_leaked_process_is_detected(nothing_imports: None) -> None:
    left: list[subprocess.Popen[bytes]] = []
    try:
        grown = watch_growth(lambda: left.append(subprocess.Popen(["sleep", "600"])), 6, warm=1)
        assert "processes" in too_much(grown)
        assert "below" in too_much(grown)
    finally:
        for process in left:
            process.kill()
            process.wait()


@pytest.mark.parametrize("jump", range(1, 11))
def test_one_jump_is_not_growth(jump: int) -> None:
    """Another program may make a file in /dev/shm at any moment, or an allocator another pool."""
    seen = [Footprint(10 + 5 * (i > 1), 10 + 5 * (i >= jump), 0, 10 - 5 * (i >= jump), 0) for i in range(11)]
    grown = growth(list(range(11)), seen)
    assert too_much(grown) == []
