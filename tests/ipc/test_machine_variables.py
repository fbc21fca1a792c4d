"""Environment variables that ranks on other machines do not get."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from labkit.ipc.options import belongs_to_machine


@pytest.mark.parametrize("name", ["PATH", "HOME", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "XDG_CACHE_HOME", "SLURM_PROCID"])
def test_variables_of_a_machine(name: str) -> None:
    assert belongs_to_machine(name)


@pytest.mark.parametrize("name", ["HF_HOME", "MY_PATH", "NCCL_DEBUG", "TORCH_LOGS", "PYTHONHASHSEED"])
def test_variables_of_a_program(name: str) -> None:
    assert not belongs_to_machine(name)


@pytest.mark.processes
def test_the_import_of_labkit_keeps_the_variables_of_its_moment() -> None:
    """A group that starts later finds out what the notebook has changed since."""
    program = (
        "import os; os.environ['EARLY'] = '1'; import labkit; os.environ['LATE'] = '1'; "
        "from labkit.ipc.options import AT_IMPORT; print('EARLY' in AT_IMPORT, 'LATE' in AT_IMPORT)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=dict(os.environ), capture_output=True, text=True, timeout=200, check=True
    )
    assert done.stdout.split() == ["True", "False"]
