"""What facts about GPUs mean; and CUDA that is initialised here, with a made-up driver library."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from labkit.notebook.doctor_gpus import cuda_here, cuda_started, gpu_types

GIB = 2**30
T4 = [[7, 5], 15 * GIB, 14 * GIB, ""]
FACTS: dict[str, Any] = {"gpus": [T4, T4], "pairs": 1, "peers": 0, "nccl": [[{}, ""]], "amd": False}


def said(**changes: Any) -> list[str]:
    return [f"{f.subject}{'' if f.ok else ' ✗'} {f.found}".strip() for f in gpu_types(FACTS | changes)]


def test_two_t4() -> None:
    assert said() == [
        "compute capability 7.5: float32, float16; bfloat16 needs 8.0, float8 needs 8.9",
        "GPU to GPU 0 of 1 pair of GPUs have peer access; the others send through the host's memory",
        "NCCL all-reduces 1 MB between 2 GPUs",
    ]


@pytest.mark.parametrize(
    ("capability", "dtypes"),
    [
        ([6, 0], "float32; float16 needs 7.0, bfloat16 needs 8.0, float8 needs 8.9"),
        ([8, 0], "float32, float16, bfloat16; float8 needs 8.9"),
        ([8, 9], "float32, float16, bfloat16, float8"),
        ([10, 0], "float32, float16, bfloat16, float8"),
    ],
)
def test_the_types_of_a_compute_capability(capability: list[int], dtypes: str) -> None:
    name = ".".join(map(str, capability))
    assert said(gpus=[[capability, GIB, GIB, ""]], pairs=0, nccl=[]) == [f"compute capability {name}: {dtypes}"]


def test_other_machines() -> None:
    assert list(gpu_types(None)) == []
    assert said(error="ended by SIGSEGV") == ["✗ could not be tried: ended by SIGSEGV"]
    assert said(gpus=[], pairs=0, nccl=[]) == []
    assert said(gpus=[[[9, 4], 4 * GIB, GIB, ""]], pairs=0, nccl=[], amd=True) == ["GPU memory GPU 0 has 1 GiB of 4 GiB free"]
    assert said(gpus=[[[6, 0], 0, 0, "no kernel image"]], pairs=0, nccl=[])[0] == "✗ GPU 0 does not compute: no kernel image"
    assert said(peers=1)[1] == "GPU to GPU 1 of 1 pair of GPUs have peer access"


@pytest.mark.parametrize(
    ("fact", "by"),
    [
        ({"module": "torchao", "torch_says": True}, "initialised by  import torchao. "),
        ({"module": "torchao", "torch_says": False}, "initialised by  import torchao (torch.cuda.is_initialized() is False). "),
        (
            {"module": "", "torch_says": True},
            "initialised, by a cell or a module of yours, or a part of a package: no  import PACKAGE  does it",
        ),
        ({"error": "ended by SIGSEGV", "torch_says": True}, "initialised. Harmless"),
    ],
)
def test_cuda_that_is_initialised_here(fact: dict[str, Any], by: str) -> None:
    (finding,) = cuda_here(fact | {"started": True}, ("fork", None))
    assert finding.ok
    assert finding.found.startswith(by)
    assert "forked from a server that never imports your packages" in finding.found
    assert "ranks are new processes" in cuda_here(fact | {"started": True}, ("spawn", None))[0].found


def test_cuda_that_is_not() -> None:
    assert cuda_here({"started": False}, ("fork", None)) == []
    assert not cuda_started(Path("/nothing"))


DRIVER = """
static int started;
int cuInit(unsigned flags) { started = 1; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return started ? 0 : 3; }
"""
PROGRAM = """
import json
import unrelated
import opens_the_driver
from labkit.notebook.doctor_gpus import cuda_started, find_cuda_here
assert not cuda_started()
import uses_cuda
fact = find_cuda_here()
print(json.dumps(fact.reply()))
"""


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_the_import_that_initialises_cuda_is_found(tmp_path: Path) -> None:
    packages = tmp_path / "site-packages"
    packages.mkdir()
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)], input=DRIVER, text=True, check=True)
    (packages / "unrelated.py").touch()
    (packages / "opens_the_driver.py").write_text(f"import ctypes\nlibrary = ctypes.CDLL({str(library)!r})\n")
    (packages / "uses_cuda.py").write_text("from opens_the_driver import library\nlibrary.cuInit(0)\n")
    program = f"import sys; sys.path.insert(0, {str(packages)!r})\n{PROGRAM}"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100)
    assert json.loads(answer.stdout.splitlines()[-1]) == {"started": True, "torch_says": False, "module": "uses_cuda"}
