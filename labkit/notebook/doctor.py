"""`doctor` reports what this machine can run, and how to install what is missing.

It does not import frameworks: labkit keeps the notebook's kernel free of torch, CUDA and TensorFlow. Versions come from
the packages' metadata; facts that only a framework knows come from a separate process that imports it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from html import escape
from itertools import product
from pathlib import Path
from typing import Any, Final

import psutil

from labkit.errors.control_groups import control_group_folders
from labkit.errors.exceptions import install_command
from labkit.errors.lists import counted, listed
from labkit.errors.units import in_words
from labkit.launch.capacity import usable_cores

__all__ = ["Facts", "Finding", "Report", "collect_facts", "diagnose", "doctor"]

ASK_LIMIT_S: Final = 120.0  # importing a framework from a cold disk can take a minute
GIB: Final = 2**30
DRIVER: Final = Path("/proc/driver/nvidia/gpus")
SHARED_MEMORY_WANTED: Final = 1 * GIB  # with a container's default of 64 MiB, NCCL and DataLoader die of SIGBUS

# Package, display name, the extra that installs it, and its purpose.
PACKAGES: Final = (
    ("torch", "torch", "torch", "all PyTorch lessons"),
    ("tensorflow", "TensorFlow", "tf", "the TensorFlow lessons"),
    ("keras", "Keras", "tf", "the TensorFlow lessons"),
    ("jupyterlab", "JupyterLab", "course", "opening the lessons"),
    ("ipykernel", "ipykernel", "course", "running cells"),
    ("ipywidgets", "ipywidgets", "course", "interactive controls in a cell"),
    ("anywidget", "anywidget", "course", "timelines to explore"),
    ("matplotlib", "matplotlib", "plot", "timelines and all other pictures"),
    ("scikit-learn", "scikit-learn", "course", "the handwritten digits"),
    ("tensorboard", "TensorBoard", "tensorboard", "programs with keras.callbacks.TensorBoard or torch.utils.tensorboard"),
)
OPTIONAL: Final = ("tensorboard",)  # no lesson needs it

ASK_TORCH: Final = """
import sys
sys.path[:] = {0!r}
import json, torch, torch.distributed as dist
from labkit.comm.torch_internals import lost
have = dist.is_available()
rpc = False
if have:
    import torch.distributed.rpc
    rpc = torch.distributed.rpc.is_available()
print(json.dumps({{"cuda": torch.version.cuda or getattr(torch.version, "hip", None), "gpus": torch.cuda.device_count(),
                  "gloo": have and dist.is_gloo_available(), "nccl": have and dist.is_nccl_available(), "rpc": rpc,
                  "lost": lost()}}))
"""

ASK_TENSORFLOW: Final = """
import sys
sys.path[:] = {0!r}
import json, os
from labkit.worker.runtimes.tensorflow.runtime import TensorFlow
os.environ |= TensorFlow.environment
import tensorflow
from labkit.worker.runtimes.tensorflow.tensorflow_internals import lost
print(json.dumps({{"gpus": len(tensorflow.config.list_physical_devices("GPU")), "lost": lost()}}))
"""


ASK_NETWORK: Final = """
import sys
sys.path[:] = {0!r}
import json, os
from labkit.errors.exceptions import LabError
from labkit.worker.network_namespace import make, wanted
from labkit.worker.other_users import other_users
try:
    network = make(wanted(os.environ)).unless_asked_outside(os.environ)
    print(json.dumps({{"private": network.private, "why": network.why, "others": other_users(os.geteuid())}}))
except LabError as error:
    print(json.dumps({{"error": str(error)}}))
"""


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts found about a machine.

    Args:
        python: version and implementation of Python.
        system: operating system and processor.
        cores: logical cores of the machine.
        usable_cores: the number of cores that this process may use at once, by its affinity and its container's quota.
        memory_nbytes: memory of the machine, or of the container if that is less, in bytes.
        free_nbytes: free memory in bytes; None in a container with a limit, whose usage includes the disk cache.
        shared_nbytes: size of /dev/shm in bytes; None if there is none.
        gpus: names of the NVIDIA GPUs with their memory, as the driver reports them.
        gpu_search: how GPUs were searched for.
        visible_gpus: the value of CUDA_VISIBLE_DEVICES; None if it is not set.
        versions: versions by package; None for a package that is not installed.
        torch: torch's reply: "cuda", "gpus", "gloo", "nccl", "rpc", and "lost", what labkit cannot do with this
            version; or "error".
        tensorflow: TensorFlow's reply: "gpus", and "lost", as for torch; or "error".
        network: whether ranks use a private network, "private", and "why" if not; whether the machine has "others" than
            this user; or "error".
        start: the value of LABKIT_START; None if it is not set.
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
        subject: the subject, such as "torch".
        found: what was found.
        ok: False if a lesson needs something that is missing.
        remedy: what to do about it, if possible a command.
        pip: whether the remedy is a pip command.
    """

    subject: str
    found: str
    ok: bool = True
    remedy: str = ""
    pip: bool = False


_CELL: Final = "text-align:left;vertical-align:top;padding:2px 8px;white-space:normal;word-break:normal"


@dataclass(frozen=True, slots=True)
class Report:
    """What a machine can run; its text is the output of `lab.doctor()`."""

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is missing."""
        return all(f.ok for f in self.findings)

    def __str__(self) -> str:
        width = max(len(f.subject) for f in self.findings)
        lines = []
        for f in self.findings:
            lines.append(f"{' ' if f.ok else '✗'} {f.subject:<{width}}  {f.found}")
            if f.remedy:
                lines.append(f"  {'':<{width}}  → {f.remedy}")
        missing = sum(not f.ok for f in self.findings)
        count = "1 thing is" if missing == 1 else f"{missing} things are"
        lines += ["", f"{count} missing: see ✗." if missing else "Nothing is missing."]
        if any(f.pip for f in self.findings):
            lines.append("Run the commands in a terminal with this environment; in a cell write %pip instead of pip.")
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """As a table, which breaks long lines between words at any width of the page."""
        rows = []
        for f in self.findings:
            remedy = f"<br>→ <code>{escape(f.remedy)}</code>" if f.remedy else ""
            cells = "" if f.ok else "✗", f"<b>{escape(f.subject)}</b>", escape(f.found) + remedy
            rows.append("<tr>" + "".join(f'<td style="{_CELL}">{cell}</td>' for cell in cells) + "</tr>")
        last = "<br>".join(escape(line) for line in str(self).split("\n\n")[-1].splitlines())
        return f"<table><tbody>{''.join(rows)}</tbody></table><p>{last}</p>"


def doctor() -> Report:
    """Report what this machine can run (cores, memory, GPUs, torch, TensorFlow, Jupyter), and how to install the rest.

    Takes a few seconds, because separate processes import torch and TensorFlow.

    Returns:
        the report; a notebook shows its text.
    """
    return diagnose(collect_facts())


def diagnose(facts: Facts) -> Report:
    """Turn facts into a report: what they mean for the lessons."""
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
            findings.append(Finding(name, found, ok=package in OPTIONAL, remedy=install_command(extra), pip=True))
        elif package == "torch":
            findings += [*_torch(facts, version), *_recording("torch", facts.torch)]
        elif package == "tensorflow":
            findings += [_tensorflow(facts, version), *_recording("TensorFlow", facts.tensorflow)]
        else:
            findings.append(Finding(name, version))
    return Report(tuple(findings))


def _cores(facts: Facts) -> Finding:
    found = f"{facts.cores}"
    if facts.usable_cores < facts.cores:
        found += f", of which this process may use {facts.usable_cores:g}"
    if facts.usable_cores >= 4:
        return Finding("cores", found)
    return Finding("cores", f"{found}; lessons with more ranks run, too")


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
    reply = facts.torch
    if "error" in reply:
        return [_not_loading("torch", "torch", version, reply["error"])]
    gpus: int = reply["gpus"]
    build = f"CUDA {reply['cuda']}, sees {counted(gpus, 'GPU')}" if reply["cuda"] else "CPU build"
    findings = [Finding("torch", f"{version} ({build})")]
    if facts.gpus and not gpus and facts.visible_gpus != "":
        reason = "the installed CUDA build does not fit the driver" if reply["cuda"] else "the installed build is for the CPU"
        remedy = "https://pytorch.org/get-started/locally/ shows the command for your CUDA version"
        findings = [Finding("torch", f"{version} sees none of the GPUs: {reason}", ok=False, remedy=remedy)]
    backends = [name for name in ("gloo", "nccl", "rpc") if reply[name]]
    missing = [name for name in ("gloo", "rpc") if not reply[name]]
    lessons = " (lessons 07 and 08 show their code, and run it over messages)" if missing == ["rpc"] else ""
    findings.append(
        Finding(
            "torch.distributed",
            ", ".join(backends) + (f"; without {listed(missing)}{lessons}" if missing else ""),
            not missing,
        )
    )
    return findings


def _recording(name: str, reply: dict[str, Any]) -> list[Finding]:
    """Report what the tables of private names lose with the installed version."""
    if not reply.get("lost"):
        return []
    return [Finding(f"recording {name}", f"this version lacks what labkit needs for: {'; '.join(reply['lost'])}")]


def _tensorflow(facts: Facts, version: str) -> Finding:
    reply = facts.tensorflow
    if "error" in reply:
        return _not_loading("TensorFlow", "tensorflow", version, reply["error"])
    if facts.gpus and not reply["gpus"] and facts.visible_gpus != "":
        return Finding(
            "TensorFlow", f"{version} sees none of the GPUs: its lessons run on the CPU",
            remedy='pip install "tensorflow[and-cuda]"', pip=True,
        )  # fmt: skip
    return Finding("TensorFlow", f"{version}, sees {counted(reply['gpus'], 'GPU')}" if facts.gpus else version)


def _not_loading(name: str, package: str, version: str, error: str) -> Finding:
    remedy = f"pip install --force-reinstall {package}"
    return Finding(name, f"{version}, but it does not load: {error}", ok=False, remedy=remedy, pip=True)


def collect_facts() -> Facts:
    """Collect the facts about this machine."""
    gpus, gpu_search = _nvidia_gpus()
    versions = {package: _version(package) for package, *_ in PACKAGES}
    asked = {"network": _start_asking(ASK_NETWORK.format(sys.path))}
    if versions["torch"] is not None:
        asked["torch"] = _start_asking(ASK_TORCH.format(sys.path))
    if versions["tensorflow"] is not None:
        asked["tensorflow"] = _start_asking(ASK_TENSORFLOW.format(sys.path))  # in parallel with torch: it takes seconds
    replies = {package: _reply(process) for package, process in asked.items()}
    memory_nbytes, free_nbytes = _memory_sizes()
    return Facts(
        python=f"{platform.python_version()} ({platform.python_implementation()})",
        system=f"{platform.system()} {platform.machine()}",
        cores=os.cpu_count() or 1,
        usable_cores=usable_cores(),
        memory_nbytes=memory_nbytes,
        free_nbytes=free_nbytes,
        shared_nbytes=shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None,
        gpus=gpus,
        gpu_search=gpu_search,
        visible_gpus=os.environ.get("CUDA_VISIBLE_DEVICES"),
        versions=versions,
        torch=replies.get("torch", {}),
        tensorflow=replies.get("tensorflow", {}),
        network=replies["network"],
        start=os.environ.get("LABKIT_START") or None,
    )


def _start(facts: Facts) -> Finding:
    ways = {"fork": "fork from a server", "spawn": "spawn, with spare ranks kept ready"}
    if facts.start is None:
        return Finding("ranks start by", ways["fork" if facts.system.startswith("Linux") else "spawn"])
    if facts.start not in ways:
        found = f"LABKIT_START={facts.start!r} is neither 'fork' nor 'spawn'"
        return Finding("ranks start by", found, ok=False, remedy="unset LABKIT_START")
    return Finding("ranks start by", f"{ways[facts.start]}, because of LABKIT_START={facts.start}")


def _network(facts: Facts) -> Finding:
    """Report whether other users of this machine can reach the ports of torch and TensorFlow."""
    subject, reply = "ranks talk over", facts.network
    if "error" in reply:
        return Finding(subject, reply["error"], ok=False, remedy="unset LABKIT_NETWORK")
    spawned = facts.start == "spawn" or (facts.start is None and not facts.system.startswith("Linux"))
    if reply["private"] and not spawned:
        return Finding(subject, "a private network, which no other user of this machine can reach")
    why = "they are spawned" if spawned else reply["why"]
    reach = "where other users of it can reach them" if reply["others"] else "where nobody else has an account"
    return Finding(subject, f"this machine's network, {reach} ({why})")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _memory_sizes(root: Path = Path("/")) -> tuple[int, int | None]:
    """Return the size of the memory and of its free part, in bytes; the latter is None in a container with a limit."""
    memory = psutil.virtual_memory()
    limit = memory.total
    for folder, name in product(control_group_folders("memory", root), ("memory.max", "memory.limit_in_bytes")):
        with contextlib.suppress(OSError, ValueError):  # without a limit: "max", or more than the machine's memory
            limit = min(limit, int((folder / name).read_text()))
    return limit, None if limit < memory.total else memory.available


def _nvidia_gpus() -> tuple[tuple[str, ...], str]:
    """Return the names of the GPUs, and how they were searched for."""
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
    """Return the GPU names that the driver lists in /proc, for containers without nvidia-smi."""
    names = []
    for file in sorted(DRIVER.glob("*/information")):
        fields = dict(line.split(":", 1) for line in file.read_text().splitlines() if ":" in line)
        names.append(fields.get("Model", "NVIDIA GPU").strip())
    return names


def _start_asking(question: str) -> subprocess.Popen[str]:
    """Start a Python process that prints its reply as a line of JSON."""
    quiet = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", question]
    return subprocess.Popen(
        command, env=quiet, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _reply(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Wait for a process's reply and return it; if there is none, the reason under "error"."""
    with process:
        try:
            output, errors = process.communicate(timeout=ASK_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return {"error": f"no reply within {ASK_LIMIT_S:.0f} s"}
    if process.returncode == 0:
        reply: dict[str, Any] = json.loads(output.splitlines()[-1])  # the last line, after anything that a framework prints
        return reply
    if process.returncode < 0:
        return {"error": f"ended by {signal.Signals(-process.returncode).name}"}
    return {"error": next((line for line in reversed(errors.splitlines()) if line.strip()), f"exit code {process.returncode}")}
