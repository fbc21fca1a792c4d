"""Runs a short suite under other versions than those of .venv: each promised Python, and Colab's and Kaggle's packages.

`make test-versions` runs all that TABLE lists, `make test-versions ONLY="colab 3.13"` these. Each has an environment of
its own in .venv/pythons, which stays. Where a Python or a package cannot be had, a line says that it was not tested.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
ROOM_BYTES: Final = 9 * 10**9  # where only a CUDA build of torch can be had, it takes 5.1 GB, and pip as much for a moment
INSTALL_S: Final = 600

# Without torch: on Linux, the package index has CUDA builds only, 3 GB to download and 5 GB on disk for each Python.
PROCESSES: Final = (
    "tests/group/test_group.py",
    "tests/ipc",  # pickling, tracebacks, prints
    "tests/recording/test_record.py",
    "tests/launch/test_starters.py",  # starts and ends of ranks, and of programs that leave them open
)
# With torch, of whose private names labkit uses some, and with other versions of IPython and ipywidgets.
NOTEBOOKS: Final = (
    "tests/worker/comm/test_compiled.py",
    "tests/worker/comm/test_phases.py",
    "tests/worker/comm/test_pipelines.py",
    "tests/worker/comm/test_process_group.py",
    "tests/worker/comm/test_rpc_calls.py",
    "tests/recording/test_torch_internals.py",
    "tests/group/test_output.py",
    "tests/group/test_short_runs.py",
    "tests/launch/test_starters.py",
    "tests/notebook/test_kernel.py",
    "tests/plots/test_explore.py",
    "tests/group/simulation",
    "tests/worker/test_display.py",
    "notebooks/00_start_here.ipynb",
)
# What the hosted kernels have in common.
HOSTED: Final = ("ipykernel==6.17.1", "ipython==7.34.0", "jupyter_client==7.4.9", "psutil==5.9.5")


@dataclass(frozen=True, slots=True)
class Versions:
    """One environment.

    Attributes:
        pins: packages in other versions than those of constraints.txt; empty: an environment without torch.
    """

    python: str  # the version of Python
    pins: tuple[str, ...] = ()

    @property
    def packages(self) -> tuple[str, ...]:
        """What is installed beside labkit and its base dependencies."""
        tools = ("pytest", "pytest-timeout", "pytest-xdist")
        if not self.pins:
            return tools
        return (*tools, "anywidget", "ipywidgets", "matplotlib", "nbclient", "nbformat", "nbval", "scikit-learn", *self.pins)

    @property
    def tests(self) -> tuple[str, ...]:
        """What pytest runs."""
        return NOTEBOOKS if self.pins else PROCESSES

    @property
    def options(self) -> tuple[str, ...]:
        """The options of pytest; those of nbval only where it is installed."""
        options = ("-q", "-n", "2", "--dist", "loadfile", "-m", "not slow", "-p", "no:cacheprovider", "--durations=3")
        # Other people's old packages warn of what Python deprecates.
        return (
            (*options, "--nbval-lax", "-o", "filterwarnings=default")
            if self.pins
            else (*options, "-o", "addopts=--import-mode=importlib --strict-markers")
        )


TABLE: Final = {
    # Colab's image of August 2026: github.com/googlecolab/backend-info, pip-freeze.txt
    "colab": Versions("3.13", (
        "torch==2.11.0", *HOSTED, "ipywidgets==7.7.1", "widgetsnbextension==3.6.10",
        "anywidget==0.9.21", "numpy==2.1.3",
    )),
    # Kaggle's image of August 2026 is made from Colab's of May: github.com/Kaggle/docker-python. The oldest torch.
    "kaggle": Versions("3.12", ("torch==2.10.0", *HOSTED, "ipywidgets==8.1.5")),
    "3.11": Versions("3.11"),
    "3.12": Versions("3.12"),
    "3.13": Versions("3.13"),
}  # fmt: skip


def tested(name: str) -> bool:
    """Run the suite in this environment, if it can be made; return whether nothing failed."""
    versions, folder = TABLE[name], ROOT / ".venv" / "pythons" / name
    missing = made(versions, folder)
    if missing:
        print(f"{name} is not tested: {missing}", flush=True)
        return True
    print(f"{name}: Python {versions.python} {' '.join(versions.pins)}", flush=True)
    pytest = [str(folder / "bin" / "python"), "-m", "pytest", *versions.options, *versions.tests]
    return subprocess.run(pytest, cwd=ROOT, check=False).returncode == 0


def made(versions: Versions, folder: Path) -> str:
    """Make the environment, or bring it up to date; return why it cannot be had, "" if it can."""
    if versions.pins and not folder.exists() and shutil.disk_usage(ROOT).free < ROOM_BYTES:
        return f"a CUDA build of torch needs {ROOM_BYTES // 10**9} GB of free space"
    found = subprocess.run(["sh", "tools/find-python", versions.python], cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode:
        return found.stderr.strip()
    subprocess.run([found.stdout.strip(), "-m", "venv", str(folder)], check=True)
    constraints = folder / "constraints.txt"
    constraints.write_text(without((ROOT / "constraints.txt").read_text(), versions.pins))
    install = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "-c", str(constraints), "-e", "."]
    try:
        installed = subprocess.run(
            [*install, *versions.packages], cwd=ROOT, capture_output=True, text=True, check=False, timeout=INSTALL_S
        )
    except subprocess.TimeoutExpired:
        return f"its installation took more than {INSTALL_S} s"
    return installed.stderr.strip().splitlines()[-1] if installed.returncode else ""


def without(constraints: str, pins: tuple[str, ...]) -> str:
    """The constraints without those of pinned packages, and of setuptools, of which each torch wants another."""
    names = "|".join(["setuptools", *(pin.partition("==")[0] for pin in pins)]) if pins else "setuptools"
    return re.sub(rf"^({names})==.*\n", "", constraints, flags=re.MULTILINE | re.IGNORECASE)


def main(names: list[str]) -> int:
    """Test these environments (default: all but that of .venv's own Python); return the exit code."""
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    names = names or [name for name in TABLE if name != own]
    if unknown := [name for name in names if name not in TABLE]:
        print(f"labkit: ONLY must name some of {', '.join(TABLE)}; got {' '.join(unknown)}", file=sys.stderr)
        return 2
    results = [tested(name) for name in names]
    return 0 if all(results) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
