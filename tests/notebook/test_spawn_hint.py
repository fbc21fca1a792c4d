"""In a real Jupyter kernel: the hints after programs that were written for a launcher."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("ipykernel", reason="needs ipykernel")
pytest.importorskip("torch", reason="needs torch")
from kernels import shared_kernel

from labkit.notebook.spawn_hint import NO_RANK, SPAWN

pytestmark = pytest.mark.processes

CELLS = """
import functools, operator, os
import labkit as lab
import torch.multiprocessing as mp
def train(rank): ...
"""


def test_a_function_of_the_notebook_leads_to_group_spawn(tmp_path: Path) -> None:
    with shared_kernel(tmp_path) as kernel:
        assert kernel(CELLS).error is None
        cell = kernel("mp.spawn(train, nprocs=1)")
        assert cell.error is not None
        assert cell.error[0] == "ProcessExitedException"
        assert cell.stderr.endswith(f"{SPAWN}\n")
        assert SPAWN.count("\n") == 0
        raised = kernel("mp.spawn(operator.truediv, args=(0,), nprocs=1)")  # found, and called: another error
        assert raised.error is not None
        assert raised.error[0] == "ProcessRaisedException"
        assert SPAWN not in raised.stderr
        assert SPAWN not in kernel("mp.spawn(os._exit, nprocs=1)").stderr  # ends with exit code 0
        exited = kernel("mp.spawn(functools.partial(max, 3, key=os._exit), nprocs=1)")  # found, and ends with exit code 3
        assert exited.error is not None
        assert exited.error[0] == "ProcessExitedException"
        assert SPAWN not in exited.stderr
        assert kernel("1").stderr == ""


def test_a_cell_without_a_launchers_variables_leads_to_ranks(tmp_path: Path) -> None:
    with shared_kernel(tmp_path) as kernel:
        assert kernel("import labkit as lab\nimport torch.distributed as dist").error is None
        cell = kernel("dist.init_process_group('gloo')")
        assert cell.error is not None
        assert cell.stderr.endswith(f"{NO_RANK}\n")
        assert NO_RANK not in kernel("raise ValueError('RANK')").stderr
