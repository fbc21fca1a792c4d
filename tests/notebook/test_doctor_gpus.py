"""How GPUs are found, and what facts about them mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from labkit.notebook import doctor_facts
from labkit.notebook.doctor_facts import find_gpus, gpu_types

GIB = 2**30
T4 = [[7, 5], 15 * GIB, 14 * GIB, ""]
FACTS: dict[str, Any] = {"gpus": [T4, T4], "pairs": 1, "peers": 0, "amd": False}


def said(**changes: Any) -> list[str]:
    return [f"{f.subject}{'' if f.ok else ' ✗'} {f.found}".strip() for f in gpu_types(FACTS | changes)]


def test_two_t4() -> None:
    assert said() == [
        "compute capability 7.5: float32, float16; bfloat16 needs 8.0, float8 needs 8.9",
        "GPU to GPU 0 of 1 pair of GPUs have peer access; the others send through the host's memory",
    ]


@pytest.mark.parametrize(
    ("capability", "dtypes"),
    [
        ([6, 0], "float32; float16 needs 7.0, bfloat16 needs 8.0, float8 needs 8.9"),
        ([8, 0], "float32, float16, bfloat16; float8 needs 8.9"),
        ([8, 9], "float32, float16, bfloat16, float8"),
        ([10, 0], "float32, float16, bfloat16, float8"),
    ],
)
def test_the_types_of_a_compute_capability(capability: list[int], dtypes: str) -> None:
    name = ".".join(map(str, capability))
    assert said(gpus=[[capability, GIB, GIB, ""]], pairs=0) == [f"compute capability {name}: {dtypes}"]


def test_other_machines() -> None:
    assert list(gpu_types(None)) == []
    assert said(error="ended by SIGSEGV") == ["✗ could not be tried: ended by SIGSEGV"]
    assert said(gpus=[], pairs=0) == []
    assert said(gpus=[[[9, 4], 4 * GIB, GIB, ""]], pairs=0, amd=True) == ["GPU memory GPU 0 has 1 GiB of 4 GiB free"]
    assert said(gpus=[[[6, 0], 0, 0, "no kernel image"]], pairs=0)[0] == "✗ GPU 0 does not compute: no kernel image"
    assert said(peers=1)[1] == "GPU to GPU 1 of 1 pair of GPUs have peer access"


def test_the_drivers_list_of_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor_facts, "DRIVER", tmp_path)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    for number, text in enumerate(["Model: \t\t NVIDIA H200\nIRQ: 12\n", "IRQ: 13\n"]):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "information").write_text(text)
    assert find_gpus() == (("NVIDIA H200", "NVIDIA GPU"), "no nvidia-smi, no NVIDIA driver in /proc", "1")


@pytest.mark.parametrize(
    ("script", "gpus", "search"),
    [
        (
            'echo "NVIDIA H200, 143771 MiB"; echo "NVIDIA A100, 81920 MiB"',
            ("NVIDIA H200, 143771 MiB", "NVIDIA A100, 81920 MiB"),
            "asked nvidia-smi",
        ),
        ("exit 9", (), "nvidia-smi failed: CalledProcessError"),
    ],
)
@pytest.mark.processes
def test_nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, gpus: tuple[str, ...], search: str) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor_facts, "DRIVER", tmp_path / "nothing")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert find_gpus() == (gpus, search, None)
