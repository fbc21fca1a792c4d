"""`lab.doctor`: facts become findings and sentences; checking loads no framework."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from fake_control_groups import fake_control_groups

from labkit.notebook.doctor import GIB, Facts, diagnose

doctor = importlib.import_module("labkit.notebook.doctor")  # `labkit.doctor` as a name is the function

LAPTOP = Facts(
    python="3.11.7 (CPython)",
    system="Linux x86_64",
    cores=8,
    usable_cores=8,
    memory_nbytes=16 * GIB,
    free_nbytes=9 * GIB,
    shared_nbytes=8 * GIB,
    gpus=(),
    gpu_search="no nvidia-smi, no NVIDIA driver in /proc",
    visible_gpus=None,
    versions={package: "1.2" for package, *_ in doctor.PACKAGES},
    torch={"cuda": None, "gpus": 0, "gloo": True, "nccl": False, "rpc": True, "lost": []},
    tensorflow={"gpus": 0, "lost": []},
    network={"private": True, "why": "", "others": True},
)
SERVER = dataclasses.replace(
    LAPTOP,
    gpus=("NVIDIA H200, 143771 MiB",) * 2,
    torch={"cuda": "13.0", "gpus": 2, "gloo": True, "nccl": True, "rpc": True, "lost": []},
    tensorflow={"gpus": 2, "lost": []},
)


def lines(facts: Facts, **changes: Any) -> list[str]:
    return str(diagnose(dataclasses.replace(facts, **changes))).splitlines()


@pytest.mark.parametrize("name", ["torch", "TensorFlow"])
def test_a_framework_without_some_private_names_is_named(name: str) -> None:
    package = name.lower()
    reply = getattr(LAPTOP, package) | {"lost": ["collectives and messages", "lab.profile"]}
    (line,) = (line for line in lines(LAPTOP, **{package: reply}) if f"recording {name}" in line)
    assert line.endswith("this version lacks what labkit needs for: collectives and messages; lab.profile")


def test_a_complete_laptop() -> None:
    assert diagnose(LAPTOP).ok
    assert lines(LAPTOP) == [
        "  Python             3.11.7 (CPython) on Linux x86_64",
        "  cores              8",
        "  memory             16 GiB, 9 GiB of it free",
        "  shared memory      8 GiB in /dev/shm",
        "  GPUs               none (no nvidia-smi, no NVIDIA driver in /proc): ranks compute on the CPU",
        "  ranks start by     fork from a server",
        "  ranks talk over    a private network, which no other user of this machine can reach",
        "  torch              1.2 (CPU build)",
        "  torch.distributed  gloo, rpc",
        "  TensorFlow         1.2",
        "  Keras              1.2",
        "  JupyterLab         1.2",
        "  ipykernel          1.2",
        "  ipywidgets         1.2",
        "  anywidget          1.2",
        "  matplotlib         1.2",
        "  scikit-learn       1.2",
        "  TensorBoard        1.2",
        "",
        "Nothing is missing.",
    ]


def test_a_notebook_shows_a_table_that_breaks_lines_between_words() -> None:
    report = diagnose(dataclasses.replace(LAPTOP, versions=LAPTOP.versions | {"tensorflow": None}))
    html = report._repr_html_()
    assert html.count("<tr>") == len(report.findings)
    assert "word-break:normal" in html
    assert "✗" in html
    assert re.search(r"→ <code>.*pip install", html)
    assert str(report).splitlines()[-1] in html


def test_a_complete_server() -> None:
    text = lines(SERVER)
    assert "  GPUs               2 × NVIDIA H200, 143771 MiB" in text
    assert "  torch              1.2 (CUDA 13.0, sees 2 GPUs)" in text
    assert "  torch.distributed  gloo, nccl, rpc" in text
    assert "  TensorFlow         1.2, sees 2 GPUs" in text
    assert diagnose(SERVER).ok


@pytest.mark.parametrize(("package", "name", "extra", "purpose"), doctor.PACKAGES)
def test_missing_packages_name_their_command(package: str, name: str, extra: str, purpose: str) -> None:
    report = diagnose(dataclasses.replace(LAPTOP, versions=LAPTOP.versions | {package: None}))
    (finding,) = [f for f in report.findings if f.remedy]
    lessons_need_it = package != "tensorboard"
    assert finding == doctor.Finding(
        name, f"not installed; needed for {purpose}", ok=not lessons_need_it, remedy=f'pip install "labkit[{extra}]"', pip=True
    )
    assert str(report).splitlines()[-2:] == [
        "1 thing is missing: see ✗." if lessons_need_it else "Nothing is missing.",
        "Run the commands in a terminal with this environment; in a cell write %pip instead of pip.",
    ]


def test_remedies_name_extras_that_exist() -> None:
    extras = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {extra for *_, extra, _ in doctor.PACKAGES} <= set(extras)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"usable_cores": 1.5}, "  cores              8, of which this process may use 1.5; lessons with more ranks run, too"),
        ({"free_nbytes": None}, "  memory             16 GiB, the container's limit"),
        ({"shared_nbytes": 2**26}, "✗ shared memory      only 64 MiB in /dev/shm"),
        ({"system": "Darwin arm64"}, "  ranks start by     spawn, with spare ranks kept ready"),
        ({"start": "spawn"}, "  ranks start by     spawn, with spare ranks kept ready, because of LABKIT_START=spawn"),
        (
            {"start": "spawn"},
            "  ranks talk over    this machine's network, where other users of it can reach them (they are spawned)",
        ),
        (
            {"network": {"private": False, "why": "LABKIT_NETWORK=shared", "others": True}},
            "  ranks talk over    this machine's network, where other users of it can reach them (LABKIT_NETWORK=shared)",
        ),
        (
            {"network": {"private": False, "why": "LABKIT_NETWORK=private hides them", "others": False}},
            "  ranks talk over    this machine's network, where nobody else has an account (LABKIT_NETWORK=private hides them)",
        ),
        (
            {"network": {"error": "LABKIT_NETWORK='public': expected 'private'"}},
            "✗ ranks talk over    LABKIT_NETWORK='public': expected 'private'",
        ),
        ({"start": "forkserver"}, "✗ ranks start by     LABKIT_START='forkserver' is neither 'fork' nor 'spawn'"),
        (
            {"torch": LAPTOP.torch | {"rpc": False}},
            "✗ torch.distributed  gloo; without rpc (lessons 07 and 08 show their code, and run it over messages)",
        ),
        ({"torch": {"error": "ended by SIGSEGV"}}, "✗ torch            1.2, but it does not load: ended by SIGSEGV"),
        ({"tensorflow": {"error": "boom"}}, "✗ TensorFlow         1.2, but it does not load: boom"),
    ],
)
def test_a_laptop_that_differs(changes: dict[str, Any], expected: str) -> None:
    assert expected in lines(LAPTOP, **changes)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"visible_gpus": "1"}, "  GPUs               2 × NVIDIA H200, 143771 MiB; CUDA_VISIBLE_DEVICES=1"),
        ({"torch": LAPTOP.torch}, "✗ torch              1.2 sees none of the GPUs: the installed build is for the CPU"),
        (
            {"torch": SERVER.torch | {"gpus": 0}},
            "✗ torch              1.2 sees none of the GPUs: the installed CUDA build does not fit the driver",
        ),
        ({"torch": SERVER.torch | {"gpus": 0}, "visible_gpus": ""}, "  torch              1.2 (CUDA 13.0, sees 0 GPUs)"),
        ({"tensorflow": LAPTOP.tensorflow}, "  TensorFlow         1.2 sees none of the GPUs: its lessons run on the CPU"),
    ],
)
def test_a_server_that_differs(changes: dict[str, Any], expected: str) -> None:
    assert expected in lines(SERVER, **changes)


def test_checking_loads_no_framework() -> None:
    program = """
import sys
import tomllib
from labkit.notebook.doctor import doctor
report = doctor()
loaded = {"torch", "tensorflow", "keras", "matplotlib", "ipywidgets", "IPython", "numpy"} & set(sys.modules)
print(report, "loaded:", sorted(loaded))
"""
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=200)
    assert answer.stdout.endswith("loaded: []\n")
    assert answer.stdout.startswith(f"  Python             {sys.version.split()[0]} ")


@pytest.mark.processes
def test_querying_a_process() -> None:
    def ask(question: str) -> dict[str, Any]:
        return doctor._reply(doctor._start_asking(question))

    assert ask("print('noise'); print('{\"gpus\": 3}')") == {"gpus": 3}
    assert ask("import nothing_of_this_name") == {"error": "ModuleNotFoundError: No module named 'nothing_of_this_name'"}
    assert ask("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)") == {"error": "ended by SIGSEGV"}
    assert ask("raise SystemExit(7)") == {"error": "exit code 7"}


@pytest.mark.processes
def test_querying_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ASK_LIMIT_S", 0)
    assert doctor._reply(doctor._start_asking("import time; time.sleep(100)")) == {"error": "no reply within 0 s"}


@pytest.mark.processes
def test_facts_from_torch() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    said = doctor._reply(doctor._start_asking(doctor.ASK_TORCH.format(sys.path)))
    assert set(said) == {"cuda", "gpus", "gloo", "nccl", "rpc", "lost"}
    assert said["lost"] == []
    assert said["gloo"] is True


@pytest.mark.tf
@pytest.mark.processes
@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed")
def test_facts_from_tensorflow() -> None:
    said = doctor._reply(doctor._start_asking(doctor.ASK_TENSORFLOW.format(sys.path)))
    assert set(said) == {"gpus", "lost"}
    assert said["lost"] == []


def test_the_drivers_list_of_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "DRIVER", tmp_path)
    monkeypatch.setenv("PATH", "")
    for number, text in enumerate(["Model: \t\t NVIDIA H200\nIRQ: 12\n", "IRQ: 13\n"]):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "information").write_text(text)
    assert doctor._nvidia_gpus() == (("NVIDIA H200", "NVIDIA GPU"), "no nvidia-smi, no NVIDIA driver in /proc")


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
    monkeypatch.setattr(doctor, "DRIVER", tmp_path / "nothing")
    assert doctor._nvidia_gpus() == (gpus, search)


@pytest.mark.parametrize(
    ("version", "files", "limit"),
    [
        ("v2", {"memory.max": "max\n"}, None),
        ("v2", {"memory.max": "536870912\n"}, 2**29),
        ("v2", {"memory.max": "536870912\n", "pod/memory.max": "1073741824\n"}, 2**29),
        ("v1", {"memory/memory.limit_in_bytes": "536870912\n"}, 2**29),
        ("v1", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, None),
    ],
)
def test_a_containers_limit_of_memory(version: str, files: dict[str, str], limit: int | None, tmp_path: Path) -> None:
    folder = fake_control_groups(tmp_path, version, "/pod")
    total, free = doctor._memory_sizes(tmp_path)
    assert free is not None
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    total_now, free_now = doctor._memory_sizes(tmp_path)
    assert total_now == (limit or total)
    assert (free_now is None) == (limit is not None)
