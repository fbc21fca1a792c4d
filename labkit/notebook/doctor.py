"""What this machine can run, and what to install if something is missing: `doctor`.

Nothing of a framework is loaded into the asking process: labkit keeps the notebook's kernel free of torch, CUDA and TensorFlow.
Versions come from the packages' metadata; what only a framework itself knows, a process of its own is asked.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from labkit.errors.exceptions import install_command
from labkit.errors.units import in_words

__all__ = ["Facts", "Finding", "Report", "diagnose", "doctor", "look"]

ASK_LIMIT_S: Final = 120.0  # importing a framework from a cold disk may take a minute
GIB: Final = 2**30
CGROUP: Final = Path("/sys/fs/cgroup")
DRIVER: Final = Path("/proc/driver/nvidia/gpus")
SHARED_MEMORY_WANTED: Final = 1 * GIB  # a container's default of 64 MiB ends NCCL and torch's data loaders with a bus error

# package, name for people, the extra that brings it, what it is for
PACKAGES: Final = (
    ("torch", "torch", "torch", "all PyTorch lessons"),
    ("tensorflow", "TensorFlow", "tf", "the TensorFlow lessons"),
    ("keras", "Keras", "tf", "the TensorFlow lessons"),
    ("jupyterlab", "JupyterLab", "course", "opening the lessons"),
    ("ipykernel", "ipykernel", "course", "running cells"),
    ("ipywidgets", "ipywidgets", "course", "interactive controls in a cell"),
    ("anywidget", "anywidget", "course", "timelines to look into"),
    ("matplotlib", "matplotlib", "plot", "timelines and all other pictures"),
    ("scikit-learn", "scikit-learn", "course", "the handwritten digits"),
)

ASK_TORCH: Final = """
import json, torch, torch.distributed as dist
have = dist.is_available()
rpc = False
if have:
    import torch.distributed.rpc
    rpc = torch.distributed.rpc.is_available()
print(json.dumps({"cuda": torch.version.cuda or getattr(torch.version, "hip", None), "gpus": torch.cuda.device_count(),
                  "gloo": have and dist.is_gloo_available(), "nccl": have and dist.is_nccl_available(), "rpc": rpc}))
"""

ASK_TENSORFLOW: Final = """
import json, tensorflow
print(json.dumps({"gpus": len(tensorflow.config.list_physical_devices("GPU"))}))
"""


ASK_NETWORK: Final = """
import sys
sys.path[:] = {0!r}
import json, os
from labkit.errors.exceptions import LabError
from labkit.worker.network_namespace import make, wanted
try:
    network = make(wanted(os.environ)).unless_asked_outside(os.environ)
    print(json.dumps({{"private": network.private, "why": network.why}}))
except LabError as error:
    print(json.dumps({{"error": str(error)}}))
"""


@dataclass(frozen=True, slots=True)
class Facts:
    """What was seen of a machine.

    Args:
        python: version and implementation of Python.
        system: operating system and processor.
        cores: logical cores of the machine.
        usable_cores: how many of them this process may use at once, by its affinity and its container's quota.
        memory_nbytes: memory of the machine, or of the container where that is less.
        free_nbytes: how much of it is free; None inside a container with a limit, whose use includes the disk's cache.
        shared_nbytes: size of /dev/shm; None where there is none.
        gpus: names of the NVIDIA GPUs with their memory, as the driver gives them.
        gpu_search: where they were looked for.
        visible_gpus: CUDA_VISIBLE_DEVICES; None where it is not set.
        versions: version by package; None for one that is not installed.
        torch: what torch said: "cuda", "gpus", "gloo", "nccl", "rpc"; or "error".
        tensorflow: what TensorFlow said: "gpus"; or "error". Empty where it was not asked, since there is no GPU.
        network: whether ranks talk over a network of their own: "private", "why" not; or "error".
        start: LABKIT_START; None where it is not set.
    """

    python: str
    system: str
    cores: int
    usable_cores: float
    memory_nbytes: int
    free_nbytes: int | None
    shared_nbytes: int | None
    gpus: tuple[str, ...]
    gpu_search: str
    visible_gpus: str | None
    versions: dict[str, str | None]
    torch: dict[str, Any] = field(default_factory=dict)
    tensorflow: dict[str, Any] = field(default_factory=dict)
    network: dict[str, Any] = field(default_factory=dict)
    start: str | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a report.

    Args:
        what: what it is about.
        found: what was found.
        ok: False where a lesson lacks something.
        remedy: what to do about it, a command where there is one.
        pip: whether the remedy is a command of pip.
    """

    what: str
    found: str
    ok: bool = True
    remedy: str = ""
    pip: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """What a machine can run; as text it is the answer to `lab.doctor()`."""

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is missing."""
        return all(f.ok for f in self.findings)

    def __str__(self) -> str:
        width = max(len(f.what) for f in self.findings)
        lines = []
        for f in self.findings:
            lines.append(f"{' ' if f.ok else '✗'} {f.what:<{width}}  {f.found}")
            if f.remedy:
                lines.append(f"  {'':<{width}}  → {f.remedy}")
        lacking = sum(not f.ok for f in self.findings)
        count = "1 thing is" if lacking == 1 else f"{lacking} things are"
        lines += ["", f"{count} missing: see ✗." if lacking else "Everything is here."]
        if any(f.pip for f in self.findings):
            lines.append("The commands are for a terminal with this environment; in a cell write %pip instead of pip.")
        return "\n".join(lines)

    __repr__ = __str__


def doctor() -> Report:
    """What this machine can run: Python, cores, memory, GPUs, torch, TensorFlow, Jupyter; for what is missing, the command.

    Takes a few seconds, because torch is asked in a process of its own; TensorFlow too where there is a GPU.
    """
    return diagnose(look())


def diagnose(facts: Facts) -> Report:
    """What the facts mean for the lessons."""
    findings = [
        Finding("Python", f"{facts.python} on {facts.system}"),
        _cores(facts),
        _memory(facts),
        *_shared_memory(facts),
        _gpus(facts),
        _start(facts),
        _network(facts),
    ]
    for package, name, extra, purpose in PACKAGES:
        version = facts.versions.get(package)
        if version is None:
            found = f"not installed; needed for {purpose}"
            findings.append(Finding(name, found, ok=False, remedy=install_command(extra), pip=True))
        elif package == "torch":
            findings += _torch(facts, version)
        elif package == "tensorflow":
            findings.append(_tensorflow(facts, version))
        else:
            findings.append(Finding(name, version))
    return Report(tuple(findings))


def _cores(facts: Facts) -> Finding:
    found = f"{facts.cores}"
    if facts.usable_cores < facts.cores:
        found += f", of which this process may use {facts.usable_cores:g}"
    if facts.usable_cores >= 4:
        return Finding("cores", found)
    return Finding("cores", found, remedy="every lesson runs; with more ranks than cores, more ranks are not faster")


def _memory(facts: Facts) -> Finding:
    free = "the container's limit" if facts.free_nbytes is None else f"{in_words(facts.free_nbytes, 'iB')} of it free"
    return Finding("memory", f"{in_words(facts.memory_nbytes, 'iB')}, {free}")


def _shared_memory(facts: Facts) -> list[Finding]:
    if facts.shared_nbytes is None:
        return []
    found = f"{in_words(facts.shared_nbytes, 'iB')} in /dev/shm"
    if facts.shared_nbytes >= SHARED_MEMORY_WANTED:
        return [Finding("shared memory", found)]
    return [Finding("shared memory", f"only {found}", ok=False, remedy="start the container with  docker run --shm-size=2g")]


def _gpus(facts: Facts) -> Finding:
    if not facts.gpus:
        return Finding("GPUs", f"none ({facts.gpu_search}): ranks compute on the CPU")
    counted = [f"{facts.gpus.count(name)} × {name}" for name in dict.fromkeys(facts.gpus)]
    visible = f"; CUDA_VISIBLE_DEVICES={facts.visible_gpus}" if facts.visible_gpus is not None else ""
    return Finding("GPUs", ", ".join(counted) + visible)


def _torch(facts: Facts, version: str) -> list[Finding]:
    said = facts.torch
    if "error" in said:
        return [_not_loading("torch", "torch", version, said["error"])]
    gpus: int = said["gpus"]
    build = f"CUDA {said['cuda']}, sees {gpus} GPU{'s' * (gpus != 1)}" if said["cuda"] else "CPU build"
    findings = [Finding("torch", f"{version} ({build})")]
    if facts.gpus and not gpus and facts.visible_gpus != "":
        reason = "the installed CUDA build does not fit the driver" if said["cuda"] else "the installed build is for the CPU"
        remedy = "https://pytorch.org/get-started/locally/ shows the command for your CUDA version"
        findings = [Finding("torch", f"{version} sees none of the GPUs: {reason}", ok=False, remedy=remedy)]
    backends = [name for name in ("gloo", "nccl", "rpc") if said[name]]
    missing = [name for name in ("gloo", "rpc") if not said[name]]
    lessons = " (lessons 07 and 08 show their code, and run it over messages)" if missing == ["rpc"] else ""
    findings.append(
        Finding(
            "torch.distributed",
            ", ".join(backends) + (f"; without {' and '.join(missing)}{lessons}" if missing else ""),
            not missing,
        )
    )
    return findings


def _tensorflow(facts: Facts, version: str) -> Finding:
    said = facts.tensorflow
    if "error" in said:
        return _not_loading("TensorFlow", "tensorflow", version, said["error"])
    if facts.gpus and not said["gpus"] and facts.visible_gpus != "":
        return Finding(
            "TensorFlow", f"{version} sees none of the GPUs: its lessons run on the CPU",
            remedy='pip install "tensorflow[and-cuda]"', pip=True,
        )  # fmt: skip
    return Finding("TensorFlow", f"{version}, sees {said['gpus']} GPU{'s' * (said['gpus'] != 1)}" if said else version)


def _not_loading(name: str, package: str, version: str, error: str) -> Finding:
    remedy = f"pip install --force-reinstall {package}"
    return Finding(name, f"{version}, but it does not load: {error}", ok=False, remedy=remedy, pip=True)


def look() -> Facts:
    """See what this machine is and has."""
    gpus, gpu_search = _nvidia_gpus()
    versions = {package: _version(package) for package, *_ in PACKAGES}
    asked = {"network": _start_asking(ASK_NETWORK.format(sys.path))}
    if versions["torch"] is not None:
        asked["torch"] = _start_asking(ASK_TORCH)
    if versions["tensorflow"] is not None and gpus:
        asked["tensorflow"] = _start_asking(ASK_TENSORFLOW)  # beside torch, since it takes seconds
    answers = {package: _answer(process) for package, process in asked.items()}
    memory_nbytes, free_nbytes = _memory_sizes()
    return Facts(
        python=f"{platform.python_version()} ({platform.python_implementation()})",
        system=f"{platform.system()} {platform.machine()}",
        cores=os.cpu_count() or 1,
        usable_cores=_usable_cores(),
        memory_nbytes=memory_nbytes,
        free_nbytes=free_nbytes,
        shared_nbytes=shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None,
        gpus=gpus,
        gpu_search=gpu_search,
        visible_gpus=os.environ.get("CUDA_VISIBLE_DEVICES"),
        versions=versions,
        torch=answers.get("torch", {}),
        tensorflow=answers.get("tensorflow", {}),
        network=answers["network"],
        start=os.environ.get("LABKIT_START") or None,
    )


def _start(facts: Facts) -> Finding:
    words = {"fork": "fork from a server", "spawn": "spawn, spare ones kept warm"}
    if facts.start is None:
        return Finding("ranks start by", words["fork" if facts.system.startswith("Linux") else "spawn"])
    if facts.start not in words:
        found = f"LABKIT_START={facts.start!r} is neither 'fork' nor 'spawn'"
        return Finding("ranks start by", found, ok=False, remedy="unset LABKIT_START")
    return Finding("ranks start by", f"{words[facts.start]}, because LABKIT_START says so")


def _network(facts: Facts) -> Finding:
    """Whether other users of this machine can reach the ports that torch and TensorFlow open, which authenticate nobody."""
    what, said = "ranks talk over", facts.network
    if "error" in said:
        return Finding(what, said["error"], ok=False, remedy="unset LABKIT_NETWORK")
    spawned = facts.start == "spawn" or (facts.start is None and not facts.system.startswith("Linux"))
    if said["private"] and not spawned:
        return Finding(what, "a network of their own, which no other user of this machine can reach")
    why = "they are spawned" if spawned else said["why"]
    return Finding(what, f"this machine's network, where other users of it can reach them ({why})")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _usable_cores() -> float:
    cores = float(len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else float(os.cpu_count() or 1)
    try:
        quota_us, period_us = (CGROUP / "cpu.max").read_text().split()  # "max 100000" where there is no quota
    except (OSError, ValueError):
        return cores
    return cores if quota_us == "max" else min(cores, round(int(quota_us) / int(period_us), 1))


def _memory_sizes() -> tuple[int, int | None]:
    """Memory in bytes, and how much of it is free; None for that inside a container with a limit."""
    memory = psutil.virtual_memory()
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # control groups, version 2 and version 1
        try:
            limit = int((CGROUP / name).read_text())  # "max", or a number beyond the machine's memory, where there is no limit
        except (OSError, ValueError):
            continue
        if limit < memory.total:
            return limit, None
    return memory.total, memory.available


def _nvidia_gpus() -> tuple[tuple[str, ...], str]:
    """The names of the GPUs, and where they were looked for."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return tuple(_gpu_names_of_driver()), "no nvidia-smi, no NVIDIA driver in /proc"
    query = [program, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=ASK_LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return tuple(_gpu_names_of_driver()), f"nvidia-smi failed: {type(error).__name__}"
    return tuple(line.strip() for line in answer.stdout.splitlines() if line.strip()), "asked nvidia-smi"


def _gpu_names_of_driver() -> list[str]:
    """What the driver tells without its tools, as in a container that leaves them out."""
    names = []
    for file in sorted(DRIVER.glob("*/information")):
        fields = dict(line.split(":", 1) for line in file.read_text().splitlines() if ":" in line)
        names.append(fields.get("Model", "NVIDIA GPU").strip())
    return names


def _start_asking(question: str) -> subprocess.Popen[str]:
    """Start a fresh Python that answers in one line of JSON."""
    quiet = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", question]
    return subprocess.Popen(
        command, env=quiet, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What it said; under "error" why it said nothing."""
    with process:
        try:
            output, complaint = process.communicate(timeout=ASK_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return {"error": f"no answer within {ASK_LIMIT_S:.0f} s"}
    if process.returncode == 0:
        said: dict[str, Any] = json.loads(output.splitlines()[-1])  # whatever a framework prints comes before it
        return said
    if process.returncode < 0:
        return {"error": f"ended by {signal.Signals(-process.returncode).name}"}
    return {"error": next((line for line in reversed(complaint.splitlines()) if line.strip()), f"exit code {process.returncode}")}
