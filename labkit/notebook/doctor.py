"""`doctor` reports what this machine can run, and how to install what is missing; `TABLE` has an entry per subject.

It does not import frameworks: labkit keeps the notebook's kernel free of torch, CUDA and TensorFlow. Versions come from
the packages' metadata; facts that only a framework knows come from a separate process that imports it.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from labkit.errors.exceptions import LabError, install_command
from labkit.errors.lists import counted, listed
from labkit.errors.units import in_words
from labkit.errors.wrong_calls import public_api
from labkit.launch.capacity import FreeMemory, usable_memory
from labkit.launch.machines.engines import Engine
from labkit.launch.machines.facts import Facts, differences
from labkit.launch.machines.relay_starter import survey
from labkit.launch.server_requests import Surveyed
from labkit.notebook.doctor_facts import GpusFound, PlaceFound, ask_gpus, find_gpus, find_place, gpu_types, gpus, place
from labkit.notebook.findings import Entry, Finding, ProcessQuestion, Report, collect, report
from labkit.recording.cores import usable_cores
from labkit.worker.runtimes.registry import FRAMEWORKS

SHARED_MEMORY: Final = Path("/dev/shm")  # labkit does not use it: its shared memory is anonymous
WANTED: Final = 2**30  # bytes there; with a container's default of 64 MiB, NCCL and DataLoader fail


@public_api
def doctor(on: Engine | None = None) -> Report:
    """Report what this machine can run (cores, memory, GPUs, torch, TensorFlow, Jupyter), and how to install the rest.

    Takes a few seconds, because separate processes import torch and TensorFlow, and compute on the GPUs.

    Args:
        on: machines, as for `labkit.Group`: report what these have, and what is missing there, instead.

    Returns:
        the report; a notebook shows its text.
    """
    return report(TABLE, collect(TABLE)) if on is None else machines_report(on)


def main(arguments: Sequence[str]) -> int:
    """Print the report, as a command without arguments; return the exit status, 1 if something is missing."""
    if arguments:
        raise SystemExit("usage: python -m labkit doctor")
    found = doctor()
    print(found)
    return 0 if found.ok else 1


def _find_python() -> str:
    python = f"{platform.python_version()} ({platform.python_implementation()})"
    return f"{python} on {platform.system()} {platform.machine()}"


def _cores(cores: tuple[int, float]) -> list[Finding]:
    number, usable = cores
    limit = f", of which this process may use {usable:g}" if usable < number else ""
    few = "; lessons with more ranks run, too" if usable < 4 else ""
    return [Finding(f"{number}{limit}{few}")]


def _memory(memory: FreeMemory) -> list[Finding]:
    limit = " (the container's limit)" if memory.limited else ""
    return [Finding(f"{in_words(memory.nbytes, 'iB')}{limit}, {in_words(memory.free_nbytes, 'iB')} of it free")]


def _find_shared_memory(_: PlaceFound) -> tuple[int, int] | None:
    """Return the size of /dev/shm and its free part, in bytes; None where there is none, as on macOS."""
    if not SHARED_MEMORY.is_dir():
        return None
    usage = shutil.disk_usage(SHARED_MEMORY)
    return usage.total, usage.free


def _shared_memory(memory: tuple[int, int] | None, place: PlaceFound) -> list[Finding]:
    """Report /dev/shm, which DataLoader's workers and NCCL fill."""
    if memory is None:
        return []
    nbytes, free_nbytes = memory
    found = f"{in_words(nbytes, 'iB')} in /dev/shm"
    free = f"{in_words(free_nbytes, 'iB')} of it free; DataLoader's workers and NCCL may need more"
    if nbytes < WANTED:
        return [Finding(f"only {found}, {free}", ok=False, remedy=place.shared_memory)]
    if free_nbytes < WANTED:
        return [Finding(f"{found}, only {free}", ok=False, remedy="du -a /dev/shm | sort -n | tail")]
    return [Finding(found)]


def _find_start() -> str:
    """Return how ranks start; a `LabError` if LABKIT_START is no method."""
    from labkit.group.open_groups import default_start  # processes that are asked need not import all this

    return default_start()


def _start(method: str) -> list[Finding]:
    return [Finding({"fork": "fork from a server", "spawn": "spawn, with spare ranks kept ready"}[method])]


def _ask_network() -> dict[str, Any]:
    """Return whether ranks have a private network, which only a process with a single thread can make, or why not."""
    from labkit.worker.network_namespace import make, other_users, wanted

    try:
        network = make(wanted(os.environ)).unless_asked_outside(os.environ)
    except LabError as error:
        return {"error": str(error)}
    return {"private": network.private, "why": network.why, "others": other_users(os.geteuid())}


def _network(network: dict[str, Any], start: str) -> list[Finding]:
    """Report whether other users of this machine can reach the ports of torch and TensorFlow."""
    if "error" in network:
        return [Finding(network["error"], ok=False, remedy="unset LABKIT_NETWORK")]
    spawned = start == "spawn"
    if network["private"] and not spawned:
        return [Finding("a private network, which no other user of this machine can reach")]
    why = "they are spawned" if spawned else network["why"]
    reach = "where other users of it can reach them" if network["others"] else "where nobody else has an account"
    return [Finding(f"this machine's network, {reach} ({why})")]


def _ask_about_gpus(gpus: GpusFound, torch: ProcessQuestion | dict[str, Any]) -> ProcessQuestion | None:
    installed = isinstance(torch, ProcessQuestion)
    return ProcessQuestion(ask_gpus) if installed and gpus.names and gpus.visible != "" else None


def _package(
    name: str, extra: str, purpose: str, *, optional: bool = False, front_end: bool = False, needs: tuple[str, ...] = (),
    ask: Callable[[], dict[str, Any]] | None = None,
    means: Callable[..., Iterable[Finding]] = lambda fact: [Finding(fact["version"])],
) -> Entry:  # fmt: skip
    """Make the entry of a package. Its fact is its "version", None if it is not installed, and the reply to a question.

    Another process calls `ask` if the package is installed. `means` is called if it is installed and loads. A kernel
    needs no other `front_end`.
    """

    def find(*_: Any) -> dict[str, Any] | ProcessQuestion:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return {"version": None}
        return ProcessQuestion(ask, version=version) if ask else {"version": version}

    def findings(fact: dict[str, Any], place: PlaceFound, *needed: Any) -> Iterable[Finding]:
        version = fact["version"]
        if version is None:
            if front_end and place.has_kernel:
                return []
            found = f"not installed; needed for {purpose}"
            replaces_none = place.hosted and extra in ("course", "plot")  # the extra that keeps a hosted kernel's packages
            command = install_command("hosted" if replaces_none else extra)
            return [Finding(found, ok=optional, remedy=command, pip=True)]
        if "error" in fact:
            remedy = f"pip install --force-reinstall {name.lower()}"
            return [Finding(f"{version}, but it does not load: {fact['error']}", ok=False, remedy=remedy, pip=True)]
        return means(fact, *needed)

    return Entry(name, find, findings, ("place", *needs))


def _ask_torch() -> dict[str, Any]:
    """Return what torch is built for, what it sees, and what labkit cannot do with this version ("lost")."""
    import torch
    from torch import distributed as dist
    from torch.distributed import rpc

    from labkit.recording.torch_internals import lost

    have = dist.is_available()
    return {
        "cuda": torch.version.cuda or getattr(torch.version, "hip", None), "gpus": torch.cuda.device_count(),
        "gloo": have and dist.is_gloo_available(), "nccl": have and dist.is_nccl_available(), "rpc": rpc.is_available(),
        "lost": lost(),
    }  # fmt: skip


def _torch(torch: dict[str, Any], gpus: GpusFound) -> Iterator[Finding]:
    version, cuda, seen = torch["version"], torch["cuda"], torch["gpus"]
    if gpus.missed(seen):
        reason = "the installed CUDA build does not fit the driver" if cuda else "the installed build is for the CPU"
        remedy = "https://pytorch.org/get-started/locally/ shows the command for your CUDA version"
        yield Finding(f"{version} sees none of the GPUs: {reason}", ok=False, remedy=remedy)
    else:
        build = f"CUDA {cuda}, sees {counted(seen, 'GPU')}" if cuda else "CPU build"
        yield Finding(f"{version} ({build})")
    missing = [name for name in ("gloo", "rpc") if not torch[name]]
    found = ", ".join(name for name in ("gloo", "nccl", "rpc") if torch[name])
    if missing:
        lessons = " (lessons 07 and 08 show their code, and run it over messages)" if missing == ["rpc"] else ""
        found += f"; without {listed(missing)}{lessons}"
    yield Finding(found, ok=not missing, subject="torch.distributed")
    yield from _recording("torch", torch["lost"])


def _recording(framework: str, lost: Sequence[str]) -> Iterator[Finding]:
    if lost:
        yield Finding(f"this version lacks what labkit needs for: {'; '.join(lost)}", subject=f"recording {framework}")


def _ask_tensorflow() -> dict[str, Any]:
    """Return what TensorFlow sees in a rank, and what labkit cannot do with this version ("lost")."""
    from labkit.worker.runtimes.tensorflow.runtime import TensorFlow

    os.environ |= TensorFlow.environment
    import tensorflow

    from labkit.worker.runtimes.tensorflow.tensorflow_internals import lost

    return {"gpus": len(tensorflow.config.list_physical_devices("GPU")), "lost": lost()}


def _tensorflow(tensorflow: dict[str, Any], gpus: GpusFound) -> Iterator[Finding]:
    version, seen = tensorflow["version"], tensorflow["gpus"]
    if gpus.missed(seen):
        found = f"{version} sees none of the GPUs: its lessons run on the CPU"
        yield Finding(found, remedy='pip install "tensorflow[and-cuda]"', pip=True)
    else:
        yield Finding(f"{version}, sees {counted(seen, 'GPU')}" if gpus.names else version)
    yield from _recording("TensorFlow", tensorflow["lost"])


TABLE: Final = (
    Entry("Python", _find_python, lambda python: [Finding(python)]),
    Entry("place", find_place, place),
    Entry("cores", lambda: (os.cpu_count() or 1, usable_cores()), _cores),
    Entry("memory", usable_memory, _memory),
    Entry("shared memory", _find_shared_memory, _shared_memory, needs=("place",)),
    Entry("GPUs", find_gpus, gpus),
    Entry("ranks start by", _find_start, _start),
    Entry("ranks talk over", lambda _: ProcessQuestion(_ask_network), _network, needs=("ranks start by",)),
    _package("torch", "torch", "all PyTorch lessons", needs=("GPUs",), ask=_ask_torch, means=_torch),
    Entry("GPU types", _ask_about_gpus, gpu_types, needs=("GPUs", "torch")),
    _package("TensorFlow", "tf", "the TensorFlow lessons", needs=("GPUs",), ask=_ask_tensorflow, means=_tensorflow),
    _package("Keras", "tf", "the TensorFlow lessons"),
    _package("JupyterLab", "course", "opening the lessons", front_end=True),
    _package("ipykernel", "course", "running cells"),
    _package("ipywidgets", "course", "interactive controls in a cell"),
    _package("anywidget", "course", "timelines to explore"),
    _package("matplotlib", "plot", "timelines and all other pictures"),
    _package("scikit-learn", "course", "the handwritten digits"),
    _package(
        "TensorBoard", "tensorboard", "programs with keras.callbacks.TensorBoard or torch.utils.tensorboard", optional=True
    ),
)  # fmt: skip


PORTS: Final = (
    "labkit opens none, except for ten seconds at a start, to see whether the machines can connect. torch and gloo connect ranks "
    "at random ports of these addresses, TensorFlow of all addresses. These authenticate nobody: only the machines themselves "
    "should reach them"
)


def machines_report(on: Engine) -> Report:
    """Connect to machines, and report what they have."""
    if (instead := on.instead()) is not None:
        return Report((Finding(instead[1], ok=False, subject="machines"),))
    try:
        return Report(tuple(_findings(Facts.here(), survey(on))))
    except LabError as error:
        return Report((_problem(str(error), "machines"),))


def _findings(here: Facts, surveyed: Surveyed) -> Iterator[Finding]:
    compared = [package for package in ("Python", "labkit", *FRAMEWORKS) if package in here.versions]
    known = {machine.name: machine for machine in surveyed.machines}
    for name in surveyed.names:
        if name in surveyed.problems:
            yield _problem(surveyed.problems[name], name)
        if name not in known:
            continue
        machine, facts = known[name], known[name].facts
        gpus = counted(facts.gpus, "GPU") if facts.gpus else "no GPU"
        memory = f"{in_words(facts.memory_bytes, 'iB')} of memory free"
        yield Finding(f"{facts.address}: {facts.cores:g} cores, {memory}, {gpus}", subject=name)
        versions = ", ".join(f"{package} {version}" for package, version in facts.versions.items())
        yield Finding(f"{versions}; {facts.python}", subject=name)
        trip, error = in_words(machine.round_trip_ns / 1e9, "s"), in_words(machine.clock_error_ns / 1e9, "s")
        yield Finding(f"a round trip takes {trip}; its clock is known to within {error}", subject=name)
        yield from (_problem(line, name) for line in differences(compared, here, name, facts))
    if "" in surveyed.problems:
        yield _problem(surveyed.problems[""], "network")
    yield Finding(PORTS, subject="ports")


def _problem(line: str, subject: str) -> Finding:
    """A problem, and behind its first sentence what to do about it."""
    found, _, remedy = line.partition(". ")
    return Finding(found, ok=False, remedy=remedy.removesuffix("."), subject=subject)
