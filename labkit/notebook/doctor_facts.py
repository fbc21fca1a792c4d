"""What `doctor` reports of GPUs and of the place: a hosted service, a hub, a container or a plain machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from labkit.errors.lists import counted
from labkit.errors.units import in_words
from labkit.notebook.findings import ASK_LIMIT_S, Finding

DRIVER: Final = Path("/proc/driver/nvidia/gpus")
# The compute capability from which on GPUs multiply matrices of a type.
# Source: https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/index.html, "Datatype and hardware support
# matrix"; "Features and Technical Specifications" in the CUDA C++ Programming Guide for float16.
DTYPES: Final = {"float16": (7, 0), "bfloat16": (8, 0), "float8": (8, 9)}


class GpusFound(NamedTuple):
    """The NVIDIA GPUs of the machine."""

    names: tuple[str, ...]  # with their memory, as the driver reports them
    search: str  # how they were searched for
    visible: str | None  # the value of CUDA_VISIBLE_DEVICES; None if it is not set

    def missed(self, seen: int) -> bool:
        """Whether a framework that sees so many of them should see more."""
        return bool(self.names) and not seen and self.visible != ""


def find_gpus() -> GpusFound:
    """Ask nvidia-smi; where there is none, the driver: containers may have the driver alone."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    program, search = shutil.which("nvidia-smi"), "no nvidia-smi, no NVIDIA driver in /proc"
    if program is not None:
        query = [program, "--query-gpu=name,memory.total", "--format=csv,noheader"]
        try:
            answer = subprocess.run(query, capture_output=True, text=True, timeout=ASK_LIMIT_S, check=True)
            return GpusFound(
                tuple(line.strip() for line in answer.stdout.splitlines() if line.strip()), "asked nvidia-smi", visible
            )
        except (OSError, subprocess.SubprocessError) as error:
            search = f"nvidia-smi failed: {type(error).__name__}"
    models = [re.search(r"^Model:(.*)", file.read_text(), re.MULTILINE) for file in sorted(DRIVER.glob("*/information"))]
    return GpusFound(tuple(model[1].strip() if model else "NVIDIA GPU" for model in models), search, visible)


def gpus(found: GpusFound) -> list[Finding]:
    """Report which GPUs there are."""
    if not found.names:
        return [Finding(f"none ({found.search}): ranks compute on the CPU")]
    models = [f"{found.names.count(name)} × {name}" for name in dict.fromkeys(found.names)]
    visible = f"; CUDA_VISIBLE_DEVICES={found.visible}" if found.visible is not None else ""
    return [Finding(", ".join(models) + visible)]


def ask_gpus() -> dict[str, Any]:
    """Compute on each GPU, and return what it is, and how many pairs have peer access."""
    import torch

    each, count = [], torch.cuda.device_count()
    for number in range(count):
        error = ""
        try:
            (torch.ones(1, device=f"cuda:{number}") + 1).item()
        except RuntimeError as failed:  # this build has no code for this GPU, or all its memory is taken
            error = str(failed).splitlines()[0]
        free_nbytes, nbytes = (0, 0) if error else torch.cuda.mem_get_info(number)
        each.append([list(torch.cuda.get_device_capability(number)), nbytes, free_nbytes, error])
    pairs = [(a, b) for a in range(count) for b in range(a)]
    peers = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
    return {"gpus": each, "pairs": len(pairs), "peers": peers, "amd": torch.version.hip is not None}


def gpu_types(facts: dict[str, Any] | None, *_: Any) -> Iterator[Finding]:
    """Report what each kind of GPU can compute with, its memory if others use it, and peer access."""
    if facts is None:
        return
    if "error" in facts:
        yield Finding(f"could not be tried: {facts['error']}", ok=False, remedy="nvidia-smi shows what uses the GPUs")
        return
    for number, (_, nbytes, free_nbytes, error) in enumerate(facts["gpus"]):
        if error:
            remedy = "https://pytorch.org/get-started/locally/ shows other builds; nvidia-smi shows what uses the GPU"
            yield Finding(f"GPU {number} does not compute: {error}", ok=False, remedy=remedy)
        elif free_nbytes < nbytes / 2:
            free = f"GPU {number} has {in_words(free_nbytes, 'iB')} of {in_words(nbytes, 'iB')} free"
            yield Finding(free, remedy="nvidia-smi shows what uses the rest", subject="GPU memory")
    for capability in [] if facts["amd"] else sorted({tuple(capability) for capability, *_ in facts["gpus"]}):
        yield Finding(_dtypes(capability))
    if facts["pairs"]:
        reach = f"{facts['peers']} of {counted(facts['pairs'], 'pair')} of GPUs have peer access"
        rest = "" if facts["peers"] == facts["pairs"] else "; the others send through the host's memory"
        yield Finding(reach + rest, subject="GPU to GPU")


def _dtypes(capability: Sequence[int]) -> str:
    has = [name for name, least in DTYPES.items() if tuple(capability) >= least]
    lacks = [f"{name} needs {least[0]}.{least[1]}" for name, least in DTYPES.items() if name not in has]
    but = f"; {', '.join(lacks)}" if lacks else ""
    return f"compute capability {'.'.join(map(str, capability))}: {', '.join(['float32', *has])}{but}"


@dataclass(frozen=True, slots=True)
class PlaceFound:
    """A place where notebooks run."""

    name: str  # "" for a plain machine
    variables: tuple[str, ...] = ()  # that exist only there
    files: tuple[str, ...] = ()  # that exist only there
    limits: str = ""
    shared_memory: str = "it cannot be enlarged here: use DataLoader(..., num_workers=0)"  # what enlarges its /dev/shm
    hosted: bool = False  # whether its kernel comes with packages that an installation should not replace
    has_kernel: bool = False  # whether this process is a kernel, so that some front end is at hand


PLAIN: Final = PlaceFound("", shared_memory="sudo mount -o remount,size=2G /dev/shm")
# The first that fits. Kaggle's image is made from Colab's, Binder is a JupyterHub, and all but Colab run in containers.
_PLACES: Final = (
    # https://github.com/Kaggle/kagglehub/blob/main/src/kagglehub/env.py, https://www.kaggle.com/docs/notebooks
    PlaceFound(
        "Kaggle", ("KAGGLE_KERNEL_RUN_TYPE",), hosted=True,
        limits="a session lasts 12 hours at most; with internet switched off, pip installs only from files of a dataset",
    ),
    # https://github.com/Kaggle/kagglehub/pull/230, https://research.google.com/colaboratory/faq.html
    PlaceFound(
        "Google Colab", ("COLAB_RELEASE_TAG",), hosted=True,
        limits="a runtime without charge lasts 12 hours at most, ends earlier when it is idle, and its files end with it",
    ),
    # https://github.com/jupyterhub/binderhub/blob/main/binderhub/binderspawner_mixin.py,
    # https://mybinder.readthedocs.io/en/latest/about/user-guidelines.html
    PlaceFound(
        "Binder", ("BINDER_LAUNCH_HOST", "BINDER_REPO_URL"), hosted=True,
        limits="mybinder.org gives 1 to 2 GB of memory, and ends a session after 10 minutes without activity, or after 6 hours",
    ),
    # https://docs.github.com/en/codespaces/developing-in-a-codespace/default-environment-variables-for-your-codespace,
    # https://docs.github.com/en/codespaces/setting-your-user-preferences/setting-your-timeout-period-for-github-codespaces
    PlaceFound(
        "GitHub Codespaces", ("CODESPACES",),
        limits="a codespace stops after 30 minutes without activity, unless its settings say otherwise",
        shared_memory='add  "runArgs": ["--shm-size=1g"]  to .devcontainer/devcontainer.json, and rebuild the container',
    ),
    # https://jupyterhub.readthedocs.io/en/stable/reference/api/spawner.html
    PlaceFound(
        "JupyterHub", ("JUPYTERHUB_USER", "JUPYTERHUB_API_URL"), hosted=True,
        limits="its administrators limit memory, cores and idle time",
        shared_memory="ask its administrators for a volume  emptyDir: {medium: Memory}  at /dev/shm",
    ),
    # https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables,
    # https://docs.podman.io/en/latest/markdown/podman-run.1.html. Docker documents no mark; it has created this file
    # since 2013: https://github.com/moby/moby/blob/master/daemon/initlayer
    PlaceFound(
        "a container", ("KUBERNETES_SERVICE_HOST",), (".dockerenv", "run/.containerenv"),
        limits="what started it limits memory and cores",
        shared_memory="start it with  --shm-size=1g;  in Kubernetes, mount a volume  emptyDir: {medium: Memory}  at /dev/shm",
    ),
)  # fmt: skip


def find_place(environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> PlaceFound:
    """Return where this process runs. Tests pass an environment and a root of their own."""
    found = next(
        (p for p in _PLACES if any(map(environment.get, p.variables)) or any((root / file).exists() for file in p.files)), PLAIN
    )
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return replace(found, has_kernel=hasattr(shell, "kernel"))


def place(place: PlaceFound) -> list[Finding]:
    """Report the place, unless it is a plain machine."""
    return [Finding(f"{place.name}: {place.limits}")] if place.name else []
