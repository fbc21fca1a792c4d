"""A runtime is listed in one table; the rest follows from it."""

from __future__ import annotations

from labkit.notebook.doctor import TABLE
from labkit.worker.runtimes.registry import FRAMEWORKS


def test_doctor_looks_at_the_framework_of_each_runtime() -> None:
    assert {"torch", "tensorflow"} <= set(FRAMEWORKS) <= {entry.subject.lower() for entry in TABLE}
