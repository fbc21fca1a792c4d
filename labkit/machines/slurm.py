"""`Slurm`: the nodes of an allocation; no port opens, since the stdin and stdout of `srun` are the connection."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

from labkit.errors.exceptions import LabError
from labkit.errors.wrong_calls import public_api
from labkit.launch.fork_server import PR_SET_PDEATHSIG
from labkit.machines.command import over_command
from labkit.machines.engines import AGENT, Connection, Engine

__all__ = ["Slurm"]

QUEUE_S: Final = 7 * 86400.0  # a job may wait for days; Stop ends that
# Each agent gets all that the job has on its node: cores, memory, GPUs; its ranks share these.
STEP: Final = ("--overlap", "--nodes=1", "--ntasks=1", "--cpu-bind=none", "--mem=0", "--unbuffered", "--kill-on-bad-exit=0")
# A job that labkit asks for ends when the shell's stdin does, which is when the relay ends, however that ends.
HOLD: Final = 'echo "$SLURM_JOB_ID $SLURM_JOB_NODELIST"; exec cat >&2'


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
        self._process: asyncio.subprocess.Process | None = None

    def _key(self) -> tuple[object, ...]:
        return self._asked, self._python, self._allocation

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slurm) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

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
        pipe = asyncio.subprocess.PIPE
        command = ["salloc", "--job-name=labkit", *self._asked, "sh", "-c", HOLD]
        process = await _started(*command, stdin=pipe, stdout=pipe, stderr=pipe, preexec_fn=_end_with_parent)
        assert process.stdout is not None
        assert process.stderr is not None
        self._process = process  # its stdin stays open as long as this process lives
        line = (await process.stdout.readline()).decode().split()
        if not line:
            said = (await process.stderr.read()).decode(errors="replace").strip().splitlines()
            raise LabError(f"Slurm gives no nodes: {said[-1] if said else 'salloc ended'}")
        self._job, nodes = line
        return nodes

    async def connect(self, machine: str, limit_s: float) -> Connection:  # noqa: ARG002  # the command is killed
        """See `Engine`."""
        command = ["srun", f"--jobid={self._job}", *STEP, f"--nodelist={machine}", self._python, "-u", "-m", AGENT]
        return await over_command(machine, command, _explain)


def _explain(_: str, said: str, code: int) -> str:
    lines = said.strip().splitlines()
    return (lines[-1] if lines else f"srun ended with exit code {code}").rstrip(".") + "."


def _end_with_parent() -> None:
    """In a child: end with the parent, so that a job does not wait in the queue for nobody."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


async def _started(*command: str, **streams: Any) -> asyncio.subprocess.Process:
    try:
        return await asyncio.create_subprocess_exec(*command, **streams, start_new_session=True)
    except FileNotFoundError:
        raise LabError(f"there is no {command[0]} here: this is no machine of a cluster with Slurm") from None


async def _output(*command: str) -> str:
    process = await _started(*command, stdout=asyncio.subprocess.PIPE)
    return (await process.communicate())[0].decode()
