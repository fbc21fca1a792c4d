"""`lab.doctor`: facts become findings and sentences; checking loads no framework."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import questions

from labkit.errors.exceptions import LabError
from labkit.launch.capacity import FreeMemory
from labkit.notebook import findings
from labkit.notebook.doctor import TABLE
from labkit.notebook.doctor_facts import PLAIN, GpusFound, PlaceFound
from labkit.notebook.findings import Finding, ProcessQuestion, Report

doctor = sys.modules["labkit.notebook.doctor"]  # `labkit.doctor` as a name is the function
GIB = 2**30
# What shows each package, the extra that installs it, and what needs it.
PACKAGES = [
    ("torch", "torch", "all PyTorch lessons"),
    ("TensorFlow", "tf", "the TensorFlow lessons"),
    ("Keras", "tf", "the TensorFlow lessons"),
    ("JupyterLab", "course", "opening the lessons"),
    ("ipykernel", "course", "running cells"),
    ("ipywidgets", "course", "interactive controls in a cell"),
    ("anywidget", "course", "timelines to explore"),
    ("matplotlib", "plot", "timelines and all other pictures"),
    ("scikit-learn", "course", "the handwritten digits"),
    ("TensorBoard", "tensorboard", "programs with keras.callbacks.TensorBoard or torch.utils.tensorboard"),
]
TORCH = {"version": "1.2", "cuda": None, "gpus": 0, "gloo": True, "nccl": False, "rpc": True, "lost": []}
TENSORFLOW = {"version": "1.2", "gpus": 0, "lost": []}
LAPTOP = {
    "Python": "3.11.7 (CPython) on Linux x86_64",
    "cores": (8, 8),
    "place": PLAIN,
    "memory": FreeMemory(16 * GIB, 9 * GIB, limited=False),
    "shared memory": (8 * GIB, 7 * GIB),
    "GPUs": GpusFound((), "no nvidia-smi, no NVIDIA driver in /proc", None),
    "ranks start by": "fork",
    "ranks talk over": {"private": True, "why": "", "others": True},
    **{name: {"version": "1.2"} for name, *_ in PACKAGES},
    "torch": TORCH,
    "TensorFlow": TENSORFLOW,
    "GPU types": None,
}
GPUS = GpusFound(("NVIDIA H200, 143771 MiB",) * 2, "asked nvidia-smi", None)
SERVER = LAPTOP | {
    "GPUs": GPUS,
    "torch": TORCH | {"cuda": "13.0", "gpus": 2, "nccl": True},
    "TensorFlow": TENSORFLOW | {"gpus": 2},
}


def diagnose(facts: dict[str, Any]) -> Report:
    return findings.report(TABLE, facts)


def lines(facts: dict[str, Any], **changes: Any) -> list[str]:
    return str(diagnose(facts | changes)).splitlines()


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


@pytest.mark.parametrize(("name", "extra", "purpose"), PACKAGES)
def test_missing_packages_name_their_command(name: str, extra: str, purpose: str) -> None:
    report = diagnose(LAPTOP | {name: {"version": None}})
    (finding,) = [f for f in report.findings if f.remedy]
    lessons_need_it = name != "TensorBoard"
    assert finding == Finding(
        f"not installed; needed for {purpose}", not lessons_need_it, f'pip install "labkit[{extra}]"', pip=True, subject=name
    )
    assert str(report).splitlines()[-2:] == [
        "1 thing is missing: see ✗." if lessons_need_it else "Nothing is missing.",
        "Run the commands in a terminal with this environment; in a cell write %pip instead of pip.",
    ]


def test_remedies_name_extras_that_exist() -> None:
    extras = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
    report = diagnose(LAPTOP | {name: {"version": None} for name, *_ in PACKAGES})
    named = [extra for f in report.findings for extra in re.findall(r"labkit\[(\w+)\]", f.remedy)]
    assert len(named) == len(PACKAGES)
    assert set(named) <= set(extras)


LOST = ["collectives and messages", "lab.profile"]
ENOUGH = "DataLoader's workers and NCCL may need more"
SHARED = "  ranks talk over    this machine's network, where"
DIFFERENT: list[tuple[dict[str, Any], str]] = [
    ({"cores": (8, 1.5)}, "  cores              8, of which this process may use 1.5; lessons with more ranks run, too"),
    ({"memory": FreeMemory(2 * GIB, GIB, limited=True)}, "  memory             2 GiB (the container's limit), 1 GiB of it free"),
    ({"place": PlaceFound("a hub", limits="few cores")}, "  place              a hub: few cores"),
    ({"shared memory": (2 * GIB, GIB)}, "  shared memory      2 GiB in /dev/shm"),
    ({"shared memory": (GIB >> 4, GIB >> 5)}, f"✗ shared memory      only 64 MiB in /dev/shm, 32 MiB of it free; {ENOUGH}"),
    ({"shared memory": (2 * GIB, GIB >> 6)}, f"✗ shared memory      2 GiB in /dev/shm, only 16 MiB of it free; {ENOUGH}"),
    ({"ranks start by": "spawn"}, "  ranks start by     spawn, with spare ranks kept ready"),
    ({"ranks start by": "spawn"}, f"{SHARED} other users of it can reach them (they are spawned)"),
    ({"ranks talk over": {"private": False, "why": "x", "others": True}}, f"{SHARED} other users of it can reach them (x)"),
    ({"ranks talk over": {"private": False, "why": "x", "others": False}}, f"{SHARED} nobody else has an account (x)"),
    ({"ranks talk over": {"error": "LABKIT_NETWORK='public'"}}, "✗ ranks talk over    LABKIT_NETWORK='public'"),
    (
        {"torch": TORCH | {"rpc": False}},
        "✗ torch.distributed  gloo; without rpc (lessons 07 and 08 show their code, and run it over messages)",
    ),
    (
        {"torch": {"version": "1.2", "error": "ended by SIGSEGV"}},
        "✗ torch            1.2, but it does not load: ended by SIGSEGV",
    ),
    ({"TensorFlow": {"version": "1.2", "error": "boom"}}, "✗ TensorFlow         1.2, but it does not load: boom"),
    *(
        (
            {name: LAPTOP[name] | {"lost": LOST}},
            f"  recording {name:<10} this version lacks what labkit needs for: {'; '.join(LOST)}",
        )
        for name in ("torch", "TensorFlow")
    ),
    (SERVER, "  GPUs               2 × NVIDIA H200, 143771 MiB"),
    (SERVER, "  torch              1.2 (CUDA 13.0, sees 2 GPUs)"),
    (SERVER, "  torch.distributed  gloo, nccl, rpc"),
    (SERVER, "  TensorFlow         1.2, sees 2 GPUs"),
    (SERVER | {"GPUs": GPUS._replace(visible="1")}, "  GPUs               2 × NVIDIA H200, 143771 MiB; CUDA_VISIBLE_DEVICES=1"),
    (SERVER | {"torch": TORCH}, "✗ torch              1.2 sees none of the GPUs: the installed build is for the CPU"),
    (
        SERVER | {"torch": TORCH | {"cuda": "13.0"}},
        "✗ torch              1.2 sees none of the GPUs: the installed CUDA build does not fit the driver",
    ),
    (
        SERVER | {"torch": TORCH | {"cuda": "13.0"}, "GPUs": GPUS._replace(visible="")},
        "  torch              1.2 (CUDA 13.0, sees 0 GPUs)",
    ),
    (SERVER | {"TensorFlow": TENSORFLOW}, "  TensorFlow         1.2 sees none of the GPUs: its lessons run on the CPU"),
]


@pytest.mark.parametrize(("changes", "expected"), DIFFERENT)
def test_a_machine_that_differs(changes: dict[str, Any], expected: str) -> None:
    assert expected.split() in [line.split() for line in lines(LAPTOP, **changes)]
    assert diagnose(LAPTOP | changes).ok == ("✗" not in expected)


def test_shared_memory_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "SHARED_MEMORY", tmp_path)
    nbytes, free_nbytes = doctor._find_shared_memory(PLAIN)
    assert nbytes >= free_nbytes > 0
    monkeypatch.setattr(doctor, "SHARED_MEMORY", tmp_path / "nothing")
    assert doctor._shared_memory(doctor._find_shared_memory(PLAIN), PLAIN) == []


@pytest.mark.processes
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
def test_an_installed_package_is_asked_for_more() -> None:
    entry = doctor._package("PyTest", "test", "tests", ask=questions.noisy, needs=("GPUs",))
    assert entry.find(0).reply() == {"version": pytest.__version__, "gpus": 3}
    assert doctor._package("nothing-of-this-name", "test", "tests", ask=questions.noisy).find() == {"version": None}


@pytest.mark.parametrize(
    ("variable", "platform", "start"), [("", "linux", "fork"), ("", "darwin", "spawn"), ("spawn", "linux", "spawn")]
)
def test_how_ranks_start(monkeypatch: pytest.MonkeyPatch, variable: str, platform: str, start: str) -> None:
    monkeypatch.setenv("LABKIT_START", variable)
    monkeypatch.setattr(sys, "platform", platform)
    assert doctor._find_start() == start


def test_a_start_method_that_does_not_exist_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_START", "forkserver")
    with pytest.raises(LabError, match="LABKIT_START='forkserver': expected 'fork' or 'spawn'"):
        doctor._find_start()


@pytest.mark.processes
def test_facts_from_torch() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    said = ProcessQuestion(doctor._ask_torch).reply()
    assert set(said) == {"cuda", "gpus", "gloo", "nccl", "rpc", "lost"}
    assert said["lost"] == []
    assert said["gloo"] is True


@pytest.mark.tf
@pytest.mark.processes
@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed")
def test_facts_from_tensorflow() -> None:
    said = ProcessQuestion(doctor._ask_tensorflow).reply()
    assert set(said) == {"gpus", "lost"}
    assert said["lost"] == []


def test_a_kernel_needs_no_jupyterlab() -> None:
    missing = {"JupyterLab": {"version": None}, "anywidget": {"version": None}}
    assert diagnose(LAPTOP | missing | {"place": PlaceFound("", has_kernel=True)}).findings == tuple(
        f for f in diagnose(LAPTOP | missing).findings if f.subject != "JupyterLab"
    )


def test_hosted_kernels_keep_their_packages() -> None:
    report = diagnose(LAPTOP | {"place": PlaceFound("a service", hosted=True), "anywidget": {"version": None}})
    assert [f.remedy for f in report.findings if f.remedy] == ['pip install "labkit[hosted]"']


@pytest.mark.parametrize(
    ("gpus", "installed", "asked"),
    [(GPUS, True, True), (GPUS, False, False), (LAPTOP["GPUs"], True, False), (GPUS._replace(visible=""), True, False)],
)
@pytest.mark.processes
def test_gpus_are_tried_where_torch_may_see_some(gpus: GpusFound, installed: bool, asked: bool) -> None:
    torch: Any = ProcessQuestion(questions.noisy) if installed else {"version": None}
    answer = doctor._ask_about_gpus(gpus, torch)
    if installed:
        torch.reply()
    assert isinstance(answer, ProcessQuestion) is asked
    if answer is not None:
        assert answer.reply() == {"gpus": [], "pairs": 0, "peers": 0, "amd": False}
