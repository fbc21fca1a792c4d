"""`Slurm`: the nodes of an allocation; no port opens, since the stdin and stdout of `srun` are the connection."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final

from labkit.errors.exceptions import LabError
from labkit.errors.wrong_calls import public_api
from labkit.launch.machines.command import over_command
from labkit.launch.machines.engines import AGENT, Connection, Engine

QUEUE_S: Final = 7 * 86400.0  # a job may wait for days; Stop ends that
# Each agent gets all that the job has on its node: cores, memory, GPUs; its ranks share these.
STEP: Final = (
    "--overlap",
    "--nodes=1",
    "--ntasks=1",
    "--cpu-bind=none",
    "--mem=0",
    "--unbuffered",
    "--kill-on-bad-exit=0",
    "--export=ALL",
)
# A job that labkit asks for, queued or running, ends when the guard's stdin does: when the relay ends, however it does.
# Not by a signal to `salloc`: one that has its nodes may then run on for ever, without a job.
GUARD: Final = 'cat; exec scancel --quiet --name="$1"'


class Slurm(Engine):
    """The nodes of a Slurm allocation; or of a job that labkit asks for, which ends with the notebook's process.

    Args:
        nodes: the number of nodes to ask for; None: those of the allocation in which the notebook runs.
        gpus_per_node, partition, time: what else to ask for, as for `salloc`.
        options: more options of `salloc`, such as "--account=physics".
        python: the path of Python on the nodes; default: the notebook's.

    Examples:
        `lab.Slurm()` in a JupyterLab inside an allocation; on a login node
        `lab.Slurm(nodes=4, gpus_per_node=4, partition="gpu", time="1:00:00")`.
    """

    ready_limit_s = QUEUE_S

    @public_api
    def __init__(
        self,
        nodes: int | None = None,
        *,
        gpus_per_node: int | None = None,
        partition: str | None = None,
        time: str | None = None,
        options: Sequence[str] = (),
        python: str | None = None,
    ) -> None:
        asked = {"nodes": nodes, "gpus-per-node": gpus_per_node, "partition": partition, "time": time}
        if nodes is None and (options or any(value is not None for value in asked.values())):
            raise ValueError("Slurm(...): expected nodes=..., the number of nodes to ask for, with the other options")
        if nodes is not None and (not isinstance(nodes, int) or nodes < 1):
            raise ValueError(f"Slurm(nodes={nodes!r}): expected a number of nodes above 0")
        self._asked = (*(f"--{name}={value}" for name, value in asked.items() if value is not None), *options)
        self._python = python or sys.executable
        self._allocation = "" if nodes is not None else os.environ.get("SLURM_JOB_ID", "")
        self._job = self._allocation
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def key(self) -> Hashable:
        """See `Engine`."""
        return self._asked, self._python, self._allocation

    def __repr__(self) -> str:
        return f"Slurm({', '.join(self._asked).replace('--', '')})"

    async def machines(self, say: Callable[[str], None]) -> Sequence[str]:
        """See `Engine`."""
        nodes = os.environ.get("SLURM_JOB_NODELIST", "")
        if self._asked:
            say("Slurm has not given the nodes yet; squeue --me tells why")
            nodes = await self._ask_for_nodes()
        elif not self._allocation:
            raise LabError(
                "lab.Slurm(): this notebook does not run inside an allocation of Slurm. Start JupyterLab in one (salloc, "
                "sbatch), or say what to ask for: lab.Slurm(nodes=2, time='1:00:00')"
            )
        listed = await _output("scontrol", "show", "hostnames", nodes)
        return listed.split()

    async def _ask_for_nodes(self) -> str:
        """Ask for nodes, and return them once the job has them."""
        if shutil.which("salloc") is None:
            raise LabError("there is no salloc here: this is no machine of a cluster with Slurm")
        name = f"labkit-{os.getpid()}-{secrets.token_hex(4)}"
        self._guard = subprocess.Popen(["sh", "-c", GUARD, "sh", name], stdin=subprocess.PIPE, start_new_session=True)  # noqa: ASYNC220
        command = ["salloc", "--no-shell", f"--job-name={name}", *self._asked]
        said = (await (await _started(*command, stderr=asyncio.subprocess.PIPE)).communicate())[1].decode(errors="replace")
        granted = re.search(r"Granted job allocation (\d+)", said)
        if granted is None:
            raise LabError(f"Slurm gives no nodes: {said.strip().splitlines()[-1] if said.strip() else 'salloc ended'}")
        self._job = granted[1]
        return (await _output("squeue", "--noheader", f"--jobs={self._job}", "--format=%N")).strip()

    async def connect(self, machine: str, limit_s: float) -> Connection:  # noqa: ARG002  # the command is killed
        """See `Engine`."""
        os.environ.pop("SLURM_EXACT", None)  # of the notebook's own job step: the agent would get one core
        command = ["srun", f"--jobid={self._job}", *STEP, f"--nodelist={machine}", self._python, "-u", "-m", AGENT]
        return await over_command(machine, command, _explain)


def _explain(_: str, said: str, code: int) -> str:
    lines = said.strip().splitlines()
    return (lines[-1] if lines else f"srun ended with exit code {code}").rstrip(".") + "."


async def _started(*command: str, **streams: Any) -> asyncio.subprocess.Process:
    try:
        return await asyncio.create_subprocess_exec(*command, **streams, start_new_session=True)
    except FileNotFoundError:
        raise LabError(f"there is no {command[0]} here: this is no machine of a cluster with Slurm") from None


async def _output(*command: str) -> str:
    process = await _started(*command, stdout=asyncio.subprocess.PIPE)
    return (await process.communicate())[0].decode()
