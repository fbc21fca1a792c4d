"""Whether a machine can run `make gpu`: which Python has a torch that sees its GPUs, and what each stage lacks.

Needs only the standard library, because it runs before anything is known to be installed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
OLDEST_TORCH: Final = (2, 10)  # as pyproject.toml
# A first import of a CUDA build of torch from a cold disk takes tens of seconds, on a busy machine once more than 50;
# if this is too short, nothing runs at all.
PROBE_LIMIT_S: Final = 120.0

# What a stage imports besides torch: the module, and the package that provides it.
_BASE: Final = {"cloudpickle": "cloudpickle", "numpy": "numpy", "psutil": "psutil", "matplotlib": "matplotlib"}
NEEDS: Final[dict[str, dict[str, str]]] = {
    "tests": _BASE | {"pytest": "pytest", "pytest_timeout": "pytest-timeout"},
    "lessons": _BASE | {"nbformat": "nbformat", "nbclient": "nbclient", "ipykernel": "ipykernel", "sklearn": "scikit-learn"},
    "benchmark": _BASE, "doctor": _BASE, "smoke": _BASE,
}  # fmt: skip

# Prints the fields of a `Machine`.
_PROBE: Final = """
import importlib.util, json, platform, sys
found = {"version": platform.python_version(), "gpus": []}
found["missing"] = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
try:
    import torch
    found |= {"torch": torch.__version__, "cuda": torch.version.cuda or ""}
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        found["gpus"].append([properties.name, properties.total_memory, f"{properties.major}.{properties.minor}"])
    if found["gpus"]:
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
except Exception as error:
    if getattr(error, "name", "") != "torch":
        found["error"] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Machine:
    """The capabilities of one Python on this machine."""

    python: str  # its executable
    version: str = ""  # its version
    torch: str = ""  # the version of its torch; "" if it has none
    cuda: str = ""  # the version of CUDA that torch was built for; "" for a CPU build
    nccl: str = ""  # the version of NCCL; "" without GPUs
    gpus: Sequence[tuple[str, int, str]] = ()  # name, bytes of memory and compute capability of each GPU that torch sees
    missing: Sequence[str] = ()  # modules of `NEEDS` that it lacks
    error: str = ""  # why torch could not be queried
    driver: str = ""  # the version of the NVIDIA driver; "" if nvidia-smi does not report it

    @property
    def fit(self) -> bool:
        """Whether this Python can run on GPUs."""
        return bool(self.gpus) and _release(self.torch) >= OLDEST_TORCH

    def lacks(self, stage: str) -> list[str]:
        """The packages that must be installed before a stage can run."""
        return sorted(package for module, package in NEEDS[stage].items() if module in self.missing)

    def why_unfit(self) -> str:
        """One sentence: why this Python cannot run on a GPU."""
        if self.error:
            return f"{self.python}: torch does not load ({self.error})"
        if not self.torch:
            return f"{self.python}: torch is not installed"
        if not self.cuda:
            return f"{self.python}: torch {self.torch} is a build without CUDA"
        if not self.gpus:
            return f"{self.python}: torch {self.torch} (CUDA {self.cuda}) sees no GPU"
        oldest = ".".join(map(str, OLDEST_TORCH))
        return f"{self.python}: torch {self.torch} is older than {oldest}"


def find(asked: str = "") -> tuple[Machine | None, list[str]]:
    """The first Python that can run on a GPU, and the reasons why others cannot.

    They are the one that the user named, or the project's, this one, and `python3`.
    """
    candidates = [asked] if asked else [str(ROOT / ".venv" / "bin" / "python"), sys.executable, shutil.which("python3") or ""]
    driver, seen, reasons = _driver(), set[str](), []
    for candidate in candidates:
        path = shutil.which(candidate) if candidate else None
        if path is None:
            reasons += [f"{candidate}: there is no such program"] if asked else []
            continue
        if path in seen:  # links are not resolved: a virtual environment's python is a link to the one it was made from
            continue
        seen.add(path)
        machine = _probe(path, driver)
        if machine.fit:
            return machine, reasons
        reasons.append(machine.why_unfit())
    if not driver:
        reasons.append("nvidia-smi shows no GPU: no NVIDIA driver is loaded here, or this container was not given the GPU")
    return None, reasons


def _probe(python: str, driver: str) -> Machine:
    modules = sorted({module for needs in NEEDS.values() for module in needs})
    try:
        answer = subprocess.run(
            [python, "-c", _PROBE, *modules], capture_output=True, text=True, timeout=PROBE_LIMIT_S, check=False, cwd=ROOT
        )
        return Machine(python, driver=driver, **json.loads(answer.stdout.splitlines()[-1]))
    except subprocess.TimeoutExpired:
        return Machine(python, error=f"no answer within {PROBE_LIMIT_S:.0f} s", driver=driver)
    except (OSError, ValueError, IndexError) as error:
        return Machine(python, error=f"{type(error).__name__}: {error}", driver=driver)


def _driver() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.split("\n")[0].strip() if answer.returncode == 0 else ""


def _release(version: str) -> tuple[int, ...]:
    numbers = version.partition("+")[0].split(".")[:2]
    return tuple(int(n) for n in numbers) if all(n.isdecimal() for n in numbers) and version else ()


def environment(*, rehearsal: bool) -> dict[str, str]:
    """The environment of the stages, with this checkout's labkit, whatever else is installed."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    return os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "LABKIT_GPU_REHEARSAL": "1" if rehearsal else "0"}


def this_one() -> Machine:
    """The Python that runs this, whether it has a GPU or not."""
    return _probe(sys.executable, _driver())
