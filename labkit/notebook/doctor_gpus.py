"""The GPUs of this machine: which there are, what they can compute with, and what they have in common."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
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
