"""In a real Jupyter kernel: the hints after programs that were written for a launcher."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("ipykernel", reason="needs ipykernel")
pytest.importorskip("torch", reason="needs torch")
from kernels import shared_kernel

from labkit.notebook.spawn_hint import FORK, NO_RANK, SPAWN

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


FORKS = """
import os, threading
import labkit as lab
import torch.multiprocessing as mp
from labkit.notebook import spawn_hint
spawn_hint.LOOK_EVERY_S = spawn_hint.IDLE_S = 0.2
states, looked = spawn_hint._states, []
def looks(pids):
    looked.append(states(pids))
    if len(looked) == 4:
        open("enough", "w").close()
    return looked[-1]
def compute(rank):
    while not os.path.exists("enough"):
        pass
def hang(rank):
    threading.Event().wait()
"""


def test_forked_processes_that_hang_lead_to_group_spawn(tmp_path: Path) -> None:
    with shared_kernel(tmp_path) as kernel:
        assert kernel(FORKS).error is None
        computes = kernel("spawn_hint._states = looks\nmp.start_processes(compute, nprocs=1, start_method='fork')")
        assert computes.error is None
        assert computes.stderr == ""
        cell = kernel(
            "spawn_hint._states = states\nmp.start_processes(hang, nprocs=2, start_method='fork')",
            when=lambda cell: FORK in cell.stderr,
            then=kernel.manager.interrupt_kernel,
        )
        assert cell.stderr.count(FORK) == 2, "while it hangs, and after Stop"
        assert FORK not in kernel("raise KeyboardInterrupt").stderr


def test_a_cell_without_a_launchers_variables_leads_to_ranks(tmp_path: Path) -> None:
    with shared_kernel(tmp_path) as kernel:
        assert kernel("import labkit as lab\nimport torch.distributed as dist").error is None
        cell = kernel("dist.init_process_group('gloo')")
        assert cell.error is not None
        assert cell.stderr.endswith(f"{NO_RANK}\n")
        assert NO_RANK not in kernel("raise ValueError('RANK')").stderr
