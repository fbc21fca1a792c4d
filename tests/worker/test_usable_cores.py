"""The number of cores that a process may use."""

from __future__ import annotations

import os

import pytest

from labkit.worker.usable_cores import usable_cores


def test_the_cores_of_the_processs_affinity_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 5, 7}, raising=False)
    assert usable_cores() == 3


@pytest.mark.parametrize(("count", "cores"), [(8, 8), (None, 1)])
def test_without_affinities_all_cores_count(monkeypatch: pytest.MonkeyPatch, count: int | None, cores: int) -> None:
    """As on macOS."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: count)
    assert usable_cores() == cores
