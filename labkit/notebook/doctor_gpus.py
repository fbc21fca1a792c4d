"""What the GPUs can compute with, whether they reach each other, and whether CUDA is initialised in this process."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from labkit.errors.lists import counted
from labkit.errors.units import in_words
from labkit.notebook.findings import Finding, Question
from labkit.notebook.nccl_probe import attempt, probe, verdict

# The compute capability from which on GPUs multiply matrices of a type.
# Source: https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/index.html, "Datatype and hardware support
# matrix"; "Features and Technical Specifications" in the CUDA C++ Programming Guide for float16.
DTYPES: Final = {"float16": (7, 0), "bfloat16": (8, 0), "float8": (8, 9)}
# The CUDA driver API: every function but cuInit returns CUDA_ERROR_NOT_INITIALIZED before cuInit was called.
# Source: https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__INITIALIZE.html
CUDA_SUCCESS: Final = 0


def ask_gpus() -> dict[str, Any]:
    """Compute on each GPU, and return what it is, which pairs have peer access, and what NCCL's attempts gave."""
    import torch
    from torch import distributed as dist

    gpus, count = [], torch.cuda.device_count()
    for number in range(count):
        error = ""
        try:
            (torch.ones(1, device=f"cuda:{number}") + 1).item()
        except RuntimeError as failed:  # this build has no code for this GPU, or all its memory is taken
            error = str(failed).splitlines()[0]
        free_nbytes, nbytes = (0, 0) if error else torch.cuda.mem_get_info(number)
        gpus.append([list(torch.cuda.get_device_capability(number)), nbytes, free_nbytes, error])
    pairs = [(a, b) for a in range(count) for b in range(a)]
    peers = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
    works = count > 1 and not any(error for *_, error in gpus) and dist.is_available() and dist.is_nccl_available()
    nccl = probe(lambda variables: attempt(variables, count)) if works else []
    return {"gpus": gpus, "pairs": len(pairs), "peers": peers, "nccl": nccl, "amd": torch.version.hip is not None}


def gpu_types(facts: dict[str, Any] | None, *_: Any) -> Iterator[Finding]:
    """Report what each kind of GPU can compute with, its memory if others use it, peer access, and NCCL."""
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
    if facts["nccl"]:
        nccl = verdict(facts["nccl"], len(facts["gpus"]))
        yield Finding(nccl.found, nccl.ok, nccl.remedy, subject="NCCL")


def _dtypes(capability: Sequence[int]) -> str:
    has = [name for name, least in DTYPES.items() if tuple(capability) >= least]
    lacks = [f"{name} needs {least[0]}.{least[1]}" for name, least in DTYPES.items() if name not in has]
    but = f"; {', '.join(lacks)}" if lacks else ""
    return f"compute capability {'.'.join(map(str, capability))}: {', '.join(['float32', *has])}{but}"


def cuda_started(maps: Path = Path("/proc/self/maps")) -> bool:
    """Whether CUDA's driver has been initialised in this process, by whatever library; does not initialise it.

    torch.cuda.is_initialized() knows only of torch's own initialisation.
    """
    with contextlib.suppress(OSError, AttributeError):  # no /proc; a library without the function
        files = {line.split(" ", 5)[5].strip() for line in maps.read_text().splitlines() if "/libcuda.so" in line}
        for file in files:  # loaded already: this only returns it
            if ctypes.CDLL(file).cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == CUDA_SUCCESS:
                return True
    return False


def find_cuda_here() -> Question | dict[str, Any]:
    """Return whether CUDA is initialised here, whether torch says so, and the module whose import does it."""
    torch = sys.modules.get("torch")
    torch_says = torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized()
    if not torch_says and not cuda_started():
        return {"started": False}
    return Question(ask_which_import, _installed_packages(), started=True, torch_says=torch_says)


def _installed_packages() -> list[str]:
    """The installed packages that this process has imported, in that order, without their thousands of modules."""
    found = []
    for name, module in list(sys.modules.items()):
        file = getattr(getattr(module, "__spec__", None), "origin", None) or ""
        if "." not in name and not name.startswith(("_", "labkit")) and {"site-packages", "dist-packages"} & {*Path(file).parts}:
            found.append(name)
    return found


def ask_which_import(packages: Sequence[str]) -> dict[str, Any]:
    """Import packages, and return the first after which CUDA is initialised, under "module"; "" if none does it."""
    for name in packages:
        with contextlib.suppress(Exception):  # it needs what only the notebook has
            importlib.import_module(name)
        if cuda_started():
            return {"module": name}
    return {"module": ""}


def cuda_here(facts: dict[str, Any], start: tuple[str | None, str | None]) -> list[Finding]:
    """Report that CUDA is initialised in this process; nothing if it is not."""
    if not facts["started"]:
        return []
    if "error" in facts:
        by = ""
    elif facts["module"]:
        by = f" by  import {facts['module']}"
    else:
        by = ", by a cell or a module of yours, or a part of a package: no  import PACKAGE  does it"
    unknown = "" if facts["torch_says"] else " (torch.cuda.is_initialized() is False)"
    ranks = "new processes" if start[0] == "spawn" else "forked from a server that never imports your packages"
    forks = "Processes that you fork from this one cannot use CUDA"
    return [Finding(f"initialised{by}{unknown}. Harmless for groups, because ranks are {ranks}. {forks}")]
