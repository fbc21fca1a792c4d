"""Memory in a container: its limit, and how much of it is free, for both versions of control groups."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from fake_control_groups import fake_control_groups

from labkit.launch.capacity import FreeMemory, usable_memory

MIB = 2**20


@pytest.mark.parametrize(
    ("version", "files", "expected"),
    [
        ("none", {}, None),
        ("v2", {"memory.max": "max\n"}, None),
        (
            "v2",
            {
                "memory.max": f"{512 * MIB}\n",
                "memory.current": f"{300 * MIB}\n",
                "memory.stat": f"anon {100 * MIB}\ninactive_file {120 * MIB}\nactive_file {60 * MIB}\n",
            },
            FreeMemory(512 * MIB, 392 * MIB, limited=True),
        ),
        (
            "v2",
            {
                "memory.max": f"{512 * MIB}\n", "memory.current": f"{100 * MIB}\n", "memory.stat": "",
                "pod/memory.max": f"{256 * MIB}\n", "pod/memory.current": f"{256 * MIB}\n",
                "pod/memory.stat": "inactive_file 0\n",
            },
            FreeMemory(256 * MIB, 0, limited=True),
        ),
        (
            "v1",
            {
                "memory/memory.limit_in_bytes": f"{512 * MIB}\n",
                "memory/memory.usage_in_bytes": f"{500 * MIB}\n",
                "memory/memory.stat": f"active_file 7\ntotal_inactive_file {80 * MIB}\ntotal_active_file {20 * MIB}\n",
            },
            FreeMemory(512 * MIB, 112 * MIB, limited=True),
        ),
        (
            "v1",
            {
                "memory/memory.limit_in_bytes": "9223372036854771712\n", "memory/memory.usage_in_bytes": "7\n",
                "memory/memory.stat": "",
            },
            None,
        ),
    ],
)  # fmt: skip
def test_a_containers_limit(
    version: str, files: dict[str, str], expected: FreeMemory | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = psutil.virtual_memory()._replace(total=8192 * MIB, available=4096 * MIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    folder = fake_control_groups(tmp_path, version, "/pod")
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    assert usable_memory(tmp_path) == (expected or FreeMemory(8192 * MIB, 4096 * MIB, limited=False))
