"""The number of cores that a process may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fake_control_groups import fake_control_groups

from labkit.launch.capacity import usable_cores


@pytest.fixture
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)


def test_the_cores_of_the_processs_affinity_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 5, 7}, raising=False)
    assert usable_cores(tmp_path) == 3


@pytest.mark.parametrize(("count", "cores"), [(8, 8), (None, 1)])
def test_without_affinities_all_cores_count(
    monkeypatch: pytest.MonkeyPatch, count: int | None, cores: int, tmp_path: Path
) -> None:
    """As on macOS."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: count)
    assert usable_cores(tmp_path) == cores


@pytest.mark.parametrize(
    ("version", "files", "cores"),
    [
        ("v2", {"cpu.max": "max 100000\n"}, 16),
        ("v2", {"cpu.max": "200000 100000\n"}, 2),
        ("v2", {"cpu.max": "50000 100000\n"}, 0.5),
        ("v2", {"cpu.max": "6400000 100000\n"}, 16),  # more than the machine has
        ("v2", {"pod/cpu.max": "150000 100000\n", "pod/inner/cpu.max": "max 100000\n"}, 1.5),
        ("v2", {"pod/cpu.max": "300000 100000\n", "pod/inner/cpu.max": "100000 50000\n"}, 2),
        ("v1", {"cpu,cpuacct/cpu.cfs_quota_us": "-1\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"}, 16),
        ("v1", {"cpu,cpuacct/pod/cpu.cfs_quota_us": "250000\n", "cpu,cpuacct/pod/cpu.cfs_period_us": "100000\n"}, 2.5),
    ],
)
@pytest.mark.usefixtures("sixteen_cores")
def test_the_smallest_quota_of_the_processs_control_groups_counts(
    version: str, files: dict[str, str], cores: float, tmp_path: Path
) -> None:
    folder = fake_control_groups(tmp_path, version, "/pod/inner")
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    assert usable_cores(tmp_path) == cores
