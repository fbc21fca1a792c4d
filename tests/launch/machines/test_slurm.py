"""Groups in allocations of Slurm: arguments without it, and a real one on this computer, where it can be had."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from slurm_cluster import missing_for_slurm, slurm_cluster

import labkit as lab
from labkit.group.open_groups import notebook
from labkit.launch.machines.relay_starter import RelayStarter

pytestmark = pytest.mark.processes
REASON = missing_for_slurm()
real = pytest.mark.skipif(bool(REASON), reason=REASON or "can be had")


def test_what_it_says() -> None:
    assert repr(lab.Slurm()) == "Slurm()"
    asked = lab.Slurm(nodes=4, gpus_per_node=2, partition="gpu", time="1:00:00", options=["--account=x"])
    assert repr(asked) == "Slurm(nodes=4, gpus-per-node=2, partition=gpu, time=1:00:00, account=x)"
    assert pickle.loads(pickle.dumps(asked)) == asked != lab.Slurm(nodes=4)


@pytest.mark.parametrize("arguments", [{"nodes": 0}, {"nodes": "two"}, {"partition": "gpu"}])
def test_arguments_that_it_cannot_have(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="nodes"):
        lab.Slurm(**arguments)


def test_outside_of_an_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST"):
        monkeypatch.delenv(name, raising=False)
    with lab.Group(2, runtime="bare", on=lab.Slurm()) as group, pytest.raises(lab.LabError, match="does not run inside an alloc"):
        group.run(int)


def test_without_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with lab.Group(2, runtime="bare", on=lab.Slurm(nodes=2)) as group, pytest.raises(lab.LabError, match="no salloc here"):
        group.run(int)


@pytest.fixture(scope="module")
def slurm() -> Iterator[None]:
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory() as folder,  # pytest's own are not accessible to others, as munge wants it
        slurm_cluster(Path(folder)) as config,
    ):
        patch.setenv("SLURM_CONF", str(config))
        yield
        for key, starter in list(notebook.starters.items()):
            if isinstance(starter, RelayStarter):
                starter.close()
                del notebook.starters[key]


def jobs() -> list[str]:
    """The states of the jobs that have not ended."""
    found = subprocess.run(["squeue", "-h", "-o", "%t"], capture_output=True, text=True, check=True).stdout.split()
    return [state for state in found if state != "CG"]


@real
@pytest.mark.usefixtures("slurm")
def test_ranks_on_the_nodes_of_a_job_that_ends_with_the_notebook(ssh_python: str, tmp_path: Path) -> None:
    """The second job waits in the queue, since the first has all nodes; both end."""
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(f"""
        import os, threading, time
        import labkit as lab

        def f():
            return os.environ["GROUP_RANK"], sorted(name for name in os.environ if name.startswith("SLURM_"))

        first = lab.Group(4, runtime="bare", on=lab.Slurm(nodes=2, time="10", python={ssh_python!r}))
        print(first.run(f).results, flush=True)
        second = lab.Group(4, runtime="bare", on=lab.Slurm(nodes=2, time="11", python={ssh_python!r}))
        second.run(f)
        """)
    )
    environment = os.environ | {"PYTHONPATH": str(Path(lab.__file__).parents[1])}
    with subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, env=environment, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "[('0', []), ('0', []), ('1', []), ('1', [])]\n"
        until = time.monotonic() + 60
        while jobs() != ["PD", "R"] and time.monotonic() < until:
            time.sleep(0.1)
        process.send_signal(signal.SIGKILL)
    until = time.monotonic() + 60
    while jobs() and time.monotonic() < until:
        time.sleep(0.1)
    assert not jobs()


@real
@pytest.mark.usefixtures("slurm")
def test_collectives_inside_an_allocation(ssh_python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    allocated = subprocess.run(["salloc", "--no-shell", "--nodes=2"], capture_output=True, text=True, check=True).stderr
    job = allocated.split("allocation")[1].split()[0]
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-2]")

    def f() -> float:
        import torch
        import torch.distributed as dist

        x = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(x)
        return x.item()

    try:
        with lab.Group(4, on=lab.Slurm(python=ssh_python), timeout_s=200) as group:
            run = group.run(f)
    finally:
        subprocess.run(["scancel", job], check=True)
    assert run.results == [6.0] * 4
    assert run.trace.ranks == ("rank 0 · node1", "rank 1 · node1", "rank 2 · node2", "rank 3 · node2")
